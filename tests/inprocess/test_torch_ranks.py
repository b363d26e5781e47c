"""The hook in ranks with torch: steps, collections, heartbeats, loaders; many are forks of one process."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.inprocess.hooked import QUICK, WITHOUT_COMPILER, check_table, run_code
from tests.rank.start_shim import ALLOWED

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

def catch(action):
    try:
        return action()
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
"""
"""What every program below has before its own lines."""


BEGIN = f"""
import gc, io
from gc import collect as copied_collect
from pathlib import Path
from launcher.watch.ranks import read_heartbeat
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
@pytest.mark.timeout(600)
@pytest.mark.slow
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
