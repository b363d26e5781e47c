"""`launch logs` of logs that grow, are cut, and begin late, and of real runs on this machine."""

import contextlib
import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.runs.manifest import identify_process
from launcher.runs.rank_logs import CHUNK, RunOutputReader, find_tail
from tests.cli.make_runs import make_run, write_applied, write_log
from tests.seam import (
    LAUNCH,
    PATIENCE,
    Launch,
    Result,
    Started,
    clean_environ,
    in_shell,
    start,
    wait_for,
    write_program,
)

STEPS = """
import os, sys, time
for step in range(1, 200):
    print(f"rank {os.environ['RANK']} step {step}", flush=True)
    time.sleep(0.01)
"""


def test_all_ranks_with_their_origin_out_before_err(launch: Launch, here: Path) -> None:
    path = make_run(here / "runs")
    for rank in (0, 2, 10):
        write_log(path, rank, f"out of {rank}\nno end")
        write_log(path, rank, f"err of {rank}\n", ending="err")
        write_applied(path, rank, f"n{rank}")
    lines = [f"[n{r}:{r}] {text}\n" for r in (0, 2, 10) for text in (f"out of {r}", "no end", f"err of {r}")]
    assert launch("logs", "tiny") == Result(0, "".join(lines), "")
    assert launch("logs", "tiny", "rank=10") == Result(0, "out of 10\nno end\nerr of 10\n", "")


def test_without_a_name_it_is_the_newest_run(launch: Launch, here: Path) -> None:
    launch("logs").assert_error(2, "no run below runs_dir=runs yet")
    for name, stamp in (("llama", "20260801-120000"), ("gpt", "20260801-120001")):
        write_log(make_run(here / "runs", name, stamp), 0, f"out of {name}\n")
    told = "launch: logs of gpt/20260801-120001, the newest run\n"
    assert launch("logs", "rank=0") == Result(0, "out of gpt\n", told)
    assert launch("logs", "llama", "rank=0") == Result(0, "out of llama\n", "")


def test_what_was_printed_arrives_as_its_bytes(here: Path) -> None:
    path = make_run(here / "runs")
    written = b"1%\r2%\r" * CHUNK + bytes(range(256)) * 99 + b"no end"
    for rank in (0, 1):
        write_log(path, rank, "").write_bytes(written)
    commands = [[*LAUNCH, "logs", "tiny", *words] for words in ([], ["rank=1"])]
    both, one = (subprocess.check_output(words, cwd=here, env=clean_environ()) for words in commands)
    assert one == written
    marked = [f"[?:{rank}] ".encode() + written.replace(b"\n", f"\n[?:{rank}] ".encode()) for rank in (0, 1)]
    assert both == b"\n".join(marked)


def test_the_last_attempt_with_output(launch: Launch, here: Path) -> None:
    path = make_run(here / "runs")
    write_log(path, 0, "first\n")
    write_log(path, 0, "second\n", attempt=1)
    write_log(path, 1, "late\n", attempt=10)
    assert launch("logs", "tiny").out == "[?:1] late\n"
    assert launch("logs", "tiny", "rank=0").out == "second\n"


def test_a_job_that_failed_before_its_ranks_began_is_explained_by_its_own_log(
    launch: Launch, here: Path
) -> None:
    path = make_run(here / "runs", state="failed")
    (path / "logs/agent-box.log").write_text("agent\n")
    assert launch("logs", "tiny").out == "agent\n"
    (path / "logs/slurm-12.out").write_text("module: no such module\nslurmstepd: error")
    assert launch("logs", "tiny").out == "module: no such module\nslurmstepd: error"
    write_log(path, 0, "ran\n")
    assert launch("logs", "tiny").out == "[?:0] ran\n"
    (path / "logs/1").mkdir()
    assert launch("logs", "tiny").out == "[?:0] ran\nmodule: no such module\nslurmstepd: error"
    assert launch("logs", "-f", "tiny", "logs.tail=1").out == "[?:0] ran\nslurmstepd: error"


def test_no_output_says_how_the_run_stands(launch: Launch, here: Path) -> None:
    make_run(here / "runs", state="failed", outcome={"reason": "no agent"})
    text = "launch: no output: tiny/20260801-120000 has failed: no agent\n"
    assert launch("logs", "tiny") == Result(0, "", text)


def test_mistakes(launch: Launch, here: Path) -> None:
    path = make_run(here / "runs")
    make_run(here / "runs", "other")
    for rank in (0, 2):
        write_log(path, rank, "x\n")
    for words, part in (
        ("tiny rank=5", "the run's ranks are 0 to 2"),
        ("tiny rank=-1", "rank=-1"),
        ("tiny logs.tail=0", "logs.tail=0"),
        ("tiny other", "are 2 runs"),
        ("nix", "no run 'nix'"),
    ):
        launch("logs", *words.split()).assert_error(2, part)


def test_the_last_lines_are_found_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    for size, end in itertools.product((1, 7, CHUNK - 1, CHUNK, CHUNK + 1), ("", "\n")):
        lines = ["x" * size, "", "last but one", "last"]
        path.write_text("\n".join(lines) + end)
        for count in range(1, 6):
            found = path.read_text()[find_tail(path, count) :]
            assert found == "\n".join(lines[-count:]) + end, (size, end)
    path.write_text("")
    assert find_tail(path, 3) == find_tail(tmp_path / "none", 3) == 0
    monkeypatch.setattr("launcher.runs.rank_logs.BACKWARDS", 1000)
    path.write_text("a\n" + "x" * 5000)
    assert find_tail(path, 1) == 4002, "a line longer than is searched does not take for ever"


def read(tail: RunOutputReader, *, final: bool = False) -> list[str]:
    return [line.text for line in tail.read_lines(final=final)]


def test_ranks_and_attempts_that_come_later_and_logs_that_are_cut(tmp_path: Path) -> None:
    path = make_run(tmp_path, state="running")
    tail = RunOutputReader(path, lines=2)
    assert read(tail) == []
    log = write_log(path, 0, "1\n2\n3\nhalf")
    assert read(tail) == ["3"]  # the half line is one of the two
    write_log(path, 1, "a\nb\nc\n")
    write_log(path, 0, " and whole\n")
    assert read(tail) == ["half and whole", "a", "b", "c"]
    log.write_text("new\n")
    assert read(tail) == ["new"]
    write_log(path, 0, "unfinished")
    write_log(path, 0, "of the second\n", attempt=2)
    assert read(tail) == ["unfinished", "attempt 2", "of the second"]
    write_log(path, 1, "too late\n")
    write_log(path, 3, "last", attempt=3)
    assert read(tail) == ["attempt 3"]
    assert read(tail, final=True) == ["last"]
    assert read(tail, final=True) == []


@contextlib.contextmanager
def follow(folder: Path, *words: str) -> Iterator[Started]:
    """A `launch logs -f` in a folder of its own, so that its output is not that of the run."""
    own = folder / "following"
    own.mkdir()
    with start(own, "logs", f"runs_dir={folder}/runs", *words) as tail:
        yield tail


def test_following_goes_over_the_attempts_to_the_end(here: Path) -> None:
    living = subprocess.Popen(["sleep", "100"])
    process = identify_process(living.pid)
    path = make_run(here / "runs", state="running", process=process)
    write_applied(path, 0, "box")
    write_log(path, 0, "1\n2\n3\n4\n")
    with follow(here, "-f", "tiny", "logs.tail=2") as tail:
        wait_for(lambda: tail.read("stdout") == "[box:0] 3\n[box:0] 4\n", "the last two lines")
        write_log(path, 0, "5\n")
        wait_for(lambda: tail.read("stdout").endswith("[box:0] 5\n"), "a new line")
        write_log(path, 0, "again\n", attempt=1)
        wait_for(lambda: tail.read("stdout").endswith("] again\n"), "the next attempt")
        assert tail.process.poll() is None
        living.kill()
        living.wait()
        assert tail.wait(PATIENCE) == 0
        assert tail.read().startswith("launch: attempt 1\nlaunch: tiny/20260801-120000 is lost: process ")


def test_ctrl_c_ends_following_quietly(here: Path) -> None:
    path = make_run(here / "runs", state="running", process=identify_process(os.getpid()))
    write_log(path, 0, "1\n")
    with follow(here, "--follow", "rank=0", "tiny") as tail:
        wait_for(lambda: tail.read("stdout") == "1\n", "the line")
        tail.process.send_signal(signal.SIGINT)
        assert tail.wait(PATIENCE) == 130
        assert tail.read() == ""


def test_a_reader_that_leaves_ends_it_quietly(here: Path) -> None:
    path = make_run(here / "runs")
    write_log(path, 0, "line\n" * 100_000)
    result = in_shell("launch logs tiny | head -1", here)
    assert (result.code, result.out, result.err) == (141, "[?:0] line\n", "")


@pytest.mark.usefixtures("quick_agent")
def test_a_real_run_is_followed_whole(here: Path) -> None:
    program = write_program(here, STEPS)
    with start(here, "nproc_per_node=2", "name=real", "--", program) as run:
        wait_for(lambda: any((here / "runs").glob("real/*/manifest.json")), "the run directory")
        with follow(here, "-f", "real", "logs.tail=1000") as tail:
            assert run.wait() == 0
            assert tail.wait(PATIENCE) == 0
            text = tail.read("stdout")
            assert tail.read().endswith("has succeeded\n")
    host = os.uname().nodename
    for rank in range(2):
        shown = [line for line in text.splitlines() if f"] rank {rank} step" in line]
        assert shown == [f"[{host}:{rank}] rank {rank} step {step}" for step in range(1, 200)]
