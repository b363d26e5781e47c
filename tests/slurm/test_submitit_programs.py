"""Programs that were written for submitit: what its helpers do in a rank, as docs/slurm.md says."""

import sys
from pathlib import Path

from tests.seam import run_outside

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
