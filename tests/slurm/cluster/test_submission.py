"""`launch` on a login node: what SLURM is asked for, what it answers, and what is left on the disk.

Options and refusals are rows of `submission.toml`.
"""

import json
import re
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.make_runs import read_manifest
from tests.config.test_sweep_trials import write_plugin
from tests.seam import find_run
from tests.slurm.cluster.conftest import Sandbox

pytestmark = pytest.mark.slurm

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("submission.toml").read_text())
SLURM = ("cluster=slurm", "nproc_per_node=1")
HELD = (*SLURM, "cluster.additional.hold=true", "--", "true")
FILES = {"config.yaml", "job.json", "logs", "manifest.json", "submission.sh"}
HOSTILE = """a "b" c'd #e%j $(id) ü hetjob"""


def show(sandbox: Sandbox, job_id: str) -> dict[str, str]:
    """What SLURM knows of a job."""
    text = sandbox.run("scontrol", "show", "job", job_id)
    found = re.findall(r"(\S+?)=(.*?)(?= \S+?=|$)", text, re.MULTILINE)
    return {name: value.strip() for name, value in found}


def find_job(out: str) -> str:
    match = re.match(r"submitted .*?(\d+) \(", out)
    assert match, out
    return match[1]


def test_what_slurm_is_asked_for_and_what_is_written(sandbox: Sandbox, tmp_path: Path) -> None:
    words = [
        "nodes=2",
        "cluster.time=1:30:00",
        "cluster.additional.comment=my comment",
        f"name='{HOSTILE.replace(chr(39), chr(92) + chr(39))}'",
    ]
    done = sandbox.launch(*words, *HELD, cwd=tmp_path)
    assert done.code == 0, done
    run = find_run(tmp_path)
    job_id = find_job(done.out)
    assert run.parent.name == HOSTILE
    lines = done.out.splitlines()
    assert lines[1] == f"run directory {run}"
    assert lines[2] == f"follow with  launch status {job_id}"
    job = show(sandbox, job_id)
    sandbox.run("scancel", job_id)
    assert (job["JobName"], job["Comment"], job["Partition"]) == (HOSTILE, "my comment", "main")
    assert (job["NumNodes"], job["CPUs/Task"], job["NtasksPerN:B:S:C"]) == ("2-2", "8", "1:0:*:*")
    assert job["TRES"] == "cpu=16,mem=16000M,node=2,billing=16"
    assert "gpu:1" in job["TresPerNode"]
    assert (job["Requeue"], job["TimeLimit"], job["WorkDir"]) == ("1", "01:30:00", str(tmp_path))
    assert job["Command"] == f"{run}/submission.sh"
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["outcome"]["state"] == "submitted"
    assert manifest["slurm"]["job_id"] == job_id
    assert manifest["packages"]["launch"]
    assert {path.name for path in run.iterdir()} == FILES
    for path in (run, *run.iterdir()):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert not list((run / "logs").iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


@pytest.mark.parametrize("case", TABLES["option"], ids=lambda case: case["words"][0])
def test_options(case: dict[str, Any], sandbox: Sandbox, tmp_path: Path) -> None:
    done = sandbox.launch(*SLURM, *case["words"], *HELD[2:], cwd=tmp_path)
    assert done.code == 0, done
    job = show(sandbox, find_job(done.out))
    sandbox.run("scancel", find_job(done.out))
    assert {name: job.get(name) for name in case["job"]} == case["job"]


def test_variables_that_contradict_are_not_heard(sandbox: Sandbox, tmp_path: Path) -> None:
    words = ["cluster.time=60", "cluster.mem=2G", "name=mine"]
    done = sandbox.launch(*words, *HELD, cwd=tmp_path, env=TABLES["login_shell"])
    assert done.code == 0, done
    job = show(sandbox, find_job(done.out))
    sandbox.run("scancel", find_job(done.out))
    assert (job["JobName"], job["TimeLimit"], job["MinMemoryNode"]) == ("mine", "01:00:00", "2G")
    assert (job["Requeue"], job["NumNodes"], job["Partition"]) == ("1", "1-1", "urgent")
    assert job["StdOut"].startswith(str(find_run(tmp_path)))
    assert "ArrayJobId" not in job


def test_a_program_gets_its_words_variables_and_secrets(sandbox: Sandbox, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s 100% "here"'
    folder.mkdir()
    program = folder / "pro gram.sh"
    program.write_text(
        '#!/bin/sh\nprintf "<%s>" "$@"\necho\n'
        'printf "%s|%s|%s|%s\\n" "$HF_TOKEN" "$ODD" "$FROM_SETUP" "$MINE"\n',
        encoding="utf-8",
    )
    program.chmod(0o755)
    words = ["a b", "it's", '"q"', "$(id) `id` $HOME", "new\nline", "ü€", "", "--x=%j", "\\n"]
    odd = "one two\n$(id) 'q'"
    setup = "cluster.setup=['set -euo pipefail; export FROM_SETUP=yes PYTHONPATH=:','cd .']"
    done = sandbox.launch(
        *("cluster=slurm", "nproc_per_node=1", "cluster.gpus_per_node=0", "name=x y", setup),
        "cluster.additional.hold=true",
        *("env.HF_TOKEN=sesame-42", f"env.ODD={odd}", "--", "./pro gram.sh", *words),
        cwd=folder,
        env={"SBATCH_EXPORT": "NONE", "FROM_SETUP": "no", "MINE": odd},
    )
    assert done.code == 0, done
    job_id = find_job(done.out)
    for name in ("random.py", "json.py", "launcher.py"):
        (folder / name).write_text("raise SystemExit('shadowed')")
    sandbox.run("scontrol", "release", job_id)
    run = find_run(folder)
    state = sandbox.wait(job_id, "COMPLETED", "FAILED")
    log = (run / "logs" / f"slurm-{job_id}.out").read_text(encoding="utf-8")
    assert state == "COMPLETED", log
    shown = (run / "logs/0/rank-0.out").read_text(encoding="utf-8")
    assert "".join(f"<{word}>" for word in words) + f"\nsesame-42|{odd}|yes|{odd}\n" in shown
    for path in run.rglob("*"):
        if path.is_file() and path.parent.name != "0" and not path.name.startswith("slurm-"):
            assert "sesame-42" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("case", TABLES["refusal"], ids=lambda case: case["words"][-1])
def test_a_refusal_is_one_line_and_leaves_nothing(
    case: dict[str, Any], sandbox: Sandbox, tmp_path: Path
) -> None:
    words = (*SLURM, *case["words"], "runs_dir=deep/er", "--", "true")
    sandbox.launch(*words, cwd=tmp_path).assert_error(4, *case["says"])
    assert not list(tmp_path.iterdir())


def test_slurmctld_away(sandbox: Sandbox, tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(re.sub(r"(?m)^SlurmctldPort=.*", "SlurmctldPort=1", sandbox.conf.read_text()))
    (tmp_path / "gres.conf").write_text((sandbox.folder / "gres.conf").read_text())
    folder = tmp_path / "here"
    folder.mkdir()
    done = sandbox.launch(*SLURM, "--", "true", cwd=folder, env={"SLURM_CONF": str(conf)})
    done.assert_error(4, "Unable to contact slurm controller", "scontrol ping", "Nothing was submitted")
    assert not list(folder.iterdir())


def test_a_refused_run_that_was_to_go_on_is_as_it_was(sandbox: Sandbox, tmp_path: Path) -> None:
    first = sandbox.launch("new_run_dir=my/run", *HELD, cwd=tmp_path)
    assert first.code == 0, first
    job_id, run = find_job(first.out), tmp_path / "my" / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    busy = sandbox.launch("run_dir=my/run", *HELD, cwd=tmp_path)
    busy.assert_error(2, f"belongs to job {job_id}, which is PENDING", f"launch cancel {job_id}")
    here = sandbox.launch("run_dir=my/run", "cluster=local", "--", "true", cwd=tmp_path)
    here.assert_error(2, f"belongs to job {job_id}, which is PENDING", f"launch cancel {job_id}")
    sandbox.run("scancel", job_id)
    refused = sandbox.launch("run_dir=my/run", "cluster.partition=nope", *HELD, cwd=tmp_path)
    assert (refused.code, refused.out) == (4, ""), refused
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    again = sandbox.launch("run_dir=my/run", "cluster.time=10", *HELD, cwd=tmp_path)
    assert again.code == 0, again
    sandbox.run("scancel", find_job(again.out))
    assert "other settings" in again.err
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["slurm"]["job_id"] == find_job(again.out)


def test_a_sweep_is_one_array(sandbox: Sandbox, tmp_path: Path) -> None:
    words = ["-m", "+model=tiny,gpt2", "program.lr=1e-3,2e-3", "cluster.array_parallelism=2"]
    done = sandbox.launch("cluster=slurm", "cluster.additional.hold=true", *words, cwd=tmp_path)
    assert done.code == 0, done
    job_id = find_job(done.out)
    job = show(sandbox, job_id)
    script = sandbox.run("scontrol", "write", "batch_script", job_id, "-")
    sandbox.run("scancel", job_id)
    assert (job["ArrayTaskId"], job["ArrayTaskThrottle"], job["JobName"]) == ("0-3%2", "2", "tiny+1")
    members = {}
    for path in tmp_path.glob("runs/*/*"):
        manifest = json.loads((path / "manifest.json").read_text())
        request = json.loads((path / "job.json").read_text())
        rate = float(request["config"]["program"]["lr"])
        members[manifest["slurm"]["job_id"]] = (request["choices"]["model"], rate, path)
        assert (path / "submission.sh").read_text() == script
    assert {number: value[:2] for number, value in members.items()} == {
        f"{job_id}_0": ("tiny", 1e-3),
        f"{job_id}_1": ("tiny", 2e-3),
        f"{job_id}_2": ("gpt2", 1e-3),
        f"{job_id}_3": ("gpt2", 2e-3),
    }
    (listed,) = re.findall(r"launch_runs=\(\n(.*?)\n\)", script, re.DOTALL)
    assert listed.split() == [str(members[f"{job_id}_{number}"][2]) for number in range(4)]


def test_a_batch_is_an_array_and_the_next_one_follows_from_it(sandbox: Sandbox, tmp_path: Path) -> None:
    plugin = write_plugin(tmp_path / "plugins")
    (tmp_path / "mine.sh").write_text('#!/bin/sh\nx=${1#--x=}\n[ "$x" != 9.0 ] && echo "step 1/1 loss $x"\n')
    (tmp_path / "mine.sh").chmod(0o755)
    (tmp_path / "conf/program").mkdir(parents=True)
    (tmp_path / "conf/program/mine.yaml").write_text("command: [./mine.sh]\nx: 0\n")
    words = ["hydra/sweeper=halving", "hydra.sweeper.size=2", "hydra.sweep.dir=swept", "program=mine"]
    own = ["cluster=slurm", "nproc_per_node=1", "cluster.gpus_per_node=0"]
    done = sandbox.launch("-m", *words, *own, cwd=tmp_path, env=plugin)
    assert done.code == 0, done
    tried = json.loads((tmp_path / "swept/tried.json").read_text())
    assert tried == [[9.0, "trial 1 failed with exit code 1"], [8.0, 8.0], [4.0, 4.0], [5.0, 5.0]]
    jobs = [read_manifest(tmp_path / f"swept/{number}")["slurm"]["job_id"] for number in range(4)]
    first, second = (job.partition("_")[0] for job in jobs[::2])
    assert jobs == [f"{first}_0", f"{first}_1", f"{second}_0", f"{second}_1"] and first != second
    sandbox.wait_empty()
