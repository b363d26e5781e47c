"""Each job script of slurm/ on a real SLURM: two nodes, a rank each, arguments that break careless ones."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.seam import LAUNCH

from .conftest import Sandbox

pytestmark = pytest.mark.slurm
SLURM = Path(__file__).parents[3] / "slurm"
ARGUMENTS = [
    "--lr",
    "3e 4",
    "",
    'it\'s "quoted"',
    "$(touch broken) `touch broken`",
    "grüße 日本 *",
    "a\nb",
    "--",
]
SMALL = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=4", "--exclusive=user")
"""In place of what the scripts ask for; an exclusive job has all GPUs of its nodes."""
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
TRAIN = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.ones(1)
dist.all_reduce(ranks)
seen = {"argv": sys.argv[1:], "ranks": int(ranks), "environ": dict(os.environ)}
with open(f"rank-{dist.get_rank()}.json", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
"""


def make_commands(folder: Path) -> Path:
    """The commands that the scripts call, as an activated environment has them."""
    commands = {
        "launch": LAUNCH,
        "launch-rank": (sys.executable, "-c", "from launcher.rank.shim import main; main()"),
        "torchrun": (sys.executable, "-m", "torch.distributed.run"),
        "python": (sys.executable,),
    }
    folder.mkdir()
    for name, words in commands.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def run_script(name: str, sandbox: Sandbox, parent: Path) -> list[dict[str, Any]]:
    """Submit a script as it is, and return what its two ranks saw."""
    folder = parent / f"{name} it's"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    path = f"{make_commands(folder / 'bin')}:{os.environ['PATH']}"
    script = SLURM / f"{name}.sbatch"
    options = ("--parsable", f"--chdir={folder}", *SMALL)
    job = sandbox.run("sbatch", *options, script, *ARGUMENTS, env={"PATH": path}).strip()
    try:
        sandbox.wait(job, "COMPLETED")
    except pytest.fail.Exception as error:
        raise AssertionError((folder / f"train-{job}.out").read_text()) from error
    sandbox.wait_empty()
    assert not (folder / "broken").exists()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def check_ranks(ranks: list[dict[str, Any]]) -> None:
    """Both ranks met, on nodes of their own, with the arguments as they were given."""
    assert [rank["ranks"] for rank in ranks] == [2, 2]
    assert [rank["argv"] for rank in ranks] == [ARGUMENTS] * 2
    environs = [rank["environ"] for rank in ranks]
    assert [environ["RANK"] for environ in environs] == ["0", "1"]
    assert [environ["LOCAL_RANK"] for environ in environs] == ["0", "0"]
    assert len({environ["SLURMD_NODENAME"] for environ in environs}) == 2
    assert len({environ["MASTER_ADDR"] for environ in environs}) == 1
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ in environs] == ["0", "0"]


@pytest.mark.parametrize("name", ["torchrun", "srun"])
def test_a_script_runs_the_same_with_launch_rank(name: str, sandbox: Sandbox, tmp_path: Path) -> None:
    before = run_script(name, sandbox, tmp_path)
    after = run_script(f"{name}-launch-rank", sandbox, tmp_path)
    check_ranks(before)
    check_ranks(after)
    for old, new in zip(before, after, strict=True):
        for variable in VARIABLES:
            assert new["environ"][variable] == old["environ"][variable], variable
        lost = set(old["environ"]) - set(new["environ"])
        assert not {variable for variable in lost if not variable.startswith("SLURM")}
    assert "LAUNCH_NUM_WORKERS" in after[0]["environ"]
    assert "LAUNCH_NUM_WORKERS" not in before[0]["environ"]


def test_the_script_with_launch(sandbox: Sandbox, tmp_path: Path) -> None:
    ranks = run_script("launch", sandbox, tmp_path)
    check_ranks(ranks)
    (manifest,) = (tmp_path / "launch it's" / "runs").glob("*/*/manifest.json")
    outcome = json.loads(manifest.read_text())["outcome"]
    assert outcome["state"] == "succeeded"


def test_srun_and_launch_rank_alone_make_ranks_that_meet(sandbox: Sandbox, tmp_path: Path) -> None:
    """The line that the README shows, in a script that exports nothing."""
    (tmp_path / "train.py").write_text(TRAIN)
    path = f"{make_commands(tmp_path / 'bin')}:{os.environ['PATH']}"
    options = ("--parsable", f"--chdir={tmp_path}", "--nodes=2", "--gpus-per-node=2", "--cpus-per-task=4")
    line = "srun --ntasks-per-node=2 --cpu-bind=none launch-rank python train.py a"
    job = sandbox.run("sbatch", *options, "--ntasks-per-node=2", "--wrap", line, env={"PATH": path}).strip()
    sandbox.wait(job, "COMPLETED")
    sandbox.wait_empty()
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [rank["ranks"] for rank in ranks] == [4] * 4
    environs = [rank["environ"] for rank in ranks]
    assert [environ["LOCAL_RANK"] for environ in environs] == ["0", "1", "0", "1"]
    assert {environ["MASTER_ADDR"] for environ in environs} == {environs[0]["SLURMD_NODENAME"]}
    assert not [name for environ in environs for name in environ if name.startswith("TORCHELASTIC")]
