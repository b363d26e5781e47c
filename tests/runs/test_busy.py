"""One run directory, and a second run that is to go into it: only where the first has ended."""

import os
from pathlib import Path

from launcher.runs.process import identify_process
from tests.conftest import run_outside
from tests.verbs.making import make_run

HERE = ("cluster=local", "nproc_per_node=1")


def test_a_run_whose_process_is_there(tmp_path: Path) -> None:
    path = make_run(tmp_path / "runs", state="running", process=identify_process(os.getpid()))
    before = (path / "manifest.json").read_bytes()
    done = run_outside([f"run_dir={path}", *HERE, "--", "true"], tmp_path)
    done.assert_error(2, f"belongs to process {os.getpid()}, which is running", f"launch cancel {path}")
    assert (path / "manifest.json").read_bytes() == before


def test_a_run_whose_process_is_gone(tmp_path: Path) -> None:
    process = {**identify_process(os.getpid()), "start": 1}
    path = make_run(tmp_path / "runs", state="running", process=process)
    assert run_outside([f"run_dir={path}", *HERE, "--", "true"], tmp_path).code == 0


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
