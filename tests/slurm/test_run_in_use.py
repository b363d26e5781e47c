"""One run directory, and a second run that is to go into it: only where the first has ended."""

import os
from pathlib import Path

import pytest

from launcher.errors import SchedulerError, UsageError
from launcher.runs.run_process import identify_process
from launcher.slurm.run_states import refuse_run_in_use
from tests.cli.make_runs import make_run
from tests.seam import run_outside

HERE = ("cluster=local", "nproc_per_node=1")


def test_a_run_whose_process_is_there(tmp_path: Path) -> None:
    path = make_run(tmp_path / "runs", state="running", process=identify_process(os.getpid()))
    before = (path / "manifest.json").read_bytes()
    done = run_outside([f"run_dir={path}", *HERE, "--", "true"], tmp_path)
    done.assert_error(2, f"belongs to process {os.getpid()}, which is running", f"launch cancel {path}")
    assert (path / "manifest.json").read_bytes() == before


@pytest.mark.usefixtures("quick_agent")
def test_a_run_whose_process_is_gone(tmp_path: Path) -> None:
    process = {**identify_process(os.getpid()), "start": 1}
    path = make_run(tmp_path / "runs", state="running", process=process)
    assert run_outside([f"run_dir={path}", *HERE, "--", "true"], tmp_path).code == 0


@pytest.mark.usefixtures("quick_agent")
def test_a_job_that_cannot_be_asked_for_is_no_obstacle_to_a_run_here(tmp_path: Path) -> None:
    path = make_run(tmp_path / "runs", state="requeued", slurm={"job_id": "7"})
    # A controller that does not answer is waited for; this one is refused at once.
    squeue = tmp_path / "squeue"
    squeue.write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n"
    )
    squeue.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run_outside([f"run_dir={path}", *HERE, "--", "true"], tmp_path, environ)
    assert done.code == 0, done
    assert f"whether run_dir={path} is still in use is not known: squeue" in done.err


JOB = {"job_id": "7"}
AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for SLURM's commands, the only one on PATH, in no job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    return folder


def let_squeue(folder: Path, text: str) -> None:
    """A squeue that notes that it was asked."""
    (folder / "squeue").write_text(f"#!/bin/sh\n: > {folder}/asked\n{text}\n")
    (folder / "squeue").chmod(0o755)


def show(state: str) -> str:
    """What squeue prints of job 7."""
    return f"echo '7|{state}|main|2|n[0-1]|N/A|N/A|0|0|None|'"


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "SUSPENDED"])
@pytest.mark.parametrize("word", ["submitted", "requeued", "running"])
def test_a_job_that_has_not_ended(tmp_path: Path, slurm: Path, word: str, state: str) -> None:
    path = make_run(tmp_path / "runs", state=word, slurm=JOB)
    let_squeue(slurm, show(state))
    for submits in (True, False):
        with pytest.raises(UsageError) as caught:
            refuse_run_in_use(path, submits=submits)
        told = f"run_dir={path} belongs to job 7, which is {state}: wait for its end, or `launch cancel 7`"
        assert str(caught.value) == told


@pytest.mark.parametrize("said", [show("COMPLETED"), show("CANCELLED"), show("NODE_FAIL"), UNKNOWN])
def test_a_job_that_has_ended_whatever_the_manifest_says(tmp_path: Path, slurm: Path, said: str) -> None:
    let_squeue(slurm, said)
    refuse_run_in_use(make_run(tmp_path / "runs", state="running", slurm=JOB), submits=True)
    assert (slurm / "asked").exists()


@pytest.mark.parametrize("word", ["succeeded", "failed", "stopped"])
def test_of_a_run_that_has_ended_nobody_is_asked(tmp_path: Path, slurm: Path, word: str) -> None:
    let_squeue(slurm, show("RUNNING"))
    refuse_run_in_use(make_run(tmp_path / "runs", state=word, slurm=JOB), submits=True)
    refuse_run_in_use(tmp_path / "not there", submits=True)
    assert not (slurm / "asked").exists()


def test_the_job_that_this_is_in_is_no_other(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_squeue(slurm, show("RUNNING"))
    path = make_run(tmp_path / "runs", state="running", slurm=JOB)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    refuse_run_in_use(path, submits=False)
    assert not (slurm / "asked").exists()
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    with pytest.raises(UsageError, match="belongs to job 7"):
        refuse_run_in_use(path, submits=False)


def test_a_job_is_not_submitted_where_slurm_cannot_be_asked(
    tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    let_squeue(slurm, AWAY)
    path = make_run(tmp_path / "runs", state="running", slurm=JOB)
    with pytest.raises(SchedulerError, match="Unable to contact slurm controller"):
        refuse_run_in_use(path, submits=True)
    assert capsys.readouterr().err == ""
    refuse_run_in_use(path, submits=False)
    assert capsys.readouterr().err.startswith(f"launch: warning: whether run_dir={path} is still in use is")


def test_a_process_of_another_host_is_not_known_here(tmp_path: Path, slurm: Path) -> None:
    process = {**identify_process(os.getpid()), "host": "elsewhere"}
    refuse_run_in_use(make_run(tmp_path / "runs", state="running", process=process), submits=True)
    let_squeue(slurm, show("RUNNING"))
    with pytest.raises(UsageError, match="belongs to job 7"):
        refuse_run_in_use(
            make_run(tmp_path / "more", state="running", process=process, slurm=JOB), submits=True
        )
