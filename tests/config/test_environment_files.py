"""`env.from_file`: what is read of dotenv files, what comes over what, and what is never written down."""

import json
import os
from pathlib import Path

import pytest

from launcher.config.environment_files import read_variables
from launcher.launch.job import JobSpec
from launcher.slurm.job_request import JobRequest, read_job_request, write_job_request
from tests.seam import run_outside
from tests.specify import specify


def make_spec(*words: str, environ: dict[str, str] | None = None) -> JobSpec:
    return specify(words, environ={"PATH": os.defpath, **(environ or {})})


def write(name: str, data: str | bytes) -> str:
    Path(name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return name


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
    (here / "conf/experiment").mkdir(parents=True)
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
