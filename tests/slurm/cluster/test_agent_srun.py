"""agent=srun on a real SLURM: each rank is a task, and has what torchrun's agent would have given it."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.agent.endpoint import read_client_ports
from launcher.protocol import LAUNCH_CACHE
from launcher.runs.node_records import read_nodes
from launcher.runs.run_records import read_run
from launcher.slurm.rendezvous import pick_port
from tests.seam import find_run, write_program
from tests.slurm.cluster.conftest import Sandbox
from tests.slurm.cluster.jobs import SHRUNK, Run, submit

pytestmark = pytest.mark.slurm

TWO = ("agent=srun", "nodes=2", "nproc_per_node=2", "name=ranks")
SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]), flush=True)\n"
FAIL = """
import os, signal, sys, time
if os.environ["RANK"] == "2":
    print("the last words", file=sys.stderr, flush=True)
    if HOW:
        os.kill(os.getpid(), HOW)
    sys.exit(7)
print("waiting", flush=True)
time.sleep(120)
"""
CATCH = """
import os, signal, subprocess, sys, time
got = []
if os.environ["RANK"] != "1":
    signal.signal(signal.SIGUSR2, lambda *_: got.append(1))
helper = subprocess.Popen(["sleep", "120"])
print("up", flush=True)
end = time.monotonic() + 60
while not os.path.exists("told") and time.monotonic() < end:
    if got:
        print("caught; the helper", "lives" if helper.poll() is None else "is lost", flush=True)
        got.clear()
    time.sleep(0.05)
helper.kill()
"""


def run_job(sandbox: Sandbox, folder: Path, text: str, *words: str) -> Run:
    """A job of four ranks on two nodes, to its end."""
    run = submit(sandbox, folder, *TWO, *words, "--", write_program(folder, text))
    run.await_end()
    return run


def read_environ(run: Run, rank: int) -> dict[str, str]:
    """What the program found, as it has printed it."""
    environ: dict[str, str] = json.loads(run.read_rank(rank))[0]
    return environ


STEPS_OWN = ("SLURM_", "SLURMD_", "SRUN_", "PMI")
"""Variables of a step of SLURM's, and of a task: an agent is one, a rank another."""
ACCOUNTED = {
    "TORCHELASTIC_ERROR_FILE",  # torchelastic's @record writes an exception there for its agent to read
    "TORCHELASTIC_RUN_ID",  # of each run its own
    "LAUNCH_RUN_DIR",
    "LAUNCH_RUN_ID",
    "MASTER_PORT",  # of each job its own
    "TORCHELASTIC_USE_AGENT_STORE",  # no agent, no store of its
    "TORCHELASTIC_SIGNALS_TO_HANDLE",  # the agent's own
    "TRITON_CACHE_DIR",  # on the node for the job, where there is somebody to remove them
    "TORCHINDUCTOR_CACHE_DIR",
    "LAUNCH_RANK_PLAN",  # it has all of these that the plan sets
}
"""Where the two agents differ."""
TOLD = {"LAUNCH_GC", "LAUNCH_NUM_WORKERS", "LAUNCH_RANK_PLAN", "LAUNCH_RUN_DIR", "LAUNCH_RUN_ID"}
"""Variables of the launcher's that are for the program."""


def test_both_agents_give_the_program_the_same_variables(sandbox: Sandbox, tmp_path: Path) -> None:
    users = {"RANK": "9", "LOCAL_RANK": "9", "MY_OWN": "a  b", "SLURM_NTASKS_PER_NODE": "7"}
    told = {}
    for agent in ("torchrun", "srun"):
        (tmp_path / "x.env").write_text("SEEN=no\nTOLD='by file'\nHF_TOKEN=file-secret\n")
        words = ("nodes=2", "nproc_per_node=2", "name=both", f"agent={agent}")
        env = ("env.SEEN=yes", "env.from_file=x.env")
        run = submit(sandbox, tmp_path, *words, *env, "--", write_program(tmp_path, SHOW), env=users)
        (tmp_path / "x.env").unlink()  # it was read at submission
        assert run.await_end() == "succeeded", run.read_console()
        told[agent] = [
            {n: v for n, v in read_environ(run, rank).items() if not n.startswith(STEPS_OWN)}
            for rank in range(4)
        ]
        (tmp_path / "program.py").unlink()
        files = [path for path in run.path.rglob("*") if path.is_file() and path.suffix != ".out"]
        assert len(files) > 8
        assert not [path for path in files if "file-secret" in path.read_text(errors="replace")]
    for rank in range(4):
        by_agent, by_srun = told["torchrun"][rank], told["srun"][rank]
        differ = {name for name in {*by_agent, *by_srun} if by_agent.get(name) != by_srun.get(name)}
        assert differ <= ACCOUNTED, {name: (by_agent.get(name), by_srun.get(name)) for name in differ}
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2)}
        sizes = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "SEEN": "yes"}
        expected |= {**sizes, "MY_OWN": "a  b", "MASTER_ADDR": "n0"}
        assert {name: by_srun.get(name) for name in expected} == expected
        told_names = {name for name in by_srun if name.startswith("LAUNCH_")}
        assert told_names - {LAUNCH_CACHE} == TOLD  # that one is the tests' own
        plans = [json.loads(environ["LAUNCH_RANK_PLAN"]) for environ in (by_agent, by_srun)]
        for plan in plans:
            plan["env"] = {name: value for name, value in plan["env"].items() if name not in ACCOUNTED}
        assert plans[0] == plans[1]
        assert (by_srun["TOLD"], by_srun["HF_TOKEN"]) == ("by file", "file-secret")


def test_training_to_the_end(sandbox: Sandbox, tmp_path: Path) -> None:
    run = submit(sandbox, tmp_path, *TWO, *SHRUNK, "program.steps=12")
    assert run.await_end() == "succeeded", run.read_console()
    losses = [float(loss) for loss in run.read_losses().values()]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    records = read_run(run.path)
    assert [(host.name, len(host.planned), len(host.records)) for host in records.hosts] == [
        ("n0", 2, 2),
        ("n1", 2, 2),
    ]
    assert not records.damaged
    assert run.manifest["hosts"] == ["n0", "n1"]
    assert [record.state for record in read_nodes(run.path, 0)] == ["succeeded"] * 2
    console = run.read_console()
    assert "[n0:0] " in console and "step 12" in console
    assert "[n1:2] " not in console
    assert "cpu binding" not in console
    assert run.find_processes() == {}


@pytest.mark.parametrize(("how", "code", "reason"), [(0, 7, "code 7"), (9, 137, "SIGKILL")])
def test_a_rank_that_fails_ends_the_others_and_is_told(
    sandbox: Sandbox, tmp_path: Path, how: int, code: int, reason: str
) -> None:
    run = run_job(sandbox, tmp_path, f"HOW = {how}\n{FAIL}", "logs.console=all")
    outcome = run.outcome
    assert (outcome["state"], outcome["cause"], outcome["exit_code"]) == ("failed", "crash", code)
    first = outcome["first_failure"]
    assert (first["rank"], first["local_rank"], first["host"], first["exit_code"]) == (2, 0, "n1", code)
    assert reason in first["reason"]
    assert first["last_lines"] == ["the last words"]
    console = run.read_console()
    assert "[n0:0] waiting" in console and "[n1:3] waiting" in console
    assert "launch: rank 2 on n1 failed" in console
    states = {record.host: (record.state, record.exit_code) for record in read_nodes(run.path, 0)}
    assert states == {"n0": ("stopped", 143), "n1": ("failed", code)}
    assert run.find_processes() == {}


def test_scancel_leaves_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    code = "import time; print('up', flush=True); time.sleep(120)"
    run = submit(sandbox, tmp_path, *TWO, "--", write_program(tmp_path, code))
    run.wait_for(lambda: all("up" in run.read_rank(rank) for rank in range(4)), "ranks", 60)
    sandbox.run("scancel", run.job_id)
    assert run.await_end() == "stopped"
    assert run.outcome["cause"] == "cancelled"
    run.wait_for(lambda: not run.find_processes(), "the end of all processes", 30)


def test_the_checkpoint_signal_reaches_the_ranks_that_catch_it_and_nobody_else(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    run = submit(sandbox, tmp_path, *TWO, "--", write_program(tmp_path, CATCH))
    run.wait_for(lambda: all("up" in run.read_rank(rank) for rank in range(4)), "ranks", 60)
    sandbox.run("scancel", "--batch", "--signal=USR2", run.job_id)
    catching = (0, 2, 3)
    run.wait_for(lambda: all("caught" in run.read_rank(rank) for rank in catching), "the signal", 30)
    (tmp_path / "told").touch()
    assert run.await_end() == "succeeded", run.read_console()
    for rank in catching:
        assert run.read_rank(rank) == "up\ncaught; the helper lives\n"
    assert run.read_rank(1) == "up\n"
    assert "SIGUSR2 not sent: 1 rank has no handler for it" in run.read_console()


def test_arguments_survive(sandbox: Sandbox, tmp_path: Path) -> None:
    given = ["a b", "c'd\"", "$(touch x)", "new\nline", "é\t*", "", "--", "\\", "%t", "{num_workers}"]
    words = (*TWO, "nproc_per_node=1", "--", write_program(tmp_path, SHOW), *given)
    run = submit(sandbox, tmp_path, *words)
    assert run.await_end() == "succeeded", run.read_console()
    for rank in range(2):
        environ, argv = json.loads(run.read_rank(rank))
        assert argv == [*given[:-1], environ["LAUNCH_NUM_WORKERS"]]


def test_a_port_that_is_taken_is_left_to_its_owner(sandbox: Sandbox, tmp_path: Path) -> None:
    words = (*TWO, "nproc_per_node=1", "cluster.additional.hold=true", "--", write_program(tmp_path, SHOW))
    run = submit(sandbox, tmp_path, *words)
    ports = [pick_port(int(run.job_id), 0, trial, read_client_ports()) for trial in range(2)]
    with socket.create_server(("", ports[0])):
        sandbox.run("scontrol", "release", run.job_id)
        assert run.await_end() == "succeeded", run.read_console()
    assert [read_environ(run, rank)["MASTER_PORT"] for rank in range(2)] == [str(ports[1])] * 2
    assert [record.state for record in read_nodes(run.path, 0)] == ["succeeded"] * 2


def enter_allocation(sandbox: Sandbox, folder: Path, code: str) -> "subprocess.Popen[str]":
    """`launch agent=srun` in `salloc`, from a shell that has asked for something else."""
    inner = [
        sys.executable,
        "-c",
        "from launcher.cli.main import main; main()",
        "agent=srun",
        "logs.console=all",
    ]
    outer = ["salloc", "--quiet", "--nodes=2", "--gpus-per-node=2", "--exclusive", "--immediate=60"]
    options = {"SLURM_CPUS_PER_TASK": "3", "SLURM_NTASKS": "1", "RANK": "9"}
    return subprocess.Popen(
        [*outer, *inner, "name=ranks", "--", sys.executable, "-c", code],
        cwd=folder,
        env={**sandbox.environ, **options, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_inside_an_allocation(sandbox: Sandbox, tmp_path: Path) -> None:
    shell = enter_allocation(sandbox, tmp_path, "import os; print('rank', os.environ['RANK'])")
    told = shell.communicate(timeout=90)[0]
    assert shell.returncode == 0, told
    assert {line for line in told.splitlines() if "] rank " in line} == {
        f"[n{rank // 2}:{rank}] rank {rank}" for rank in range(4)
    }
    assert Run(find_run(tmp_path), sandbox).outcome["state"] == "succeeded"


def test_ctrl_c_in_an_allocation_stops_the_ranks(sandbox: Sandbox, tmp_path: Path) -> None:
    shell = enter_allocation(sandbox, tmp_path, "import time; print('up', flush=True); time.sleep(120)")
    assert shell.stdout
    for rank in range(4):
        line = next(line for line in shell.stdout if line.endswith("] up\n"))
        assert line.startswith(("[n0:", "[n1:")), rank
    run = Run(find_run(tmp_path), sandbox)
    os.kill(run.manifest["process"]["pid"], signal.SIGINT)
    told = shell.communicate(timeout=60)[0]
    assert told.count("KeyboardInterrupt") == 4, told
    assert " failed (" not in told
    assert (run.outcome["state"], run.outcome["signal"]) == ("stopped", "SIGINT")
    assert shell.returncode == run.outcome["exit_code"] == 130
    assert {(record.state, record.signal) for record in read_nodes(run.path, 0)} == {("stopped", "SIGINT")}
    assert run.find_processes() == {}


def test_what_torchrun_alone_can_do_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    program = ("--", sys.executable, "-c", "")
    elastic = sandbox.launch("agent=srun", "nodes=1:2", "cluster=slurm", *program, cwd=tmp_path)
    elastic.assert_error(2, "nodes=1:2 with agent=srun", "agent=torchrun")
    restarts = sandbox.launch("torchrun.max_restarts=2", *TWO, *program, cwd=tmp_path)
    restarts.assert_error(2, "torchrun.max_restarts=2 with agent=srun", "cluster.requeue.crash")
    assert not list(tmp_path.iterdir())
