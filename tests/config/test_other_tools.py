"""Names of other tools: each is answered with the key to type instead."""

import shlex
from pathlib import Path

import pytest
from submitit import AutoExecutor
from submitit.slurm.slurm import SlurmExecutor

from launcher.config.composed import resolve
from launcher.config.composition import compose
from launcher.config.other_tools import explain_foreign, read_tables
from launcher.config.schema import LaunchConfig
from launcher.config.search_path import find_sources
from tests.seam import Launch

LINES = [
    ("timeout_min=60", "timeout_min=60 is submitit's: the key here is cluster.time"),
    ("+slurm_partition=gpu", "is submitit's: the key here is cluster.partition"),
    ("mem_gb=32", "cluster.mem=32G"),
    ("slurm_ntasks_per_node=8", "is submitit's: the key here is nproc_per_node"),
    ("slurm_job_name=x", "is submitit's: the key here is name"),
    ("slurm_nodes=2", "is submitit's: the key here is nodes"),
    ("slurm_thread_spec=2", "is submitit's: the key here is cluster.additional.thread_spec"),
    ("cluster.timeout_min=60", "is submitit's: the key here is cluster.time"),
    ("cluster.slurm_qos=x", "is submitit's: the key here is cluster.qos"),
    ("hydra.launcher.timeout_min=60", "is submitit's: the key here is cluster.time"),
    ("hydra.launcher.partition=gpu", "is submitit's: the key here is cluster.partition"),
    ("use_srun=false", "is submitit's: leave it out, `srun launch-rank"),
    (
        "--nproc-per-node 2 train.py --lr 1",
        "--nproc-per-node 2 is torchrun's: the key here is nproc_per_node",
    ),
    ("--nproc_per_node=2 -- train.py", "is torchrun's: the key here is nproc_per_node"),
    ("plan --nnodes 1:4 nproc_per_node=2", "--nnodes 1:4 is torchrun's: the key here is nodes"),
    (
        "--standalone --nnodes=1 train.py",
        "leave it out, a job on one node needs no rendezvous; --nnodes=1 is",
    ),
    ("--max-restarts 3 train.py", "the key here is torchrun.max_restarts"),
    ("--num_processes 4 train.py", "is accelerate's: the key here is nproc_per_node, ranks on each node"),
    ("--num_gpus=4 train.py", "is deepspeed's: the key here is nproc_per_node"),
    (
        "-N 2 -A me train.py",
        "-N 2 is SLURM's: the key here is nodes; -A me is SLURM's: the key here is cluster.account",
    ),
    ("partition=gpu train.py", "is SLURM's: the key here is cluster.partition"),
    ("--gres gpu:4 -- ./train", "is SLURM's: the key here is cluster.gpus_per_node for GPUs"),
    ("gpus=2 python train.py", "gpus=2 is no key of launch's: the key here is nproc_per_node"),
    ("tune dataloader gpus=2 train.py", "gpus=2 is no key of launch's"),
    ("num_workers=4 train.py", "the key here is dataloader"),
    (
        "CUDA_VISIBLE_DEVICES=0,1 train.py",
        "is a variable of the environment: the key here is env.CUDA_VISIBLE",
    ),
    ("devices=0,1 train.py", "takes all, own or spread: write env.CUDA_VISIBLE_DEVICES=0,1"),
    ("--dry-run train.py", "--dry-run is a setting, and these are written KEY=VALUE: write dry_run=…"),
    ("--binding.policy numa train.py", "write binding.policy=numa"),
    ("--mutirun a=1,2", "did you mean --multirun?"),
    ("--lr 1e-4 train.py --wd 0", "there is no option --lr: a program's options stand after the program"),
    ("plan train", "'train' is not KEY=VALUE"),
]


@pytest.mark.parametrize(("line", "says"), LINES, ids=[line for line, _ in LINES])
def test_the_key_is_told(launch: Launch, here: Path, line: str, says: str) -> None:
    (here / "train.py").touch()
    launch(*shlex.split(line)).assert_error(2, says)
    assert [path.name for path in here.iterdir()] == ["train.py"]


def test_a_secret_is_not_shown(launch: Launch) -> None:
    told = launch("HF_TOKEN=hf_secretsecretsecret", "--api-key", "secretsecret", "train.py")
    assert told.code == 2 and "secretsecret" not in told.err and "env.HF_TOKEN" in told.err


def test_options_after_the_program_are_the_programs(launch: Launch, here: Path) -> None:
    (here / "train.py").touch()
    result = launch("dry_run=true", "train.py", "--nproc-per-node", "2", "gpus=2")
    assert (result.code, "train.py --nproc-per-node 2 gpus=2" in result.out) == (0, True)


def test_every_parameter_of_submitits_has_an_answer() -> None:
    own = {f"slurm_{name}" for name in SlurmExecutor._valid_parameters()}
    for name in own | set(AutoExecutor._typed_parameters()) - {"name", "nodes"}:
        assert explain_foreign(name), name
    for name in SlurmExecutor._valid_parameters() - {"use_srun", "teardown"}:
        assert explain_foreign(f"hydra.launcher.{name}"), name


def test_the_keys_that_are_told_of_exist() -> None:
    groups = {"binding", "dataloader", "env"}
    for tool, names in read_tables().items():
        for name, fix in names.items():
            top = fix.partition(",")[0].partition(" ")[0].partition(".")[0]
            known = (
                top in LaunchConfig.__dataclass_fields__ or top in groups or fix.startswith("leave it out")
            )
            assert known or tool == "short", name
    assert explain_foreign("lr") == ""


@pytest.mark.parametrize("word", ["cluster.mem=1G", "nodes=1", "name=x", "cluster.additional.comment=x"])
def test_our_own_names_are_ours(here: Path, word: str) -> None:
    compose(find_sources(None, None, None), [word])


def test_a_group_of_such_a_name_is_a_group(here: Path, launch: Launch) -> None:
    (here / "mine/gpus").mkdir(parents=True)
    (here / "mine/gpus/two.yaml").write_text("# @package _global_\nnproc_per_node: 2\n")
    assert launch("-cd", "mine", "gpus=two", "plan").code == 2
    assert launch("plan", "-cd", "mine", "gpus=two", "format=json").out.count('"local_rank"') == 2
    (here / "conf/folder").mkdir(parents=True)
    (here / "conf/folder/x.yaml").write_text("# @package _global_\nnproc_per_node: 3\n")
    assert resolve(compose(find_sources(None, None, None), ["folder=x"])).nproc_per_node == 3


def test_a_name_in_a_file_is_told_with_the_file(here: Path, launch: Launch) -> None:
    (here / "conf/cluster").mkdir(parents=True)
    (here / "conf/cluster/ours.yaml").write_text("kind: slurm\ntimeout_min: 60\n")
    told = "cluster/ours.yaml: cluster.timeout_min is submitit's: the key here is cluster.time"
    launch("cluster=ours", "dry_run=true").assert_error(2, told)
