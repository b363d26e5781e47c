"""One rank on a terminal behaves as under plain `python`: prompts, editors, bars, keys, settings after it."""

import os
import re
import signal
import termios
from pathlib import Path

import pytest

from launcher.runs.rank_logs import read_tail
from tests.launch.terminals import COLUMNS, ROWS, Terminal, launch_on_terminal, open_terminal
from tests.seam import LAUNCH, wait_for

ONE = "nproc_per_node=1"


def read_log(terminal: Terminal, ending: str = "out", attempt: int = 0) -> str:
    return (terminal.started().run_dir() / f"logs/{attempt}/rank-0.{ending}").read_bytes().decode()


ASKING = """
import os, signal, sys
signal.signal(signal.SIGWINCH, lambda *_: print("size", *os.get_terminal_size(), flush=True))
print([os.isatty(n) for n in (0, 1, 2)], os.tcgetpgrp(0) == os.getpgrp(), os.get_terminal_size())
print("told" if "LAUNCH_TERMINAL" in os.environ else "untold", file=sys.stderr)
x = 41
breakpoint()
name = input("name? ")
print(f"hello {name}")
signal.pause()
print("bytes \\xe9 \\t", end="")
"""


def test_a_debugger_a_prompt_and_the_windows_size(tmp_path: Path) -> None:
    with launch_on_terminal(tmp_path, ASKING, ONE) as terminal:
        shown = terminal.expect("launch-rank: rank 0, ", "(Pdb) ")
        assert f"[True, True, True] True os.terminal_size(columns={COLUMNS}, lines={ROWS})\r\n" in shown
        assert "untold\r\n" in shown
        terminal.type("p x + 1\r")
        terminal.expect("p x + 1\r\n42\r\n(Pdb) ")
        terminal.type("c\r")
        terminal.expect("name? ")
        terminal.type("Bop\x7fb\r")
        terminal.expect("hello Bob\r\n")
        terminal.resize(30, 100)
        terminal.expect("size 100 30\r\n")
        assert terminal.finish() == 0
        # Our own line does not follow the program's last one, which has no end.
        assert "bytes é \t\r\nlaunch: succeeded after" in terminal.text()
        assert terminal.is_restored()
        log = read_log(terminal)
        assert "(Pdb) p x + 1\n42\n(Pdb) c\n" in log and "\nhello Bob\nsize 100 30\nbytes é \t" in log
        assert log.endswith("bytes é \t") and "\r\n" not in log
        assert read_log(terminal, "err") == ""


DRAWING = """
import readline
import sys
from prompt_toolkit import prompt
from rich.console import Console
from rich.live import Live
from tqdm import tqdm
for number in tqdm(range(3), "bar", file=sys.stdout, mininterval=0, miniters=1):
    sys.stdin.readline()
print(repr(input("line> ")))
print(repr(prompt("edit> ")))
with Live("live one\\nsecond", console=Console(), auto_refresh=False) as live:
    input()
    live.update("live two\\nsecond", refresh=True)
print("step 1/9 loss 2")
"""


def test_bars_live_displays_and_line_editors(tmp_path: Path) -> None:
    left = "\x1b[D"
    with launch_on_terminal(tmp_path, DRAWING, ONE, PROMPT_TOOLKIT_NO_CPR="1") as terminal:
        for state in ("0%|", "33%|", "67%|"):
            terminal.expect(f"\rbar: {state:>5}")
            terminal.type("\r")
        terminal.expect("\rbar: 100%|")
        terminal.expect("line> ")
        terminal.type(f"ab{left}c\r")
        terminal.expect("'acb'\r\n", "edit>")
        terminal.type(f"hlo{left}{left}el\r")
        terminal.expect("'hello'\r\n", "\x1b[?25l", "live one")
        terminal.type("\r")
        terminal.expect("\x1b[1A", "live two", "\x1b[?25h")
        assert terminal.finish() == 0
        assert terminal.is_restored()
        rows = terminal.rows()
        assert any(row.startswith("launch: succeeded") for row in rows)
        assert not any(row.startswith("step 1/9 ━") for row in rows), "a bar of ours beside the program's"
        # The tail of a log has the last state of a line.
        log = terminal.started().run_dir() / "logs/0/rank-0.out"
        assert any(line.startswith("bar: 100%|") for line in read_tail(log, 99))


INTERRUPTED = """
import time
try:
    input("name? ")
except KeyboardInterrupt:
    print("was interrupted")
print("going on", flush=True)
time.sleep(300)
"""


def test_ctrl_c_is_the_programs_and_its_death_by_it_is_the_users_stop(tmp_path: Path) -> None:
    with launch_on_terminal(tmp_path, INTERRUPTED, ONE, "torchrun.max_restarts=2") as terminal:
        terminal.expect("name? ")
        rank = find_rank(terminal)
        wait_for(lambda: read_state(rank) == "S", "the read, before which a Ctrl-C would wait for a newline")
        terminal.type("\x03")
        terminal.expect("was interrupted", "going on")
        terminal.type("\x03")
        terminal.expect("KeyboardInterrupt")
        assert terminal.finish() == 130
        assert terminal.is_restored()
        shown = terminal.text()
        assert "launch: stopped after" in shown and "failed" not in shown and "SIGINT to" not in shown
        outcome = terminal.started().manifest()["outcome"]
        assert (outcome["state"], outcome["signal"], outcome["exit_code"]) == ("stopped", "SIGINT", 130)
        assert outcome["attempts"] == 1 and not (terminal.started().run_dir() / "logs/1").exists()


STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: print("not me", flush=True))
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


def test_three_ctrl_c_end_a_program_that_goes_on(tmp_path: Path) -> None:
    with launch_on_terminal(tmp_path, STUBBORN, ONE, "torchrun.shutdown_timeout=1") as terminal:
        terminal.expect("ready")
        for _ in range(2):
            terminal.type("\x03")
            terminal.expect("not me")
        terminal.type("\x03")
        terminal.expect("launch: Ctrl-C three times: the program is ended", "launch: SIGINT to the ranks")
        assert terminal.finish() == 130
        assert terminal.is_restored()
        assert "launch: stopped after" in terminal.text()
        assert terminal.started().survivors() == []


EDITOR = """
import sys, time, tty
tty.setraw(0)
print("raw", flush=True)
key = sys.stdin.buffer.raw.read(1)
if key == b"\\x03":
    print("a byte", flush=True)
    sys.exit(3)
time.sleep(300)
"""


@pytest.mark.parametrize("ending", ["failure", "SIGTERM"])
def test_the_terminal_is_as_it_was_after_a_raw_programs_end(tmp_path: Path, ending: str) -> None:
    with launch_on_terminal(tmp_path, EDITOR, ONE) as terminal:
        terminal.expect("raw")
        assert not terminal.settings()[3] & termios.ICANON  # type: ignore[operator]  # an int
        terminal.type("\x03" if ending == "failure" else "x")
        if ending == "failure":
            terminal.expect("a byte")
        else:
            terminal.process.send_signal(signal.Signals[ending])
        assert terminal.finish() == {"failure": 3, "SIGTERM": 143}[ending]
        wait_for(terminal.is_restored, "the terminal's settings")
        wait_for(lambda: terminal.started().survivors() == [], "the end of all processes")


def find_rank(terminal: Terminal) -> int:
    """PID of the program."""
    found = terminal.started().survivors_words()
    (rank,) = [pid for pid, words in found.items() if words.split()[1:] == ["program.py"]]
    return rank


def read_state(pid: int) -> str:
    """State of a process, as in proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


FLOOD = """
import os, sys
for number in range(100_000):
    print("line", number, "x" * 60)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit("once more")
open("done", "w").close()
"""


@pytest.mark.slow
def test_a_terminal_that_is_not_read_holds_up_nothing_and_shows_all_of_it_later(tmp_path: Path) -> None:
    """The log is the buffer, also over a restart."""
    with launch_on_terminal(tmp_path, FLOOD, ONE, "torchrun.max_restarts=1") as terminal:
        wait_for((tmp_path / "done").exists, "the program's end, with its output unread")
        assert terminal.finish() == 0
        lines = "".join(f"line {number} {'x' * 60}\n" for number in range(100_000))
        attempts = [read_log(terminal, attempt=attempt) for attempt in (0, 1)]
        assert attempts[0].endswith(lines + "once more\n") and attempts[1].endswith(lines)
        shown = re.sub(r"\r+\n", "\n", terminal.text()).splitlines(keepends=True)
        ours = [line for line in shown if line.startswith("launch: ")]
        assert "launch: the ranks were started again: attempt 1\n" in ours
        program = "".join(line for line in shown if not line.startswith("launch: "))
        assert attempts[0] + attempts[1] in program


def test_stderr_in_a_file_goes_there_and_the_rest_to_the_terminal(tmp_path: Path) -> None:
    program = "import os, sys; print([os.isatty(n) for n in (0, 1, 2)]); print('error', file=sys.stderr)"
    (tmp_path / "program.py").write_text(program)
    words = f"{LAUNCH[0]} -m launcher {ONE} -- program.py 2>errors"
    with open_terminal(tmp_path, "sh", "-c", words) as terminal:
        assert terminal.finish() == 0
        assert terminal.text() == "[True, True, False]\r\n"
        assert "\nerror\nlaunch: succeeded" in (tmp_path / "errors").read_text()
        assert read_log(terminal) == "[True, True, False]\n"
        assert read_log(terminal, "err").endswith("\nerror\n")


@pytest.mark.usefixtures("quick_agent")
@pytest.mark.parametrize("words", [f"{ONE} </dev/null", f"{ONE} logs.console=none", "nproc_per_node=2 | cat"])
def test_without_a_terminal_at_both_ends_or_for_several_ranks_there_is_none(
    tmp_path: Path, words: str
) -> None:
    program = "import os; print([os.isatty(n) for n in (1, 2)], file=open('seen', 'w'))"
    (tmp_path / "program.py").write_text(program)
    key, _, rest = words.partition(" ")
    more, redirection = ("", rest) if rest[0] in "<|" else (rest, "")
    command = f"{LAUNCH[0]} -m launcher {key} {more} -- program.py {redirection}"
    with open_terminal(tmp_path, "sh", "-c", command) as terminal:
        assert terminal.finish() == 0
        assert terminal.is_restored()
    assert (tmp_path / "seen").read_text() == "[False, False]\n"


TWO = """
import os, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
def wait(name):
    while not Path(name).exists():
        time.sleep(0.02)
if rank == 0:
    for state in ("10%", "20%"):
        sys.stderr.write(f"\\r{state}|##")
        wait(f"after{state}")
    print("\\nname? ", end="", flush=True)
    wait("named")
    print("Bob")
else:
    wait("speak")
    print("one speaks", flush=True)
    wait("named")
"""


@pytest.mark.usefixtures("quick_agent")
def test_several_ranks_on_a_terminal_keep_unfinished_lines_below(tmp_path: Path) -> None:
    host = os.uname().nodename
    with launch_on_terminal(tmp_path, TWO, "nproc_per_node=2", "logs.console=all") as terminal:
        terminal.expect(f"[{host}:0] 10%|##")
        (tmp_path / "after10%").touch()
        terminal.expect(f"[{host}:0] 20%|##")
        (tmp_path / "after20%").touch()
        terminal.expect(f"[{host}:0] name? ")
        (tmp_path / "speak").touch()
        terminal.expect(f"\r\x1b[K[{host}:1] one speaks\r\n[{host}:0] name? ")
        (tmp_path / "named").touch()
        assert terminal.finish() == 0
        rows = terminal.rows()
        assert f"[{host}:0] name? Bob" in rows and f"[{host}:1] one speaks" in rows
        assert terminal.is_restored()
