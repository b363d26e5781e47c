"""The hook in a rank that was forked from a process which has torch: it does all that it does after exec."""

import json
import os
from pathlib import Path

import pytest

from tests.inprocess.hooked import FOLDER, PYTHON, ROOT, run_program

FORK = f"""
import gc, io, json, os, sys
import torch
sys.path.insert(0, {str(FOLDER)!r})
import launch_inprocess
from launch_inprocess import import_hook
sys.path.pop(0)
from gc import collect as copied_collect
import_hook.note_copies()
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
launch_inprocess.start(os.environ)
"""
"""Begin of a program in such a rank."""
READ = """
from pathlib import Path
from launcher.watch.heartbeats import read_heartbeat
def read():
    return read_heartbeat(Path("rank-0.beat"))
"""
"""How it reads its heartbeat, as the watcher does."""


def run_forked(code: str, folder: Path, **variables: str) -> object:
    """Return what a forked rank prints as JSON."""
    (folder / "program.py").write_text(FORK + code)
    environ = {"PYTHONPATH": str(ROOT), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **variables}
    done = run_program([*PYTHON, "program.py"], folder, None, **environ)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_program_without_torch_has_no_heartbeat_and_no_memory_record(tmp_path: Path) -> None:
    code = (
        "from json import dumps\nprint(dumps(sorted(os.environ.keys() & {'LAUNCH_WATCH', 'LAUNCH_MEMORY'})))"
    )
    assert run_forked(code, tmp_path, LAUNCH_WATCH=str(tmp_path), LAUNCH_MEMORY=str(tmp_path)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.slow
def test_each_way_to_import_torch_begins_the_heartbeat(tmp_path: Path) -> None:
    code = """
import importlib
def begin(statement):
    "Tell in a child of this rank what has come of a statement."
    if child := os.fork():
        os.waitpid(child, 0)
        found = os.path.exists("rank-0.beat"), type(torch.__spec__).__name__
        if found[0]:
            os.unlink("rank-0.beat")
        return [statement, *found]
    os.environ["LAUNCH_WATCH"] = os.getcwd()
    launch_inprocess.start(os.environ)
    exec(statement)
    os._exit(0)
print(json.dumps([begin(statement) for statement in (
    "pass", "import torch", "from torch.nn import Linear", "import torch.optim", "import torch.special",
    "importlib.import_module('torch.distributed')", "from torch.utils.data import DataLoader",
)]))
"""
    found = run_forked(code, tmp_path)
    assert isinstance(found, list)
    assert [has_begun for _, has_begun, _ in found] == [False] + [True] * 6, found
    assert {name for *_, name in found} == {"ModuleSpec"}


@pytest.mark.slow
def test_copies_of_replaced_functions_are_replaced_too(tmp_path: Path) -> None:
    code = """
import torch
import torch.distributed as dist
from torch.distributed import init_process_group
class Watched(io.BytesIO):
    def write(self, data):
        seen.append(read().phase)
        return super().write(data)
seen = []
torch.save({"x": 1}, Watched())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
modules = [sys.modules["torch.distributed" + name] for name in ("", ".distributed_c10d", ".device_mesh")]
print(json.dumps([
    sorted(set(seen)), len({id(module.init_process_group) for module in modules}),
    hasattr(init_process_group, "_torchdynamo_disable"), torch.save is torch.serialization.save,
    copied_collect is gc.collect, type(gc.collect).__name__,
]))
"""
    variables = {"LAUNCH_WATCH": str(tmp_path), "LAUNCH_GC": "synchronized"}
    assert run_forked(READ + code, tmp_path, **variables) == [["saving"], 1, True, True, True, "Collect"]


def test_steps_are_counted_collections_done_and_memory_recorded(tmp_path: Path) -> None:
    code = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
frozen = []
for step in range(8):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    frozen.append(gc.get_freeze_count() > 100)
print(json.dumps([frozen, read().step, read().notes]))
"""
    variables = {
        "LAUNCH_GC": "synchronized,warmup=3,every=5",
        "LAUNCH_MEMORY": str(tmp_path),
        "LAUNCH_WATCH": str(tmp_path),
    }
    assert run_forked(READ + code, tmp_path, **variables) == [[False] * 2 + [True] * 6, 8, []]
    record = json.loads((tmp_path / "rank-0.memory.json").read_text())
    assert record["steps"] == 8
    assert record["resident"] > 1 << 20


def test_loaders_get_their_number_of_workers_on_their_cpus(tmp_path: Path) -> None:
    code = """
from torch.utils.data import DataLoader
class Data(list):
    def __getitem__(self, index):
        return sorted(os.sched_getaffinity(0))
loader = DataLoader(Data(range(4)), batch_size=None)
print(json.dumps([loader.num_workers, list(loader)[0], sorted(os.sched_getaffinity(0))]))
"""
    cpus = sorted(os.sched_getaffinity(0))
    plan = {"worker_cpus": str(cpus[-1]), "cpus_before": ",".join(map(str, cpus))}
    variables = {
        "LAUNCH_LOADER_DEFAULT": "1",
        "LAUNCH_NUM_WORKERS": "2",
        "LAUNCH_RANK_PLAN": json.dumps(plan),
    }
    assert run_forked(code, tmp_path, **variables) == [2, [cpus[-1]], cpus]
