"""Nodes that are sick, or lost, and a slurmctld that is away, on a real SLURM."""

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.seam import find_run, write_program, write_script
from tests.slurm.cluster.conftest import Sandbox, submit_script
from tests.slurm.cluster.jobs import Run, submit

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_is_left")]


CHECKED = (
    *("cluster=slurm", "cluster.gpus_per_node=0", "nproc_per_node=1"),
    *("preflight=light", "follow=true"),
)


def make_program(tmp_path: Path) -> str:
    """A program that says where it runs."""
    write_script(tmp_path / "program", 'echo "rank $RANK of $WORLD_SIZE on $SLURMD_NODENAME"')
    return str(tmp_path / "program")


def test_healthy_nodes_are_told_in_a_line_and_the_job_runs(sandbox: Sandbox, tmp_path: Path) -> None:
    done = sandbox.launch("nodes=4", *CHECKED, "--", make_program(tmp_path), cwd=tmp_path)
    assert done.code == 0, done.err
    assert "preflight: light checks of 4 nodes in " in done.err and "sick" not in done.err
    run = Run(find_run(tmp_path), sandbox)
    account = run.manifest["preflight"]
    assert (account["nodes"], account["sick"], account["action"]) == (4, [], "start")
    answers = [
        json.loads(path.read_text()) for path in sorted((run.path / "preflight/0").glob("node-*.json"))
    ]
    assert [answer["host"] for answer in answers] == ["n0", "n1", "n2", "n3"]
    # On a busy machine the 10 seconds that it has are over before that.
    assert account["seconds"] > 9 or all(answer["work"] for answer in answers)


def test_a_sick_node_ends_the_job_with_3_and_is_listed(sandbox: Sandbox, tmp_path: Path, data: Path) -> None:
    words = ("nodes=4", *CHECKED, f"preflight.paths=[{data}]", "preflight.on_failure=stop")
    done = sandbox.launch(*words, "--", make_program(tmp_path), cwd=tmp_path)
    assert done.code == 3, done.err
    assert "sick: n2: " in done.err and "/dev/shm has 8 MiB" in done.err and "fix: " in done.err
    assert f"{data} (data) is missing, and is there on n" in done.err and "rank 0" not in done.err
    run = Run(find_run(tmp_path), sandbox)
    assert (run.outcome["state"], run.outcome["cause"], run.causes) == ("failed", "sick_node", ["sick_node"])
    assert "preflight" in sandbox.launch("status", "program", cwd=tmp_path).out
    rows = sandbox.launch("nodes", cwd=tmp_path).out.splitlines()
    assert rows[1].split()[:3] == ["n2", "1", "1"]


def test_a_job_that_needs_more_nodes_is_requeued_without_the_sick_one(
    sandbox: Sandbox, tmp_path: Path, data: Path
) -> None:
    words = ("nodes=3", *CHECKED, "preflight.on_failure=exclude", f"preflight.paths=[{data}]")
    done = sandbox.launch(*words, "--", make_program(tmp_path), cwd=tmp_path)
    assert done.code == 0, done.err
    run = Run(find_run(tmp_path), sandbox)
    assert run.causes == ["sick_node", None] and run.manifest["hosts"] == ["n0", "n1", "n3"]
    assert run.manifest["earlier"][0]["outcome"]["sick"] == ["n2"]
    assert run.manifest["preflight"]["sick"] == []


def test_a_spare_node_of_an_allocation_takes_a_sick_ones_place(
    sandbox: Sandbox, tmp_path: Path, data: Path
) -> None:
    words = ("nodes=3", "nproc_per_node=1", "preflight=light", "preflight.on_failure=exclude")
    launch = " ".join((sys.executable, "-P", "-m", "launcher", *words, f"preflight.paths=[{data}]"))
    whole = launch.replace("nodes=3", "nodes=4")
    program = make_program(tmp_path)
    script = f"{launch} -- {program}; echo code $?; {whole} -- {program}; echo code $?\n"
    script += f"{sys.executable} -P -m launcher doctor preflight=light preflight.paths=[{data}]"
    job = submit_script(sandbox, tmp_path, script, "--nodes=4", "--exclusive")
    sandbox.wait(job, "COMPLETED", "FAILED")
    text = (tmp_path / f"{job}.out").read_text()
    assert "the job goes on n3 in place of n2, on 3 nodes" in text and "code 0" in text, text
    assert "not launch's to requeue" in text and "code 3" in text
    assert re.search("^. n2 +limits: /dev/shm has 8 MiB", text, re.MULTILINE), text


TRAINING = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
saved = os.path.join(os.environ["LAUNCH_RUN_DIR"], "checkpoints", "last")
os.makedirs(os.path.dirname(saved), exist_ok=True)
begin = int(open(saved).read()) if os.path.exists(saved) else 0
where = os.environ['SLURMD_NODENAME']
print(f"begins after step {begin} on {where} of {os.environ['WORLD_SIZE']}", flush=True)
for step in range(begin + 1, 100_000):
    total = torch.tensor([1.0, os.path.exists("stop")])
    dist.all_reduce(total)
    assert total[0] == dist.get_world_size()
    if rank == 0:
        print(f"step {step}/100000", flush=True)
        if step % 10 == 0:
            with open(saved + ".tmp", "w") as file:
                file.write(str(step))
            os.replace(saved + ".tmp", saved)
    if total[1]:
        break
    time.sleep(0.05)
"""
"""It ends once there is a file `stop`."""
SPARE = ("nodes=2", "cluster.spares=1")


def start(sandbox: Sandbox, tmp_path: Path, *words: str) -> Run:
    program = write_program(tmp_path, TRAINING)
    return submit(sandbox, tmp_path, "nproc_per_node=1", *words, "--", program)


def await_line(run: Run, words: str, rank: int = 0) -> None:
    run.wait_for(lambda: words in run.read_rank(rank), words)


@pytest.mark.parametrize(("nodes", "causes"), [("2", ["node_failure", None]), ("2:3", [None])])
def test_a_node_dies(sandbox: Sandbox, tmp_path: Path, nodes: str, causes: list[str | None]) -> None:
    """A job of fixed size goes on without it in another attempt, an elastic one in the same."""
    run = start(sandbox, tmp_path, f"nodes={nodes}")
    await_line(run, "step 15/")
    hosts = run.manifest["hosts"]
    assert len(hosts) == int(nodes[-1])
    with sandbox.without(hosts[-1]):
        run.wait_for(lambda: run.read_rank().count("begins after step") == 2, "another start")
        (tmp_path / "stop").touch()
        assert run.await_end() == "succeeded"
    assert run.causes == causes
    assert causes == [None] or hosts[-1] not in run.manifest["hosts"]
    steps = {int(step) for step in re.findall(r"^step (\d+)/", run.read_rank(), re.MULTILINE)}
    assert steps == {*range(1, max(steps) + 1)}
    assert re.search(r"begins after step [1-9]\d*0 ", run.read_rank())


def test_a_node_that_dies_is_replaced(sandbox: Sandbox, tmp_path: Path) -> None:
    run = start(sandbox, tmp_path, *SPARE)
    await_line(run, "step 25/")
    first, lost = run.manifest["hosts"]
    (spare,) = run.manifest["spares"]
    with sandbox.without(lost):
        await_line(run, f"on {spare} of 2", rank=1)
        (tmp_path / "stop").touch()
        assert run.await_end() == "succeeded"
    console = run.read_console()
    (one,) = run.manifest["replacements"]
    assert (one["lost"], one["spare"]) == (lost, spare), console
    assert run.manifest["hosts"] == [first, spare] and "spares" not in run.manifest
    assert run.causes == [None] and run.manifest["slurm"]["restarts"] == 0
    assert f"launch: node {lost} is lost: its SLURM daemon cannot be reached" in console
    assert f"launch: spare node {spare} takes the place of {lost}\n" in console
    assert re.search(r"begins after step [1-9]\d*0 ", run.read_rank(0))
    status = sandbox.launch("status", run.path.name, cwd=tmp_path)
    assert f"{spare} in the place of {lost}" in status.out, status


def test_two_nodes_are_lost_and_one_is_spare(sandbox: Sandbox, tmp_path: Path) -> None:
    """The second loss ends the attempt: the job is requeued, and asks for as many nodes as before."""
    run = start(sandbox, tmp_path, *SPARE)
    await_line(run, "step 15/")
    first, lost = run.manifest["hosts"]
    (spare,) = run.manifest["spares"]
    with contextlib.ExitStack() as undone:
        # Until it is restarted, SLURM 22.05 counts the GPUs of lost nodes as used: later tests need them.
        undone.callback(sandbox.break_it, "restart-controller")
        with sandbox.without(lost):
            await_line(run, f"on {spare} of 2", rank=1)
            await_line(run, "step 45/")
            undone.enter_context(sandbox.without(spare))
            run.wait_for(lambda: run.outcome["state"] == "requeued", "the requeue")
        (tmp_path / "stop").touch()
        assert run.await_end() == "succeeded"
    # SLURM 22.05 may give the next attempt no GPUs, and gives them to the one after it.
    assert run.causes in (["node_failure", None], ["node_failure", "node_failure", None])
    before = run.manifest["earlier"][0]
    assert [one["lost"] for one in before["replacements"]] == [lost]
    assert (before["outcome"]["lost"], before["hosts"]) == ([spare], [first, spare])
    assert len([*run.manifest["hosts"], *run.manifest.get("spares", [])]) == 3


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def assert_requeued(run: Run, tmp_path: Path, first: str) -> None:
    """The first attempt was ended by another node, and the next one ends the job."""
    (tmp_path / "stop").touch()
    assert run.await_end() == "succeeded", run.describe()
    console = run.read_console()
    assert run.causes == ["node_failure", None], console
    outcome = run.manifest["earlier"][0]["outcome"]
    assert (outcome["state"], outcome["exit_code"], outcome["lost"]) == ("requeued", 3, [first])
    assert console.count(f"node {first}, which ran the batch script, is lost: ") == 1
    assert console.count("ends the attempt in its place") == 1
    status = run.sandbox.launch("status", run.path.name, cwd=tmp_path)
    assert "succeeded" in status.out, status


@pytest.mark.parametrize("words", [SPARE, ("nodes=2:3",)], ids=["spare", "elastic"])
def test_the_first_node_dies(sandbox: Sandbox, tmp_path: Path, words: tuple[str, ...]) -> None:
    run = start(sandbox, tmp_path, *words)
    await_line(run, "step 15/")
    first = run.manifest["hosts"][0]
    with sandbox.without(first):
        run.wait_for(lambda: run.outcome["state"] == "requeued", "the requeue")
    assert_requeued(run, tmp_path, first)
    assert re.search(r"begins after step [1-9]\d*0 ", run.read_rank(0))


def test_a_first_node_freezes_and_comes_back(sandbox: Sandbox, tmp_path: Path) -> None:
    """What is left of it does nothing to the job that goes on without it."""
    run = start(sandbox, tmp_path, *SPARE)
    await_line(run, "step 15/")
    first = run.manifest["hosts"][0]
    words = [line.split() for line in sandbox.list_processes()]
    pids = [int(pid) for pid, host, _ in words if host == first]
    pids.append(int((sandbox.folder / f"slurmd-{first}.pid").read_text()))
    send(pids, signal.SIGSTOP)
    try:
        run.wait_for(lambda: len(run.manifest["earlier"]) == 1, "the next attempt")
    finally:
        send(pids, signal.SIGCONT)
    assert_requeued(run, tmp_path, first)
    assert run.manifest["slurm"]["restarts"] == 1


FAILS_ONCE = """
import os, sys, time
go = sys.argv[1]
if "SLURM_RESTART_COUNT" not in os.environ:
    open(f"{go}.waits", "w").close()
    while not os.path.exists(go):
        time.sleep(0.1)
    sys.exit(7)
"""


@contextmanager
def controller_away(sandbox: Sandbox, run: Run, words: str) -> Iterator[None]:
    """Kill slurmctld until the batch script says something of it.

    A restart in good order has it save that the job runs: it would start the job again otherwise.
    """
    sandbox.break_it("restart-controller")
    with sandbox.without("slurmctld"):
        yield
        run.wait_for(lambda: words in run.read_console(), words)


def test_a_requeue_that_is_due_while_slurmctld_is_away(sandbox: Sandbox, tmp_path: Path) -> None:
    program, go = write_program(tmp_path, FAILS_ONCE), tmp_path / "go"
    words = ("cluster=slurm", "nproc_per_node=1", "cluster.requeue.crash=1", "--", program, str(go))
    run = submit(sandbox, tmp_path, *words)
    run.wait_for(Path(f"{go}.waits").exists, "the rank")
    with controller_away(sandbox, run, "launch: warning: the requeue is tried again until SLURM answers"):
        go.touch()
    assert run.await_end() == "succeeded"
    assert run.causes == ["crash", None] and run.manifest["slurm"]["restarts"] == 1


def test_a_step_that_is_due_while_slurmctld_is_away(sandbox: Sandbox, tmp_path: Path) -> None:
    program, go = write_program(tmp_path, "print('done')"), tmp_path / "go"
    setup = f"cluster.setup=['touch {go}.waits; while ! test -e {go}; do sleep 0.1; done']"
    run = submit(sandbox, tmp_path, "cluster=slurm", "nproc_per_node=1", setup, "--", program)
    run.wait_for(Path(f"{go}.waits").exists, "the setup")
    with controller_away(sandbox, run, "until slurmctld answers, it is tried again"):
        go.touch()
    assert run.await_end() == "succeeded"
    assert run.causes == [None] and run.manifest["slurm"]["restarts"] == 0
