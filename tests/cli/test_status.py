"""`launch status` of run directories made by hand, and of real runs on this machine."""

import io
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from launcher.report.runs import print_details, print_runs
from launcher.runs.run_process import check_process, identify_process, open_process
from launcher.runs.run_status import RunStatus, add_progress, read_status
from launcher.slurm.run_states import resolve_run
from tests.cli.make_runs import make_run, write_log
from tests.seam import Launch, Result, start, wait_for, write_program

DAMAGED = [
    *(
        "",
        "{",
        "[]",
        "null",
        '{"outcome": 3}',
        '{"outcome": {"state": ["x"]}, "hosts": 3, "earlier": {"a": 1}}',
    ),
    '{"outcome": {"state": "failed", "first_failure": [1]}, "earlier": [1, {"outcome": 2}], "started": 7}',
    '{"outcome": {"state": "failed", "first_failure": {"last_lines": 3}}, "ended": "x", "started": "y"}',
]
STEPS = """
import sys, time
for step in range(1, 1000):
    print(f"step {step}/1000 loss {1 / step:.3f}", flush=True)
    time.sleep(0.02)
"""


def read_runs(result: Result) -> list[dict[str, object]]:
    assert (result.code, result.err) == (0, ""), result
    data = json.loads(result.out)
    assert data["schema"] == 1
    return list(data["runs"])


def test_no_run_yet(launch: Launch) -> None:
    assert launch("status") == Result(0, "no run below runs_dir=runs yet\n", "")
    assert read_runs(launch("status", "format=json")) == []


def test_a_run_that_failed(launch: Launch, here: Path) -> None:
    failure = {"rank": 3, "local_rank": 1, "host": "n2", "reason": "was killed by SIGKILL (signal 9)"}
    failure["last_lines"] = ["Traceback", "RuntimeError: \x1b[31moh\x1b[0m"]
    outcome = {"exit_code": 137, "cause": "crash", "first_failure": failure}
    path = make_run(here / "runs", state="failed", hosts=["n1", "n2"], outcome=outcome)
    write_log(path, 0, "step 7/90 loss 1.5\n\x1b[1mthe last\x1b[0m\n\n", attempt=1)
    (run,) = read_runs(launch("status", "format=json"))
    expected: dict[str, object] = {
        "run": "tiny/20260801-120000",
        "path": str(path),
        "state": "failed",
        "job_id": None,
        "nodes": 2,
    }
    expected |= {"step": 7, "total": 90, "last_line": "the last", "restarts": 1, "seconds": 90.0}
    expected |= {"exit_code": 137, "first_failure": failure, "nodelist": "n1,n2"}
    assert {key: run[key] for key in expected} == expected
    assert run["reason"] == "rank 3 on n2 was killed by SIGKILL (signal 9)"
    shown = launch("status", "tiny").out
    for text in ("first failure", "rank 3 on n2 (local rank 1)", "| RuntimeError: ", "7/90", "1 min 30 s"):
        assert text in shown
    assert "\x1b" not in shown


def test_attempts_are_told_with_their_causes(launch: Launch, here: Path) -> None:
    times = {"started": "2026-08-01T10:00:00+00:00", "ended": "2026-08-01T11:00:00+00:00", "command": []}
    earlier = [
        {**times, "outcome": {"state": "submitted"}},
        {**times, "outcome": {"state": "requeued", "cause": "preempted"}},
        {**times, "outcome": {"state": "requeued", "cause": "timeout", "reason": "time limit: requeued"}},
    ]
    outcome = {"cause": "no_progress", "reason": "no progress in 3 attempts in a row"}
    make_run(here / "runs", state="stopped", earlier=earlier, outcome=outcome)
    (run,) = read_runs(launch("status", "format=json", "tiny"))
    attempts = run["attempts"]
    assert isinstance(attempts, list)
    assert [(one["state"], one["cause"]) for one in attempts] == [
        ("requeued", "preempted"),
        ("requeued", "timeout"),
        ("stopped", "no_progress"),
    ]
    shown = [line.strip().rpartition("  ")[2] for line in launch("status", "tiny").out.splitlines()]
    assert "requeued: preempted" in shown and "requeued: time limit: requeued" in shown
    assert "stopped: no progress in 3 attempts in a row" in shown


@pytest.mark.parametrize(
    ("hosts", "cell"),
    [
        (["n0", "n1"], "2 n[0-1]"),
        (["gpu12", "gpu09", "gpu10", "gpu11"], "4 gpu[09-12]"),
        (["box"], "1 box"),
        (["login", "n3"], "2 login,n3"),
        (["n1-ib.cluster", "n2-ib.cluster"], "2"),
    ],
)
def test_nodes_of_a_run_that_has_ended_are_shown_as_slurm_writes_them(
    launch: Launch, here: Path, hosts: list[str], cell: str
) -> None:
    make_run(here / "runs", hosts=hosts)
    header, row = launch("status").out.splitlines()
    at = header.index("nodes")
    assert row[at:].partition("  ")[0].strip() == cell, row
    (run,) = read_runs(launch("status", "format=json"))
    assert run["nodelist"] == ",".join(hosts)


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


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_manifest_is_shown_as_far_as_it_goes(launch: Launch, here: Path, text: str) -> None:
    (make_run(here / "runs") / "manifest.json").write_text(text)
    (run,) = read_runs(launch("status", "format=json"))
    assert run["state"] in ("unknown", "failed")
    assert launch("status", "tiny").code == 0


def test_a_run_whose_process_is_gone_is_lost(launch: Launch, here: Path) -> None:
    process = subprocess.Popen(["sleep", "100"])
    record = identify_process(process.pid)
    make_run(here / "runs", state="running", process=record)
    assert read_runs(launch("status", "format=json"))[0]["state"] == "running"
    process.kill()
    process.wait()
    (run,) = read_runs(launch("status", "format=json"))
    assert run["state"] == "lost" and str(process.pid) in str(run["reason"])


def test_a_run_on_another_host_that_is_silent_may_be_over(launch: Launch, here: Path) -> None:
    elsewhere = {**identify_process(os.getpid()), "host": "elsewhere"}
    path = make_run(here / "runs", state="running", process=elsewhere)
    (path / "logs/0").mkdir(parents=True, exist_ok=True)
    log = path / "logs/0/rank-0.out"
    log.touch()
    (run,) = read_runs(launch("status", "format=json"))
    assert (run["state"], run["reason"]) == ("running", "")
    for written in (*path.glob("logs/*/*"), *path.glob("logs/*"), *path.glob("watch/*")):
        os.utime(written, (1e9, 1e9))
    (run,) = read_runs(launch("status", "format=json"))
    assert run["state"] == "running" and str(run["reason"]).startswith("nothing was written for ")
    assert str(run["reason"]).endswith("can be seen on elsewhere alone")


def test_a_process_is_known_by_more_than_its_number(tmp_path: Path) -> None:
    mine = identify_process(os.getpid())
    assert check_process(mine) is True
    with pytest.raises(PermissionError, match="is not the launch of this run"):
        open_process(mine, tmp_path)
    held = os.open(tmp_path, os.O_RDONLY)
    os.close(open_process(mine, tmp_path))
    for other in ({"start": 1}, {"boot": "another"}):
        assert check_process({**mine, **other}) is False
        with pytest.raises(ProcessLookupError):
            open_process({**mine, **other}, tmp_path)
    os.close(held)
    for other in ({"host": "elsewhere"}, {"namespace": "pid:[1]"}):
        assert check_process({**mine, **other}) is None
    assert check_process({}) is None
    child = subprocess.Popen(["true"])
    record = identify_process(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not record or check_process(record) is False, "a zombie is no process"
    child.wait()
    assert identify_process(child.pid) == {}


def test_runs_of_another_host_are_as_their_manifests_have_them(launch: Launch, here: Path) -> None:
    make_run(here / "runs", state="running", process={**identify_process(os.getpid()), "host": "elsewhere"})
    assert read_runs(launch("status", "format=json"))[0]["state"] == "running"


def test_the_step_of_the_attempt_before_counts_until_there_is_one(tmp_path: Path) -> None:
    path = make_run(tmp_path, state="running")
    write_log(path, 0, "step 40/90 loss 1\n")
    write_log(path, 0, "loading\n", attempt=1)
    status = add_progress(read_status(path))
    assert (status.step, status.total, status.last_line, status.restarts) == (40, 90, "loading", 1)
    write_log(path, 0, "step 38/90 loss 1\n", attempt=1)
    assert add_progress(read_status(path)).step == 38


def test_the_last_line_is_the_programs_of_the_stream_that_it_wrote_to_last(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    (path / "logs/slurm-12.out").write_text("head\nlaunch: run directory /a/b\n")
    assert add_progress(read_status(path)).last_line == "head"
    err = write_log(path, 0, "warned\nlaunch-rank: rank 0, cpus 0\n", ending="err")
    assert add_progress(read_status(path)).last_line == "warned"
    out = write_log(path, 0, " 10%\r 20%\n")
    os.utime(err, (1, 1))
    assert add_progress(read_status(path)).last_line == "20%"
    os.utime(out, (0, 0))
    assert add_progress(read_status(path)).last_line == "warned"


def show(run: RunStatus, width: int) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    print_runs(console, [run])
    print_details(console, run)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return [line.rstrip() for line in lines]


def test_narrow_terminals_lose_columns_and_keep_the_run_and_its_state() -> None:
    run = RunStatus(
        *("llama7b/20260801-120000", "/scratch/runs/llama7b/20260801-120000", "queued", "Resources"),
        **{"job_id": "123456_7", "nodes": 4, "nodelist": "n[0-3]", "step": 120, "total": 40000},  # type: ignore[arg-type]  # a dictionary of JSON
        last_line="step 120/40000 loss 2.345 " * 4,
        restarts=2,
        seconds=12000,
    )
    titles = {width: show(run, width)[0].split() for width in (160, 120, 100, 80, 60, 40)}
    assert titles[160] == [
        "run",
        "job",
        "state",
        "nodes",
        "step",
        "restarts",
        "time",
        "reason",
        "last",
        "line",
    ]
    assert titles[80] == ["run", "job", "state", "nodes", "step", "reason"]
    assert titles[40] == ["run", "state"]
    row = show(run, 160)[1]
    assert "4 n[0-3]  120/40000         2  3 h 20 min  Resources  step 120/40000" in row and row.endswith("…")


def test_a_bad_name_and_a_bad_format_are_errors(launch: Launch, here: Path) -> None:
    make_run(here / "runs")
    launch("status", "tinny").assert_error(2, "did you mean tiny")
    launch("status", "format=xml").assert_error(2, "format=xml", "table")
    launch("status", "tiny", "nix").assert_error(2, "'nix'")


@pytest.mark.usefixtures("quick_agent")
def test_a_real_run_from_its_start_to_its_end(here: Path, launch: Launch) -> None:
    with start(here, "nproc_per_node=1", "name=real", "--", write_program(here, STEPS)) as run:
        path = here / "runs/real"
        wait_for(lambda: any(path.glob("*/logs/0/rank-0.out")) and "step 3/" in read_out(path), "three steps")
        (found,) = read_runs(launch("status", "format=json", "real"))
        assert found["state"] == "running" and found["total"] == 1000 and found["step"]
        assert str(found["last_line"]).startswith("step ")
        run.process.kill()
        run.wait()
        (found,) = read_runs(launch("status", "format=json", "real"))
        assert found["state"] == "lost"
        wait_for(lambda: not run.survivors(), "the ranks' end")


def read_out(path: Path) -> str:
    return next(path.glob("*/logs/0/rank-0.out")).read_text()


@pytest.mark.usefixtures("quick_agent")
def test_a_real_run_that_was_interrupted(here: Path, launch: Launch) -> None:
    with start(here, "nproc_per_node=1", "name=real", "--", write_program(here, STEPS)) as run:
        path = here / "runs/real"
        wait_for(lambda: any(path.glob("*/logs/0/rank-0.out")) and "step 3/" in read_out(path), "three steps")
        run.process.send_signal(signal.SIGTERM)
        run.wait()
    (found,) = read_runs(launch("status", "format=json"))
    assert (found["state"], found["reason"], found["exit_code"]) == ("stopped", "by SIGTERM", 143)


def test_a_job_that_slurm_forgot_has_begun_where_it_has_a_log(tmp_path: Path) -> None:
    path = make_run(tmp_path, state="submitted", slurm={"job_id": "12"})
    assert "cancelled in the queue" in resolve_run(read_status(path), None).reason
    (path / "logs/slurm-12.out").write_text("launch: error: cluster.setup ended with 127 at: module\n")
    found = resolve_run(read_status(path), None)
    assert found.state == "lost" and "ended before it came to the program" in found.reason
