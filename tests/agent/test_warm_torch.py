"""Ranks that are forked with torch: its threads, its settings, its collectives."""

import socket
from collections.abc import Iterator

import pytest

from tests.agent.warm_ranks import Ranks, open_ranks

THREADS = """
import ctypes, json, os, threading
import torch
import numpy
found = []
thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
thread.start()
thread.join()
blas = [line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line][:1]
get = [getattr(ctypes.CDLL(p), "scipy_openblas_get_num_threads64_", None) for p in blas]
info = torch.__config__.parallel_info()
print(json.dumps([torch.get_num_threads(), found, [f() for f in get if f], info]))
"""
COLLECTIVE = """
import json, random
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(64, 64) @ torch.ones(64, 64)
dist.all_reduce(total)
model = torch.nn.Linear(64, 8)
loader = torch.utils.data.DataLoader(torch.ones(4, 64), batch_size=2, num_workers=1)
for batch in loader:
    model(batch).sum().backward()
print(json.dumps([total[0, 0].item(), model.bias.grad.tolist()[0], torch.initial_seed(), random.random()]))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with open_ranks(tmp_path_factory.mktemp("ranks"), modules=["torch"]) as opened:
        yield opened


@pytest.mark.slow
def test_threads_are_those_that_the_imports_would_take(ranks: Ranks) -> None:
    for variables in ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "64", "MKL_NUM_THREADS": "2"}):
        by_exec, forked = ranks.exec(THREADS, **variables), ranks.fork(THREADS, **variables)
        assert (forked.code, forked.out, forked.err) == (0, by_exec.out, by_exec.err)


def test_collectives_and_workers_of_two_ranks(ranks: Ranks) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks.write(COLLECTIVE)
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "2"}
    pids = [ranks.begin_fork(RANK=str(rank), **given) for rank in range(2)]
    told = [ranks.collect(pid, rank) for rank, pid in enumerate(pids)]
    assert [end.code for end in told] == [0, 0], told
    first, second = (end.read() for end in told)
    assert first[:2] == second[:2] == [128.0, 4.0]
    assert not {*first[2:]} & {*second[2:]}
