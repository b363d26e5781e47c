"""Trials of a sweeper plugin on a real SLURM: those of a batch are one job array, and followed."""

import json
from pathlib import Path

import pytest

from launcher.runs.manifest import read_manifest
from tests.config.sweepers import write_plugin
from tests.slurm.cluster.conftest import Sandbox

pytestmark = pytest.mark.slurm


def test_a_batch_is_an_array_and_the_next_one_follows_from_it(sandbox: Sandbox, tmp_path: Path) -> None:
    plugin = write_plugin(tmp_path / "plugins")
    (tmp_path / "mine.sh").write_text('#!/bin/sh\nx=${1#--x=}\n[ "$x" != 9.0 ] && echo "step 1/1 loss $x"\n')
    (tmp_path / "mine.sh").chmod(0o755)
    (tmp_path / "conf/program").mkdir(parents=True)
    (tmp_path / "conf/program/mine.yaml").write_text("command: [./mine.sh]\nx: 0\n")
    words = ["hydra/sweeper=halving", "hydra.sweeper.size=2", "hydra.sweep.dir=swept", "program=mine"]
    own = ["cluster=slurm", "nproc_per_node=1", "cluster.gpus_per_node=0"]
    done = sandbox.launch("-m", *words, *own, cwd=tmp_path, env=plugin)
    assert done.code == 0, done
    tried = json.loads((tmp_path / "swept/tried.json").read_text())
    assert tried == [[9.0, "trial 1 failed with exit code 1"], [8.0, 8.0], [4.0, 4.0], [5.0, 5.0]]
    jobs = [read_manifest(tmp_path / f"swept/{number}")["slurm"]["job_id"] for number in range(4)]
    first, second = (job.partition("_")[0] for job in jobs[::2])
    assert jobs == [f"{first}_0", f"{first}_1", f"{second}_0", f"{second}_1"] and first != second
    sandbox.wait_empty()
