"""A training program that hangs on purpose; it knows nothing of the launcher.

Each rank makes steps of a second. In the ninth the rank `--culprit` meets the hang `--hang`: it writes the
time to `STAMPS/began` and does what the hang's name says. `HANG HERE NAME` marks the line on which it then
stands.
"""

import argparse
import ctypes
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, ROWS = 64, 8
"""Of the model, and of its batch."""
AT, STEPS, HOURS = 8, 600, 4 * 3600
"""The step, counted from 0, in which it hangs; steps in all; seconds of what does not end."""
PAIR = 2
"""Ranks in each of the groups of the program `groups`."""
ALL_RANKS = {"disk-all", "mismatch-shape"}
"""Hangs that all ranks come to."""
ELSEWHERE = ("worker-stuck", "worker-loop", "worker-killed", "sigstop", "node-stopped")
HANGS: dict[str, tuple[str, Callable[["Words"], None] | None]] = dict.fromkeys(ELSEWHERE, ("step", None))
"""When each hang begins, and what the culprit does; None if it begins elsewhere."""


@dataclass(frozen=True, slots=True)
class Words:
    """The command line, and which rank this is."""

    program: str
    hang: str
    culprit: int
    stamps: Path
    rank: int

    @property
    def is_culprit(self) -> bool:
        return self.rank == self.culprit

    def stamp(self) -> None:
        """Note that the hang begins now."""
        partial = self.stamps / f"began.{self.rank}"
        partial.write_text(str(time.time()))
        partial.rename(self.stamps / "began")

    def meet(self, when: str) -> None:
        """Hang now if it is time."""
        moment, hang = HANGS.get(self.hang, ("", None))
        if hang and moment == when and (self.is_culprit or self.hang in ALL_RANKS):
            self.stamp()
            hang(self)


def hang(*names: str, when: str = "step") -> Callable[[Callable[[Words], None]], Callable[[Words], None]]:
    """Make a function what the culprit does: before it joins, before the first collective, or in a step."""

    def register(function: Callable[[Words], None]) -> Callable[[Words], None]:
        HANGS.update(dict.fromkeys(names, (when, function)))
        return function

    return register


@hang("sleep")
@hang("never-joins", when="join")
@hang("first-collective", when="first")
def sleep_long(words: Words) -> None:
    time.sleep(HOURS)  # HANG HERE sleep never-joins first-collective


@hang("left")
@hang("left-start", when="join")
def leave(words: Words) -> None:
    os._exit(0)


@hang("gil")
def hold_gil(words: Words) -> None:
    ctypes.PyDLL(None).sleep(HOURS)  # HANG HERE gil


@hang("regex")
def match_badly(words: Words) -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # HANG HERE regex


@hang("lock")
def lock_twice(words: Words) -> None:
    first, second, ready = threading.Lock(), threading.Lock(), threading.Event()

    def take_second() -> None:
        with second:
            ready.set()
            with first:
                pass

    with first:
        threading.Thread(target=take_second, daemon=True).start()
        ready.wait()
        with second:  # HANG HERE lock
            pass


@hang("loop", "plain-loop")
def loop_forever(words: Words) -> None:
    count = 0
    while True:  # HANG HERE loop plain-loop
        count += 1  # HANG HERE loop plain-loop


@hang("eval-sleep")
def evaluate(words: Words) -> None:
    """The rank alone sets a model to evaluate, and draws a batch that does not come."""
    make_model().eval()
    for _ in DataLoader(Rows(0), batch_size=None):
        pass


@hang("fifo", "disk-all")
def read_fifo(words: Words) -> None:
    """The FIFO has a writer, this process, so that not the opening waits but the reading."""
    path = words.stamps / f"fifo-{words.rank}"
    os.mkfifo(path)
    os.read(os.open(path, os.O_RDWR), 1)  # HANG HERE fifo disk-all


@hang("pool-killed")
def lose_pool_worker(words: Words) -> None:
    """multiprocessing.Pool starts another worker, and never says that a task is lost."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        result = pool.apply_async(time.sleep, (HOURS,))
        time.sleep(0.5)
        (worker,) = multiprocessing.active_children()
        worker.kill()
        result.get()  # HANG HERE pool-killed


@hang("mismatch-shape")
def reduce_other_shape(words: Words) -> None:
    """All ranks come here; one has another shape."""
    dist.all_reduce(torch.zeros(3 if words.is_culprit else 1000))  # HANG HERE mismatch-shape


@hang("mismatch-op")
def skip_to_barrier(words: Words) -> None:
    """The rank is done with its data and waits for the others at the end, as with uneven shards."""
    dist.barrier()  # HANG HERE mismatch-op
    time.sleep(HOURS)


class Rows(Dataset[torch.Tensor]):
    """The batches; a worker that is to be stuck reads the fatal one for hours, or computes."""

    def __init__(self, fatal: int | None, hang: str = "") -> None:
        self.fatal, self.hang = fatal, hang

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        while index == self.fatal and self.hang == "worker-loop":  # HANG HERE worker-loop
            index += 0  # HANG HERE worker-loop
        if index == self.fatal:
            time.sleep(HOURS)  # HANG HERE worker-stuck eval-sleep
        return torch.full((ROWS, WIDTH), 1 / (1 + index))


def load_batches(words: Words) -> Iterator[torch.Tensor]:
    """Batches: of DataLoader workers if the hang is about them."""
    fatal = AT if words.is_culprit and words.hang in ("worker-stuck", "worker-loop") else None
    by_workers = words.hang.startswith("worker-")
    batches = iter(DataLoader(Rows(fatal, words.hang), batch_size=None, num_workers=2 * by_workers))
    for step in range(STEPS):
        if words.is_culprit and step == AT and by_workers:
            words.stamp()
            if words.hang == "worker-killed":
                os.kill(batches._workers[step % 2].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        yield next(batches)  # HANG HERE worker-stuck worker-loop


def make_model() -> torch.nn.Sequential:
    """A small model, the same on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))


def make_ddp(words: Words) -> tuple[torch.nn.Module, Callable[[], None]]:
    """Plain data parallelism."""
    return DistributedDataParallel(make_model()), lambda: None


def make_fsdp2(words: Words) -> tuple[torch.nn.Module, Callable[[], None]]:
    """Sharded parameters, gathered for each layer."""
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), make_model()
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    return model, lambda: None


def make_groups(words: Words) -> tuple[torch.nn.Module, Callable[[], None]]:
    """Gradients are averaged in pairs of ranks, then over all of them."""
    pairs = [list(range(first, first + PAIR)) for first in range(0, dist.get_world_size(), PAIR)]
    groups = [dist.new_group(pair, group_desc=f"pair-{number}") for number, pair in enumerate(pairs)]
    model = make_model()

    def average() -> None:
        for group in (groups[words.rank // PAIR], dist.group.WORLD):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)

    return model, average


PROGRAMS: Mapping[str, Callable[[Words], tuple[torch.nn.Module, Callable[[], None]]]] = {
    "ddp": make_ddp,
    "fsdp2": make_fsdp2,
    "groups": make_groups,
}
"""Each makes a model, and what averages its gradients after the backward pass."""


def main() -> None:
    """Train, and hang."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--program", choices=PROGRAMS, default="ddp")
    parser.add_argument("--hang", choices=[*HANGS, "none"], default="none")
    parser.add_argument("--culprit", type=int, default=2)
    parser.add_argument("--stamps", type=Path, required=True, help="folder for time stamps")
    words = Words(**vars(parser.parse_args()), rank=int(os.environ["RANK"]))
    (words.stamps / f"pid-{words.rank}").write_text(str(os.getpid()))
    words.meet("join")
    dist.init_process_group("gloo")
    words.meet("first")
    model, average = PROGRAMS[words.program](words)
    optimizer = None if words.hang == "plain-loop" else torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(load_batches(words)):
        time.sleep(1.0)
        (words.stamps / f"step-{words.rank}").write_text(str(step))
        if step == AT:
            words.meet("step")
        model.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        average()
        if optimizer:
            optimizer.step()
            if words.rank == 0:
                print(f"step {step}: loss {float(loss.detach()):.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
