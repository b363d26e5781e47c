"""The sandbox cluster."""

from pathlib import Path

import pytest

from .conftest import Sandbox

pytestmark = pytest.mark.slurm


def test_a_job_over_all_nodes_sees_each_nodes_gpus(sandbox: Sandbox, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = 'srun --ntasks-per-node=1 sh -c "echo \\$SLURMD_NODENAME \\$CUDA_VISIBLE_DEVICES"'
    job = sandbox.run(
        "sbatch", "--parsable", "--nodes=4", "--gpus-per-node=2", f"--output={out}", f"--wrap={script}"
    ).strip()
    sandbox.wait(job, "COMPLETED")
    assert sorted(out.read_text().splitlines()) == [f"n{number} 0,1" for number in range(4)]
