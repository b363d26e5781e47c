"""A healthy training program that is slow now and then; it knows nothing of the launcher.

`--case` says what is slow. Each rank makes some steps, then comes what is slow, then steps again.
"""

import argparse
import asyncio
import fcntl
import gzip
import json
import mmap
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import matplotlib.figure
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


def only_rank_0(job: Job, slow: Callable[[], object]) -> None:
    """Something that rank 0 alone does, while the others wait in a collective."""
    if job.rank == 0:
        slow()
    dist.barrier()


def compute_for(seconds: float) -> int:
    """Compute in Python, in whatever process."""
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        count += sum(range(1000))
    return count


def compute_in_steps(job: Job) -> None:
    """Steps of 30 s of computing."""
    for _ in range(4):
        job.work(30)
        job.train(1)


def roll_out_in_pool(job: Job) -> None:
    """Rollouts of 40 s in a pool of processes, twice."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        for _ in range(2):
            pool.map(compute_for, [20 * job.scale] * 2)
            job.train(4)


def roll_out(job: Job) -> None:
    """Rollouts of 40 s in the process, twice."""
    for _ in range(2):
        job.work(40)
        job.train(4)


def evaluate_in_training_mode(job: Job) -> None:
    """Forget `eval()`."""
    end = time.monotonic() + 40 * job.scale
    with torch.no_grad():
        while time.monotonic() < end:
            job.module(torch.randn(ROWS, WIDTH))
            time.sleep(0.1)


def tokenize(job: Job) -> None:
    """Count words between epochs."""
    counts: dict[str, int] = {}
    end, number = time.monotonic() + 40 * job.scale, 0
    while time.monotonic() < end:
        number += 1
        for word in f"the {number} quick brown foxes jump over {number % 97} lazy dogs".split():
            counts[word] = counts.get(word, 0) + 1
        if len(counts) > 1 << 16:
            counts.clear()


def save_as_json(job: Job) -> None:
    """All ranks: a checkpoint as JSON, line by line, to a slow disk."""
    with job.path("weights.json").open("w") as file:
        for _ in range(int(80 * job.scale)):
            file.write(json.dumps([float(one) for one in torch.randn(20_000)]) + "\n")
            file.flush()
            time.sleep(0.4)


def accumulate_first(job: Job) -> None:
    """64 micro-steps before the first step."""
    job.train(1, 64, 0.6 * job.scale)


def minimize(job: Job) -> None:
    """L-BFGS, whose step calls the model many times."""
    model = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=25, tolerance_grad=0, tolerance_change=0)
    data = torch.randn(ROWS, WIDTH)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(data) - 1).abs().pow(1.5).mean()
        loss.backward()
        time.sleep(job.scale)
        return float(loss)

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[no-untyped-call]


def wait_between_epochs(job: Job) -> None:
    """A pause of 35 s between epochs, three times."""
    for _ in range(3):
        time.sleep(35 * job.scale)
        job.train(4)


def draw(job: Job) -> None:
    """Rank 0 draws figures for 35 s."""

    def save_figures() -> None:
        end = time.monotonic() + 35 * job.scale
        while time.monotonic() < end:
            figure = matplotlib.figure.Figure()
            figure.subplots().plot(torch.randn(2000).tolist())
            figure.savefig(job.path("figure").with_suffix(".png"), dpi=200)

    only_rank_0(job, save_figures)


def upload(job: Job) -> None:
    """Rank 0 uploads a few bytes each second for 40 s, to a server in a thread of its own."""

    def send() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=take_all, args=(listener,), daemon=True)
            thread.start()
            with socket.create_connection(listener.getsockname()) as connection:
                for _ in range(int(40 * job.scale)):
                    connection.sendall(bytes(4000))
                    time.sleep(1)
            thread.join()

    only_rank_0(job, send)


def take_all(listener: socket.socket) -> None:
    """Read until the other side closes."""
    connection, _ = listener.accept()
    with connection:
        while connection.recv(1 << 16):
            pass


def await_service(job: Job) -> None:
    """Rank 0 waits for an answer of a service for 40 s."""

    def ask() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer() -> None:
                with listener.accept()[0] as asked:
                    time.sleep(40 * job.scale)
                    asked.sendall(b"ok")

            threading.Thread(target=answer, daemon=True).start()
            with socket.create_connection(listener.getsockname()) as connection:
                connection.recv(10)

    only_rank_0(job, ask)


def reduce_without_optimizer(job: Job) -> None:
    """Work of 25 s and an all_reduce, in turn; called before all steps."""
    for _ in range(4):
        job.work(25)
        dist.all_reduce(torch.ones(4))


def end_with_child(job: Job) -> None:
    """Rank 0 waits for a child process at its end, as one that converts a checkpoint."""
    if job.rank == 0:
        subprocess.run([sys.executable, "-c", f"import time; time.sleep({45 * job.scale})"], check=True)


def compress(job: Job) -> None:
    """Rank 0 compresses a checkpoint for 45 s."""

    def write() -> None:
        end = time.monotonic() + 45 * job.scale
        with gzip.open(job.path("checkpoint.gz"), "wb") as file:
            while time.monotonic() < end:
                file.write(os.urandom(1 << 16))

    only_rank_0(job, write)


def lock_file(job: Job) -> None:
    """Rank 0 prepares data for 45 s under a file's lock, for which the other waits."""
    with (job.folder / "lock").open("w") as file:
        if job.rank:
            time.sleep(2)
        fcntl.flock(file, fcntl.LOCK_EX)
        if not job.rank:
            time.sleep(45 * job.scale)
    dist.barrier()


def work_in_thread(job: Job) -> None:
    """The main thread waits for one that computes for 45 s."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(compute_for, 45 * job.scale).result()


def await_many(job: Job) -> None:
    """Rank 0 waits for many answers at once for 50 s, a few of which come each second."""

    async def answer(number: int) -> None:
        await asyncio.sleep(number * job.scale / 4)

    async def gather() -> None:
        await asyncio.gather(*(answer(number) for number in range(200)))

    only_rank_0(job, lambda: asyncio.run(gather()))


def build(job: Job) -> None:
    """All ranks wait for a compiler of 45 s, which rank 0 has started."""
    words = f"import time\nend = time.monotonic() + {45 * job.scale}\nwhile time.monotonic() < end: pass"
    only_rank_0(job, lambda: subprocess.run([sys.executable, "-c", words], check=True))


def pause_longer(job: Job) -> None:
    """Pauses of 10, 25, 45 and 80 s."""
    for seconds in (10, 25, 45, 80):
        time.sleep(seconds * job.scale)
        job.train(3)


def start_workers_slowly(job: Job) -> None:
    """DataLoader workers that only sleep for 45 s when they start, in each of two epochs."""
    for _ in range(2):
        loader = DataLoader(
            Rows(4), batch_size=None, num_workers=1, worker_init_fn=lambda _: time.sleep(45 * job.scale)
        )
        for _ in loader:
            job.train(1)


def prepare_in_fork(job: Job) -> None:
    """A forked child prepares data for 45 s, and the rank waits for it."""
    child = os.fork()
    if not child:
        compute_for(45 * job.scale)
        os._exit(0)
    os.waitpid(child, 0)


def serve_parameters(job: Job) -> None:
    """Rank 1 asks rank 0, which never steps, for parameters each 30 s."""
    for _ in range(3):
        if job.rank == 1:
            job.work(30)
            dist.send(torch.ones(4), 0)
        else:
            dist.recv(torch.empty(4), 1)


def read_mapped(job: Job) -> None:
    """Rank 0 goes through a mapped file slowly, for 50 s."""
    path = job.path("mapped")
    path.write_bytes(bytes(64 * CHUNK))

    def read() -> None:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for number in range(int(200 * job.scale)):
                data[(number % 64) * CHUNK : (number % 64 + 1) * CHUNK]
                time.sleep(0.25)

    only_rank_0(job, read)


def debug(job: Job) -> None:
    """A debugger waits at its prompt for somebody who has gone for coffee; the harness types `c` then."""
    breakpoint()


FIRST: Mapping[str, Callable[[Job], None]] = {
    "first-step": step_slowly_first,
    "preprocess-alone": alone(step_slowly_first),
    "download-alone": download_alone,
    "accumulate-first": accumulate_first,
    "no-optimizer": reduce_without_optimizer,
}
"""Before the first step."""
LAST: Mapping[str, Callable[[Job], None]] = {"child-at-end": end_with_child}
"""After all steps, and after the process group."""
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
    "steps-compute": compute_in_steps,
    "rollout-pool": roll_out_in_pool,
    "rollout": roll_out,
    "evaluate-training": evaluate_in_training_mode,
    "tokenize": tokenize,
    "save-json": save_as_json,
    "lbfgs": minimize,
    "epochs-wait": wait_between_epochs,
    "draw-alone": draw,
    "upload-alone": upload,
    "service-alone": await_service,
    "compress-alone": compress,
    "file-lock": lock_file,
    "thread": work_in_thread,
    "asyncio-alone": await_many,
    "build-alone": build,
    "longer-pauses": pause_longer,
    "workers-sleep": start_workers_slowly,
    "fork-waits": prepare_in_fork,
    "parameter-server": serve_parameters,
    "mapped-alone": read_mapped,
    "breakpoint": debug,
    "pdb": lambda job: job.train(1),
}


def main() -> None:
    """Train, with what is slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", choices=[*FIRST, *LATER, *LAST], required=True)
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
    if words.case == "no-optimizer":
        return
    job.train(STEPS)
    if words.case in LATER:
        LATER[words.case](job)
    job.train(STEPS)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    if words.case in LAST:
        LAST[words.case](job)


if __name__ == "__main__":
    main()
