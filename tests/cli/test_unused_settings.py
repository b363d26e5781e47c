"""Settings that have no use for a run here are told of; a verb's own are refused."""

from pathlib import Path

import pytest

from launcher.cli import run
from tests.seam import Launch
from tests.specify import specify

HERE = ("dry_run=true", "nproc_per_node=1")


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
