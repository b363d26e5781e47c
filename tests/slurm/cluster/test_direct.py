"""agent=direct on several nodes: what ranks find, starts after a death or a hang, stops in each phase."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from launcher.runs.node_records import read_nodes
from tests.launch.start_launch import write_program
from tests.slurm.cluster.conftest import Sandbox
from tests.slurm.cluster.test_step import HOSTILE, SHOW, allocate, finish

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_is_left")]

OF_A_RUN = {
    *("LAUNCH_RUN_DIR", "LAUNCH_RUN_ID", "LAUNCH_RANK_PLAN", "MASTER_PORT"),
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
    *("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_TASK_PID", "SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT"),
}
"""Variables that differ between any two runs in an allocation."""
OF_TORCHRUN = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
WAITING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("UP", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"], flush=True)
while not os.path.exists("stop"):
    time.sleep(0.05)
"""


def read_environ(run: Path, rank: int) -> dict[str, Any]:
    text = (run / f"logs/0/rank-{rank}.out").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("FOUND "))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def test_the_environment_is_that_of_torchrun(sandbox: Sandbox, tmp_path: Path) -> None:
    words = shlex.join(["nproc_per_node=auto", "env.NICE=a b", "--", write_program(tmp_path, SHOW), *HOSTILE])
    script = "\n".join(
        f"launch agent={agent} name={agent} {words} || exit" for agent in ("torchrun", "direct")
    )
    done = finish(allocate(sandbox, tmp_path, script, "--nodes=2", "--gpus-per-node=2", MINE="kept"))
    assert done.code == 0, done
    theirs, ours = (next(tmp_path.glob(f"runs/{agent}/*")) for agent in ("torchrun", "direct"))
    for rank in range(4):
        before, after = read_environ(theirs, rank), read_environ(ours, rank)
        assert before["argv"] == after["argv"] and before["cwd"] == after["cwd"]
        names = {*before["env"], *after["env"]} - OF_A_RUN
        pairs = {name: (before["env"].get(name), after["env"].get(name)) for name in names}
        differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        assert differing.keys() == OF_TORCHRUN, differing
    assert [(r.state, r.exit_code, r.ranks) for r in read_nodes(ours, 0)] == [("succeeded", 0, 2)] * 2
