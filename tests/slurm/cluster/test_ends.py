"""How attempts end on a real SLURM, and what is told of it; the programs have no torch (peers.py)."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster.conftest import Sandbox
from tests.slurm.cluster.jobs import Run, submit

pytestmark = pytest.mark.slurm

PEERS = str(Path(__file__).with_name("peers.py"))
SMALL = ("nproc_per_node=1", "cluster.gpus_per_node=0", "cluster.cpus_per_task=1", "cluster.mem=300")
TWO = ("nodes=2", *SMALL)


@pytest.fixture(autouse=True)
def programs_end(nothing_is_left: None, tmp_path: Path) -> Iterator[None]:
    """Programs that a failed test has left end by themselves, before all must have gone."""
    yield
    (tmp_path / "stop").touch()


def start(sandbox: Sandbox, cwd: Path, *words: str, program: tuple[str, ...] = (PEERS,)) -> Run:
    """Submit a job of `peers.py`."""
    return submit(sandbox, cwd, *words, "--", *program)


def await_rank(run: Run, attempt: int, rank: int = 1, step: int = 3) -> psutil.Process:
    """Wait until a rank is at work in an attempt, and return its process."""
    log = run.path / f"logs/{attempt}/rank-{rank}.out"
    run.wait_for(lambda: log.exists() and f"step {step}/" in log.read_text(), f"rank {rank} of {attempt}")
    return run.find_rank(rank)


def list_reasons(run: Run) -> list[str]:
    """Why each attempt but the last one ended, in words."""
    return [entry["outcome"]["reason"] for entry in run.manifest["earlier"]]


def test_a_program_that_asks_for_another_start_at_the_limit_gets_it(sandbox: Sandbox, tmp_path: Path) -> None:
    limit = ("cluster.time=1", "cluster.signal=USR2@40")
    run = start(sandbox, tmp_path, *TWO, *limit, program=(PEERS, "again"))
    run.wait_for(lambda: len(run.causes) == 2, "another attempt")
    await_rank(run, 1)
    (tmp_path / "stop").touch()
    assert run.await_end() == "succeeded"
    assert run.causes == ["timeout", None]
    assert list_reasons(run)[0].endswith("; time limit: requeued (attempt 2 of at most 200)")
    assert "ended with 75, and asks for another start" in run.read_console()
    assert "failed" not in run.read_console()


@pytest.mark.parametrize(("agent", "above"), [("torchrun", (1, 0)), ("direct", (0,))])
def test_a_signal_from_outside_is_named_and_requeued(
    sandbox: Sandbox, tmp_path: Path, agent: str, above: tuple[int, ...]
) -> None:
    """To a node's task, to torchrun's agent if there is one, and to a rank: none of them failed."""
    run = start(sandbox, tmp_path, *TWO, f"agent={agent}", "cluster.requeue.no_progress=0")
    for attempt, level in enumerate(above):
        await_rank(run, attempt).parents()[level].terminate()
    await_rank(run, len(above)).terminate()
    await_rank(run, len(above) + 1)
    (tmp_path / "stop").touch()
    assert run.await_end() == "succeeded"
    assert run.causes == [*["stopped"] * (len(above) + 1), None]
    *launchers, rank = list_reasons(run)
    host = run.manifest["earlier"][0]["hosts"][1]
    outside = (
        f"{host} got SIGTERM from outside: neither launch nor SLURM's queue sent it; stopped from outside"
    )
    assert all(reason.startswith(outside) for reason in launchers)
    assert rank.startswith(f"rank 1 on {host} was stopped first: it was killed by SIGTERM (signal 15)")
    assert all(entry["outcome"]["lost"] == [] for entry in run.manifest["earlier"])
    assert "failed first" not in run.read_console()
    assert "ExcNodeList=(null)" in sandbox.run("scontrol", "show", "job", run.job_id)


def test_a_signal_to_srun_from_outside_is_no_cancellation(sandbox: Sandbox, tmp_path: Path) -> None:
    """srun has the tasks killed then, as `scancel JOB.STEP` does: neither is a rank's failure."""
    run = start(sandbox, tmp_path, *TWO)
    await_rank(run, 0)
    sruns = [pid for pid, words in run.find_processes().items() if words.startswith("srun ")]
    psutil.Process(min(sruns)).terminate()  # the other one is its child
    await_rank(run, 1)
    (tmp_path / "stop").touch()
    assert run.await_end() == "succeeded"
    assert run.causes == ["stopped", None]
    assert list_reasons(run)[0].startswith("srun got SIGTERM from outside: neither launch nor SLURM's queue")
    assert "out of memory" not in run.read_console()


@pytest.mark.parametrize("batch", [(), ("--batch",)])
def test_a_users_checkpoint_signal_reaches_the_ranks_that_handle_it(
    sandbox: Sandbox, tmp_path: Path, batch: tuple[str, ...]
) -> None:
    """Without --batch, SLURM sends it to the nodes' tasks, and to nobody else of a step."""
    run = start(sandbox, tmp_path, *TWO, program=(PEERS, "again"))
    await_rank(run, 0)
    sandbox.run("scancel", *batch, "--signal=USR2", run.job_id)
    run.wait_for(lambda: len(run.causes) == 2, "another attempt")
    await_rank(run, 1)
    (tmp_path / "stop").touch()
    assert run.await_end() == "succeeded"
    assert run.causes == ["requested", None]


@pytest.mark.parametrize("how", ["--signal=TERM", "--quiet"])
def test_a_step_that_a_user_cancels_is_cancelled(sandbox: Sandbox, tmp_path: Path, how: str) -> None:
    run = start(sandbox, tmp_path, *TWO)
    await_rank(run, 0)
    sandbox.run("scancel", how, f"{run.job_id}.0")
    assert run.await_end() == "stopped"
    assert run.causes == ["cancelled"]


def test_what_was_aimed_at_an_earlier_attempt_misses_the_next(sandbox: Sandbox, tmp_path: Path) -> None:
    """Steps are told apart by job and number alone, and numbers begin at 0 in each attempt."""
    run = start(sandbox, tmp_path, *TWO)
    await_rank(run, 0)
    sandbox.run("scontrol", "requeue", run.job_id)
    rank = await_rank(run, 1)
    assert run.causes[0] == "requeued"
    assert "requeued from outside (attempt 2 of at most 200)" in run.read_console()
    # As slurmctld does it, which repeats a signal to a node that was lost once that is back.
    scancel = ["scancel", "--signal=TERM", f"{run.job_id}.0"]
    subprocess.run(scancel, env=sandbox.environ, capture_output=True, check=False)
    await_rank(run, 1, step=30)
    assert rank.is_running()
    (tmp_path / "stop").touch()
    assert run.await_end() == "succeeded"


def test_a_job_with_grace_is_requeued_by_its_first_node(sandbox: Sandbox, tmp_path: Path) -> None:
    """With GraceTime SLURM sends SIGTERM to the steps alone, and forgets a job that ends within it."""
    urgent = ("--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
    sandbox.run("scontrol", "update", "PartitionName=main", "GraceTime=60")
    try:
        run = start(sandbox, tmp_path, *TWO)
        await_rank(run, 0)
        sandbox.run("sbatch", *urgent)
        await_rank(run, 1)
    finally:
        sandbox.run("scontrol", "update", "PartitionName=main", "GraceTime=0")
    (tmp_path / "stop").touch()
    assert run.await_end() == "succeeded"
    assert run.causes == ["preempted", None]


def test_the_node_of_the_batch_script_dies(sandbox: Sandbox, tmp_path: Path) -> None:
    """SLURM requeues the job, and the next attempt finds out why."""
    run = start(sandbox, tmp_path, *TWO)
    await_rank(run, 0)
    host = run.manifest["hosts"][0]
    with sandbox.without(host):
        run.wait_for(lambda: len(run.causes) == 2, "another attempt")
        await_rank(run, 1)
    (tmp_path / "stop").touch()
    assert run.await_end() == "succeeded"
    (before,) = run.manifest["earlier"]
    assert (before["outcome"]["cause"], before["outcome"]["lost"]) == ("node_failure", [host])
