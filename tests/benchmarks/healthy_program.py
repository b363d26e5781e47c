"""A healthy training program that is slow now and then; it knows nothing of the launcher.

`--case` says what is slow. Each rank makes some steps, then comes what is slow, then steps again.
"""

import argparse
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, ROWS = 64, 8
"""Of the model, and of its batch."""
MIB = 1 << 20
STEPS = 8
"""Before and after what is slow."""
CASES: dict[str, tuple[str, Callable[["Job"], None]]] = {}
"""When what is slow comes, and the function: `first`, before all steps; `later`; `last`, after all."""


def case(name: str, when: str = "later") -> Callable[[Callable[["Job"], None]], Callable[["Job"], None]]:
    """Make a function a case; one named `-alone` is called on rank 0, while the others wait in a barrier."""

    def register(function: Callable[["Job"], None]) -> Callable[["Job"], None]:
        CASES[name] = when, function
        return function

    return register


class Rows(Dataset[torch.Tensor]):
    """Batches, each of which takes a while to read."""

    def __init__(self, size: int, seconds: float = 0.0) -> None:
        self.size, self.seconds = size, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((ROWS, WIDTH), 1 / (1 + index))


class SlowFile:
    """A file on a slow disk: a MiB each quarter of a second, until a time is over."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.file = path.open("wb")
        self.pauses = int(4 * seconds)

    def write(self, data: bytes) -> int:
        for at in range(0, len(data), MIB):
            self.file.write(data[at : at + MIB])
            self.file.flush()
            self.pauses -= 1
            time.sleep(0.25 if self.pauses >= 0 else 0)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


@dataclass(slots=True)
class Job:
    """What a case works with."""

    rank: int
    folder: Path
    scale: float
    """Of all slow things, for trials."""
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    steps: int = 0
    step_seconds: float = 1.0

    def train(self, steps: int, micro_steps: int = 1, micro_seconds: float = 0.0) -> None:
        """Make steps, each of micro-steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            time.sleep(self.step_seconds)
            for _ in range(micro_steps):
                time.sleep(micro_seconds)
                loss = self.module(torch.randn(ROWS, WIDTH)).square().mean()
                loss.backward()
            self.optimizer.step()
            self.steps += 1
            if self.rank == 0:
                print(f"step {self.steps}: loss {float(loss):.4f}", flush=True)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds * self.scale)

    def work(self, seconds: float) -> None:
        """Compute in Python."""
        compute(seconds * self.scale)

    def last_for(self, seconds: float) -> Iterator[int]:
        """Count until a time is over."""
        end, number = time.monotonic() + seconds * self.scale, 0
        while time.monotonic() < end:
            number += 1
            yield number

    def path(self, name: str) -> Path:
        return self.folder / f"{name}-{self.rank}"

    def connect(self, serve: Callable[[socket.socket], None]) -> socket.socket:
        """Return a connection to a server in a thread, which serves it."""
        listener = socket.create_server(("127.0.0.1", 0))

        def accept() -> None:
            with listener, listener.accept()[0] as connection:
                serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        return socket.create_connection(listener.getsockname())


def compute(seconds: float) -> int:
    """Compute in Python, in whatever process."""
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        count += sum(range(1000))
    return count


@case("no-optimizer", "first")
def reduce_without_optimizer(job: Job) -> None:
    for _ in range(4):
        job.work(25)
        dist.all_reduce(torch.ones(4))


@case("accumulate-first", "first")
def accumulate_first(job: Job) -> None:
    job.train(1, 64, 0.6 * job.scale)


@case("download-alone", "first")
def download(job: Job) -> None:
    """64 KiB each quarter of a second, as from a slow server."""

    def serve(asked: socket.socket) -> None:
        for _ in job.last_for(60):
            asked.sendall(bytes(1 << 16))
            time.sleep(0.25)

    with job.connect(serve) as connection:
        while connection.recv(1 << 16):
            pass


@case("first-step", "first")
@case("preprocess-alone", "first")
def work_for_a_minute(job: Job) -> None:
    job.work(60)


@case("save")
@case("save-alone")
def save_slowly(job: Job) -> None:
    """torch.save of 240 MiB to a slow file."""
    weights = {str(number): torch.zeros(MIB // 4) for number in range(240)}
    torch.save(weights, cast("IO[bytes]", SlowFile(job.path("checkpoint"), 60 * job.scale)))


@case("save-by-hand")
def save_by_hand(job: Job) -> None:
    """torch.save of something small, then a copy by hand."""
    torch.save({"steps": job.steps}, job.path("small"))
    SlowFile(job.path("copy"), 60 * job.scale).write(bytes(240 * MIB))


def evaluate(job: Job, batches: Iterator[torch.Tensor]) -> None:
    job.module.eval()
    model = getattr(job.module, "module", job.module)
    with torch.no_grad():
        losses = [float(model(batch).square().mean()) for batch in batches]
    print(f"evaluated: {sum(losses) / len(losses):.4f}", flush=True)
    job.module.train()


@case("evaluate")
@case("evaluate-alone")
def evaluate_plainly(job: Job) -> None:
    """Two minutes without a DataLoader."""

    def make_batch() -> torch.Tensor:
        time.sleep(0.4)
        compute(0.1)
        return torch.randn(ROWS, WIDTH)

    evaluate(job, (make_batch() for _ in range(int(240 * job.scale))))


@case("evaluate-loader")
@case("evaluate-loader-alone")
def evaluate_loaded(job: Job) -> None:
    evaluate(job, iter(DataLoader(Rows(int(240 * job.scale), 0.5), batch_size=None, num_workers=1)))


@case("compile")
def compile_model(job: Job) -> None:
    """torch.compile of a model that takes a while, and again for other shapes; never from a cache."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    layers = (torch.nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True) for _ in range(4))
    compiled = torch.compile(torch.nn.Sequential(*layers), dynamic=False)
    for length in (4, 8, 12):
        compiled(torch.randn(2, length, WIDTH)).sum().backward()


def load_after(job: Job, start_worker: Callable[[int], None]) -> None:
    """Two epochs, each with a new DataLoader worker."""
    for _ in range(2):
        for _ in DataLoader(Rows(4), batch_size=None, num_workers=1, worker_init_fn=start_worker):
            job.train(1)


@case("loader-start")
def read_index_in_workers(job: Job) -> None:
    """DataLoader workers read an index when they start."""
    index = job.path("index")
    index.write_bytes(bytes(MIB))

    def read_index(_: int) -> None:
        for _ in job.last_for(45):
            index.read_bytes()
            time.sleep(0.25)

    load_after(job, read_index)


@case("workers-sleep")
def sleep_in_workers(job: Job) -> None:
    load_after(job, lambda _: job.sleep(45))


@case("accumulation")
def accumulate(job: Job) -> None:
    for micro_steps in (1, 2, 64, 4, 1, 32, 8, 64, 1, 1, 48, 16):
        job.train(1, micro_steps, 0.2 * job.scale)


@case("pauses")
def pause_between_epochs(job: Job) -> None:
    """A pause of 15 s after each eight steps, and steps of 15 s."""
    for _ in range(3):
        job.train(STEPS)
        job.sleep(15)
    job.step_seconds = 15 * job.scale
    job.train(4)
    job.step_seconds = 1.0


def alternate(job: Job, spend: Callable[[float], None], seconds: tuple[float, ...], steps: int) -> None:
    """Spend some time, make some steps, and again."""
    for one in seconds:
        spend(one)
        job.train(steps)


case("epochs-wait")(lambda job: alternate(job, job.sleep, (35, 35, 35), 4))
case("longer-pauses")(lambda job: alternate(job, job.sleep, (10, 25, 45, 80), 3))
case("steps-compute")(lambda job: alternate(job, job.work, (30, 30, 30, 30), 1))
case("rollout")(lambda job: alternate(job, job.work, (40, 40), 4))


@case("service-alone")
def await_service(job: Job) -> None:
    """A service answers after 40 s."""

    def answer(asked: socket.socket) -> None:
        job.sleep(40)
        asked.sendall(b"ok")

    with job.connect(answer) as connection:
        connection.recv(10)


@case("file-lock")
def lock_file(job: Job) -> None:
    """Rank 0 prepares data under a file's lock, for which the other waits."""
    with (job.folder / "lock").open("w") as file:
        time.sleep(2 if job.rank else 0)
        fcntl.flock(file, fcntl.LOCK_EX)
        job.sleep(0 if job.rank else 45)
    dist.barrier()


@case("thread")
def work_in_thread(job: Job) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(job.work, 45).result()


@case("fork-waits")
def work_in_fork(job: Job) -> None:
    child = os.fork()
    if not child:
        job.work(45)
        os._exit(0)
    os.waitpid(child, 0)


@case("parameter-server")
def serve_parameters(job: Job) -> None:
    """Rank 1 asks rank 0, which never steps, for parameters each 30 s."""
    for _ in range(3):
        if job.rank == 1:
            job.work(30)
            dist.send(torch.ones(4), 0)
        else:
            dist.recv(torch.empty(4), 1)


@case("breakpoint")
def debug(job: Job) -> None:
    """A debugger waits at its prompt for somebody who has gone for coffee; the benchmark types `c` then."""
    breakpoint()


case("pdb")(lambda job: job.train(1))  # the program runs under pdb


@case("child-at-end", "last")
def end_with_child(job: Job) -> None:
    """Rank 0 waits for a child process, as one that converts a checkpoint."""
    if job.rank == 0:
        subprocess.run([sys.executable, "-c", f"import time; time.sleep({45 * job.scale})"], check=True)


def main() -> None:
    """Train, with what is slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--scale", type=float, default=1.0)
    words = parser.parse_args()
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    module = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    job = Job(int(os.environ["RANK"]), words.folder, words.scale, module, optimizer)
    when, slow = CASES[words.case]
    for moment in ("first", "later", "last"):
        if moment == when:
            if job.rank == 0 or not words.case.endswith("-alone"):
                slow(job)
            if words.case.endswith("-alone"):
                dist.barrier()
        if words.case == "no-optimizer":
            break
        if moment != "last":
            job.train(STEPS)
        if moment == "later":
            dist.barrier()
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
