"""A healthy training program that is slow now and then; it knows nothing of the launcher.

`--case` says what is slow. Each rank makes some steps, then comes what is slow, then steps again.
"""

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, ROWS = 64, 8
"""Of the model, and of its batch."""
CHUNK = 1 << 20
STEPS = 8
"""Before and after what is slow."""


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
        for at in range(0, len(data), CHUNK):
            self.file.write(data[at : at + CHUNK])
            self.file.flush()
            if self.pauses:
                self.pauses -= 1
                time.sleep(0.25)
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

    def work(self, seconds: float) -> None:
        """Compute in Python."""
        end, count = time.monotonic() + seconds * self.scale, 0
        while time.monotonic() < end:
            count += sum(range(1000))

    def weights(self) -> dict[str, torch.Tensor]:
        """About 240 MiB, as a checkpoint has."""
        return {str(number): torch.zeros(CHUNK // 4) for number in range(240)}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}-{self.rank}"


def save_slowly(job: Job) -> None:
    """All ranks: torch.save to a slow file for 60 s."""
    torch.save(job.weights(), cast("IO[bytes]", SlowFile(job.path("checkpoint"), 60 * job.scale)))


def save_by_hand(job: Job) -> None:
    """torch.save of something small, then a copy by hand for 60 s."""
    torch.save({"steps": job.steps}, job.path("small"))
    SlowFile(job.path("copy"), 60 * job.scale).write(bytes(240 * CHUNK))


def save_alone(job: Job) -> None:
    """Rank 0 saves for 60 s, the others wait in a barrier."""
    if job.rank == 0:
        save_slowly(job)
    dist.barrier()


def evaluate(job: Job, batches: Iterator[torch.Tensor]) -> None:
    """Evaluate as programs do."""
    job.module.eval()
    model = getattr(job.module, "module", job.module)
    with torch.no_grad():
        losses = [float(model(batch).square().mean()) for batch in batches]
    if job.rank == 0:
        print(f"evaluated: {sum(losses) / len(losses):.4f}", flush=True)
    job.module.train()


def evaluate_plainly(job: Job) -> None:
    """Two minutes without a DataLoader."""

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(int(240 * job.scale)):
            time.sleep(0.4)
            job.work(0.1 / job.scale)
            yield torch.randn(ROWS, WIDTH)

    evaluate(job, batches())


def evaluate_loaded(job: Job) -> None:
    """Two minutes with a DataLoader of one worker."""
    evaluate(job, iter(DataLoader(Rows(int(240 * job.scale), 0.5), batch_size=None, num_workers=1)))


def alone(slow: Callable[[Job], None]) -> Callable[[Job], None]:
    """On rank 0, while the others wait in a barrier."""

    def run(job: Job) -> None:
        if job.rank == 0:
            slow(job)
        dist.barrier()

    return run


def compile_model(job: Job) -> None:
    """torch.compile of a model that takes a while, and again for other shapes; never from a cache."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    model = torch.nn.Sequential(
        *(torch.nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True) for _ in range(4))
    )
    compiled = torch.compile(model, dynamic=False)
    for length in (4, 8, 12):
        compiled(torch.randn(2, length, WIDTH)).sum().backward()
        print(f"rank {job.rank} compiled for {length}", flush=True)


def step_slowly_first(job: Job) -> None:
    """A first step with 60 s of computing; called before all others."""
    job.work(60)


def serve_slowly(listener: socket.socket, seconds: float) -> None:
    """Send 64 KiB each quarter of a second, as a slow server does."""
    connection, _ = listener.accept()
    with connection:
        for _ in range(int(4 * seconds)):
            connection.sendall(bytes(1 << 16))
            time.sleep(0.25)


def download_alone(job: Job) -> None:
    """Rank 0 downloads for 60 s (from a thread of rank 1), while the others wait in a barrier."""
    address = job.folder / "port"
    if job.rank == 1:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=serve_slowly, args=(listener, 60 * job.scale), daemon=True).start()
        address.with_suffix(".partial").write_text(str(listener.getsockname()[1]))
        address.with_suffix(".partial").rename(address)
    if job.rank == 0:
        while not address.exists():
            time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", int(address.read_text()))) as connection:
            while connection.recv(1 << 16):
                pass
    dist.barrier()


def load_slowly(job: Job) -> None:
    """A DataLoader whose worker reads an index for 45 s when it starts, in each of two epochs."""
    index = job.path("index")
    index.write_bytes(bytes(CHUNK))

    def read_index(_: int) -> None:
        for _ in range(int(180 * job.scale)):
            index.read_bytes()
            time.sleep(0.25)

    for _ in range(2):
        loader = DataLoader(
            Rows(STEPS),
            batch_size=None,
            num_workers=1,
            worker_init_fn=read_index,
        )
        for _ in loader:
            job.train(1)


def accumulate(job: Job) -> None:
    """From 1 to 64 micro-steps of 0.2 s, the same number on all ranks."""
    for micro_steps in (1, 2, 64, 4, 1, 32, 8, 64, 1, 1, 48, 16):
        job.train(1, micro_steps, 0.2 * job.scale)


def pause_between_epochs(job: Job) -> None:
    """A pause of 15 s after each eight steps, and steps of 15 s."""
    for _ in range(3):
        job.train(STEPS)
        time.sleep(15 * job.scale)
    job.step_seconds = 15 * job.scale
    job.train(4)
    job.step_seconds = 1.0


def debug(job: Job) -> None:
    """A debugger waits at its prompt for somebody who has gone for coffee; the harness types `c` then."""
    breakpoint()


FIRST: Mapping[str, Callable[[Job], None]] = {
    "first-step": step_slowly_first,
    "preprocess-alone": alone(step_slowly_first),
    "download-alone": download_alone,
}
"""Before the first step."""
LATER: Mapping[str, Callable[[Job], None]] = {
    "save": save_slowly,
    "save-by-hand": save_by_hand,
    "save-alone": save_alone,
    "evaluate": evaluate_plainly,
    "evaluate-loader": evaluate_loaded,
    "evaluate-alone": alone(evaluate_plainly),
    "evaluate-loader-alone": alone(evaluate_loaded),
    "compile": compile_model,
    "loader-start": load_slowly,
    "accumulation": accumulate,
    "pauses": pause_between_epochs,
    "breakpoint": debug,
    "pdb": lambda job: job.train(1),
}


def main() -> None:
    """Train, with what is slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=[*FIRST, *LATER], required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--scale", type=float, default=1.0)
    words = parser.parse_args()
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    module = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    job = Job(int(os.environ["RANK"]), words.folder, words.scale, module, optimizer)
    if words.case in FIRST:
        FIRST[words.case](job)
    job.train(STEPS)
    if words.case in LATER:
        LATER[words.case](job)
    job.train(STEPS)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
