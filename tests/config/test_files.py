"""Files that are read for a configuration: variables for the program, and what would hang a reader."""

import json
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import files
from launcher.config.program import read_variables
from launcher.config.words import MOST_BYTES
from launcher.launch.job import JobSpec
from launcher.slurm.job_request import JobRequest, read_job_request, write_job_request
from tests.seam import LAUNCH, Launch, clean_environ, run_outside
from tests.specify import specify


def make_spec(*words: str, environ: dict[str, str] | None = None) -> JobSpec:
    return specify(words, environ={"PATH": os.defpath, **(environ or {})})


def write(name: str | Path, data: str | bytes) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(name)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ("A=1\nB=two words\n", {"A": "1", "B": "two words"}),
        ("export A=1\n  B = 2 \n", {"A": "1", "B": "2"}),
        ("# comment\n\nA=1 # more\nB=x#y\n", {"A": "1", "B": "x#y"}),
        ("A='$HOME ${B} #'\nB=\"a\\tb\"\nC=$A\n", {"A": "$HOME ${B} #", "B": "a\tb", "C": "$A"}),
        ("A=\"two\nlines\"\nB='and\r\nmore'\n", {"A": "two\nlines", "B": "and\r\nmore"}),
        ("A=\nB=\"\"\nC=' '\n", {"A": "", "B": "", "C": " "}),
        ("A=1\nA=2", {"A": "2"}),
        ("A=a=b==\nB={\"x\": [1, 2]}\nC=é😀\n", {"A": "a=b==", "B": '{"x": [1, 2]}', "C": "é😀"}),
        ("\ufeffA=1\r\nB=2\r\n", {"A": "1", "B": "2"}),
        (b"A=\xe9\xff", {"A": os.fsdecode(b"\xe9\xff")}),
        ("", {}),
    ],
    ids=repr,
)  # fmt: skip
def test_what_stands_in_a_file(here: Path, data: str | bytes, found: dict[str, str]) -> None:
    assert read_variables(write("x.env", data)) == found


def test_the_variables_given_come_over_the_files_and_these_over_the_environment(here: Path) -> None:
    write("one.env", "A=one\nB=one\nC=one\n")
    write("two.env", "B=two\nC=two\n")
    made = make_spec("env.from_file=[one.env,two.env]", "env.C=given", environ={"A": "user", "D": "user"})
    assert made.config.env == {"A": "one", "B": "two", "C": "given"}
    assert {name: made.environ.get(name) for name in "ABCD"} == {**made.config.env, "D": "user"}


def test_a_configuration_names_files_too_and_null_names_none(here: Path) -> None:
    write("conf/experiment/x.yaml", "# @package _global_\nenv:\n  from_file: [a b.env]\n  N: 3\n  T: 0.5\n")
    write("a b.env", "A=1\n")
    assert make_spec("experiment=x").config.env == {"A": "1", "N": "3", "T": "0.5"}
    assert make_spec("experiment=x", "env.from_file=null").config.env == {"N": "3", "T": "0.5"}
    assert make_spec("env.from_file=a b.env").config.env == {"A": "1"}


def test_a_submitted_job_takes_the_variables_along_and_writes_no_secret(here: Path) -> None:
    write("x.env", "HF_TOKEN=hf-secret\nPLAIN=seen\nDB=postgres://me:pw-secret@db/x\n")
    made = make_spec("env.from_file=x.env")
    request = JobRequest(made.config, {}, None, ("launch",), str(here), 1, 1)
    secrets = write_job_request(request, here)
    written = (here / "job.json").read_text()
    assert "seen" in written and "secret" not in written
    Path("x.env").unlink()
    carried = {"LAUNCH_SECRETS": json.dumps({"": secrets})}
    assert read_job_request(here, carried).config.env == request.config.env
    assert request.config.env["HF_TOKEN"] == "hf-secret"


PROGRAM = (
    "import os; print([os.environ[name] for name in ('A', 'B', 'HF_TOKEN')], os.environ.get('from_file'))"
)


@pytest.mark.usefixtures("quick_agent")
def test_a_run_has_them_and_its_directory_has_no_secret(tmp_path: Path) -> None:
    (tmp_path / "x.env").write_text("A=file\nB='two  words'\nHF_TOKEN=hf-secret\n")
    (tmp_path / "show.py").write_text(PROGRAM)
    words = ("nproc_per_node=1", "env.from_file=x.env", "new_run_dir=run", "explain=true", "--", "show.py")
    done = run_outside(words, tmp_path, {"A": "user", "NCCL_AUTH_TOKEN": "nccl-secret"})
    assert done.code == 0, done.err
    assert "['file', 'two  words', 'hf-secret'] None" in done.out
    said = done.err.replace("hf-secret'] None", "")
    assert "HF_TOKEN" in said and "secret" not in said
    files = {path: path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {path.name for path in files if "secret" in files[path]} == {
        "rank-0.out"
    }  # the program's own word
    assert "from_file: x.env" in files[tmp_path / "run/config.yaml"]
    (plan,) = (json.loads(text) for path, text in files.items() if path.name.startswith("plan-"))
    told = {each["name"]: (each["value"], each["from"]) for each in plan["ranks"][0]["variables"]}
    assert told["A"] == ("file", "configuration")
    assert told["HF_TOKEN"] == ("***", "configuration")
    assert told["NCCL_AUTH_TOKEN"] == ("***", "user")


def test_a_sweep_reads_a_file_for_each_job(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.env").write_text(f"HIP_VISIBLE_DEVICES={name}\n")
    done = run_outside(("plan", "-m", "env.from_file=a.env,b.env", "format=json"), tmp_path)
    assert done.code == 0, done.err
    assert [f'"value": "{name}"' in done.out for name in "abc"] == [True, True, False]


# Pipes and devices


@pytest.mark.parametrize("form", ["pipe", "device"])
def test_folders_of_the_search_path_are_no_way_around(launch: Launch, here: Path, form: str) -> None:
    """Hydra finds what is in `hydra.searchpath` by itself."""
    path = here / "more/model/x.yaml"
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/zero") if form == "device" else os.mkfifo(path)
    text = f"defaults: [launch_defaults, _self_]\nhydra: {{searchpath: [file://{here}/more]}}\n"
    write(here / "conf/launch.yaml", text)
    launch("plan", "model=x").assert_error(2, "no 'x' in model")


def test_a_file_that_is_too_large(launch: Launch, here: Path) -> None:
    write(here / "conf/launch.yaml", "#" * MOST_BYTES + "\n")
    launch("plan").assert_error(2, "conf/launch.yaml cannot be read (more than 512 KiB)")


def test_a_large_file_that_is_not_chosen_is_left(launch: Launch, here: Path) -> None:
    """A folder conf/ may be that of a training program, with files that are not for us."""
    write(here / "conf/vocabulary/large.yaml", "#" * MOST_BYTES + "\na: &a 1\nb: *a\n")
    result = launch("plan")
    assert result.code == 0, result.err


@pytest.mark.parametrize("name", ["launch.yaml", "model/tiny.yaml", "program/mine.yaml"])
def test_a_configuration_that_is_no_file(launch: Launch, here: Path, name: str) -> None:
    path = here / "conf" / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    launch("plan").assert_error(2, f"conf/{name} is no regular file: move it away")
    assert launch("--help-all").code == 0
    path.unlink()
    path.symlink_to("/dev/zero")
    launch("status").assert_error(2, f"conf/{name} is no regular file")


@pytest.mark.parametrize("key", ["machine.snapshot", "env.from_file"])
def test_a_pipe_from_which_nothing_comes(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    os.mkfifo(here / "pipe")
    launch("plan", f"{key}=pipe").assert_error(
        2, f"{key}=pipe cannot be read (nothing came from it in 0.1 s)"
    )


def test_a_command_in_place_of_a_file(here: Path) -> None:
    """As in `env.from_file=<(pass show hf)`, whose output may come late."""
    assert run_outside(["topo", "save=node.json"], here).code == 0
    write(here / "late.sh", "sleep 0.2; echo A=1; sleep 0.2; echo B=two\n")
    words = "plan explain=true machine.snapshot=<(cat node.json) env.from_file=<(sh late.sh)"
    script = f'launch() {{ "$@"; }}; launch "$@" {words}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *LAUNCH],
        cwd=here,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "two" in done.stdout


def limit_files(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_open_files_are_an_error_and_few_are_made_more(here: Path) -> None:
    words = ["nproc_per_node=2", "--", "true"]
    run_outside(words, here, preexec_fn=limit_files(12, 12)).assert_error(
        3, "may open 12 files", "needs 32", "ulimit -Hn"
    )
    assert not (here / "runs").exists()
    done = run_outside(words, here, preexec_fn=limit_files(12, 256))
    assert done.code == 0, done.err
