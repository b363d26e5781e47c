"""Garbage collection in a rank: what policies do, and what becomes of the program's own use of gc."""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.inprocess.hooked import (
    PROGRAMS,
    QUICK,
    ROOT,
    check_table,
    read_table,
    run_code,
    run_program,
    run_scenarios,
)
from tests.rank.start_shim import ALLOWED
from tests.seam import find_run, start


@pytest.mark.timeout(600)
def test_what_policies_do(tmp_path: Path) -> None:
    check_table("collector.toml", tmp_path)


def test_collections_are_told_on_request(tmp_path: Path) -> None:
    begin = "import gc, json, os\nfrom launcher import collect\n"
    (tmp_path / "program.py").write_text(begin + "for _ in range(11):\n    collect()\n")
    log = f"{QUICK},log"
    done = run_program([sys.executable, "program.py"], tmp_path, log, PYTHONPATH=str(ROOT), RANK="7")
    assert done.stdout == ""
    steps = zip((3, 5, 10), (" are frozen", " are frozen", " ms"), done.stderr.splitlines(), strict=True)
    for step, end, line in steps:
        assert line.startswith(f"launch: rank 7: step {step}: ") and line.endswith(end), line
    (tmp_path / "program.py").write_text(begin + "os.close(2)\nprint([n for n in range(1, 6) if collect()])")
    done = run_program([sys.executable, "program.py"], tmp_path, log, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (0, "[3, 5]\n"), "a closed stderr ends nothing"


GARBAGE = {
    "many small things": (
        3000,
        "for _ in range(100 + step % 300): make_cycle().text = bytes(500)",
    ),
    "few with much in them, as tensors have": (
        300,
        "for _ in range(100): make_cycle()\n    make_cycle().text = bytes(range(250)) * 20_000",
    ),
    "what outlives collections of the youngest generation": (
        300,
        "(node := make_cycle()).text = bytes(range(250)) * 20_000; alive = [[] for _ in range(2000)]",
    ),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in GARBAGE])
def test_memory_stays_within_a_tenth_of_the_defaults(kind: str, tmp_path: Path) -> None:
    """A million objects live, and each step leaves garbage in cycles."""
    steps, garbage = GARBAGE[kind]
    code = f"""
live = [{{"number": number}} for number in range(1_000_000)]
for step in range({steps}):
    {garbage}
    collect()
with open("/proc/self/status") as file:
    show(int(file.read().split("VmHWM:")[1].split()[0]))
"""
    policies = ("default", "synchronized", "disabled,every=0")
    scenarios = [{"code": code, "variables": {"LAUNCH_GC": policy}} for policy in policies]
    default, synchronized, disabled = (
        int(out) for out, _ in run_scenarios(read_table("collector.toml")["begin"], scenarios, tmp_path)
    )
    assert synchronized < 1.1 * default
    assert disabled > 2 * default  # the garbage is there


@pytest.mark.usefixtures("quick_agent")
def test_ranks_of_a_job_collect_at_the_same_steps_and_have_their_workers_in_all_ways(tmp_path: Path) -> None:
    """Whatever garbage each of them makes; the number of workers and the run directory are handed over."""
    (tmp_path / "program.py").write_text(PROGRAMS["handed"] + PROGRAMS["ranks"])
    words = ["nproc_per_node=2", "gc.warmup=4", "gc.every=10", "gc.log=true", "dataloader.default=true"]
    words += ["dataloader=none", "env.LAUNCH_NUM_WORKERS=1", "--", "program.py", "{num_workers}", "{run_dir}"]
    with start(tmp_path, *words) as started:
        assert started.wait(240) == 0, started.read()
    run = find_run(tmp_path)
    for rank in range(2):
        ways = f"WAYS {[*[1] * 5, rank]}\n{run} {run} {run} {run.name}\n"
        assert (run / f"logs/0/rank-{rank}.out").read_text() == f"{ways}done\n"
        text = (run / f"logs/0/rank-{rank}.err").read_text()
        found = re.findall(rf"^launch: rank {rank}: step (\d+): ", text, re.MULTILINE)
        assert found == ["4", "10", "20", "30"], text


# Heartbeats


@pytest.mark.timeout(600)
def test_what_heartbeats_tell(tmp_path: Path) -> None:
    check_table("heartbeat.toml", tmp_path)


def test_a_program_without_torch_and_steps_leaves_nothing(tmp_path: Path) -> None:
    code = """
import json, os, sys
loaded = [name for name in ("mmap", "faulthandler", "ctypes", "signal", "torch") if name in sys.modules]
tasks = os.listdir("/proc/self/task")
print(json.dumps([loaded, len(tasks), "LAUNCH_WATCH" in os.environ, os.listdir("beats")]))
"""
    (tmp_path / "beats").mkdir()
    watched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LAUNCH_WATCH": str(tmp_path / "beats")}
    assert run_code(code, tmp_path, "default", **watched) == [[], 1, False, []]


# Ranks with torch


@pytest.mark.skipif(len(ALLOWED) < 2, reason="one CPU has no room for workers of their own")
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_what_ranks_with_torch_do(tmp_path: Path) -> None:
    check_table("torch_ranks.toml", tmp_path)
    record = json.loads((tmp_path / "rank-0.memory.json").read_text())
    assert record["steps"] == 8
    assert record["resident"] > 1 << 20


@pytest.mark.slow
def test_compiled_steps_have_no_more_graphs_nor_breaks(tmp_path: Path) -> None:
    def run(policy: str | None) -> object:
        folder = tmp_path / str(policy is None)
        folder.mkdir()
        return run_code(PROGRAMS["compiled"], folder, policy, python=(sys.executable,))

    with ThreadPoolExecutor() as pool:
        with_hook, without = pool.map(run, (QUICK, None))
    assert isinstance(with_hook, list) and isinstance(without, list)
    assert with_hook[0] == without[0]
    assert without[0]["stats"]["unique_graphs"] > 1
    assert (with_hook[1], without[1]) == (True, False)
