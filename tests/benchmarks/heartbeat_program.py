"""Times what the hook does for a heartbeat, in one process, in place and taken out in turn; prints JSON.

Times are of the thread's own CPU time: none of this waits for anything.
"""

import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import dataloader

BLOCKS, CALLS = 200, 200


class Endless(torch.utils.data.IterableDataset[int]):
    """Items that cost nothing."""

    def __iter__(self) -> Iterator[int]:
        """Return numbers."""
        return iter(range(1 << 60))


def time_calls(call: Callable[[], object], calls: int) -> float:
    """Microseconds of a call."""
    begin = time.thread_time()
    for _ in range(calls):
        call()
    return 1e6 * (time.thread_time() - begin) / calls


def time_pairs(
    switch: Callable[[bool], None], call: Callable[[], object], calls: int = CALLS
) -> list[tuple[float, float]]:
    """Microseconds of a call (without, with) the heartbeat, blocks in turn."""
    pairs = []
    for _ in range(BLOCKS):
        switch(False)
        without = time_calls(call, calls)
        switch(True)
        pairs.append((without, time_calls(call, calls)))
    return pairs


def switch_method(owner: Any, name: str) -> Callable[[bool], None]:
    """Return what puts the hook's method in place, and the original."""
    ours = getattr(owner, name)
    original = inspect.unwrap(ours)
    if original is ours:
        raise RuntimeError(f"{name} is not the hook's: nothing to measure")
    return lambda on: setattr(owner, name, ours if on else original)


def main() -> None:
    """Time a step, a batch, and the setting of a model of 1,000 modules to train."""
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(8))
    parameter.grad = torch.ones(8)
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    optimizer.step()
    actions = sys.modules["launch_inprocess.step_counter"].COUNTER.actions
    kept = list(actions)

    def switch_steps(on: bool) -> None:
        actions[:] = kept if on else kept[:-1]

    batches = iter(torch.utils.data.DataLoader(Endless(), batch_size=None))
    model = torch.nn.ModuleList([torch.nn.Identity() for _ in range(1000)])
    times = {
        "an optimizer's step": time_pairs(switch_steps, optimizer.step),
        "a batch": time_pairs(
            switch_method(dataloader._BaseDataLoaderIter, "__next__"), partial(next, batches)
        ),
        "`train()` of 1,000 modules": time_pairs(switch_method(torch.nn.Module, "train"), model.train, 2),
    }
    print(json.dumps(times))


if __name__ == "__main__":
    main()
