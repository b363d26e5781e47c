"""The submission script, whole, and run by a real bash."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.slurm.batch_script import END_MARK, Script, render_script, render_standalone
from launcher.slurm.sbatch_options import Option

OPTIONS = (
    Option("job-name", """a "b" c\\d 'e' #f $(id) hetjob ü""", "name"),
    Option("nodes", "2-4", "nodes"),
    Option("no-kill", None, "nodes"),
    Option("nodelist", "n[0-3],n7", "cluster.nodelist"),
    Option("signal", "B:USR2@120", "cluster.signal"),
)
TRAP = """
# the checkpoint signal, if it comes before the ranks
launch_signal=
trap 'launch_signal=USR2' USR2
"""
PYTHON = ("/opt/py env/bin/python", "-I")


def make(
    options: tuple[Option, ...], setup: Sequence[str], python: Sequence[str], remarks: tuple[str, ...] = ()
) -> Script:
    return Script(options, remarks, tuple(setup), tuple(python))


def test_a_job() -> None:
    text = render_script(make(OPTIONS, [], PYTHON), ["/data/it's 100%/runs/x y/1"])
    assert text == (
        "#!/bin/bash\n"
        '#SBATCH --job-name="a \\"b\\" c\\\\d \'e\' #f $(id) hetjob ü"\n'
        "#SBATCH --nodes=2-4\n"
        "#SBATCH --no-kill\n"
        "#SBATCH --nodelist=n[0-3],n7\n"
        "#SBATCH --signal=B:USR2@120\n"
        "#SBATCH --open-mode=append\n"
        '#SBATCH --output="/data/it\'s 100%%/runs/x y/1/logs/slurm-%j.out"\n'
        f"{TRAP}\n"
        "launch_run='/data/it'\"'\"'s 100%/runs/x y/1'\n"
        "\n"
        "if [ ! -x '/opt/py env/bin/python' ]; then\n"
        "    printf '%s\\n' 'launch: error: no /opt/py env/bin/python on this node: is it on a filesystem"
        " that all nodes share?' >&2\n"
        "    exit 3\n"
        "fi\n"
        "trap '' USR2\n"
        "exec '/opt/py env/bin/python' -I -m launcher.slurm \"$launch_run\" $launch_signal\n"
    )


def test_an_array_with_setup() -> None:
    text = render_script(
        make(OPTIONS[-1:], ["module load cuda/12.4", "export X='1 2'"], ["/py"]), ["/r/1", "/r/a b"]
    )
    assert text == (
        "#!/bin/bash\n"
        "#SBATCH --signal=B:USR2@120\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --output=/dev/null\n"
        f"{TRAP}\n"
        "launch_runs=(\n"
        "    /r/1\n"
        "    '/r/a b'\n"
        ")\n"
        "launch_run=${launch_runs[$SLURM_ARRAY_TASK_ID]}\n"
        'exec >>"$launch_run/logs/slurm-$SLURM_JOB_ID.out" 2>&1\n'
        "\n"
        "# cluster.setup: a line that fails ends the job\n"
        'trap \'launch_code=$?; printf "launch: error: cluster.setup ended with %s at: %s\\n" \\\n'
        '    "$launch_code" "$launch_line" >&2; exit "$((launch_code ? launch_code : 1))"\' EXIT\n'
        'launch_check() { if [ "$1" != 0 ]; then exit "$1"; fi; }\n'
        "launch_line='module load cuda/12.4'\n"
        "module load cuda/12.4\n"
        "launch_check $?\n"
        "launch_line='export X='\"'\"'1 2'\"'\"''\n"
        "export X='1 2'\n"
        "launch_check $?\n"
        "trap - EXIT\n"
        "unset -v launch_line launch_code\n"
        "unset -f launch_check\n"
        "\n"
        "if [ ! -x /py ]; then\n"
        "    printf '%s\\n' 'launch: error: no /py on this node: is it on a filesystem that all nodes"
        " share?' >&2\n"
        "    exit 3\n"
        "fi\n"
        "trap '' USR2\n"
        'exec /py -m launcher.slurm "$launch_run" $launch_signal\n'
    )


def test_remarks_stay_comments() -> None:
    text = render_script(make(OPTIONS[-1:], [], PYTHON, ("Program: 'a\nrm -rf x' \x1b[2J ü", "")), ["/r"])
    assert text.splitlines()[1:3] == ["# Program: 'a\\nrm -rf x' \\x1b[2J ü", "# "]


def test_a_job_that_its_script_describes(fake: Path, tmp_path: Path) -> None:
    fake.write_text("#!/bin/sh\necho $*; exec cat\n")
    document = '{"words": ["$(id) `id` \\\\ \'", "é"]}'
    text = render_standalone(make(OPTIONS, ["echo setup"], [str(fake), "-I"]), document)
    assert "#SBATCH --output=%x-%j.out\n" in text
    done = run(text, tmp_path)
    assert done.stdout == f"setup\n-I -m launcher.slurm --standalone\n{document}\n"
    assert text.endswith(f"\n{document}\n{END_MARK}\n")
    array = render_standalone(make((Option("array", "0-1", ""), *OPTIONS[-1:]), [], PYTHON), "[]")
    assert "#SBATCH --output=%x-%A_%a.out\n" in array


@pytest.mark.parametrize("path", ["/a\nb", "/a\\b", "/a\x07"])
def test_a_path_that_slurm_cannot_take(path: str) -> None:
    with pytest.raises(UsageError, match=r"run directory .* set runs_dir"):
        render_script(make(OPTIONS[-1:], [], PYTHON), [path])


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


def run(text: str, cwd: Path, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    script = cwd / "submission.sh"
    script.write_text(text, encoding="utf-8")
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    environ = {"PATH": os.environ["PATH"], **(env or {})}
    return subprocess.run(
        ["bash", script], cwd=cwd, env=environ, capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize(
    "setup",
    [
        [],
        ["set -euo pipefail"],
        ["set -a -f", "IFS=,", "shopt -s failglob nullglob extglob"],
        ["set -o noclobber -o posix"],
        ["if true; then", "true", "else", "false", "fi"],
        ["for i in 1 2; do\n  false || true\ndone"],
        ["# a comment", "", "false || true"],
        ["export X=it\\'s", "trap 'echo bye' EXIT"],
        ["true \\", "  and more"],
        ["cd /"],
        ["launch_check() { false; }; unset -f launch_check; launch_check() { :; }"],
    ],
    ids=str,
)
def test_the_users_lines_do_not_break_ours(setup: list[str], fake: Path, tmp_path: Path) -> None:
    done = run(render_script(make(OPTIONS[-1:], setup, [str(fake), "-I"]), ["/r u/n"]), tmp_path)
    shown = "it's" if "export X=it\\'s" in setup else ""
    assert (done.returncode, done.stdout) == (
        7,
        f"-I|-m|launcher.slurm|/r u/n|X={shown}\n",
    ), done
    assert done.stderr == ""


@pytest.mark.parametrize("standalone", [False, True])
def test_the_checkpoint_signal_during_setup_reaches_the_first_node(
    standalone: bool, fake: Path, tmp_path: Path
) -> None:
    """bash handles it once the command ends that runs meanwhile, and goes on."""
    fake.write_text("#!/bin/sh\nkill -USR2 $$\necho $*\n")
    script = make(OPTIONS[-1:], ["kill -USR2 $$; true", "set -u"], [str(fake)])
    text = render_standalone(script, "{}") if standalone else render_script(script, ["/run"])
    done = run(text, tmp_path)
    words = "--standalone" if standalone else "/run"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"-m launcher.slurm {words} USR2\n", "")


@pytest.mark.parametrize(
    ("setup", "code", "line"),
    [
        (["true", "false", "true"], 1, "false"),
        (["(exit 42)"], 42, "(exit 42)"),
        (["exit 0"], 1, "exit 0"),
        (["set -e", "false"], 1, "false"),
        (["set -u", 'echo "$nothing_like_it"'], 1, 'echo "$nothing_like_it"'),
        (["no-such-command-here 'a b'"], 127, "no-such-command-here 'a b'"),
        (["source /no/such/activate"], 1, "source /no/such/activate"),
    ],
    ids=str,
)
def test_a_line_that_fails_ends_the_job(
    setup: list[str], code: int, line: str, fake: Path, tmp_path: Path
) -> None:
    done = run(render_script(make(OPTIONS[-1:], setup, [str(fake)]), ["/run"]), tmp_path)
    shown = 0 if setup == ["exit 0"] else code
    assert (done.returncode, done.stdout) == (code, ""), done
    assert f"launch: error: cluster.setup ended with {shown} at: {line}\n" in done.stderr


def test_a_missing_interpreter_is_told(tmp_path: Path) -> None:
    done = run(render_script(make(OPTIONS[-1:], [], ["/no/such/python", "-I"]), ["/run"]), tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith("launch: error: no /no/such/python on this node")


def test_a_member_of_an_array_has_its_own_directory(fake: Path, tmp_path: Path) -> None:
    runs = [tmp_path / "a b", tmp_path / "$HOME'"]
    for path in runs:
        (path / "logs").mkdir(parents=True)
    text = render_script(make(OPTIONS[-1:], ["echo setup"], [str(fake)]), [str(path) for path in runs])
    done = run(text, tmp_path, {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "99"})
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    log = runs[1] / "logs" / "slurm-99.out"
    assert log.read_text() == f"setup\n-m|launcher.slurm|{runs[1]}|X=\n"
    assert not list((runs[0] / "logs").iterdir())


@pytest.mark.parametrize("path", [None, ":", "."])
def test_files_in_the_working_directory_do_not_shadow_ours(path: str | None, tmp_path: Path) -> None:
    for name in ("random.py", "json.py", "launcher.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")
    text = render_script(make(OPTIONS[-1:], [], [sys.executable, "-I"]), ["/no/such/run"])
    done = run(text, tmp_path, {} if path is None else {"PYTHONPATH": path})
    assert "shadowed" not in done.stderr + done.stdout
    assert done.returncode != 0
    assert "/no/such/run" in done.stderr, shlex.join([done.stdout, done.stderr])
