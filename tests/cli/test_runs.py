"""`launch status`, `nodes` and `logs`, of run directories made by hand and of real runs on this machine."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.runs.manifest import ProcessId, open_process
from tests.cli.make_runs import identify_process, make_run, read_manifest, write_applied, write_log
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

DAMAGED = [
    *("", "{", "[]", "null", '{"outcome": 3}'),
    '{"outcome": {"state": ["x"]}, "hosts": 3, "earlier": {"a": 1}}',
    '{"outcome": {"state": "failed", "first_failure": [1]}, "earlier": [1, {"outcome": 2}], "started": 7}',
    '{"outcome": {"state": "failed", "first_failure": {"last_lines": 3}}, "ended": "x", "started": "y"}',
]
STEPS = """
import time
for step in range(1, 1000):
    print(f"step {step}/1000 loss {1 / step:.3f}", flush=True)
    time.sleep(0.02)
"""
RUN = "tiny/20260801-120000"
CHUNK = 1 << 20
"""Bytes of a log that are read at once."""


def read_runs(result: Result) -> list[dict[str, Any]]:
    assert (result.code, result.err) == (0, ""), result
    data = json.loads(result.out)
    assert data["schema"] == 1
    return list(data["runs"])


def read_newest(launch: Launch) -> dict[str, Any]:
    return read_runs(launch("status", "format=json"))[0]


def test_no_run_yet_and_mistakes(launch: Launch, here: Path) -> None:
    for verb in ("status", "nodes"):
        assert launch(verb) == Result(0, "no run below runs_dir=runs yet\n", "")
    assert read_runs(launch("status", "format=json")) == []
    make_run(here / "runs")
    launch("status", "tinny").assert_error(2, "did you mean tiny")
    launch("status", "format=xml").assert_error(2, "format=xml", "table")
    launch("status", "tiny", "nix").assert_error(2, "'nix'")


def test_a_run_that_failed(launch: Launch, here: Path) -> None:
    failure: dict[str, Any] = {"rank": 3, "local_rank": 1, "host": "n2", "attempt": 1, "exit_code": 137}
    failure["reason"] = "was killed by SIGKILL (signal 9)"
    failure["last_lines"] = ["Traceback", "RuntimeError: \x1b[31moh\x1b[0m"]
    outcome = {"exit_code": 137, "cause": "crash", "first_failure": failure}
    checked = {"lines": ["sick: n3: limits: \x1b[2J", "light checks of 3 nodes in 9.9 s: 1 sick (n3)"]}
    path = make_run(here / "runs", state="failed", hosts=["n1", "n2"], outcome=outcome, preflight=checked)
    write_log(path, 0, "step 7/90 loss 1.5\n\x1b[1mthe last\x1b[0m\n\n", attempt=1)
    run = read_newest(launch)
    expected: dict[str, object] = {"run": RUN, "path": str(path), "state": "failed", "job_id": None}
    expected |= {"step": 7, "total": 90, "last_line": "the last", "restarts": 1, "seconds": 90.0, "nodes": 2}
    expected |= {"exit_code": 137, "first_failure": failure, "nodelist": "n1,n2"}
    assert {key: run[key] for key in expected} == expected
    assert run["reason"] == "rank 3 on n2 was killed by SIGKILL (signal 9)"
    shown = launch("status", "tiny").out
    for text in ("first failure", "rank 3 on n2 (local rank 1)", "| RuntimeError: ", "7/90", "1 min 30 s"):
        assert text in shown
    assert "preflight      sick: n3: limits: " in shown and ": 1 sick (n3)" in shown
    assert "\x1b" not in shown
    make_run(here / "others", preflight={"kind": "light", "problem": "no such plugin"})
    shown = launch("status", "tiny", "runs_dir=others").out
    assert "preflight  the nodes were not checked: no such plugin" in shown


def test_attempts_are_told_with_their_causes(launch: Launch, here: Path) -> None:
    times = {"started": "2026-08-01T10:00:00+00:00", "ended": "2026-08-01T11:00:00+00:00", "command": []}
    earlier = [
        {**times, "outcome": {"state": "submitted"}},
        {**times, "outcome": {"state": "requeued", "cause": "preempted"}},
        {**times, "outcome": {"state": "requeued", "cause": "timeout", "reason": "time limit: requeued"}},
    ]
    outcome = {"cause": "no_progress", "reason": "no progress in 3 attempts in a row"}
    make_run(here / "runs", state="stopped", earlier=earlier, outcome=outcome)
    found = [(one["state"], one["cause"]) for one in read_newest(launch)["attempts"]]
    assert found == [("requeued", "preempted"), ("requeued", "timeout"), ("stopped", "no_progress")]
    shown = [line.strip().rpartition("  ")[2] for line in launch("status", "tiny").out.splitlines()]
    told = {"requeued: preempted", "requeued: time limit: requeued"}
    assert told | {"stopped: no progress in 3 attempts in a row"} <= {*shown}


def test_nodes_are_shown_as_slurm_writes_them(launch: Launch, here: Path) -> None:
    path = make_run(here / "runs") / "manifest.json"
    manifest = json.loads(path.read_text())
    for hosts, cell in (
        (["n0", "n1"], "2 n[0-1]"),
        (["gpu12", "gpu09", "gpu10", "gpu11"], "4 gpu[09-12]"),
        (["box"], "1 box"),
        (["login", "n3"], "2 login,n3"),
        (["n1-ib.cluster", "n2-ib.cluster"], "2"),
    ):
        path.write_text(json.dumps({**manifest, "hosts": hosts}))
        header, row = launch("status").out.splitlines()
        assert row[header.index("nodes") :].partition("  ")[0].strip() == cell, row
        assert read_newest(launch)["nodelist"] == ",".join(hosts)


def test_the_newest_ten_and_all_that_live(launch: Launch, here: Path) -> None:
    mine = {"process": identify_process(os.getpid())}
    make_run(here / "runs", "old", "20250101-000000", "running", **mine)
    make_run(here / "runs", "old", "20250101-000001")
    for number in range(12):
        make_run(here / "runs", "new", f"20260801-0000{number:02}")
    found = [run["run"] for run in read_runs(launch("status", "format=json"))]
    assert found == [f"new/20260801-0000{number:02}" for number in range(11, 1, -1)] + ["old/20250101-000000"]
    named = read_runs(launch("status", "format=json", "old/20250101-000001", "new"))
    assert [run["run"] for run in named] == ["old/20250101-000001", "new/20260801-000011"]


def test_a_damaged_manifest_is_shown_as_far_as_it_goes(launch: Launch, here: Path) -> None:
    path = make_run(here / "runs") / "manifest.json"
    for text in DAMAGED:
        path.write_text(text)
        assert read_newest(launch)["state"] in ("unknown", "failed"), text
        assert launch("status", "tiny").code == 0, text


def test_a_run_is_known_by_its_process_and_that_by_more_than_its_number(launch: Launch, here: Path) -> None:
    def look(process: dict[str, object]) -> tuple[str, str]:
        (path / "manifest.json").write_text(json.dumps({**manifest, "process": process}))
        run = read_newest(launch)
        return run["state"], run["reason"]

    mine = identify_process(os.getpid())
    path = make_run(here / "runs", state="running")
    manifest = read_manifest(path)
    assert look(mine) == look({}) == ("running", "")
    gone = f"process {{}} on {os.uname().nodename} is gone, and left no word"
    for other in ({"start": 1}, {"boot": "another"}):
        assert look({**mine, **other}) == ("lost", gone.format(os.getpid()))
    # Of another host's nothing is known but what it writes.
    for other in ({"host": "elsewhere"}, {"namespace": "pid:[1]"}):
        assert look({**mine, **other}) == ("running", "")
        os.utime(path / "logs", (1e9, 1e9))
    for written in (write_log(path, 0, ""), path / "logs/0", path / "logs"):
        os.utime(written, (1e9, 1e9))
    state, reason = look({**mine, "host": "elsewhere"})
    assert state == "running" and reason.startswith("nothing was written for ")
    assert reason.endswith("can be seen on elsewhere alone")
    child = subprocess.Popen(["sleep", "100"])
    record = identify_process(child.pid)
    assert look(record)[0] == "running"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert look(record) == ("lost", gone.format(child.pid)), "a zombie is no process"
    child.wait()
    assert look(record) == ("lost", gone.format(child.pid))


def test_a_process_is_signalled_as_the_launch_of_its_run_alone(tmp_path: Path) -> None:
    mine = ProcessId(**identify_process(os.getpid()))  # type: ignore[arg-type]
    with pytest.raises(PermissionError, match="is not the launch of this run"):
        open_process(mine, tmp_path)
    held = os.open(tmp_path, os.O_RDONLY)
    os.close(open_process(mine, tmp_path))
    for other in (replace(mine, start=1), replace(mine, boot="another")):
        with pytest.raises(ProcessLookupError):
            open_process(other, tmp_path)
    os.close(held)


def test_the_step_and_the_last_line_by_the_logs(launch: Launch, here: Path) -> None:
    def look() -> tuple[object, ...]:
        run = read_newest(launch)
        return run["step"], run["last_line"], run["restarts"]

    path = make_run(here / "runs")
    (path / "logs/slurm-12.out").write_text("head\nlaunch: run directory /a/b\n")
    assert look() == (None, "head", 0), "lines of ours do not count"
    err = write_log(path, 0, "warned\nlaunch-rank: rank 0, cpus 0\n", ending="err")
    assert look() == (None, "warned", 0)
    out = write_log(path, 0, "step 40/90 loss 1\n 10%\r 20%\n")
    os.utime(err, (1, 1))
    assert look() == (40, "20%", 0)
    os.utime(out, (0, 0))
    assert look() == (40, "warned", 0), "the stream that was written to last counts"
    write_log(path, 0, "loading\n", attempt=1)
    assert look() == (40, "loading", 1), "the step of the attempt before counts until there is one"
    write_log(path, 0, "step 38/90 loss 1\n", attempt=1)
    assert look()[0] == 38


def test_narrow_terminals_lose_columns_and_keep_the_run_and_its_state(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        lines = re.sub("\x1b\\[[0-9;]*m", "", launch("status", "llama7b").out).splitlines()
        assert max(map(len, lines)) <= width
        return [line.rstrip() for line in lines]

    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("LINES", "24")):  # as on a terminal
        monkeypatch.setenv(name, value)
    more = {"hosts": [f"n{number}" for number in range(4)], "slurm": {"job_id": "123456_7"}}
    more |= {"ended": "2026-08-01T15:20:00.000+00:00", "outcome": {"reason": "Resources"}}
    path = make_run(here / "runs", "llama7b", "20260801-120000", "failed", **more)
    write_log(path, 0, "step 120/40000 loss 2.345 " * 4, attempt=2)
    titles = {width: " ".join(show(width)[0].split()) for width in (160, 120, 100, 80, 60, 40)}
    assert titles[160] == "run job state nodes step restarts time reason last line"
    assert titles[80] == "run job state nodes step reason"
    assert titles[40] == "run state"
    row = show(160)[1]
    assert "4 n[0-3]  120/40000         2  3 h 20 min  Resources  step 120/40000" in row and row.endswith("…")


@pytest.mark.usefixtures("quick_agent")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=str)
def test_a_real_run_from_its_start_to_its_end(here: Path, launch: Launch, number: signal.Signals) -> None:
    with start(here, "nproc_per_node=1", "name=real", "--", write_program(here, STEPS)) as run:
        logs = "runs/real/*/logs/0/rank-0.out"
        wait_for(lambda: any("step 3/" in log.read_text() for log in here.glob(logs)), "three steps")
        found = read_newest(launch)
        assert found["state"] == "running" and found["total"] == 1000 and found["step"]
        assert found["last_line"].startswith("step ")
        run.process.send_signal(number)
        run.wait()
        found = read_newest(launch)
        if number == signal.SIGKILL:
            assert found["state"] == "lost"
        else:
            ended = (found["state"], found["reason"], found["exit_code"])
            assert ended == ("stopped", "by SIGTERM", 143)
        wait_for(lambda: not run.survivors(), "the ranks' end")


# launch nodes


@pytest.fixture
def runs(here: Path) -> Path:
    """Three runs on nodes n0 to n11."""
    hosts: dict[str, Any] = {"hosts": [f"n{number}" for number in range(12)]}
    finding = {"host": "n2", "level": "error", "subject": "limits", "what": "8 MiB\x1b[2J " * 40, "fix": ""}
    checked = {"findings": [finding], "sick": ["n2"]}
    make_run(here / "runs", "a", "20260801-120001", **hosts, preflight=checked)
    make_run(here / "runs", "a", "20260801-120002", "failed", **hosts, outcome={"lost": ["n11"]})
    make_run(here / "runs", "a", "20260801-120003", hosts=["n11", "login"])
    return here / "runs"


def test_nodes_with_trouble_come_first_and_are_named_by_patterns(launch: Launch, runs: Path) -> None:
    lines = launch("nodes").out.splitlines()
    assert lines[0].split()[:8] == ["node", "runs", "sick", "lost", "hangs", "slow", "warnings", "seen"]
    assert {lines[1].split()[0], lines[2].split()[0]} == {"n2", "n11"} and len(lines) == 14
    shown = launch("nodes", "n[10-11]", "n2*").out
    assert {line.split()[0] for line in shown.splitlines()[1:4]} == {"n2", "n10", "n11"}
    assert "a/20260801-120002  lost" in shown and "\x1b" not in shown
    launch("nodes", "m*").assert_error(2, "was on a node 'm*'", "login, n0")
    found = json.loads(launch("nodes", "n11", "format=json").out)
    (node,) = found["nodes"]
    assert found["schema"] == 1
    assert (node["host"], node["runs"], node["lost"], node["trouble"]) == ("n11", 3, 1, 1)
    assert node["events"][0]["run"] == "a/20260801-120002"


def test_what_is_no_manifest_is_passed_over(launch: Launch, runs: Path) -> None:
    for stamp in ("20260801-120004", "20260801-120006"):
        (runs / "b" / stamp).mkdir(parents=True)
    (runs / "b/20260801-120004/manifest.json").write_text("[" * 100_000)
    (runs / "b/20260801-120006/manifest.json").symlink_to("/dev/zero")
    make_run(runs, "b", "20260801-120005", hosts={"n0": 1}, preflight=[1], hangs="x")
    assert len(launch("nodes", "format=json").out) > 1000


COUNTED = """
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


def test_the_last_lines_are_found_from_the_end(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(here / "runs")
    printed = [
        (["x" * size, "", "last but one", "last"], end)
        for size, end in itertools.product((1, 7, CHUNK - 1, CHUNK, CHUNK + 1), ("\n", ""))
    ]
    for rank, (lines, end) in enumerate(printed):
        write_log(path, rank, "\n".join(lines) + end)
    write_log(path, len(printed), "")
    for count in range(1, 6):
        shown = launch("logs", "-f", "tiny", f"logs.tail={count}").out
        found = [line.partition(" ") for line in shown.split("\n")]
        assert {mark for mark, *_ in found} == {f"[?:{rank}]" for rank in range(len(printed))}
        for rank, (lines, _) in enumerate(printed):
            assert [line for mark, _, line in found if mark == f"[?:{rank}]"] == lines[-count:], rank
    monkeypatch.setattr("launcher.runs.rank_logs.BACKWARDS", 1000)
    write_log(path, 0, "a\n" + "x" * 5000, attempt=1)
    shown = launch("logs", "-f", "tiny", "rank=0", "logs.tail=1").out
    assert shown == "x" * 1000, "a line longer than is searched does not take for ever"


@contextlib.contextmanager
def follow(folder: Path, *words: str) -> Iterator[Started]:
    """A `launch logs -f` in a folder of its own, so that its output is not that of the run."""
    own = folder / "following"
    own.mkdir()
    with start(own, "logs", f"runs_dir={folder}/runs", *words) as tail:
        yield tail


def test_ranks_and_attempts_that_come_later_and_logs_that_are_cut_are_followed_to_the_end(here: Path) -> None:
    living = subprocess.Popen(["sleep", "100"])
    path = make_run(here / "runs", state="running", process=identify_process(living.pid))
    write_applied(path, 0, "box")
    log = write_log(path, 0, "1\n2\n3\nhalf")
    with follow(here, "-f", "tiny", "logs.tail=2") as tail:
        shown = ""

        def await_lines(*lines: str) -> None:
            nonlocal shown
            shown += "".join(f"[{line}\n" for line in lines)
            wait_for(lambda: tail.read("stdout") == shown, str(lines), tell=lambda: tail.read("stdout"))

        await_lines("box:0] 3")  # the half line is one of the two
        write_log(path, 1, "a\nb\nc\n")
        await_lines("?:1] a", "?:1] b", "?:1] c")
        write_log(path, 0, " and whole\n")
        await_lines("box:0] half and whole")
        log.write_text("new\n")
        await_lines("box:0] new")
        write_log(path, 0, "unfinished")
        write_log(path, 0, "of the second\n", attempt=2)
        await_lines("box:0] unfinished", "?:0] of the second")  # the record is of the first
        write_log(path, 1, "too late\n")
        write_log(path, 3, "last", attempt=3)
        wait_for(lambda: "attempt 3\n" in tail.read(), "the last attempt")
        assert tail.process.poll() is None
        living.kill()
        living.wait()
        assert tail.wait(PATIENCE) == 0
        assert tail.read("stdout") == f"{shown}[?:3] last"
        ended = "launch: tiny/20260801-120000 is lost: process "
        assert tail.read().startswith(f"launch: attempt 2\nlaunch: attempt 3\n{ended}")


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
    program = write_program(here, COUNTED)
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
