"""The hook in ranks with torch: steps, collections, heartbeats, loaders; many are forks of one process."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.cpulist import format_cpulist
from tests.inprocess.hooked import QUICK, WITHOUT_COMPILER, check_table, run_code
from tests.rank.start_shim import ALLOWED, run_shim, write_plan

OWN, ALL = ALLOWED[:1], ALLOWED[:2]
HEAD = f"""
import inspect, json, os, sys, warnings
import multiprocessing
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

OWN, ALL = {OWN}, {ALL}

class Places(Dataset):
    "Tells on which CPUs it is read."
    def __init__(self, length=4):
        self.length = length
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        if index >= self.length:
            raise IndexError(index)
        cpus = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
        return [os.getpid(), index, sorted(set.union(*map(set, cpus)))]

class Lines(IterableDataset):
    def __iter__(self):
        return iter(range(5))

def keep(batch):
    return batch

def look(loader):
    "Where each worker is, all of its threads, and where this process."
    rows = [row for batch in loader for row in batch]
    workers = {{row[0]: row[2] for row in rows}}
    assert os.getpid() not in workers
    return [sorted(workers.values()), sorted(os.sched_getaffinity(0))]

def count_warnings(workers):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(Places(), collate_fn=keep, num_workers=workers)
        rows = len(list(loader))
    assert rows == 4
    return [[os.path.basename(entry.filename), str(entry.message)[:32]] for entry in caught]

def note(**values):
    print("NOTE", json.dumps(values), flush=True)

def catch(action):
    try:
        return action()
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
"""
"""What every program below has before its own lines."""


def run_program(
    folder: Path, lines: str, *, workers: int = 2, default: bool = True, worker_cpus: str = "", **more: str
) -> "subprocess.CompletedProcess[str]":
    """Run a program as the only rank on the first allowed CPU, its workers on the first two."""
    env = {"LAUNCH_NUM_WORKERS": str(workers), **({"LAUNCH_LOADER_DEFAULT": "1"} if default else {})}
    cpus = worker_cpus or format_cpulist(set(ALL))
    plan = write_plan(folder, str(OWN[0]), worker_cpus=cpus, num_workers=workers, env=env)
    program = folder / "program.py"
    program.write_text(HEAD + lines)
    words = (sys.executable, "-W", "error::UserWarning", str(program))
    return run_shim(*words, preexec=lambda: os.sched_setaffinity(0, ALL), LAUNCH_PLAN=str(plan), **more)


def read_notes(done: "subprocess.CompletedProcess[str]") -> dict[str, object]:
    """Return what a program noted; it must have ended well, with nothing but the shim's line on stderr."""
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    lines = [line.removeprefix("NOTE ") for line in done.stdout.splitlines() if line.startswith("NOTE ")]
    notes: dict[str, object] = {}
    for line in lines:
        notes |= json.loads(line)
    return notes


BEGIN = f"""
import gc, io
from gc import collect as copied_collect
from pathlib import Path
from launcher.watch.heartbeat import read_heartbeat
{HEAD}{WITHOUT_COMPILER}
import torch.distributed, torch.serialization
model, seen = torch.nn.Linear(4, 4), []

def show(value):
    print(json.dumps(value), flush=True)

def begin_rank(worker_cpus=",".join(map(str, ALL)), **variables):
    "Start the hook in this rank, which has one CPU; without it, it would have as many as its workers."
    os.sched_setaffinity(0, OWN)
    plan = {{"worker_cpus": worker_cpus, "cpus_before": ",".join(map(str, ALL))}}
    ours = {{"LAUNCH_RANK_PLAN": json.dumps(plan), "LAUNCH_NUM_WORKERS": "2", "LAUNCH_GC": "default"}}
    os.environ.update({{**ours, "LOCAL_RANK": "0", "WORLD_SIZE": "1", **variables}})
    launch_inprocess.start(os.environ)

def make(kind=torch.optim.SGD):
    return kind(model.parameters(), lr=0.01)

def train(*optimizers, steps=1):
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
            for _ in range(2):  # gradient accumulation
                model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
"""


@pytest.mark.skipif(len(ALL) < 2, reason="one CPU has no room for workers of their own")
def test_what_ranks_with_torch_do(tmp_path: Path) -> None:
    check_table("torch_ranks.toml", tmp_path, BEGIN)
    record = json.loads((tmp_path / "rank-0.memory.json").read_text())
    assert record["steps"] == 8
    assert record["resident"] > 1 << 20


COMPILED = """
import gc, json, sys, torch
from torch._dynamo.utils import counters
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)

def step(x, collect):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    if collect:
        gc.collect()
    optimizer.zero_grad()
    return loss

run = torch.compile(step, backend="eager")
alone = torch.compile(optimizer.step, backend="eager")
for number in range(8):  # two steps in each
    run(torch.ones(2, 4), number % 2 == 1)
    alone()
found = {name: dict(counters[name]) for name in ("stats", "recompile_limit")}
found["breaks"] = sorted(counters["graph_break"].values())  # gc.collect() is one, for another reason
print(json.dumps([found, gc.get_freeze_count() > 1000]))
"""


@pytest.mark.slow
def test_compiled_steps_have_no_more_graphs_nor_breaks(tmp_path: Path) -> None:
    def run(policy: str | None) -> object:
        folder = tmp_path / str(policy is None)
        folder.mkdir()
        return run_code(COMPILED, folder, policy, python=(sys.executable,))

    with ThreadPoolExecutor() as pool:
        with_hook, without = pool.map(run, (QUICK, None))
    assert isinstance(with_hook, list) and isinstance(without, list)
    assert with_hook[0] == without[0]
    assert without[0]["stats"]["unique_graphs"] > 1
    assert (with_hook[1], without[1]) == (True, False)


PLACED = """
import threading

def start_thread(_):
    "A thread of the worker's, from before it is moved."
    begun = threading.Event()
    threading.Thread(target=lambda: begun.set() or threading.Event().wait(), daemon=True).start()
    begun.wait()

def bind(worker):
    if worker:
        os.sched_setaffinity(0, ALL[1:])

def make(**options):
    return DataLoader(Places(8), **{"collate_fn": keep, "num_workers": 2, **options})

def main():
    note(count=DataLoader(Places()).num_workers, file=inspect.getsourcefile(DataLoader.__init__),
         default=inspect.signature(DataLoader).parameters["num_workers"].default)
    note(fits=count_warnings(2), over=count_warnings(3))
    note(method=DataLoader.check_worker_number_rationality.__name__)
    note(plain=look(make()), threads=look(make(worker_init_fn=start_thread)),
         bound=look(make(worker_init_fn=bind)))
    note(started=look(make(multiprocessing_context="forkserver")))
    kept = make(persistent_workers=True)
    note(epochs=[look(kept) for _ in range(3)], two=[a[0][0] for a in map(look, [kept, make(num_workers=1)])])
    kept = None
    child = os.fork()
    if child == 0:
        note(child=look(make(num_workers=1)))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.sched_setaffinity(0, ALL[1:])
    note(moved=look(make(num_workers=1)), counted=count_warnings(2))

if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(len(ALL) < 2, reason="one CPU has no room for workers of their own")
def test_workers_are_on_their_cpus_and_unless_asked_for_loaders_are_torchs_own(tmp_path: Path) -> None:
    notes = read_notes(run_program(tmp_path, PLACED, default=False))
    assert (notes["count"], notes["default"]) == (0, 0)
    assert str(notes["file"]).endswith("torch/utils/data/dataloader.py")
    warning = ["dataloader.py", "This DataLoader will create 3 wo"]
    assert notes["fits"] == []
    assert notes["over"] == [warning, warning]  # when it is made, and when it starts them
    assert notes["method"] == "check_worker_number_rationality"
    theirs = [[ALL, ALL], OWN]
    assert notes["plain"] == notes["threads"] == notes["started"] == theirs
    assert notes["epochs"] == [theirs] * 3
    assert notes["two"] == [ALL, ALL]
    # A program that binds its workers, or this process, means it; so does one that forks before it loads.
    assert notes["bound"] == [[ALL, ALL[1:]], OWN]
    assert notes["child"] == [[OWN], OWN]
    assert notes["moved"] == [[ALL[1:]], ALL[1:]]
    assert notes["counted"] == [[warning[0], "This DataLoader will create 2 wo"]] * 2


CHILDREN = """
def count(queue):
    queue.put([DataLoader(Places()).num_workers, outer.num_workers, len(list(outer))])

def in_child(context, daemon):
    queue = context.SimpleQueue()
    child = context.Process(target=count, args=(queue,), daemon=daemon)
    child.start()
    found = queue.get()
    child.join()
    return found

class Nested(Dataset):
    "Reads another loader, in a worker that may have no children."
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return [outer.num_workers, DataLoader(Places()).num_workers, len(list(outer))]

outer = DataLoader(Places(), collate_fn=keep)
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    note(daemon=in_child(context, True), child=in_child(context, False),
         spawned=in_child(multiprocessing.get_context("spawn"), False)[0])
    note(worker=[batch[0] for batch in DataLoader(Nested(), collate_fn=keep)], outer=outer.num_workers,
         rows=len(list(outer)))
"""


@pytest.mark.slow
def test_children_and_workers_have_torchs_default(tmp_path: Path) -> None:
    notes = read_notes(run_program(tmp_path, CHILDREN))
    assert notes["daemon"] == notes["child"] == [0, 0, 4]
    assert notes["worker"] == [[0, 0, 4]] * 2
    assert (notes["spawned"], notes["outer"], notes["rows"]) == (0, 2, 4)
