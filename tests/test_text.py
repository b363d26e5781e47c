"""Text for people."""

import logging

import pytest

from launcher.text import describe_time, redirect_log


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (41.25, "41.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (60, "1 min 0 s"),
        (725, "12 min 5 s"),
        (3599.6, "1 h 0 min"),
        (12000, "3 h 20 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert describe_time(seconds) == text


def test_what_is_logged_goes_to_a_function_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    logger, shown = logging.getLogger("launcher.text"), list[logging.LogRecord]()
    restore = redirect_log(shown.append)
    logger.warning("a")
    restore()
    logger.warning("b\x1b[2J")
    assert [record.getMessage() for record in shown] == ["a"]
    assert capsys.readouterr().err == "launch: warning: b\\x1b[2J\n"
