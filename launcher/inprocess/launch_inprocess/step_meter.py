"""Measures a rank's steps and its waiting for data, for `launch tune`, then ends the rank.

`LAUNCH_METER` is JSON: the `folder` for the ranks' records, and the `steps` and `seconds` that are enough for
any noise. A rank that has measured enough writes its record and goes on, since the others may wait for it in
a collective. Once all ranks have written, each ends itself.
"""

import math
import os
import sys
import time
from _thread import get_ident
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from .import_hook import when_imported

WARMUP = 3
"""Steps that are slow for once: the first of everything, compilation, the workers' start."""
MIN_STEPS = 12
"""Measured steps at least."""
MIN_BLOCKS = 3
PRECISION = 0.015
"""Standard error of the mean, as a share of it, that is good enough."""
MIN_BLOCK_STEPS = 4
"""Steps that a block has at least; fewer say nothing of the noise."""
POLL = 0.02
"""Seconds between two looks for the other ranks' records."""
PATIENCE = 60.0
"""Seconds that a rank which is done waits for one that neither steps nor loads."""


def start_meter(environ: Mapping[str, str]) -> None:
    """Measure the training of this process, a rank."""
    import atexit
    import json

    order = json.loads(environ["LAUNCH_METER"])
    meter = Meter(order, int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")))
    when_imported("torch.utils.data.dataloader", meter.time_loaders)
    when_imported("torch.optim.optimizer", meter.note_optimizers)
    atexit.register(meter.record_at_exit)
    from .step_counter import on_step

    on_step(meter.note_step)


class Meter:
    """What one rank has measured."""

    def __init__(self, order: "dict[str, Any]", rank: int, ranks: int) -> None:
        self.folder = str(order["folder"])
        self.max_steps, self.seconds = int(order["steps"]), float(order["seconds"])
        self.rank, self.ranks = rank, ranks
        self.process = os.getpid()
        self.waited, self.batches = 0.0, 0
        """Seconds in the DataLoaders' `__next__` and `__iter__`, and the batches that came."""
        self.waiting: set[int] = set()
        """Threads in one of these: a dataset may read from another loader."""
        self.loaders: dict[tuple[int, bool, int | None], int] = {}
        """Batches by the loader's number of workers, whether its dataset is iterable, and its batch size."""
        self.has_optimizer, self.unit = False, "batch"
        self.marks: list[tuple[float, float, int]] = []
        """Time, waiting and batches at the end of each step."""
        self.first: int | None = None
        """Index of the mark at which the warm-up was over."""
        self.done = False

    def time_loaders(self, module: ModuleType) -> None:
        """Time what the training waits for: batches, and the start of the workers."""
        iterator, loader = module._BaseDataLoaderIter, module.DataLoader
        iterator.__next__ = self.time_method(iterator.__next__, counts=True)
        loader.__iter__ = self.time_method(loader.__iter__, counts=False)

    def time_method(self, original: Any, *, counts: bool) -> Any:  # noqa: ANN401 - torch's own methods
        """Return a method of torch's that adds its time to the waiting, and counts what it returns."""

        def timed(owner: Any) -> Any:  # noqa: ANN401
            thread = get_ident()
            if self.done or thread in self.waiting or os.getpid() != self.process:
                return original(owner)
            self.waiting.add(thread)
            begin = time.perf_counter()
            try:
                found = original(owner)
            finally:
                self.waiting.discard(thread)
                self.waited += time.perf_counter() - begin
            if counts:
                self.note_batch(owner)
            return found

        return timed

    def note_optimizers(self, module: ModuleType) -> None:
        """Note that there is an optimizer: then its steps are counted, else batches."""
        original = module.Optimizer.__init__

        def init_and_note(owner: object, *args: object, **kwargs: object) -> None:
            self.has_optimizer = True
            original(owner, *args, **kwargs)

        module.Optimizer.__init__ = init_and_note

    def note_batch(self, iterator: object) -> None:
        """Count a batch, which is a step if there is no optimizer."""
        workers, iterable = getattr(iterator, "_num_workers", 0), getattr(iterator, "_dataset_kind", 0)
        kind = int(workers), bool(iterable), find_batch_size(iterator)
        self.loaders[kind] = self.loaders.get(kind, 0) + 1
        self.batches += 1
        if not self.has_optimizer:
            self.note_mark()

    def note_step(self, _step: int) -> None:
        """Count a step of the leading optimizer; batches before the first were no steps."""
        if self.done or os.getpid() != self.process:
            return
        if self.unit == "batch":
            self.unit, self.first = "step", None
            self.marks.clear()
        self.note_mark()

    def note_mark(self) -> None:
        """End a step, and the measuring if it has enough steps."""
        self.marks.append((time.perf_counter(), self.waited, self.batches))
        if self.first is None:
            if self.is_warm():
                self.synchronize_mark()
                self.first = len(self.marks) - 1
            return
        workers = max((workers for workers, *_ in self.loaders), default=0)
        if is_enough(self.list_times(), choose_block(workers), self.max_steps, self.seconds):
            self.synchronize_mark()
            self.finish_measuring()

    def is_warm(self) -> bool:
        """Tell whether the first steps are over, and the batches that were prefetched in them are used up.

        A wait shows that they are; without one, twice the workers' number are prefetched (torch's default).
        """
        if len(self.marks) < WARMUP:
            return False
        (before, waited, _), (now, waited_now, batches) = self.marks[-2:]
        workers = max((workers for workers, *_ in self.loaders), default=0)
        return workers == 0 or waited_now - waited > 0.1 * (now - before) or batches > 2 * workers

    def synchronize_mark(self) -> None:
        """Wait for the GPU to end the step, and set the step's mark there."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            cuda.synchronize()
        self.marks[-1] = (time.perf_counter(), *self.marks[-1][1:])

    def list_times(self) -> "list[float]":
        """Return the seconds of each measured step."""
        return list_changes(self.marks[self.first or 0 :], 0)

    def finish_measuring(self) -> None:
        """Write the record, and have a thread end this process when all ranks have written theirs."""
        import threading

        self.done = True
        self.write_measured(ended=False)
        sys.excepthook = lambda *_: wait_for_end()  # a peer that ends first breaks a collective here
        threading.Thread(target=self.end_process, daemon=True).start()

    def end_process(self) -> None:
        """Wait for the other ranks' records, then end this process and its workers."""
        try:
            deadline = time.monotonic() + PATIENCE
            names = {f"rank-{rank}.json" for rank in range(self.ranks)}
            while not names <= set(os.listdir(self.folder)) and time.monotonic() < deadline:
                time.sleep(POLL)
            if "multiprocessing" in sys.modules:
                for child in sys.modules["multiprocessing"].active_children():
                    child.kill()
        finally:
            os._exit(0)

    def record_at_exit(self) -> None:
        """Write what there is at the program's own end; after enough steps, wait to be ended."""
        if os.getpid() != self.process:
            return
        if self.done:
            wait_for_end()
        if self.marks or self.has_optimizer or self.batches:
            self.done = True
            self.write_measured(ended=True)

    def write_measured(self, *, ended: bool) -> None:
        """Write what this rank has measured, whole or not at all."""
        import json

        measured = self.marks[self.first :] if self.first is not None else []
        names = ("workers", "iterable", "batch_size", "batches")
        loaders = [dict(zip(names, (*kind, count), strict=True)) for kind, count in self.loaders.items()]
        record = {
            "rank": self.rank,
            "unit": self.unit,
            "steps": len(self.marks),
            "first": self.first,
            "times": list_changes(measured, 0),
            "waits": list_changes(measured, 1),
            "loaders": loaders,
            "batches": measured[-1][2] - measured[0][2] if measured else 0,
            "memory_kib": measure_memory(),
            "peak_kib": measure_peak_memory(),
            **measure_gpu(),
            "ended": ended,
        }
        path = os.path.join(self.folder, f"rank-{self.rank}.json")
        with open(f"{path}.draft", "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(f"{path}.draft", path)


def list_changes(marks: "list[tuple[float, float, int]]", at: int) -> "list[float]":
    """Return how a field of the marks has changed from each to the next."""
    return [marks[number][at] - marks[number - 1][at] for number in range(1, len(marks))]


def wait_for_end() -> None:
    """Wait for the end of this process."""
    while True:
        time.sleep(PATIENCE)


def choose_block(workers: int) -> int:
    """Return how many steps belong together: workers that start together deliver together."""
    return max(1, workers) * math.ceil(MIN_BLOCK_STEPS / max(1, workers))


def is_enough(times: Sequence[float], block: int, max_steps: int, seconds: float) -> bool:
    """Tell whether the mean of these step times (s) is known, or enough has been spent on it.

    Steps count in whole blocks, unless `seconds` are over.
    """
    if len(times) >= 2 * MIN_BLOCK_STEPS and sum(times) >= seconds:
        return True
    if len(times) < MIN_STEPS or len(times) % block:
        return False
    if len(times) >= max_steps:
        return True
    sums = [sum(times[at : at + block]) for at in range(0, len(times), block)]
    return len(sums) >= MIN_BLOCKS and find_error(sums) <= PRECISION


def find_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean, as a share of it; infinite for a single value."""
    count, mean = len(values), sum(values) / len(values)
    if count < 2 or mean <= 0:
        return math.inf
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return math.sqrt(variance / count) / mean


def find_batch_size(iterator: object) -> "int | None":
    """Return the samples of a loader's batches, by its batch sampler; None if that does not say."""
    size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def measure_gpu() -> "dict[str, int]":
    """Return in KiB what a GPU has, the most that PyTorch had reserved of it, and what else uses it now.

    All 0 if this process has not used one. What else is used is CUDA's own context, NCCL, other processes.
    """
    found = {"gpu_total_kib": 0, "gpu_reserved_kib": 0, "gpu_other_kib": 0}
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return found
    try:
        free, total = cuda.mem_get_info()
        found["gpu_total_kib"] = total >> 10
        found["gpu_reserved_kib"] = cuda.max_memory_reserved() >> 10
        found["gpu_other_kib"] = max(0, total - free - cuda.memory_reserved()) >> 10
    except Exception:  # an allocator without statistics, or a backend that is no NVIDIA's
        return found
    return found


def measure_peak_memory() -> int:
    """Return in KiB the most that this process has had in memory, with what its children have now.

    0 if the kernel does not report it. Source: VmHWM in proc_pid_status(5).
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            peak = next((int(line.split()[1]) for line in file if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0
    return peak + sum(map(read_pss, list_child_pids()))


def measure_memory() -> int:
    """Return what this process and its children use in KiB, pages that several share counted in part.

    0 if the kernel does not report it.
    """
    return sum(read_pss(pid) for pid in ["self", *list_child_pids()])


def list_child_pids() -> "list[str]":
    """Return the PIDs of this process's children, whichever thread has started them (proc(5))."""
    found: list[str] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                found += file.read().split()
    except OSError:
        return found
    return found


def read_pss(pid: str) -> int:
    """Return a process's proportional share of memory in KiB."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii", errors="replace") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0
