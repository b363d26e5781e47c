"""Programs that were written for submitit: what its helpers do in a rank, as docs/slurm.md says."""

import sys
from pathlib import Path

import pytest

from tests.seam import run_outside
from tests.slurm.cluster.conftest import Sandbox

PROGRAM = """
import os, submitit
try:
    env = submitit.JobEnvironment()
    print("rank", env.global_rank, env.local_rank, env.num_tasks, "of", *map(os.environ.get, NAMES))
except RuntimeError as error:
    print("refused", error)
try:
    submitit.helpers.TorchDistributedEnvironment().export()
except RuntimeError as error:
    print("refused", error)
""".replace("NAMES", repr(("RANK", "LOCAL_RANK", "WORLD_SIZE")))


def test_outside_of_a_job_of_submitits_it_says_so(tmp_path: Path) -> None:
    done = run_outside(["nproc_per_node=1", "--", sys.executable, "-c", PROGRAM], tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("refused Could not figure out which environment") == 2, done.out


@pytest.mark.slurm
def test_tasks_of_srun_can_be_told_to_it(sandbox: Sandbox, tmp_path: Path) -> None:
    words = ["cluster=slurm", "nodes=2", "nproc_per_node=2", "agent=srun", "cluster.gpus_per_node=0"]
    words += ["env.SUBMITIT_EXECUTOR=slurm", "follow=true", "logs.console=all"]
    done = sandbox.launch(*words, "--", sys.executable, "-c", PROGRAM, cwd=tmp_path)
    assert done.code == 0, done
    for rank in range(4):
        assert f"rank {rank} {rank % 2} 4 of {rank} {rank % 2} 4" in done.out, done
    assert done.out.count("refused Cannot export environment variables as MASTER_ADDR is already set") == 4
