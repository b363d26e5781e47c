"""`launch … dry_run=true > job.sh; sbatch job.sh`: the script runs its job, and requeues it."""

import json
from pathlib import Path

import pytest

from tests.slurm.cluster.conftest import Sandbox
from tests.slurm.cluster.jobs import SHRUNK, Run

pytestmark = pytest.mark.slurm
SHOW = """
import json, os, sys
from pathlib import Path
rank = int(os.environ["RANK"])
names = ("A", "HF_TOKEN", "OUT", "WORLD_SIZE")
seen = {"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
Path(f"{os.environ.get('SLURM_ARRAY_TASK_ID', '')}rank-{rank}.json").write_text(json.dumps(seen))
sys.exit(7 if "fail" in sys.argv else 0)
"""
ARGUMENTS = ["$(id)", "it's", "a\nb", "é", "", "--", "--api-key", "sesame"]


def submit_script(sandbox: Sandbox, folder: Path, *words: str, env: dict[str, str] | None = None) -> str:
    """Write the script of a dry run, submit it, and return the job's number."""
    (folder / "show.py").write_text(SHOW)
    done = sandbox.launch("dry_run=true", *words, cwd=folder)
    assert done.code == 0, done
    (folder / "job.sh").write_text(done.out)
    assert not (folder / "runs").exists()
    return sandbox.run("sbatch", "--parsable", folder / "job.sh", env=env).strip()


def test_a_script_runs_the_job_with_its_words_and_secrets(sandbox: Sandbox, tmp_path: Path) -> None:
    words = ("nodes=2", "nproc_per_node=1", "env.A='1 2'", "env.HF_TOKEN=sesame", "env.OUT='${run_dir}/out'")
    more = ("cluster.time=10", "--", "show.py", *ARGUMENTS)
    secrets = {"HF_TOKEN": "sesame", "SECRET_2": "sesame"}
    job = submit_script(sandbox, tmp_path, *words, *more, env=secrets)
    sandbox.wait(job, "COMPLETED")
    run = Run(tmp_path / "runs" / "show" / f"job-{job}", sandbox)
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert seen == {
            "argv": ARGUMENTS,
            "A": "1 2",
            "HF_TOKEN": "sesame",
            "OUT": f"{run.path}/out",
            "WORLD_SIZE": "2",
        }
    assert run.outcome["state"] == "succeeded" and run.job_id == job
    assert "launch: succeeded after" in (tmp_path / f"show-{job}.out").read_text()
    text = (tmp_path / "job.sh").read_text()
    assert "sesame" not in text and "sesame" not in (run.path / "job.json").read_text()
    status = sandbox.launch("status", job, cwd=tmp_path)
    assert status.code == 0 and "succeeded" in status.out, status


def test_a_requeued_script_goes_on_in_its_directory(sandbox: Sandbox, tmp_path: Path) -> None:
    words = (*SHRUNK, "nodes=1", "nproc_per_node=1", "program.steps=40", "program.checkpoint_every=5")
    job = submit_script(sandbox, tmp_path, *words, "cluster.kind=slurm")
    run = Run(tmp_path / "runs" / "llama7b" / f"job-{job}", sandbox)
    run.wait_for(
        lambda: (run.path / "manifest.json").is_file() and max(run.read_losses(), default=0) >= 10, "step 10"
    )
    sandbox.run("scontrol", "requeue", job)
    assert run.await_end() == "succeeded", run.describe()
    assert len(run.causes) == 2
    assert sorted(run.read_losses()) == list(range(1, 41))
    assert [path.name for path in run.path.parent.iterdir()] == [run.path.name]
