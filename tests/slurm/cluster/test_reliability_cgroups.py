"""Jobs whose memory, devices and cores SLURM constrains: the rest of the table in docs/reliability.md."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.seam import wait_for, write_program
from tests.slurm.cluster.conftest import Sandbox, demand_cgroups, demand_programs, start_sandbox
from tests.slurm.cluster.jobs import submit

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("nothing_is_left")]

AGENTS = pytest.mark.parametrize("agent", ["direct", "torchrun"])
TWO = ("nodes=2", "nproc_per_node=2")
MEMORY = 800
"""MiB of each node's job: an agent and its ranks need less than half of it."""
EAT = """
import os, subprocess, sys, time
def eat():
    held = []
    while True:
        held.append(b"x" * (16 << 20))
if "eat" in sys.argv:
    eat()
print("up", flush=True)
if os.environ["RANK"] != "3":
    open("up/" + os.environ["RANK"], "w").close()
    end = time.monotonic() + 120
    while not os.path.exists("eaten") and time.monotonic() < end:
        time.sleep(0.05)
    sys.exit()
while len(os.listdir("up")) < 3:
    time.sleep(0.05)
HOW
"""
ENDS = {
    "the rank": "eat()",
    "its child": "sys.exit(128 - subprocess.run([sys.executable, __file__, 'eat']).returncode)",
    "its worker": "subprocess.run([sys.executable, __file__, 'eat'], check=True)",
}
"""How a rank ends: by itself, as a shell that tells of its child, as a program that needs its child."""
OPEN = """
import errno, json, os, sys, time
import launcher.probe.devices as nvidia
from launcher.probe.sysfs import Tree
nvidia.DEVICE, me, other = sys.argv[1:]
seen = {"variable": os.environ.get("CUDA_VISIBLE_DEVICES"), "open": [], "probe": []}
for number in "01":
    try:
        os.close(os.open(nvidia.DEVICE + number, os.O_RDWR))
    except OSError as error:
        seen["open"].append(errno.errorcode[error.errno])
    seen["probe"].append(nvidia.is_open(Tree(), {"Device Minor": number}))
open(os.devnull, "w").write("is still there")
with open(me + ".new", "w") as file:
    json.dump(seen, file)
os.rename(me + ".new", me)
end = time.monotonic() + 60
while not os.path.exists(other) and time.monotonic() < end:
    time.sleep(0.05)
"""
PLACED = """
import json, os
rank = os.environ.get("LOCAL_RANK") or os.environ["SLURM_LOCALID"]
with open("cpus-" + rank, "w") as file:
    json.dump(sorted(os.sched_getaffinity(0)), file)
"""
ESCAPE = """
import os, subprocess, sys, time
code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
name = "escaped-" + os.environ["RANK"]
subprocess.Popen([sys.executable, "-c", code, name], env={}, start_new_session=True)
while not os.path.exists(name) or not open(name).read():
    time.sleep(0.05)
if os.environ["RANK"] == "1" and "fail" in sys.argv:
    sys.exit(9)
time.sleep(600 if "wait" in sys.argv or "fail" in sys.argv else 0)
"""


@pytest.fixture(autouse=True)
def constrained(sandbox: Sandbox) -> None:
    """All of this needs cgroups."""
    demand_cgroups(sandbox)


@pytest.mark.parametrize(("agent", "who"), [*zip(("direct", "torchrun", "direct"), ENDS, strict=True)])
def test_a_rank_out_of_memory(agent: str, who: str, sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    program = write_program(tmp_path, EAT.replace("HOW", ENDS[who]))
    run = submit(sandbox, tmp_path, *TWO, f"agent={agent}", f"cluster.mem={MEMORY}", "--", program)
    assert run.await_end() == "failed"
    assert run.causes == ["crash"]
    failure = run.outcome["first_failure"]
    host = run.manifest["hosts"][1]
    assert (failure["rank"], failure["host"]) == (3, host), run.read_console()
    assert "memory" in failure["reason"] and "cluster.mem" in failure["reason"]
    if who != "its worker":
        assert failure["exit_code"] == run.outcome["exit_code"] == 137
    assert f"rank 3 on {host}" in run.read_console()
    status = sandbox.launch("status", run.path.name, cwd=tmp_path)
    assert f"rank 3 on {host}" in status.out and "memory" in status.out, status


def test_a_helper_out_of_memory_costs_no_result(sandbox: Sandbox, tmp_path: Path) -> None:
    helper = ENDS["its worker"].replace(", check=True", "")
    text = EAT.replace("HOW", f"{helper}\nopen('eaten', 'w').close()")
    (tmp_path / "up").mkdir()
    settings = (*TWO, f"cluster.mem={MEMORY}")
    run = submit(sandbox, tmp_path, *settings, "--", write_program(tmp_path, text))
    assert run.await_end() == "succeeded", run.read_console()
    host = run.manifest["hosts"][1]
    assert f"{host}: warning: out of memory: the kernel killed a process at the limit" in run.read_console()


def test_a_device_that_the_job_may_not_open(sandbox: Sandbox, tmp_path: Path) -> None:
    """Two jobs of one node have a GPU each, that SLURM calls the first of theirs."""
    program = write_program(tmp_path, OPEN)
    where = ("nodes=1", "nproc_per_node=1", "cluster=slurm", "cluster.nodelist=n0", f"cluster.mem={MEMORY}")
    share = (*where, "cluster.gpus_per_node=1", "cluster.cpus_per_task=2")
    device, runs = f"{sandbox.folder}/gpus/nvidia", []
    for agent, mine, other in (("torchrun", "seen-0", "seen-1"), ("direct", "seen-1", "seen-0")):
        runs += [submit(sandbox, tmp_path, *share, f"agent={agent}", "--", program, device, mine, other)]
    for run in runs:
        assert run.await_end() == "succeeded", run.read_console()
    seen = [json.loads((tmp_path / f"seen-{number}").read_text()) for number in (0, 1)]
    assert [each["variable"] for each in seen] == ["0", "0"]
    # No driver is behind the device, which is what it says to those that may open it.
    assert sorted(each["open"] for each in seen) == [["ENXIO", "EPERM"], ["EPERM", "ENXIO"]]
    for each in seen:
        assert each["probe"] == [word == "ENXIO" for word in each["open"]]


@pytest.fixture(scope="module")
def fitting() -> Iterator[Sandbox]:
    """A node of this machine's size, so that each CPU that SLURM counts is one."""
    cpus = len(os.sched_getaffinity(0))
    if cpus < 2:
        pytest.skip("two ranks need two CPUs")
    demand_programs("--no-accounting")
    with start_sandbox("--no-accounting", "--nodes", "1", "--gpus", "0", "--cpus", str(cpus)) as cluster:
        yield cluster


def read_placed(folder: Path) -> list[set[int]]:
    """The CPUs of the two ranks; none is another's."""
    first, second = (set(json.loads((folder / f"cpus-{rank}").read_text())) for rank in (0, 1))
    assert first and second and not first & second, (first, second)
    return [first, second]


@pytest.mark.parametrize("binding", ["cores", "none"])
def test_launch_rank_with_what_srun_has_bound(binding: str, fitting: Sandbox, tmp_path: Path) -> None:
    program = write_program(tmp_path, PLACED)
    shim = (sys.executable, "-m", "launcher.rank", sys.executable, program)
    words = ("--nodes=1", "--ntasks=2", "--exclusive", f"--chdir={tmp_path}", f"--cpu-bind={binding}")
    fitting.run("srun", *words, *shim, env={"PYTHONPATH": str(Path(__file__).parents[3])})
    placed = read_placed(tmp_path)
    if binding == "none":
        assert set.union(*placed) == os.sched_getaffinity(0)


@AGENTS
@pytest.mark.parametrize("binding", ["cores", "none"])
def test_ranks_with_what_srun_has_bound(agent: str, binding: str, fitting: Sandbox, tmp_path: Path) -> None:
    settings = ("nodes=1", "nproc_per_node=2", "cluster=slurm", f"cluster.srun.cpu_bind={binding}")
    run = submit(fitting, tmp_path, *settings, f"agent={agent}", "--", write_program(tmp_path, PLACED))
    assert run.await_end() == "succeeded", run.read_console()
    assert set.union(*read_placed(tmp_path)) == os.sched_getaffinity(0)


@pytest.mark.parametrize(("agent", "how"), [("direct", "end"), ("torchrun", "fail"), ("direct", "wait")])
def test_what_has_left_its_session_ends_with_the_job(
    agent: str, how: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    program = write_program(tmp_path, ESCAPE)
    run = submit(sandbox, tmp_path, *TWO, f"agent={agent}", "--", program, how)
    wait_for(lambda: len(list(tmp_path.glob("escaped-*"))) == 4, "the ranks", 60, run.describe)
    if how == "wait":
        sandbox.run("scancel", run.job_id)
    assert run.await_end() == {"end": "succeeded", "fail": "failed", "wait": "stopped"}[how]
