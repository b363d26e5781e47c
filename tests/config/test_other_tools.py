"""Names of other tools: each is answered with the whole word to type instead."""

from pathlib import Path

import pytest
from submitit import AutoExecutor
from submitit.slurm.slurm import SlurmExecutor

from launcher.config.composed import resolve
from launcher.config.composition import compose
from launcher.config.other_tools import PLAIN, SUBMITIT, find_foreign
from launcher.config.search_path import find_sources
from tests.seam import Launch

WORDS = [
    ("timeout_min=60", "cluster.time=60"),
    ("slurm_time=60,120", "cluster.time=60,120"),
    ("slurm_partition=gpu", "cluster.partition=gpu"),
    ("+slurm_partition=gpu", "cluster.partition=gpu"),
    ("mem_gb=32", "cluster.mem=32G"),
    ("mem_gb=1.5,2", "cluster.mem=1536M,2G"),
    ("slurm_mem=32GB", "cluster.mem=32G"),
    ("slurm_mem_per_cpu=4GB", "cluster.additional.mem_per_cpu=4G"),
    ("tasks_per_node=8", "nproc_per_node=8"),
    ("slurm_ntasks_per_node=8", "nproc_per_node=8"),
    ("cpus_per_task=8", "cluster.cpus_per_task=8 (the CPUs of a node, for all its ranks together)"),
    ("gpus_per_node=8", "cluster.gpus_per_node=8"),
    ("slurm_gres=gpu:a100:4", "cluster.gpus_per_node=a100:4"),
    ("slurm_array_parallelism=4", "cluster.array_parallelism=4"),
    ("folder=logs/%j", "runs_dir=logs"),
    ("slurm_job_name=x", "name=x"),
    ("slurm_nodes=2", "nodes=2"),
    ("slurm_signal_delay_s=90", "cluster.signal=USR2@90"),
    ("slurm_max_num_timeout=3", "cluster.requeue.timeout=3"),
    ("slurm_comment=why", "cluster.additional.comment=why"),
    ("slurm_setup=[module load x]", "cluster.setup=[module load x]"),
    ("slurm_thread_spec=2", "cluster.additional.thread_spec=2"),
    ("cluster.timeout_min=60", "cluster.time=60"),
    ("cluster.slurm_qos=x", "cluster.qos=x"),
    ("hydra.launcher.timeout_min=60", "cluster.time=60"),
    ("hydra.launcher.partition=gpu", "cluster.partition=gpu"),
    ("hydra.launcher.mem_per_gpu=4GB", "cluster.additional.mem_per_gpu=4G"),
]


@pytest.mark.parametrize(("word", "fix"), WORDS, ids=[word for word, _ in WORDS])
def test_submitits_names(launch: Launch, here: Path, word: str, fix: str) -> None:
    launch(word, "--", "true").assert_error(2, f"{word} is submitit's: write {fix}")
    assert not list(here.iterdir())


def test_all_of_them_are_told_of_at_once(launch: Launch) -> None:
    result = launch("timeout_min=60", "nodes=2", "slurm_partition=gpu", "use_srun=false", "--", "true")
    result.assert_error(2, "cluster.time=60; slurm_partition=gpu", "cluster.partition=gpu; use_srun=false")


def test_the_words_that_are_told_are_words_that_are_taken(here: Path) -> None:
    fixes = [fix.partition(" (")[0] for _, fix in WORDS if "," not in fix]
    words = ["cluster.setup=['module load x']" if "module" in fix else fix for fix in fixes]
    config = resolve(compose(find_sources(None, None, None), [*words, "cluster=slurm"]))
    assert (config.cluster.time, config.cluster.mem, config.nproc_per_node) == ("60", "32G", 8)
    assert (config.cluster.additional["mem_per_cpu"], config.runs_dir) == ("4G", "logs")


def test_every_parameter_of_submitits_has_an_answer() -> None:
    own = {f"slurm_{name}" for name in SlurmExecutor._valid_parameters()}
    for name in own | set(AutoExecutor._typed_parameters()) - {"name", "nodes"}:
        assert find_foreign(name), name
    for name in SlurmExecutor._valid_parameters() - {"use_srun", "teardown"}:
        assert find_foreign(f"hydra.launcher.{name}"), name
    assert not {*SUBMITIT} & {*PLAIN}


@pytest.mark.parametrize("word", ["cluster.mem=1G", "nodes=1", "name=x", "cluster.additional.comment=x"])
def test_our_own_names_are_ours(here: Path, word: str) -> None:
    compose(find_sources(None, None, None), [word])


def test_a_group_of_such_a_name_is_a_group(here: Path) -> None:
    (here / "conf/folder").mkdir(parents=True)
    (here / "conf/folder/x.yaml").write_text("# @package _global_\nnproc_per_node: 3\n")
    assert resolve(compose(find_sources(None, None, None), ["folder=x"])).nproc_per_node == 3


def test_a_name_in_a_file_is_told_with_the_file(here: Path, launch: Launch) -> None:
    (here / "conf/cluster").mkdir(parents=True)
    (here / "conf/cluster/ours.yaml").write_text("kind: slurm\ntimeout_min: 60\n")
    told = "cluster/ours.yaml: cluster.timeout_min is submitit's: the key here is cluster.time"
    launch("cluster=ours", "dry_run=true").assert_error(2, told)
