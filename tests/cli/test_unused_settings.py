"""Settings that have no use for a run here are told of; a verb's own are refused."""

from pathlib import Path

import pytest

from launcher.cli import run
from tests.seam import Launch, Result
from tests.specify import specify

HERE = ("dry_run=true", "nproc_per_node=1")
SITE = "kind: {kind}\npartition: gpu\nsetup: [module load x]\n"


def list_warnings(result: Result) -> list[str]:
    """The lines about what has no use."""
    assert result.code == 0, result
    return [line for line in result.err.splitlines() if "for SLURM" in line]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], ""),
        (["cluster=local"], ""),
        (["cluster.mem=auto", "cluster.time=null", "cluster.requeue.crash=0"], ""),
        (["cluster.time=10"], "cluster.time is for SLURM, and this job runs here (one node): set"),
        (
            ["cluster=local", "cluster.time=10"],
            "cluster.time is for SLURM, and this job runs here (cluster=l",
        ),
        (["+cluster.additional={wckey: x}"], "cluster.additional is for SLURM,"),
        (["cluster.srun.mem=1G"], "cluster.srun is for SLURM,"),
        (
            ["cluster.requeue.crash=3", "cluster.partition=gpu", "nodes=1"],
            "cluster.partition, cluster.requeue.crash are for SLURM, and this job runs here (nodes=1): set"
            " cluster=slurm, or leave them out",
        ),
    ],
)
def test_what_is_slurms_has_no_use_here(launch: Launch, words: list[str], told: str) -> None:
    lines = list_warnings(launch(*HERE, *words))
    assert len(lines) == (1 if told else 0), lines
    assert not told or lines[0].startswith(f"launch: warning: {told}")


@pytest.mark.parametrize(
    ("kind", "words", "told"),
    [
        ("auto", [], ["cluster.partition", "cluster.setup"]),
        ("auto", ["cluster.mem=1G"], ["cluster.partition", "cluster.mem", "cluster.setup"]),
        ("slurm", ["cluster.kind=local"], []),
        ("slurm", ["cluster.kind=local", "cluster.partition=other"], ["cluster.partition"]),
    ],
)
def test_what_a_file_holds_counts_where_the_place_was_chosen_by_itself(
    launch: Launch, here: Path, kind: str, words: list[str], told: list[str]
) -> None:
    (here / "conf/cluster").mkdir(parents=True)
    (here / "conf/cluster/site.yaml").write_text(SITE.format(kind=kind))
    lines = list_warnings(launch(*HERE, "cluster=site", *words))
    shown = [line.removeprefix("launch: warning: ").split(" for SLURM")[0] for line in lines]
    assert shown == ([f"{', '.join(told)} {'is' if len(told) == 1 else 'are'}"] if told else [])


def test_what_is_slurms_has_its_use_there(launch: Launch) -> None:
    """There is no SLURM here: a dry run says so, and shows the script."""
    result = launch("dry_run=true", "cluster=slurm", "cluster.partition=gpu", "cluster.time=10")
    assert "#SBATCH --partition=gpu" in result.out and list_warnings(result) == []


@pytest.mark.parametrize(
    ("word", "verb"),
    [
        ("rank=0", "logs` and `launch watch"),
        ("rank=3", "logs` and `launch watch"),
        ("yes=true", "cancel` and `launch tune"),
    ],
)
def test_a_key_of_another_verb(launch: Launch, word: str, verb: str) -> None:
    launch(*HERE, word).assert_error(2, f"{word} is for `launch {verb}`, and has no use for a run")


def test_a_file_may_hold_the_keys_of_verbs(launch: Launch, here: Path) -> None:
    (here / "conf/mine").mkdir(parents=True)
    (here / "conf/mine/own.yaml").write_text('# @package _global_\n"yes": true\nrank: 0\n')
    assert launch(*HERE, "mine=own").code == 0
    assert launch(*HERE, "rank=null", "yes=false").code == 0


@pytest.mark.parametrize("words", [["plan"], [*HERE]], ids=["plan", "run"])
def test_a_variable_that_comes_over_the_command_line_is_told_of(
    launch: Launch, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCH_GC", "default")
    monkeypatch.setenv("LAUNCH_NUM_WORKERS", "1")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    keys = ["gc.every=9", "dataloader.default=true", "allocator.max_split_size_mb=512"]
    told = [line for line in launch(*words, *keys).err.splitlines() if "comes over" in line]
    assert told == [
        "launch: warning: LAUNCH_GC=default is set, and comes over gc.every: unset it",
        "launch: warning: PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128 is set, and comes over"
        " allocator.max_split_size_mb: unset it",
    ]
    monkeypatch.setenv("LAUNCH_NUM_WORKERS", "many")  # replaced, of which the plan warns
    told = [line for line in launch(*words, "dataloader=3").err.splitlines() if "comes over" in line]
    assert told == []
    monkeypatch.setenv("LAUNCH_NUM_WORKERS", "7")
    assert (
        "LAUNCH_NUM_WORKERS=7 is set, and comes over dataloader: unset it"
        in launch(*words, "dataloader=3").err
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["env.HF_TOKEN=abc"], "env.HF_TOKEN is on the command line"),
        (["+env.A=ghp_AbCdEfGh12345678AbCdEfGh12345678AbCd"], "env.A is on the command line"),
        (["env.HF_TOKEN=abc", "env.B=1", "env.PASSWORD=x"], "env.HF_TOKEN, env.PASSWORD are on the command"),
        (["+env={HF_TOKEN: abc}"], "env.HF_TOKEN is on the command line"),
        (["env.B=1"], ""),
        (["env.from_file=x.env"], ""),
        (["env.HF_TOKEN=abc", "dry_run=true"], ""),
        (["env.HF_TOKEN=abc", "cluster=slurm"], ""),
        (["env.HF_TOKEN=abc", "cluster=slurm", "follow=true"], "env.HF_TOKEN is on the command line"),
    ],
    ids=str,
)
def test_secrets_that_ps_shows_while_launch_runs(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    told: str,
) -> None:
    monkeypatch.setattr(run, "check_command", lambda *_: None)  # no sbatch is needed to say so
    (here / "x.env").write_text("HF_TOKEN=abc\n")
    specify(words, ("true",))
    said = capsys.readouterr().err
    assert told in said and ("env.from_file=FILE" in said) == bool(told)
    assert "abc" not in said


def test_a_secret_among_the_options_of_sbatch_is_refused(launch: Launch) -> None:
    words = ["cluster=slurm", "cluster.additional.comment='HF_TOKEN=abc'", "dry_run=true", "--", "true"]
    launch(*words).assert_error(2, "cluster.additional.comment has a secret", "env.NAME")
