"""The job scripts before and after: the same but for one line, and that line works."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seam import clean_environ

SLURM = Path(__file__).parents[3] / "slurm"
PAIRS = {"torchrun": ["--no-python", "--", "launch-rank"], "srun": ["--cpu-bind=none", "launch-rank"]}
"""The plain scripts, and the words that are new in the others."""
SCRIPTS = sorted(SLURM.glob("*.sbatch"))
TRAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.ones(1)
dist.all_reduce(ranks)
name = f"{os.environ['LOCAL_RANK']}-{os.environ['RANK']}-of-{int(ranks.item())}"
open(name, "w").write("\\n".join([repr(sorted(os.sched_getaffinity(0))), *sys.argv[1:]]))
dist.destroy_process_group()
"""


def read_step(name: str) -> list[str]:
    """The words of the script's srun command, with its variables as they are written."""
    text = (SLURM / f"{name}.sbatch").read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith("srun "))
    return shlex.split(line)


def read_core(name: str) -> str:
    """What srun would run on a node, as the shell reads it."""
    text = (SLURM / f"{name}.sbatch").read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith("srun "))
    return re.sub(r"^srun( --\S+)*", "exec", line)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_one_that_sbatch_takes(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    options = [line for line in lines if line.startswith("#SBATCH")]
    first = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    assert options == lines[1 : 1 + len(options)]  # sbatch stops reading at the first command
    assert first > len(options)


@pytest.mark.parametrize(("name", "new"), PAIRS.items(), ids=PAIRS)
def test_a_pair_differs_in_two_words(name: str, new: list[str]) -> None:
    before = (SLURM / f"{name}.sbatch").read_text().splitlines()
    after = (SLURM / f"{name}-launch-rank.sbatch").read_text().splitlines()
    (changed,) = ((old, line) for old, line in zip(before, after, strict=True) if old != line)
    assert [word for word in changed[1].split() if word not in changed[0].split()] == new
    assert [word for word in changed[1].split() if word not in new] == changed[0].split()
    readme = (SLURM / "README.md").read_text()
    assert f"-{changed[0]}\n+{changed[1]}\n" in readme


def test_every_script_has_its_pair() -> None:
    names = {path.stem for path in SCRIPTS}
    assert names == {*PAIRS, *(f"{name}-launch-rank" for name in PAIRS), "launch"}


def prepare(folder: Path) -> dict[str, str]:
    """A program to run, and an environment as on a node of a job of one node with two ranks."""
    (folder / "train.py").write_text(TRAIN)
    bin_dir = folder / "bin"
    bin_dir.mkdir()
    package = str(SLURM.parent)
    python = f"#!/bin/sh\nPYTHONPATH={shlex.quote(package)} exec {shlex.quote(sys.executable)} "
    commands = {
        "launch-rank": f'{python} -c "from launcher.rank.shim import main; main()" "$@"\n',
        "torchrun": f'{python} -m torch.distributed.run "$@"\n',
        "python": f'{python} "$@"\n',
    }
    for name, text in commands.items():
        (bin_dir / name).write_text(text)
        (bin_dir / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_NTASKS": "2"}
    rendezvous = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    return {**clean_environ(), **job, **rendezvous, "PATH": f"{bin_dir}:{os.environ['PATH']}"}


def test_what_the_torchrun_script_runs_on_a_node(tmp_path: Path) -> None:
    name = "torchrun-launch-rank"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", read_core(name), name, "--lr", "3e 4", ""],
        cwd=tmp_path, env=prepare(tmp_path), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr.count("launch-rank: rank") == 2, done.stderr
    # Both ranks met, had their arguments, and CPUs of their own.
    sets = []
    for name in ("0-0-of-2", "1-1-of-2"):
        cpus, *words = (tmp_path / name).read_text().split("\n")
        assert words == ["--lr", "3e 4", ""]
        sets.append(set(map(int, cpus[1:-1].split(","))))
    assert len(os.sched_getaffinity(0)) == 1 or not sets[0] & sets[1]


def test_srun_ends_the_step_with_its_first_failure() -> None:
    for name in PAIRS:
        assert {"--kill-on-bad-exit=1", "--wait=60"} <= set(read_step(name))
