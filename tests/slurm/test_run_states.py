"""How runs stand by their manifests and by SLURM's word: `launch status` with a squeue that is made up."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.make_runs import make_run
from tests.seam import clean_environ, run_outside

RUNS = tomllib.loads(Path(__file__).with_name("run_states.toml").read_text())["run"]
AWAY = "echo 'squeue: Unable to contact slurm controller' >&2; exit 1"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """SLURM's commands are in `bin`: the squeue there prints the file `rows`."""
    (tmp_path / "bin").mkdir()
    write_command(tmp_path, "squeue", "cat rows")
    write_command(tmp_path, "sacct", "exit 1")
    return {**clean_environ(), "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "TZ": "UTC"}


def write_command(folder: Path, name: str, text: str) -> None:
    """A command of SLURM's, which notes that it was asked."""
    (folder / "bin" / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{folder}/calls\ncd {folder}\n{text}\n')
    (folder / "bin" / name).chmod(0o755)


def test_slurms_word_counts_if_the_manifest_tells_no_end(tmp_path: Path, environ: dict[str, str]) -> None:
    rows, asked = [], []
    for number, run in enumerate(RUNS, 1):
        more: dict[str, Any] = {"slurm": {"job_id": str(number)}} if run.get("job", True) else {}
        once = {"outcome": {"state": "requeued"}, "slurm": {"job_id": str(number)}}
        more |= {"earlier": [once]} if run.get("earlier") else {}
        path = make_run(tmp_path / "runs", f"run{number}", state=run["state"],
                        outcome=run.get("outcome", {}), **more)  # fmt: skip
        if run.get("log"):
            (path / f"logs/slurm-{number}.out").touch()
        rows += [f"{number}|{run['squeue']}|\n"] if "squeue" in run else []
        asked += [str(number)] if "slurm" in more and run.get("asked", True) else []
    (tmp_path / "rows").write_text("".join(rows))
    names = [f"run{number}" for number in range(1, len(RUNS) + 1)]
    done = run_outside(["status", "format=json", *names], tmp_path, environ)
    assert done.code == 0, done
    found = {row["run"].partition("/")[0]: row for row in json.loads(done.out)["runs"]}
    for number, (name, run) in enumerate(zip(names, RUNS, strict=True), 1):
        expected = {key: str(value).replace("{job}", str(number)) for key, value in run["expect"].items()}
        assert {key: str(found[name][key]) for key in expected} == expected, (number, run)
    (call,) = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("squeue")]
    assert f" --jobs={','.join(asked)} " in call


def test_if_slurm_cannot_be_asked_the_manifests_count(tmp_path: Path, environ: dict[str, str]) -> None:
    write_command(tmp_path, "squeue", AWAY)
    make_run(tmp_path / "runs", state="running", slurm={"job_id": "7"})
    done = run_outside(["status", "format=json"], tmp_path, environ)
    assert [row["state"] for row in json.loads(done.out)["runs"]] == ["running"]
    assert "launch: warning: squeue: " in done.err and "Unable to contact" in done.err


def test_a_manifest_that_was_completed_meanwhile(tmp_path: Path, environ: dict[str, str]) -> None:
    path = make_run(tmp_path / "runs", state="running", slurm={"job_id": "7"})
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["outcome"] = {"state": "failed", "exit_code": 9, "reason": "so it is"}
    (tmp_path / "later").write_text(json.dumps(manifest))
    row = "7|COMPLETED|main|2|n[0-1]|N/A|N/A|0|0|None|"
    write_command(tmp_path, "squeue", f"cp later {path}/manifest.json; echo '{row}'")
    done = run_outside(["status", "format=json"], tmp_path, environ)
    (found,) = json.loads(done.out)["runs"]
    assert (found["state"], found["exit_code"], found["reason"]) == ("failed", 9, "so it is")
