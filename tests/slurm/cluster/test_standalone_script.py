"""`launch … dry_run=true > job.sh; sbatch job.sh`: a script that an administrator reads, and SLURM runs."""

import json
import re
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
"""
ARGUMENTS = ["$(id)", "it's", "a\nb", "é", "", "--", "END_OF_JOB"]


def submit_script(sandbox: Sandbox, folder: Path, *words: str, env: dict[str, str] | None = None) -> str:
    """Write the script of a dry run, submit it, and return the job's number."""
    done = sandbox.launch("dry_run=true", *words, cwd=folder)
    assert done.code == 0, done
    (folder / "job.sh").write_text(done.out)
    assert not (folder / "runs").exists()
    return sandbox.run("sbatch", "--parsable", f"--chdir={folder}", folder / "job.sh", env=env).strip()


def test_a_script_runs_the_job_and_an_administrator_can_read_it(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    words = ("nodes=2", "nproc_per_node=1", "env.A='1 2'", "env.HF_TOKEN=sesame", "env.OUT='${run_dir}/out'")
    more = ("cluster.srun.comment=seen", "cluster.time=10")
    job = submit_script(
        sandbox, tmp_path, *words, *more, "--", "show.py", *ARGUMENTS, env={"HF_TOKEN": "sesame"}
    )
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
    assert "succeeded after" in run.read_console()
    said = (tmp_path / f"show-{job}.out").read_text()
    assert f"run directory {run.path}" in said and said.endswith("launch: succeeded\n")
    text = (tmp_path / "job.sh").read_text()
    assert "sesame" not in text and "sesame" not in (run.path / "job.json").read_text()
    remarks = [line for line in text.splitlines() if line.startswith("# ")]
    assert re.search(r"# Program: \S+python\S* show\.py '\$\(id\)'", "\n".join(remarks))
    assert any("# Step: srun --nodes=2" in line and "--comment=seen" in line for line in remarks)
    assert any("A='1 2'" in line and "HF_TOKEN='***'" in line for line in remarks)
    status = sandbox.launch("status", job, cwd=tmp_path)
    assert status.code == 0 and "succeeded" in status.out, status


def test_a_requeued_script_goes_on_in_its_directory(sandbox: Sandbox, tmp_path: Path) -> None:
    words = (*SHRUNK, "nodes=1", "nproc_per_node=1", "program.steps=40", "program.checkpoint_every=5")
    job = submit_script(sandbox, tmp_path, *words, "cluster.kind=slurm")
    run = Run(tmp_path / "runs" / "llama7b" / f"job-{job}", sandbox)
    run.wait_for(lambda: run.path.is_dir() and max(run.read_losses(), default=0) >= 10, "step 10")
    sandbox.run("scontrol", "requeue", job)
    assert run.await_end() == "succeeded", run.describe()
    assert len(run.causes) == 2
    assert sorted(run.read_losses()) == list(range(1, 41))
    assert [path.name for path in run.path.parent.iterdir()] == [run.path.name]


def test_members_of_an_array_have_directories_of_their_own(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    words = ("-m", "cluster=slurm", "nproc_per_node=1", "env.A=1,2", "--", "show.py")
    job = submit_script(sandbox, tmp_path, *words)
    sandbox.wait(job, "COMPLETED")
    assert [json.loads((tmp_path / f"{member}rank-0.json").read_text())["A"] for member in range(2)] == [
        "1",
        "2",
    ]
    runs = sorted(path.name for path in (tmp_path / "runs" / "show").iterdir())
    assert runs == [f"job-{job}_0", f"job-{job}_1"]


def test_a_secret_among_the_arguments_has_to_be_written_in(sandbox: Sandbox, tmp_path: Path) -> None:
    words = ("cluster=slurm", "nproc_per_node=1", "--", "true", "--api-key", "sesame")
    job = submit_script(sandbox, tmp_path, *words)
    sandbox.wait(job, "FAILED")
    said = (tmp_path / f"true-{job}.out").read_text()
    assert "launch: error: the script has *** in place of a secret" in said
    assert not (tmp_path / "runs" / "true" / f"job-{job}" / "job.json").exists()
    script = (tmp_path / "job.sh").read_text()
    assert "sesame" not in script
    (tmp_path / "job.sh").write_text(script.replace('"***"', '"sesame"'))
    job = sandbox.run("sbatch", "--parsable", f"--chdir={tmp_path}", tmp_path / "job.sh").strip()
    sandbox.wait(job, "COMPLETED")
    run = tmp_path / "runs" / "true" / f"job-{job}"
    assert "sesame" not in (run / "job.json").read_text() + (run / "manifest.json").read_text()
