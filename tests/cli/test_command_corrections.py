"""What other tools' users type is answered with the right key, and with the whole command to type."""

import shlex
from pathlib import Path

import pytest

from launcher.config.other_tools import OTHERS, find_other
from launcher.config.schema import LaunchConfig
from tests.seam import Launch

LINES = [
    ("--nproc-per-node 2 train.py --lr 1", "nproc_per_node=2", "launch nproc_per_node=2 train.py --lr 1"),
    ("--nproc_per_node=2 -- train.py", "nproc_per_node=2", "launch nproc_per_node=2 -- train.py"),
    ("--nproc-per-node gpu train.py", "nproc_per_node=auto", "launch nproc_per_node=auto train.py"),
    ("plan --nnodes 1:4 nproc_per_node=2", "nodes=1:4", "launch plan nodes=1:4 nproc_per_node=2"),
    ("--gpus 2 train.py", "nproc_per_node=2", "launch nproc_per_node=2 train.py"),
    ("gpus=2 train.py", "nproc_per_node=2", "launch nproc_per_node=2 train.py"),
    ("--gpus 0,1 train.py", "env.CUDA_VISIBLE_DEVICES=0,1", "launch env.CUDA_VISIBLE_DEVICES=0,1 train.py"),
    ("num_workers=4 train.py", "dataloader=4", "launch dataloader=4 train.py"),
    (
        "CUDA_VISIBLE_DEVICES=0,1 train.py",
        "env.CUDA_VISIBLE_DEVICES=0,1",
        "launch env.CUDA_VISIBLE_DEVICES=0,1",
    ),
    ("OMP_NUM_THREADS=4 train.py", "env.OMP_NUM_THREADS=4", "launch env.OMP_NUM_THREADS=4 train.py"),
    ("devices=0,1 train.py", "env.CUDA_VISIBLE_DEVICES=0,1", "CUDA_VISIBLE_DEVICES=0,1 launch train.py"),
    ("--devices 2 train.py", "all, own or spread", "CUDA_VISIBLE_DEVICES=2 launch train.py"),
    ("--standalone --nnodes=1 train.py", "leave it out", "launch nodes=1 train.py"),
    ("--max-restarts 3 train.py", "torchrun.max_restarts=3", "launch torchrun.max_restarts=3 train.py"),
    ("--rdzv-conf a=1 train.py", "torchrun.rdzv_conf={a:1}", "launch 'torchrun.rdzv_conf={a:1}' train.py"),
    ("--numa-binding node train.py", "binding=numa", "launch binding=numa train.py"),
    ("--num_processes 4 train.py", "accelerate's", "launch nproc_per_node=4 train.py"),
    ("--num_gpus=4 train.py", "deepspeed's", "launch nproc_per_node=4 train.py"),
    (
        "-N 2 -A me --time=1:00:00 train.py",
        "SLURM's",
        "launch nodes=2 cluster.account=me cluster.time=1:00:00",
    ),
    ("partition=gpu train.py", "cluster.partition=gpu", "launch cluster.partition=gpu train.py"),
    ("--gres gpu:4 -- ./train", "cluster.gpus_per_node=4", "launch cluster.gpus_per_node=4 -- ./train"),
    ("--exclusive nodes=2 train.py", "SLURM's", "launch cluster.exclusive=true nodes=2 train.py"),
    ("--dry-run train.py", "dry_run=true", "launch dry_run=true train.py"),
    ("--binding.policy numa train.py", "binding.policy=numa", "launch binding.policy=numa train.py"),
    ("--nodes", "nodes=…", "launch 'nodes=…'"),
    ("--lr 1e-4 train.py --wd 0", "after the program", "launch train.py --wd 0 --lr 1e-4"),
    ("gpus=2 python train.py", "nproc_per_node=2", "launch nproc_per_node=2 -- python train.py"),
    (
        "tune dataloader gpus=2 train.py",
        "nproc_per_node=2",
        "launch tune dataloader nproc_per_node=2 train.py",
    ),
]


@pytest.mark.parametrize(("line", "fix", "command"), LINES, ids=[line for line, _, _ in LINES])
def test_the_whole_command_is_told(launch: Launch, here: Path, line: str, fix: str, command: str) -> None:
    (here / "train.py").touch()
    result = launch(*shlex.split(line))
    result.assert_error(2, fix, f"`{command}")
    told = shlex.split(result.err.rpartition(": `")[2].rstrip("`\n"))
    words = told[told.index("launch") + 1 :]
    if "…" not in command and "./train" not in command and "--exclusive" not in line:
        verb = words[:2] if words[0] == "tune" else words[:1] if words[0] == "plan" else []
        again = launch(*verb, "dry_run=true", "cluster.machine=dgx_a100", *words[len(verb) :])
        assert "launch: error" not in again.err or "sbatch" in again.err, again.err


def test_a_secret_is_not_shown(launch: Launch, here: Path) -> None:
    result = launch("gpus=2", "env.HF_TOKEN=hf_secretsecretsecret", "train.py")
    assert "secretsecret" not in result.err and "env.HF_TOKEN=***" in result.err


def test_options_after_the_program_are_the_programs(launch: Launch, here: Path) -> None:
    (here / "train.py").touch()
    result = launch("dry_run=true", "train.py", "--nproc-per-node", "2", "gpus=2")
    assert (result.code, "train.py --nproc-per-node 2 gpus=2" in result.out) == (0, True)


def test_a_group_of_such_a_name_is_a_group(here: Path, launch: Launch) -> None:
    (here / "mine/gpus").mkdir(parents=True)
    (here / "mine/gpus/two.yaml").write_text("# @package _global_\nnproc_per_node: 2\n")
    assert launch("-cd", "mine", "gpus=two", "plan").code == 2
    assert launch("plan", "-cd", "mine", "gpus=two", "format=json").out.count('"local_rank"') == 2


def test_the_keys_that_are_told_of_exist() -> None:
    groups = {"binding", "dataloader", "env"}
    for name, foreign in OTHERS.items():
        top = foreign.key.partition(".")[0]
        assert not top or top in LaunchConfig.__dataclass_fields__ or top in groups, name
    assert find_other("lr") is None
