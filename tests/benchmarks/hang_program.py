"""A training program that hangs on purpose, started by torchrun; it knows nothing of the launcher.

Each rank makes steps of `--seconds`. In step `--at` the rank `--culprit` meets the hang `--hang`: it writes
the time to `STAMPS/began` and does what the hang's name says. The comment `HANG HERE NAME` marks the line on
which it then stands.
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
HOURS = 4 * 3600
PAIR = 2
"""Ranks in each of the groups of the program `groups`."""

Train = Callable[[torch.Tensor], float]


@dataclass(frozen=True, slots=True)
class Words:
    """The command line, and which rank this is."""

    program: str
    hang: str
    culprit: int
    at: int
    steps: int
    seconds: float
    stamps: Path
    rank: int

    @property
    def is_culprit(self) -> bool:
        """Whether this rank is the one that hangs."""
        return self.rank == self.culprit

    def stamp(self) -> None:
        """Note that the hang begins now."""
        partial = self.stamps / f"began.{self.rank}"
        partial.write_text(str(time.time()))
        partial.rename(self.stamps / "began")


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
    fatal = words.at if words.is_culprit and words.hang in ("worker-stuck", "worker-loop") else None
    workers = 2 if words.hang.startswith("worker-") else 0
    loader = DataLoader(Rows(fatal, words.hang), batch_size=None, num_workers=workers)
    batches = iter(loader)
    for step in range(words.steps):
        if words.is_culprit and step == words.at and words.hang.startswith("worker-"):
            words.stamp()
            if words.hang == "worker-killed":
                os.kill(batches._workers[step % 2].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        yield next(batches)  # HANG HERE worker-stuck worker-loop


def make_model() -> torch.nn.Sequential:
    """A small model, the same on all ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))


def make_ddp(words: Words) -> Train:
    """Plain data parallelism."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return lambda batch: train_step(model, optimizer, batch)


def make_plain(words: Words) -> Train:
    """Data parallelism without an optimizer."""
    model = DistributedDataParallel(make_model())

    def train(batch: torch.Tensor) -> float:
        model(batch).square().mean().backward()
        return 0.0

    return train


def make_fsdp2(words: Words) -> Train:
    """Sharded parameters, gathered for each layer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return lambda batch: train_step(model, optimizer, batch)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Forward, backward, step."""
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def make_groups(words: Words) -> Train:
    """Gradients are averaged in pairs of ranks, then over all of them."""
    pairs = [list(range(first, first + PAIR)) for first in range(0, dist.get_world_size(), PAIR)]
    groups = [dist.new_group(pair, group_desc=f"pair-{number}") for number, pair in enumerate(pairs)]
    pair = groups[words.rank // PAIR]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for group in (pair, dist.group.WORLD):
            for gradient in gradients:
                dist.all_reduce(gradient, group=group)
        optimizer.step()
        return float(loss.detach())

    return train


PROGRAMS: Mapping[str, Callable[[Words], Train]] = {
    "ddp": make_ddp,
    "fsdp2": make_fsdp2,
    "groups": make_groups,
}


def sleep_long(words: Words) -> None:
    time.sleep(HOURS)  # HANG HERE sleep


def never_join(words: Words) -> None:
    time.sleep(HOURS)  # HANG HERE never-joins


def miss_first(words: Words) -> None:
    time.sleep(HOURS)  # HANG HERE first-collective


def hold_gil(words: Words) -> None:
    ctypes.PyDLL(None).sleep(HOURS)  # HANG HERE gil


def match_badly(words: Words) -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # HANG HERE regex


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


def loop_forever(words: Words) -> None:
    count = 0
    while True:  # HANG HERE loop plain-loop
        count += 1  # HANG HERE loop plain-loop


def evaluate(words: Words) -> None:
    """The rank alone sets a model to evaluate, and draws a batch that does not come."""
    make_model().eval()
    for _ in DataLoader(Rows(0), batch_size=None):
        pass


def read_fifo(words: Words) -> None:
    """The FIFO has a writer, this process, so that not the opening waits but the reading."""
    path = words.stamps / f"fifo-{words.rank}"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    os.read(descriptor, 1)  # HANG HERE fifo disk-all


def lose_pool_worker(words: Words) -> None:
    """multiprocessing.Pool starts another worker, and never says that a task is lost."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        result = pool.apply_async(time.sleep, (HOURS,))
        time.sleep(0.5)
        (worker,) = multiprocessing.active_children()
        worker.kill()
        result.get()  # HANG HERE pool-killed


def leave(words: Words) -> None:
    os._exit(0)


def await_signal(words: Words) -> None:
    """The harness stops this process, or its node; it goes on with its steps until then."""


def reduce_other_shape(words: Words) -> None:
    """All ranks come here; one has another shape."""
    dist.all_reduce(torch.zeros(3 if words.is_culprit else 1000))  # HANG HERE mismatch-shape


def skip_to_barrier(words: Words) -> None:
    """The rank is done with its data and waits for the others at the end, as with uneven shards."""
    dist.barrier()  # HANG HERE mismatch-op
    time.sleep(HOURS)


BEFORE_JOINING = {"never-joins": never_join, "left-start": leave}
BEFORE_FIRST = {"first-collective": miss_first}
IN_STEP: Mapping[str, Callable[[Words], None]] = {
    "sleep": sleep_long,
    "gil": hold_gil,
    "regex": match_badly,
    "lock": lock_twice,
    "plain-loop": loop_forever,
    "eval-sleep": evaluate,
    "worker-stuck": await_signal,
    "worker-loop": await_signal,
    "worker-killed": await_signal,
    "pool-killed": lose_pool_worker,
    "loop": loop_forever,
    "fifo": read_fifo,
    "disk-all": read_fifo,
    "sigstop": await_signal,
    "node-stopped": await_signal,
    "mismatch-shape": reduce_other_shape,
    "mismatch-op": skip_to_barrier,
    "left": leave,
}
ALL_RANKS = {"disk-all", "mismatch-shape"}
"""Hangs that all ranks come to."""
NO_STAMP = {"sigstop", "node-stopped", "worker-stuck", "worker-loop", "worker-killed"}
"""Hangs that begin elsewhere."""


def meet(hangs: Mapping[str, Callable[[Words], None]], words: Words) -> None:
    """Hang now if it is this rank's lot."""
    if words.hang in hangs and (words.is_culprit or words.hang in ALL_RANKS):
        if words.hang not in NO_STAMP:
            words.stamp()
        hangs[words.hang](words)


def parse_words() -> Words:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--program", choices=[*PROGRAMS], default="ddp")
    parser.add_argument("--hang", choices=[*BEFORE_JOINING, *BEFORE_FIRST, *IN_STEP, "none"], default="none")
    parser.add_argument("--culprit", type=int, default=2)
    parser.add_argument("--at", type=int, default=8, help="the step, counted from 0, in which it hangs")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a step")
    parser.add_argument("--stamps", type=Path, required=True, help="folder for time stamps")
    return Words(**vars(parser.parse_args()), rank=int(os.environ["RANK"]))


def main() -> None:
    """Train, and hang."""
    words = parse_words()
    (words.stamps / f"pid-{words.rank}").write_text(str(os.getpid()))
    meet(BEFORE_JOINING, words)
    dist.init_process_group("gloo")
    meet(BEFORE_FIRST, words)
    train = (make_plain if words.hang == "plain-loop" else PROGRAMS[words.program])(words)
    for step, batch in enumerate(load_batches(words)):
        time.sleep(words.seconds)
        (words.stamps / f"step-{words.rank}").write_text(str(step))
        if step == words.at:
            meet(IN_STEP, words)
        loss = train(batch)
        if words.rank == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
