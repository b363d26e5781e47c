"""Text for people."""

import logging

import pytest

from launcher.text import StderrHandler, describe_time, format_record, redirect_log


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
    package = logging.getLogger("launcher")
    before, shown = package.handlers, list[str]()
    try:
        package.handlers = [StderrHandler()]
        restore = redirect_log(lambda record: shown.append(format_record(record)))
        logging.getLogger("launcher.text").warning("a")
        restore()
        logging.getLogger("launcher.text").error("b\x1b[2J")
    finally:
        package.handlers = before
    assert shown == ["warning: a"]
    assert capsys.readouterr().err == "launch: error: b\\x1b[2J\n"
