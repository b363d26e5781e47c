"""agent=direct on several nodes: what ranks find, starts after a death or a hang, stops in each phase."""

import shlex
from pathlib import Path

import pytest

from tests.cli.make_runs import read_nodes
from tests.programs.start_program import read_losses
from tests.seam import write_program
from tests.slurm.cluster.conftest import Sandbox
from tests.slurm.cluster.jobs import SHRUNK, Run, submit
from tests.slurm.cluster.test_step import HOSTILE, SHOW, allocate, finish, read_found

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_is_left")]

OF_A_RUN = {
    *("LAUNCH_RUN_DIR", "LAUNCH_RUN_ID", "LAUNCH_RANK_PLAN", "MASTER_PORT"),
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
    *("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_TASK_PID", "SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT"),
}
"""Variables that differ between any two runs in an allocation."""
OF_TORCHRUN = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
WAITING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("UP", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"], flush=True)
while not os.path.exists("stop"):
    time.sleep(0.05)
"""


def test_the_environment_is_that_of_torchrun(sandbox: Sandbox, tmp_path: Path) -> None:
    words = shlex.join(["nproc_per_node=auto", "env.NICE=a b", "--", write_program(tmp_path, SHOW), *HOSTILE])
    script = "\n".join(
        f"launch agent={agent} name={agent} {words} || exit" for agent in ("torchrun", "direct")
    )
    done = finish(allocate(sandbox, tmp_path, script, MINE="kept"))
    assert done.code == 0, done
    theirs, ours = (next(tmp_path.glob(f"runs/{agent}/*")) for agent in ("torchrun", "direct"))
    for rank in range(2):
        before, after = read_found(theirs, rank), read_found(ours, rank)
        assert before["argv"] == after["argv"] and before["cwd"] == after["cwd"]
        names = {*before["env"], *after["env"]} - OF_A_RUN
        pairs = {name: (before["env"].get(name), after["env"].get(name)) for name in names}
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        assert differing.keys() == OF_TORCHRUN, differing
    assert [(r["state"], r["exit_code"], r["ranks"]) for r in read_nodes(ours, 0)] == [
        ("succeeded", 0, 1)
    ] * 2


def read_new(run: Run, attempt: int, rank: int = 0) -> str:
    path = run.path / f"logs/{attempt}/rank-{rank}.out"
    return path.read_text() if path.exists() else ""


TWO = (*SHRUNK, "nodes=2", "nproc_per_node=1", "agent=direct", "restarts=2")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_replaced_with_its_peers(sandbox: Sandbox, tmp_path: Path, victim: int) -> None:
    run = submit(sandbox, tmp_path, *TWO, "program.steps=60")
    run.await_step(15)
    run.find_rank(victim).kill()
    assert run.await_end() == "succeeded"
    steps = run.read_losses()
    assert list(steps) == list(range(1, 61))
    assert min(read_losses(read_new(run, 1))) in (11, 21), "it goes on after a checkpoint"
    said = run.read_console()
    assert f"rank {victim} on n{victim} has ended: all ranks start again (restart 1 of 2)" in said
    assert "\nTraceback" not in said, "the program's own stands after [host:rank]"
    assert run.outcome["attempts"] == 2 and run.manifest["earlier"] == []
    assert [(r["state"], r["restarts"]) for r in read_nodes(run.path, 0)] == [("succeeded", 1)] * 2


@pytest.mark.parametrize("phase", ["start", "restart"])
def test_scancel_leaves_nothing(sandbox: Sandbox, tmp_path: Path, phase: str) -> None:
    program = write_program(tmp_path, WAITING)
    run = submit(
        sandbox, tmp_path, "nodes=2", "nproc_per_node=2", "agent=direct", "restarts=1", "--", program
    )
    if phase == "start":
        run.wait_for(lambda: any("slurm.task" in words for words in run.find_processes().values()), "tasks")
    else:
        run.wait_for(lambda: all("UP 0" in read_new(run, 0, rank) for rank in range(4)), "the ranks")
        run.find_rank(3).kill()
        run.wait_for(lambda: "all ranks start again" in run.read_console(), "word of the restart")
    sandbox.run("scancel", run.job_id)
    assert run.await_end() == "stopped"
    assert run.outcome["cause"] == "cancelled" and "Traceback" not in run.read_console()
