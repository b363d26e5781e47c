"""Jobs whose attempt starts or ends while slurmctld is away, on a real SLURM."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.seam import write_program
from tests.slurm.cluster.conftest import Sandbox
from tests.slurm.cluster.jobs import Run, submit

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_is_left")]

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
    sandbox.break_it("kill", "slurmctld")
    try:
        yield
        run.wait_for(lambda: words in run.read_console(), words, 90)
    finally:
        sandbox.break_it("start", "slurmctld")


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
