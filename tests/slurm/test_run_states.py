"""How runs stand by their manifests and by SLURM's word, with a squeue that is made up: `run_states.toml`.

It tells what `launch status` shows of them, and whether another run may go into their directories.
`followed.toml` tells what is said of a job that is followed.
"""

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.errors import LaunchError
from launcher.report.console import JobConsole
from launcher.report.viewer import ViewOptions
from launcher.slurm import run_states
from launcher.slurm.run_states import JobLog, follow_jobs, refuse_run_in_use
from tests.cli.make_runs import identify_process, make_run
from tests.seam import Launch, clean_environ, run_outside, write_script

TABLES = tomllib.loads(Path(__file__).with_name("run_states.toml").read_text())
AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """SLURM's commands are in `bin`: the squeue there prints the file `rows`."""
    (tmp_path / "bin").mkdir()
    write_command(tmp_path, "squeue", "cat rows")
    return {**clean_environ(), "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "TZ": "UTC"}


def add_times(row: str) -> str:
    """Put in what a row does not tell: its end, a preemption, and the limit."""
    *head, reason = row.split("|", 7)
    return "|".join([*head, "N/A|N/A|N/A", reason])


def write_command(folder: Path, name: str, text: str) -> None:
    """A command of SLURM's, which notes that it was asked."""
    write_script(folder / "bin" / name, f'echo "{name} $*" >>{folder}/calls\ncd {folder}\n{text}')


def test_slurms_word_counts_if_the_manifest_tells_no_end(tmp_path: Path, environ: dict[str, str]) -> None:
    rows, asked, runs = [], [], TABLES["run"]
    for number, run in enumerate(runs, 1):
        more: dict[str, Any] = {"slurm": {"job_id": str(number)}} if run.get("job", True) else {}
        once = {"outcome": {"state": "requeued"}, "slurm": {"job_id": str(number)}}
        more |= {"earlier": [once]} if run.get("earlier") else {}
        path = make_run(tmp_path / "runs", f"run{number}", state=run["state"],
                        outcome=run.get("outcome", {}), **more)  # fmt: skip
        if run.get("log"):
            (path / f"logs/slurm-{number}.out").touch()
        rows += [f"{number}|{add_times(run['squeue'])}|\n"] if "squeue" in run else []
        asked += [str(number)] if "slurm" in more and run.get("asked", True) else []
    (tmp_path / "rows").write_text("".join(rows))
    names = [f"run{number}" for number in range(1, len(runs) + 1)]
    done = run_outside(["status", "format=json", *names], tmp_path, environ)
    assert done.code == 0, done
    found = {row["run"].partition("/")[0]: row for row in json.loads(done.out)["runs"]}
    for number, (name, run) in enumerate(zip(names, runs, strict=True), 1):
        expected = {key: str(value).replace("{job}", str(number)) for key, value in run["expect"].items()}
        assert {key: str(found[name][key]) for key in expected} == expected, (number, run)
    (call,) = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("squeue")]
    assert f" --jobs={','.join(asked)} " in call


def test_if_slurm_cannot_be_asked_or_answers_too_late_the_manifest_counts(
    here: Path, launch: Launch, tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", environ["PATH"])
    write_command(tmp_path, "squeue", AWAY)
    path = make_run(here / "runs", state="running", slurm={"job_id": "7"})
    done = launch("status", "format=json")
    assert [row["state"] for row in json.loads(done.out)["runs"]] == ["running"]
    assert "launch: warning: squeue: " in done.err and "Unable to contact" in done.err
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["outcome"] = {"state": "failed", "exit_code": 9, "reason": "so it is"}
    (tmp_path / "later").write_text(json.dumps(manifest))
    row = "7|COMPLETED|main|2|n[0-1]|N/A|0|0|N/A|N/A|N/A|None|"
    write_command(tmp_path, "squeue", f"cp later {path}/manifest.json; echo '{row}'")
    (found,) = json.loads(launch("status", "format=json").out)["runs"]
    assert (found["state"], found["exit_code"], found["reason"]) == ("failed", 9, "so it is")


@pytest.mark.parametrize("case", TABLES["use"], ids=lambda case: f"{case['states']} {case.get('squeue')}")
def test_a_run_directory_is_for_one_run_at_a_time(
    case: dict[str, Any],
    tmp_path: Path,
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", environ["PATH"])
    if "inside" in case:
        monkeypatch.setenv("SLURM_JOB_ID", case["inside"])
    own = identify_process(os.getpid())
    processes = {"here": own, "gone": {**own, "start": 1}, "elsewhere": {**own, "host": "elsewhere"}}
    more: dict[str, Any] = {"process": processes[case["process"]]} if "process" in case else {}
    more |= {"slurm": {"job_id": "7"}} if case.get("job", True) else {}
    for state in case["states"]:
        path = tmp_path / state
        if state != "not there":
            path = make_run(tmp_path / f"runs-{state}", state=state, **more)
        for said in case.get("squeue", ["RUNNING"]):
            shown = {"away": AWAY, "unknown": UNKNOWN}
            row = f"7|{said}|main|2|n[0-1]|N/A|0|0|N/A|N/A|N/A|None|"
            write_command(tmp_path, "squeue", shown.get(said, f"echo '{row}'"))
            (tmp_path / "calls").unlink(missing_ok=True)
            for submits in (True, False):
                expected = case.get("refuses", "") if submits or "warns" not in case else ""
                try:
                    refuse_run_in_use(path, submits=submits)
                    told = ""
                except LaunchError as error:
                    told = str(error)
                assert bool(told) == bool(expected), (state, said, told)
                assert expected.format(squeue=said, pid=os.getpid()) in told
                warning = capsys.readouterr().err
                assert bool(warning) == ("warns" in case and not submits), warning
                assert not warning or warning.startswith(case["warns"].format(run=path))
            assert (tmp_path / "calls").exists() == case.get("asked", True), (state, said)


def test_a_second_run_is_refused_and_leaves_all_as_it_was(here: Path, launch: Launch) -> None:
    path = make_run(here / "runs", state="running", process=identify_process(os.getpid()))
    before = (path / "manifest.json").read_bytes()
    done = launch(f"run_dir={path}", "cluster=local", "nproc_per_node=1", "--", "true")
    done.assert_error(2, f"belongs to process {os.getpid()}, which is running", f"launch cancel {path}")
    assert (path / "manifest.json").read_bytes() == before


FOLLOWED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("followed.toml").read_text())
SQUEUE = """cd {folder}
echo >> calls
n=$(wc -l < calls)
[ -e row-$n ] || n={last}
[ -e outcome-$n ] && cp outcome-$n {manifest}
cat row-$n
"""


@pytest.mark.parametrize("case", FOLLOWED["job"], ids=lambda case: case["about"])
def test_what_is_told_of_a_job(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "runs", state="submitted", slurm={"job_id": "12"})
    manifest = json.loads((path / "manifest.json").read_text())
    rows = [row.split("|") for row in case["squeue"]]
    for number, row in enumerate(rows, 1):
        text = ""
        if len(row) == 4:
            state, restarts, nodelist, reason = row
            start = "2026-08-02T00:00:00" if state == "PENDING" else "N/A"
            status = 5 << 8 if state == "FAILED" else 0
            text = f"12|{state}|main|2|{nodelist}|{start}|{restarts}|{status}|N/A|N/A|N/A|{reason}|\n"
        (tmp_path / f"row-{number}").write_text(text)
    for number, outcome in case.get("outcomes", {}).items():
        (tmp_path / f"outcome-{number}").write_text(json.dumps({**manifest, "outcome": outcome}))
    text = SQUEUE.format(folder=tmp_path, last=len(rows), manifest=path / "manifest.json")
    write_script(tmp_path / "squeue", text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(run_states, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(run_states, "STATE_SECONDS", 0.01)
    monkeypatch.setattr(run_states, "PATIENCE", 1.0)
    assert follow_jobs([(path, "12")]) == case["code"]
    told = [line.removeprefix("launch: ") for line in capfd.readouterr().err.splitlines()]
    assert len(told) == len(case["says"]), told
    for line, expected in zip(told, case["says"], strict=True):
        assert line.startswith(expected), told


def test_why_a_job_waits(here: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(here / "runs", state="submitted", slurm={"job_id": "12"})
    monkeypatch.setenv("PATH", f"{here}:/usr/bin:/bin")
    monkeypatch.setenv("COLUMNS", "300")
    write_script(here / "squeue", "cat rows")
    for reason, text in FOLLOWED["reasons"].items():
        (here / "rows").write_text(f"12|PENDING|main|2||N/A|0|0|N/A|N/A|N/A|{reason}|\n")
        shown = launch("status", "tiny").out
        (line,) = (line for line in shown.splitlines() if line.startswith("reason "))
        assert line.split(None, 1)[1].strip() == text


def make_log(folder: Path) -> JobLog:
    return JobLog(folder / "slurm-12.out", JobConsole(ViewOptions("all")))


def test_all_bytes_are_shown_as_they_are(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log = make_log(tmp_path)
    assert not log.show_new()
    data = bytes(range(256)) * 10_000 + b"\n[n0:0] step 5/9 loss 2\n[n1:1] step 6/9 loss 1\n"
    log.path.write_bytes(data + b"name? ")
    while log.show_new():
        pass
    assert capfdbinary.readouterr() == (data, b"")
    assert log.console.progress.steps[-1].step == 5
    with log.path.open("ab") as file:
        file.write(b"\nbar\rlaunch: no end")
    log.show_new()
    assert not log.is_whole and capfdbinary.readouterr() == (b"name? \nbar\r", b"")
    log.show_new(final=True)
    assert capfdbinary.readouterr() == (b"launch: no end", b"")


PIECES = st.sampled_from(
    [b"launch: a\n", b"launch: run directory /r\n", b"launch", b": ", b"x", b"\n", b"launch: ", b"\xff\r"]
)


@given(pieces=st.lists(PIECES, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_of_ours_are_told_apart_wherever_the_log_is_cut(
    pieces: list[bytes], tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = make_log(tmp_path)
    log.path.write_bytes(b"")
    for piece in pieces:
        with log.path.open("ab") as file:
            file.write(piece)
        log.show_new()
    log.show_new(final=True)
    whole = b"".join(pieces)
    lines = re.findall(rb"[^\r\n]*(?:[\r\n]|\Z)", whole)
    own = [line for line in lines if line.startswith(b"launch: ") and line.endswith(b"\n")]
    others = b"".join(line for line in lines if line not in own)
    assert capfdbinary.readouterr() == (others, b"".join(own))
    last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
    assert log.is_whole == (last.startswith(b"launch: run directory ") and last.endswith(b"\n"))
