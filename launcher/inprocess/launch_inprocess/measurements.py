"""Measures a rank: its steps and its waiting for data for `launch tune`, and its peak of memory for the run.

`LAUNCH_METER` is JSON: the `folder` for the ranks' records, and the `steps` and `seconds` that are enough for
any noise. A rank that has measured enough writes its record and goes on, since the others may wait for it in
a collective. Once all ranks have written, each ends itself.

`LAUNCH_MEMORY` is the run directory, in which the peak of memory is written at the rank's end. A GPU that the
program has not used is not touched.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from _thread import get_ident

from .import_hook import (
    Suppressed,
    call_safely,
    find_cuda,
    is_foreign,
    surround,
    when_framework_is_used,
    when_imported,
)
from .loaders import watch_waits
from .step_counter import COUNTER, on_step

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Mapping, MutableMapping, Sequence
    from types import ModuleType
    from typing import Any

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


def start_memory_record(environ: MutableMapping[str, str]) -> None:
    """Have the peak written at this process's end if it imports torch; what it starts is not the rank.

    It is that of resident memory, and of the GPUs on which torch has allocated something.
    """
    folder, rank, process = environ.pop("LAUNCH_MEMORY", ""), environ.get("RANK", ""), os.getpid()

    def write(_module: ModuleType) -> None:
        if os.getpid() != process:
            return
        cuda = find_cuda()
        devices: list[dict[str, object]] = []
        for index in range(cuda.device_count()) if cuda else ():
            if reserved := cuda.max_memory_reserved(index):
                name, allocated = cuda.get_device_name(index), cuda.max_memory_allocated(index)
                devices.append({"index": index, "name": name, "reserved": reserved, "allocated": allocated})
        resident = 1024 * _read_kib("/proc/self/status", "VmHWM:")
        record = {"schema": 1, "rank": int(rank), "steps": COUNTER.step, "resident": resident}
        _write_json(os.path.join(folder, f"rank-{int(rank)}.memory.json"), {**record, "devices": devices})

    if rank.isdigit():
        when_framework_is_used(lambda module: atexit.register(call_safely, write, module))


def start_meter(environ: Mapping[str, str]) -> None:
    """Measure the training of this process, a rank."""
    import json

    order = json.loads(environ["LAUNCH_METER"])
    meter = Meter(order, int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")))
    watch_waits(when_imported, meter.begin_wait, meter.end_wait)
    when_imported(
        "torch.optim.optimizer",
        lambda module: surround(module.Optimizer, "__init__", meter.note_optimizer),
    )
    atexit.register(meter.record_at_exit)
    on_step(meter.note_step)


class Meter:
    """What one rank has measured."""

    def __init__(self, order: dict[str, Any], rank: int, ranks: int) -> None:
        self.folder = str(order["folder"])
        self.max_steps, self.seconds = int(order["steps"]), float(order["seconds"])
        self.rank, self.ranks = rank, ranks
        self.process = os.getpid()
        self.waited, self.batches = 0.0, 0
        """Seconds in the DataLoaders' `__next__` and `__iter__`, and the batches that came."""
        self.waiting: dict[int, float] = {}
        """When threads have begun to wait in one of these."""
        self.loaders: dict[tuple[int, bool, int | None], int] = {}
        """Batches by the loader's number of workers, whether its dataset is iterable, and its batch size."""
        self.has_optimizer, self.unit = False, "batch"
        self.marks: list[tuple[float, float, int]] = []
        """Time, waiting and batches at the end of each step."""
        self.first: int | None = None
        """Index of the mark at which the warm-up was over."""
        self.done = False

    def begin_wait(self) -> bool:
        """Begin a wait for data; False within one: a dataset may read from another loader."""
        thread = get_ident()
        if self.done or thread in self.waiting or os.getpid() != self.process:
            return False
        self.waiting[thread] = time.perf_counter()
        return True

    def end_wait(self, iterator: object) -> None:
        """End a wait for data, or for the workers' start; count the batch if one came."""
        self.waited += time.perf_counter() - self.waiting.pop(get_ident())
        if iterator is not None:
            self._note_batch(iterator)

    def note_optimizer(self) -> None:
        """Note that there is an optimizer: then its steps are counted, else batches."""
        self.has_optimizer = True

    def _note_batch(self, iterator: object) -> None:
        """Count a batch, which is a step if there is no optimizer; its size is that of the batch sampler."""
        workers, iterable = getattr(iterator, "_num_workers", 0), getattr(iterator, "_dataset_kind", 0)
        size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
        is_size = isinstance(size, int) and not isinstance(size, bool)
        kind = int(workers), bool(iterable), size if is_size else None
        self.loaders[kind] = self.loaders.get(kind, 0) + 1
        self.batches += 1
        if not self.has_optimizer:
            self._note_mark()

    def note_step(self, _step: int) -> None:
        """Count a step of the leading optimizer; batches before the first were no steps."""
        if self.done:
            return
        if self.unit == "batch":
            self.unit, self.first = "step", None
            self.marks.clear()
        self._note_mark()

    def _note_mark(self) -> None:
        """End a step; at the end of the warm-up and of the measuring, once the GPU has ended it."""
        self.marks.append((time.perf_counter(), self.waited, self.batches))
        workers = max((workers for workers, *_ in self.loaders), default=0)
        if self.first is None:
            is_due = self._is_warm(workers)
        else:
            times = _list_changes(self.marks[self.first :], 0)
            is_due = is_enough(times, choose_block(workers), self.max_steps, self.seconds)
        if not is_due:
            return
        cuda = find_cuda()
        if cuda:
            cuda.synchronize()
        self.marks[-1] = (time.perf_counter(), *self.marks[-1][1:])
        if self.first is None:
            self.first = len(self.marks) - 1
        else:
            self._finish()

    def _is_warm(self, workers: int) -> bool:
        """Tell whether the first steps are over, and the batches that were prefetched in them are used up.

        A wait shows that they are; without one, twice the workers' number are prefetched (torch's default).
        """
        if len(self.marks) < WARMUP:
            return False
        (before, waited, _), (now, waited_now, batches) = self.marks[-2:]
        return workers == 0 or waited_now - waited > 0.1 * (now - before) or batches > 2 * workers

    def _finish(self) -> None:
        """Write the record, and have a thread end this process when all ranks have written theirs."""
        import threading

        self.done = True
        self._write(ended=False)
        sys.excepthook = lambda *_: _wait_for_end()  # a peer that ends first breaks a collective here
        threading.Thread(target=self._end_process, daemon=True).start()

    def _end_process(self) -> None:
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
            _wait_for_end()
        if self.marks or self.has_optimizer or self.batches:
            self.done = True
            self._write(ended=True)

    def _write(self, *, ended: bool) -> None:
        """Write what this rank has measured.

        Memory is in KiB: what this process and its children use, pages that several share counted in part,
        and the most that this process has had in memory, with what its children have now.
        """
        measured = self.marks[self.first :] if self.first is not None else []
        loaders = [
            {"workers": workers, "iterable": iterable, "batch_size": size, "batches": count}
            for (workers, iterable, size), count in self.loaders.items()
        ]
        of_children = sum(_read_kib(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in _list_child_pids())
        record = {
            "rank": self.rank,
            "unit": self.unit,
            "steps": len(self.marks),
            "first": self.first,
            "times": _list_changes(measured, 0),
            "waits": _list_changes(measured, 1),
            "loaders": loaders,
            "batches": measured[-1][2] - measured[0][2] if measured else 0,
            "memory_kib": _read_kib("/proc/self/smaps_rollup", "Pss:") + of_children,
            "peak_kib": _read_kib("/proc/self/status", "VmHWM:") + of_children,
            **_measure_gpu(),
            "ended": ended,
        }
        _write_json(os.path.join(self.folder, f"rank-{self.rank}.json"), record)


def _wait_for_end() -> None:
    while True:
        time.sleep(PATIENCE)


def _list_changes(marks: list[tuple[float, float, int]], at: int) -> list[float]:
    """Return how a field of the marks has changed from each to the next."""
    return [marks[number][at] - marks[number - 1][at] for number in range(1, len(marks))]


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


def _measure_gpu() -> dict[str, int]:
    """Return in KiB what a GPU has, the most that PyTorch had reserved of it, and what else uses it now.

    All 0 if this process has not used one. What else is used is CUDA's own context, NCCL, other processes.
    """
    found = dict.fromkeys(("gpu_total_kib", "gpu_reserved_kib", "gpu_other_kib"), 0)
    with Suppressed(Exception):  # an allocator without statistics, or a backend that is no NVIDIA's
        if cuda := find_cuda():
            free, total = cuda.mem_get_info()
            found["gpu_total_kib"] = total >> 10
            found["gpu_reserved_kib"] = cuda.max_memory_reserved() >> 10
            found["gpu_other_kib"] = max(0, total - free - cuda.memory_reserved()) >> 10
    return found


def _list_child_pids() -> list[str]:
    """Return the PIDs of this process's children, whichever thread has started them (proc(5))."""
    found: list[str] = []
    with Suppressed(OSError):
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                found += file.read().split()
    return found


def _read_kib(path: str, field: str) -> int:
    """Return a field of a file of procfs in KiB; 0 if the kernel does not report it (proc_pid_status(5))."""
    with Suppressed(OSError), open(path, encoding="ascii", errors="replace") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(field)), 0)
    return 0


def _write_json(path: str, record: Mapping[str, object]) -> None:
    """Write a record for this user alone, whole or not at all; raises OSError."""
    import json

    folder, name = os.path.split(path)
    draft = os.path.join(folder, f".{name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump(record, file)
        os.replace(draft, path)
    except OSError as error:  # no room
        os.unlink(draft)
        if is_foreign(error):
            raise
