"""A step over several nodes: what ranks find, in which order, how it fails, what signals do, what is left."""

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.make_runs import read_nodes
from tests.launch.terminals import open_terminal
from tests.seam import LAUNCH, PATIENCE, Result, find_processes, find_run, wait_for, write_program
from tests.slurm.cluster.conftest import Sandbox, demand_programs, start_sandbox, submit_script
from tests.slurm.cluster.test_submission import TABLES

pytestmark = pytest.mark.slurm

SHOW = """
import json, os, sys
print("FOUND " + json.dumps({"env": dict(os.environ), "argv": sys.argv[1:], "cwd": os.getcwd()}))
"""
STAY = """
import os, signal, sys, time
def note(number, frame):
    print("GOT", signal.Signals(number).name, flush=True)
    if number != signal.SIGUSR2:
        sys.exit(0)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGUSR2, note)
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGINT, note)
print("UP", flush=True)
while True:
    time.sleep(0.05)
"""
HOSTILE = ("two words", "it's", '"q"', "$(touch hacked) `id`", "line\nbreak", "ünï→", "a\\b", "", "-x=;&|")


def allocate(
    sandbox: Sandbox, cwd: Path, script: str, *options: str, **variables: str
) -> "subprocess.Popen[bytes]":
    """Start a shell script within `salloc`; `launch` is a function in it."""
    text = f'launch() {{ {shlex.join(LAUNCH)} "$@"; }}\n{script}'
    words = ["salloc", "--quiet", *(options or ("--nodes=2",)), "bash", "-c", text]
    return subprocess.Popen(
        words,
        cwd=cwd,
        env={**sandbox.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[bytes]") -> Result:
    out, err = process.communicate(timeout=PATIENCE)
    return Result(process.returncode, out.decode(), err.decode())


def read_found(run: Path, rank: int) -> dict[str, Any]:
    text = (run / "logs/0" / f"rank-{rank}.out").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("FOUND "))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def count_up(run: Path) -> int:
    return sum("UP" in path.read_text() for path in run.glob("logs/0/rank-*.out"))


def test_what_the_program_finds(sandbox: Sandbox, tmp_path: Path) -> None:
    settings = ("nproc_per_node=2", "env.HF_TOKEN=s3cret", "env.NICE=a b")
    words = shlex.join([*settings, "--", write_program(tmp_path, SHOW), *HOSTILE])
    done = finish(allocate(sandbox, tmp_path, f"launch {words}", MINE="kept"))
    assert done.code == 0, done
    run = find_run(tmp_path)
    hosts = json.loads((run / "manifest.json").read_text())["hosts"]
    assert len(hosts) == 2
    for rank in range(4):
        found = read_found(run, rank)
        env = found["env"]
        own = {"RANK": rank, "LOCAL_RANK": rank % 2, "GROUP_RANK": rank // 2}
        all_alike = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": hosts[0], "HF_TOKEN": "s3cret"}
        for name, value in {**own, **all_alike, "NICE": "a b", "MINE": "kept"}.items():
            assert env[name] == str(value), (rank, name)
        assert env["SLURMD_NODENAME"] == hosts[rank // 2]
        assert found["argv"] == list(HOSTILE) and found["cwd"] == str(tmp_path)
        assert not {"LAUNCH_SECRETS", "LAUNCH_RENDEZVOUS", "LAUNCH_ATTEMPT", "LAUNCH_RECORD_DIR"} & set(env)
        planned = json.loads((run / f"plan-{hosts[rank // 2]}.json").read_text())["ranks"][rank % 2]["cpus"]
        applied = json.loads((run / f"rank-{rank}.applied.json").read_text())
        assert (applied["cpus"], applied["host"]) == (planned, hosts[rank // 2])
    assert len({read_found(run, rank)["env"]["MASTER_PORT"] for rank in range(4)}) == 1
    assert not (tmp_path / "hacked").exists()
    assert "s3cret" not in "".join(path.read_text() for path in run.glob("*.*"))
    records = read_nodes(run, 0)
    assert [[r[key] for key in ("host", "node_rank", "state", "exit_code")] for r in records] == [
        [host, number, "succeeded", 0] for number, host in enumerate(hosts)
    ]
    assert done.err.count("succeeded after") == 1 and done.err.count("cluster=allocation") == 1


def test_a_job_script_whose_variables_contradict(sandbox: Sandbox, tmp_path: Path) -> None:
    wrong = TABLES["job_script"]
    exports = "\n".join(f"export {name}={value}" for name, value in wrong.items())
    command = shlex.join([*LAUNCH, "nproc_per_node=1", "--", write_program(tmp_path, SHOW)])
    options = ("--nodes=2", "--cpus-per-task=4", "--gpus-per-node=2")
    job = submit_script(sandbox, tmp_path, f"{exports}\n{command}", *options)
    state = sandbox.wait(job, "COMPLETED", "FAILED")
    assert state == "COMPLETED", (tmp_path / f"{job}.out").read_text()
    run = find_run(tmp_path)
    for rank in range(2):
        env = read_found(run, rank)["env"]
        assert [name for name, value in wrong.items() if env.get(name) == value] == ["MINE"]
        assert (env["MINE"], env["SLURM_JOB_ID"], env["SLURM_NTASKS"]) == ("kept", job, "2")
        assert env["CUDA_VISIBLE_DEVICES"] == "0,1", "all of the job's GPUs"


def test_nothing_is_left_of_a_head_that_is_killed(sandbox: Sandbox, tmp_path: Path) -> None:
    program = write_program(tmp_path, STAY)
    process = allocate(
        sandbox, tmp_path, f"launch nproc_per_node=1 -- {program} & echo $! > pid; wait; sleep 60"
    )
    try:
        wait_for(lambda: list(tmp_path.glob("runs/*/*/manifest.json")), "the run directory")
        run = find_run(tmp_path)
        wait_for(lambda: count_up(run) == 2, "the ranks")
        inner = int((tmp_path / "pid").read_text())  # of the shell's function, whose child is the launcher
        (child,) = Path(f"/proc/{inner}/task/{inner}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        wait_for(lambda: not find_processes(str(run)), "the end of all that it had started")
    finally:
        process.terminate()
        finish(process)


def test_ctrl_c_ends_the_ranks_and_not_srun(sandbox: Sandbox, tmp_path: Path) -> None:
    words = (*LAUNCH, "nproc_per_node=1", "--", write_program(tmp_path, STAY))
    conf = sandbox.environ["SLURM_CONF"]
    with open_terminal(tmp_path, "salloc", "--quiet", "--nodes=2", *words, SLURM_CONF=conf) as terminal:
        terminal.expect("UP")
        run = find_run(tmp_path)
        wait_for(lambda: count_up(run) == 2, "the ranks")
        terminal.type("\x03")
        assert terminal.finish() == 130, terminal.text()
    for rank in range(2):
        assert (run / f"logs/0/rank-{rank}.out").read_text() == "UP\nGOT SIGINT\n"
    assert "srun: error" not in terminal.text() and "Traceback" not in terminal.text()
    assert json.loads((run / "manifest.json").read_text())["outcome"]["state"] == "stopped"
    assert not find_processes(str(run))


def test_two_at_once_in_one_job(sandbox: Sandbox, tmp_path: Path) -> None:
    program = write_program(tmp_path, SHOW)
    one = f"launch name=one nproc_per_node=1 -- {program} & first=$!"
    script = f"{one}\nlaunch name=two nproc_per_node=1 -- {program}; second=$?\nwait $first; echo $? $second"
    done = finish(allocate(sandbox, tmp_path, script))
    assert done.out.splitlines()[-1] == "0 0", done
    runs = [path for name in ("one", "two") for path in tmp_path.glob(f"runs/{name}/*")]
    met = {line.split("met at ")[1] for line in done.err.splitlines() if "met at " in line}
    assert len(runs) == 2 and len(met) == 2


def test_a_port_that_is_taken_is_no_failure(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(
        "import socket, subprocess, sys\n"
        "with socket.create_server(('', 0)) as taken:\n"
        "    words = [word.format(port=taken.getsockname()[1]) for word in sys.argv[1:]]\n"
        "    sys.exit(subprocess.run(words).returncode)\n"
    )
    settings = ["nodes=2", "new_run_dir=run", "nproc_per_node=1", "rdzv_endpoint=n0:{port}"]
    words = [LAUNCH[0], "serve.py", *LAUNCH, *settings, "--", write_program(tmp_path, SHOW)]
    done = finish(allocate(sandbox, tmp_path, shlex.join(words), "--nodes=2"))
    assert done.code == 0, done
    assert "n0 cannot serve the ranks' port: all ranks start again" in done.err
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert (manifest["earlier"], manifest["outcome"]["attempts"]) == ([], 2)


@pytest.fixture(scope="module")
def switched() -> Iterator[Sandbox]:
    """A cluster with switches."""
    demand_programs("--no-accounting")
    with start_sandbox("--no-accounting", "--switches", "2", "--gpus", "0") as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("words", "hosts", "source"),
    [
        ((), "n0 n2 n1 n3", "topology"),
        (("agent=torchrun", "cluster.node_order=order.txt"), "n3 n1 n2 n0", "file"),
        (("cluster.node_order=slurm",), "n0 n1 n2 n3", "slurm"),
    ],
    ids=str,
)
def test_ranks_follow_the_network(
    switched: Sandbox, tmp_path: Path, words: tuple[str, ...], hosts: str, source: str
) -> None:
    (tmp_path / "order.txt").write_text("n3\nn1\nn2\nn0\nn9\n")
    program = ("--", write_program(tmp_path, SHOW))
    done = switched.launch("nodes=4", "nproc_per_node=2", "follow=true", *words, *program, cwd=tmp_path)
    assert done.code == 0, done.err
    run, names = find_run(tmp_path), hosts.split()
    found = [read_found(run, rank)["env"] for rank in range(8)]
    assert [env["SLURMD_NODENAME"] for env in found] == [host for host in names for _ in range(2)]
    assert [env["GROUP_RANK"] for env in found] == [*"00112233"]
    assert {env["MASTER_ADDR"] for env in found} == {names[0]}
    order = json.loads((run / "manifest.json").read_text())["node_order"]
    assert (order["source"], order["hosts"]) == (source, names)
    told = done.err + done.out
    assert ("ranks are in the order of" in told) == (source != "slurm"), told
