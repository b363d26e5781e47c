"""The submission script, run by a real bash."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.slurm.sbatch import Option, Script, render_script

SETUP = tomllib.loads(Path(__file__).with_name("options.toml").read_text())["setup"]
OPTIONS = (
    Option("job-name", """a "b" c\\d 'e' #f $(id) hetjob ü""", "name"),
    Option("nodes", "2-4", "nodes"),
    Option("no-kill", None, "nodes"),
    Option("nodelist", "n[0-3],n7", "cluster.nodelist"),
    Option("comment", "hetjob", "cluster.additional.comment"),
    Option("signal", "B:USR2@120", "cluster.signal"),
)


def make(*setup: str, python: str = "/py", options: tuple[Option, ...] = OPTIONS[-1:]) -> Script:
    return Script(options, "Program: 'a\nrm -rf x' \x1b[2J ü", setup, (python, "-I"))


def test_what_sbatch_reads() -> None:
    lines = render_script(make(options=OPTIONS), ["/data/it's 100%/runs/x y/1"]).splitlines()
    assert lines[:2] == ["#!/bin/bash", "# Program: 'a\\nrm -rf x' \\x1b[2J ü"]
    assert lines[2:11] == [
        '#SBATCH --job-name="a \\"b\\" c\\\\d \'e\' #f $(id) hetjob ü"',
        "#SBATCH --nodes=2-4",
        "#SBATCH --no-kill",
        "#SBATCH --nodelist=n[0-3],n7",
        '#SBATCH --comment="hetjob"',
        "#SBATCH --signal=B:USR2@120",
        "#SBATCH --open-mode=append",
        '#SBATCH --output="/data/it\'s 100%%/runs/x y/1/logs/slurm-%j.out"',
        "",
    ]
    assert "#SBATCH --output=/dev/null\n" in render_script(make(), ["/r/1", "/r/a b"])
    for path in ("/a\nb", "/a\\b", "/a\x07"):
        with pytest.raises(UsageError, match=r"run directory .* set runs_dir"):
            render_script(make(), [path])


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """In place of the interpreter: shows its words, the variables of ours that it got, and one of setup's."""
    program = tmp_path / "py thon"
    program.write_text(
        '#!/bin/sh\nprintf "%s|" "$@"\nprintf "X=%s\\n" "$X"\nenv | grep "^launch_"\nexit 7\n',
        encoding="utf-8",
    )
    program.chmod(0o755)
    return program


def run(text: str, cwd: Path, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run a script, and return its exit code, output and errors."""
    script = cwd / "submission.sh"
    script.write_text(text, encoding="utf-8")
    environ = {"PATH": os.environ["PATH"], **(env or {})}
    words = ["bash", str(script)]
    done = subprocess.run(
        words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=30, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("setup", SETUP["right"], ids=str)
def test_the_users_lines_do_not_break_ours(setup: list[str], fake: Path, tmp_path: Path) -> None:
    shown = "it's" if "export X=it\\'s" in setup else ""
    done = run(render_script(make(*setup, python=str(fake)), ["/r u/it's"]), tmp_path)
    assert done == (7, f"-I|-m|launcher.slurm|/r u/it's|X={shown}\n", "")


@pytest.mark.parametrize(("code", "line", "setup"), SETUP["wrong"], ids=str)
def test_a_line_that_fails_ends_the_job(
    setup: list[str], code: int, line: str, fake: Path, tmp_path: Path
) -> None:
    found, out, err = run(render_script(make(*setup, python=str(fake)), ["/run"]), tmp_path)
    assert (found, out) == (code, ""), err
    shown = 0 if setup == ["exit 0"] else code
    assert f"launch: error: cluster.setup ended with {shown} at: {line}\n" in err


def test_a_missing_interpreter_is_told(tmp_path: Path) -> None:
    code, _, err = run(render_script(make(python="/no/such/python"), ["/run"]), tmp_path)
    assert code == 3 and err.startswith("launch: error: no /no/such/python on this node")


def test_the_checkpoint_signal_during_setup_reaches_the_first_node(fake: Path, tmp_path: Path) -> None:
    """bash handles it once the command ends that runs meanwhile, and goes on."""
    fake.write_text("#!/bin/sh\nkill -USR2 $$\necho $*\n")
    text = render_script(make("kill -USR2 $$; true", "set -u", python=str(fake)), ["/run"])
    assert run(text, tmp_path) == (0, "-I -m launcher.slurm /run USR2\n", "")


def test_a_member_of_an_array_has_its_own_directory(fake: Path, tmp_path: Path) -> None:
    runs = [tmp_path / "a b", tmp_path / "$HOME'"]
    for path in runs:
        (path / "logs").mkdir(parents=True)
    text = render_script(make("echo setup", python=str(fake)), [str(path) for path in runs])
    assert run(text, tmp_path, {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "99"}) == (7, "", "")
    log = runs[1] / "logs" / "slurm-99.out"
    assert log.read_text() == f"setup\n-I|-m|launcher.slurm|{runs[1]}|X=\n"
    assert not list((runs[0] / "logs").iterdir())


@pytest.mark.parametrize("path", [None, ":", "."])
def test_files_in_the_working_directory_do_not_shadow_ours(path: str | None, tmp_path: Path) -> None:
    for name in ("random.py", "json.py", "launcher.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")
    text = render_script(make(python=sys.executable), ["/no/such/run"])
    code, out, err = run(text, tmp_path, {} if path is None else {"PYTHONPATH": path})
    assert code != 0 and "shadowed" not in err + out and "/no/such/run" in err
