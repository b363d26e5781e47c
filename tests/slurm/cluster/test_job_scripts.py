"""The job scripts of slurm/, the same before and after but for one line, and a dry run's, on a real SLURM."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.seam import LAUNCH, PATIENCE, clean_environ, write_program, write_script

from .conftest import Sandbox
from .jobs import SHRUNK, Run
from .test_step import SHOW, read_found

SLURM = Path(__file__).parents[3] / "slurm"
PAIRS = {"torchrun": ["--no-python", "--", "launch-rank"], "srun": ["--cpu-bind=none", "launch-rank"]}
"""The plain scripts, and the words that are new in the others."""
TRAIN = """
import os, sys
local_rank, rank, size, *meeting = (os.environ[name] for name in (
    "LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
))
cpus = repr(sorted(os.sched_getaffinity(0)))
open(f"{local_rank}-{rank}-of-{size}", "w").write("\\n".join([cpus, repr(meeting), *sys.argv[1:]]))
"""


def read_step(name: str) -> str:
    """The script's srun command, as the shell reads it."""
    text = (SLURM / f"{name}.sbatch").read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith("srun "))
    return line


def test_every_script_has_its_pair_and_is_one_that_sbatch_takes() -> None:
    scripts = {path.stem: path for path in SLURM.glob("*.sbatch")}
    assert scripts.keys() == {*PAIRS, *(f"{name}-launch-rank" for name in PAIRS), "launch"}
    for script in scripts.values():
        subprocess.run(["bash", "-n", str(script)], check=True)
        lines = script.read_text().splitlines()
        options = [line for line in lines if line.startswith("#SBATCH")]
        # sbatch stops reading at the first command
        assert lines[: 1 + len(options)] == ["#!/bin/bash", *options]


@pytest.mark.parametrize(("name", "new"), PAIRS.items(), ids=PAIRS)
def test_a_pair_differs_in_two_words(name: str, new: list[str]) -> None:
    before = (SLURM / f"{name}.sbatch").read_text().splitlines()
    after = (SLURM / f"{name}-launch-rank.sbatch").read_text().splitlines()
    (changed,) = ((old, line) for old, line in zip(before, after, strict=True) if old != line)
    assert [word for word in changed[1].split() if word not in changed[0].split()] == new
    assert [word for word in changed[1].split() if word not in new] == changed[0].split()
    readme = (SLURM / "README.md").read_text()
    assert f"-{changed[0]}\n+{changed[1]}\n" in readme
    # The step ends with its first failure.
    assert {"--kill-on-bad-exit=1", "--wait=60"} <= {*shlex.split(read_step(name))}


def prepare(folder: Path) -> dict[str, str]:
    """A program to run, and an environment as on a node of a job of one node with two ranks."""
    (folder / "train.py").write_text(TRAIN)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_NTASKS": "2"}
    rendezvous = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    return {**clean_environ(), **job, **rendezvous, "PATH": make_commands(folder)}


def test_what_the_torchrun_script_runs_on_a_node(tmp_path: Path) -> None:
    name = "torchrun-launch-rank"
    core = re.sub(r"^srun( --\S+)*", "exec", read_step(name))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", core, name, "--lr", "3e 4", ""],
        cwd=tmp_path, env=prepare(tmp_path), capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr.count("launch-rank: rank") == 2, done.stderr
    # Both ranks can meet, had their arguments, and of the CPUs some of their own: each has planned the node.
    sets, meetings = [], set()
    for name in ("0-0-of-2", "1-1-of-2"):
        cpus, meeting, *words = (tmp_path / name).read_text().split("\n")
        assert words == ["--lr", "3e 4", ""]
        sets.append({*json.loads(cpus)})
        meetings.add(meeting)
    assert len(meetings) == 1 and sets[0] | sets[1] <= os.sched_getaffinity(0)
    assert len(os.sched_getaffinity(0)) == 1 or not sets[0] & sets[1]


QUOTED = ["", 'it\'s "quoted"', "$(touch broken) `touch broken`", "grüße 日本 *", "a\nb", "--"]
ARGUMENTS = ["--lr", "3e 4", *QUOTED]
SMALL = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=4", "--exclusive=user")
"""In place of what the scripts ask for; an exclusive job has all GPUs of its nodes."""
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
TRAIN_ON_CLUSTER = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.ones(1)
dist.all_reduce(ranks)
seen = {"argv": sys.argv[1:], "ranks": int(ranks), "environ": dict(os.environ)}
with open(f"rank-{dist.get_rank()}.json", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
"""


def make_commands(folder: Path) -> str:
    """The PATH of an activated environment, which has the commands that the scripts call."""
    commands = {
        "launch": LAUNCH,
        "launch-rank": (sys.executable, "-c", "from launcher.rank.shim import main; main()"),
        "torchrun": (sys.executable, "-m", "torch.distributed.run"),
        "python": (sys.executable,),
    }
    (folder / "bin").mkdir()
    for name, words in commands.items():
        write_script(folder / "bin" / name, f'exec {shlex.join(words)} "$@"')
    return f"{folder}/bin:{os.environ['PATH']}"


def run_script(name: str, sandbox: Sandbox, parent: Path) -> list[dict[str, Any]]:
    """Submit a script as it is, and return what its two ranks saw.

    Both have met, on nodes of their own, with the arguments as they were given.
    """
    folder = parent / f"{name} it's"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN_ON_CLUSTER)
    words = ("--parsable", f"--chdir={folder}", *SMALL, str(SLURM / f"{name}.sbatch"), *ARGUMENTS)
    job = sandbox.run("sbatch", *words, env={"PATH": make_commands(folder)}).strip()
    try:
        sandbox.wait(job, "COMPLETED")
    except pytest.fail.Exception as error:
        raise AssertionError((folder / f"train-{job}.out").read_text()) from error
    sandbox.wait_empty()
    assert not (folder / "broken").exists()
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [rank["ranks"] for rank in ranks] == [2, 2]
    assert [rank["argv"] for rank in ranks] == [ARGUMENTS] * 2
    environs = [rank["environ"] for rank in ranks]
    assert [environ["RANK"] for environ in environs] == ["0", "1"]
    assert [environ["LOCAL_RANK"] for environ in environs] == ["0", "0"]
    assert len({environ["SLURMD_NODENAME"] for environ in environs}) == 2
    assert len({environ["MASTER_ADDR"] for environ in environs}) == 1
    assert [environ["CUDA_VISIBLE_DEVICES"] for environ in environs] == ["0", "0"]
    return ranks


@pytest.mark.slurm
@pytest.mark.parametrize("name", PAIRS)
def test_a_script_runs_the_same_with_launch_rank(name: str, sandbox: Sandbox, tmp_path: Path) -> None:
    before = run_script(name, sandbox, tmp_path)
    after = run_script(f"{name}-launch-rank", sandbox, tmp_path)
    for old, new in zip(before, after, strict=True):
        for variable in VARIABLES:
            assert new["environ"][variable] == old["environ"][variable], variable
        lost = set(old["environ"]) - set(new["environ"])
        assert all(variable.startswith("SLURM") for variable in lost)
    assert "LAUNCH_NUM_WORKERS" in after[0]["environ"]
    assert "LAUNCH_NUM_WORKERS" not in before[0]["environ"]


@pytest.mark.slurm
def test_the_script_with_launch(sandbox: Sandbox, tmp_path: Path) -> None:
    run_script("launch", sandbox, tmp_path)
    (manifest,) = (tmp_path / "launch it's" / "runs").glob("*/*/manifest.json")
    assert json.loads(manifest.read_text())["outcome"]["state"] == "succeeded"


@pytest.mark.slurm
def test_srun_and_launch_rank_alone_make_ranks_that_meet(sandbox: Sandbox, tmp_path: Path) -> None:
    """The line that the README shows, in a script that exports nothing."""
    (tmp_path / "train.py").write_text(TRAIN_ON_CLUSTER)
    environ = {"PATH": make_commands(tmp_path)}
    options = ("--parsable", f"--chdir={tmp_path}", "--nodes=2", "--gpus-per-node=2", "--cpus-per-task=4")
    line = "srun --ntasks-per-node=2 --cpu-bind=none launch-rank python train.py a"
    job = sandbox.run("sbatch", *options, "--ntasks-per-node=2", "--wrap", line, env=environ).strip()
    sandbox.wait(job, "COMPLETED")
    sandbox.wait_empty()
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [rank["ranks"] for rank in ranks] == [4] * 4
    environs = [rank["environ"] for rank in ranks]
    assert [environ["LOCAL_RANK"] for environ in environs] == ["0", "1", "0", "1"]
    assert {environ["MASTER_ADDR"] for environ in environs} == {environs[0]["SLURMD_NODENAME"]}
    assert not [name for environ in environs for name in environ if name.startswith("TORCHELASTIC")]


# `launch … dry_run=true > job.sh; sbatch job.sh`: the script runs its job, and requeues it

SECRET = ["--api-key", "sesame"]


def submit_shown(sandbox: Sandbox, folder: Path, *words: str, env: dict[str, str] | None = None) -> str:
    """Write the script of a dry run, submit it, and return the job's number."""
    done = sandbox.launch("dry_run=true", *words, cwd=folder)
    assert done.code == 0, done
    (folder / "job.sh").write_text(done.out)
    assert not (folder / "runs").exists()
    return sandbox.run("sbatch", "--parsable", folder / "job.sh", env=env).strip()


@pytest.mark.slurm
def test_a_script_runs_the_job_with_its_words_and_secrets(sandbox: Sandbox, tmp_path: Path) -> None:
    words = ("nodes=2", "nproc_per_node=1", "env.A='1 2'", "env.HF_TOKEN=sesame", "env.OUT='${run_dir}/out'")
    more = ("cluster.time=10", "--", write_program(tmp_path, SHOW), *ARGUMENTS, *SECRET)
    secrets = {"HF_TOKEN": "sesame", "SECRET_2": "sesame"}
    job = submit_shown(sandbox, tmp_path, *words, *more, env=secrets)
    sandbox.wait(job, "COMPLETED")
    run = Run(tmp_path / "runs" / "program" / f"job-{job}", sandbox)
    expected = {"A": "1 2", "HF_TOKEN": "sesame", "OUT": f"{run.path}/out", "WORLD_SIZE": "2"}
    for rank in range(2):
        found = read_found(run.path, rank)
        assert found["argv"] == [*ARGUMENTS, *SECRET] and expected.items() <= found["env"].items()
    assert run.outcome["state"] == "succeeded" and run.job_id == job
    assert "launch: succeeded after" in (tmp_path / f"program-{job}.out").read_text()
    text = (tmp_path / "job.sh").read_text()
    assert "sesame" not in text and "sesame" not in (run.path / "job.json").read_text()
    status = sandbox.launch("status", job, cwd=tmp_path)
    assert status.code == 0 and "succeeded" in status.out, status


@pytest.mark.slurm
def test_a_requeued_script_goes_on_in_its_directory(sandbox: Sandbox, tmp_path: Path) -> None:
    words = (*SHRUNK, "nodes=1", "nproc_per_node=1", "program.steps=40", "program.checkpoint_every=5")
    job = submit_shown(sandbox, tmp_path, *words, "cluster.kind=slurm")
    run = Run(tmp_path / "runs" / "llama7b" / f"job-{job}", sandbox)
    run.wait_for(
        lambda: (run.path / "manifest.json").is_file() and max(run.read_losses(), default=0) >= 10, "step 10"
    )
    sandbox.run("scontrol", "requeue", job)
    assert run.await_end() == "succeeded", run.describe()
    assert len(run.causes) == 2
    assert sorted(run.read_losses()) == list(range(1, 41))
    assert [path.name for path in run.path.parent.iterdir()] == [run.path.name]
