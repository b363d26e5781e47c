"""A job that starts while the submission writes its number into the manifest."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.config.settings import Settings
from launcher.runs.manifest import describe_start, read_manifest, write_manifest
from launcher.runs.run_directory import open_run_dir
from launcher.slurm import submission
from launcher.slurm.attempt_lifecycle import start_attempt
from launcher.slurm.job_request import JobRequest


def test_the_jobs_own_manifest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the submission makes of the manifest that it has read does not replace it."""
    run, read = open_run_dir(tmp_path, None), threading.Event()
    manifest = describe_start(run, ["launch", "x"], {})
    write_manifest(run, {**manifest, "outcome": {"state": "submitted"}, "slurm": {"job_id": "7"}})
    (run.path / "job.json").write_text("{}")

    def read_slowly(path: Path) -> dict[str, Any]:
        found = read_manifest(path)
        read.set()
        time.sleep(0.5)
        return found

    monkeypatch.setattr(submission, "read_manifest", read_slowly)
    staged = submission.StagedRun(run, None, {}, {}, ())  # type: ignore[arg-type]
    writer = threading.Thread(target=staged.write_job_id, args=("7",))
    writer.start()
    assert read.wait(20)
    request = JobRequest(Settings(), {}, ("program",), ("launch", "x"), "/somewhere", 2, 2)
    start_attempt(request, run, {"PATH": "/nonexistent", "SLURM_JOB_ID": "7"}, ("n0", "n1"))
    writer.join()
    assert read_manifest(run.path)["outcome"] == {"state": "running"}
