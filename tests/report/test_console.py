"""What the console shows of a running job: on terminals, in files, and when the reader has left."""

import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.report.console import JobConsole, make_console
from launcher.runs.logs import Line
from tests.conftest import clean_environ

LINES = [Line(0, "out", "zero"), Line(0, "err", "zero's stderr"), Line(1, "out", "one")]


def make(mode: str) -> JobConsole:
    return JobConsole(mode, "h", make_console())


@pytest.mark.parametrize(
    ("mode", "out", "err"),
    [
        ("rank0", "[h:0] zero\n", "[h:0] zero's stderr\n"),
        ("all", "[h:0] zero\n[h:1] one\n", "[h:0] zero's stderr\n"),
        ("none", "", ""),
    ],
)
def test_modes(capsys: pytest.CaptureFixture[str], mode: str, out: str, err: str) -> None:
    console = make(mode)
    for line in LINES:
        console.show_line(line)
    console.say("ours")
    console.close()
    assert capsys.readouterr() == (out, f"{err}launch: ours\n")


def test_progress_is_noted_in_every_mode(capsys: pytest.CaptureFixture[str]) -> None:
    console = make("none")
    console.show_line(Line(0, "out", "step 1/3 loss 2.5"))
    console.show_line(Line(1, "out", "step 2/3 loss 2.0"))
    console.show_line(Line(0, "out", "step 3/3 loss 1.5"))
    assert [step.step for step in console.steps] == [1, 3]
    assert capsys.readouterr() == ("", "")


def test_letters_that_the_stream_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    make("all").show_line(Line(0, "out", "é\udcff ok"))
    assert raw.getvalue() == b"[h:0] ?? ok\n"


def test_a_stream_that_is_gone_does_not_take_the_other_along(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        console = make("all")
        for line in LINES:
            console.show_line(line)
        console.say("still here")
        monkeypatch.undo()
        # What stays in the buffer would be complained of when it is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)
    assert console.gone == {"out"}
    assert "still here" in capsys.readouterr().err


def test_a_closed_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    console = make("all")
    console.say("to nobody")
    console.guard(lambda rich: rich.print("to nobody"))
    assert console.gone == {"err"}


def test_the_table_for_a_reader_that_has_left_is_a_broken_pipe_and_no_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rich by itself would end the process with code 1."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        console = make("all")
        console.guard(lambda rich: rich.print("to nobody"))
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)
    assert console.gone == {"err"}


SHOW = """
import sys, time
from launcher.report.console import JobConsole, make_console
from launcher.runs.logs import Line
console = JobConsole("rank0", "h", make_console())
for number in (10, 20, 30):
    console.show_line(Line(0, "out", f"step {number}/40 loss {5 - number / 10} tokens/s 1234{number} lr 0.1"))
    time.sleep(0.15)
console.say("between [bold]")
console.close()
console.say("after")
"""


def on_terminal(script: str, *, stdout: int | None = None, **variables: str) -> str:
    """What a script writes to a pseudo-terminal, its stdout elsewhere where that is given."""
    ours, theirs = pty.openpty()
    environ = {**clean_environ(), "TERM": "xterm", "COLUMNS": "100", "LINES": "30", **variables}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=theirs,
        stdout=theirs if stdout is None else stdout,
        stderr=theirs,
        env=environ,
    )
    os.close(theirs)
    seen, deadline = b"", time.monotonic() + 30
    while time.monotonic() < deadline and select.select([ours], [], [], 30)[0]:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # Linux says EIO when the other side is closed
            break
    os.close(ours)
    assert process.wait(30) == 0, seen
    return seen.decode()


def test_on_a_terminal_there_is_a_bar_with_step_loss_and_tokens() -> None:
    seen = on_terminal(SHOW)
    assert "step 30/40" in seen and "loss 2.0" in seen and "tokens/s 123430" in seen
    assert "lr 0.1" in seen.replace("[h:0] step", "") and "\x1b[" in seen
    assert "[h:0] step 10/40 loss 4.0" in seen
    assert "launch: between [bold]" in seen
    assert seen.rstrip().endswith("launch: after")


def test_with_stdout_in_a_file_the_lines_go_there_and_the_bar_to_the_terminal(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        seen = on_terminal(SHOW, stdout=file.fileno())
    assert "step 30/40" in seen and "[h:0]" not in seen
    text = (tmp_path / "out").read_text()
    assert text == "".join(
        f"[h:0] step {n}/40 loss {5 - n / 10} tokens/s 1234{n} lr 0.1\n" for n in (10, 20, 30)
    )


def test_a_bar_on_an_ascii_terminal() -> None:
    seen = on_terminal(SHOW, PYTHONIOENCODING="ascii")
    assert "step 30/40" in seen and "launch: after" in seen
    assert seen.isascii() and "\\u" not in seen


def test_a_dumb_terminal_and_no_terminal_have_no_bar(tmp_path: Path) -> None:
    seen = on_terminal(SHOW, TERM="dumb")
    assert "[h:0] step 30/40" in seen and "\x1b[" not in seen
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        capture_output=True,
        text=True,
        check=True,
        env=clean_environ(),
        timeout=60,
    )
    assert done.stdout.count("step") == 3 and done.stderr == "launch: between [bold]\nlaunch: after\n"


def test_where_there_is_no_terminal_tables_do_not_wrap(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print("x" * 150)
    assert capsys.readouterr().err == "x" * 150 + "\n"
