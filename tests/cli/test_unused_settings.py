"""Secrets on a command line that others can read."""

from pathlib import Path

import pytest

from launcher.cli import run
from tests.specify import specify


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
