"""Reads the ranks' GPUs in a thread: a driver in trouble can keep a caller for minutes."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.codec import load
from launcher.files import LARGEST, read_file
from launcher.protocol import name_plan_file
from launcher.watch.watch_model import GpuSample

FRESH = 4
"""Intervals after which a reading is too old to be given out."""
ReadGpus = Callable[[], Mapping[int, GpuSample]]
"""Reads GPUs, by local rank; nothing if there are none."""


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """A GPU as plan-HOST.json has it."""

    index: int
    uuid: str = ""
    pci: str = ""


@dataclass(frozen=True, slots=True)
class PlannedRank:
    """A rank as plan-HOST.json has it."""

    local_rank: int
    gpu: PlannedGpu | None = None


@dataclass(frozen=True, slots=True)
class PlannedRanks:
    """What of plan-HOST.json counts here."""

    ranks: tuple[PlannedRank, ...] = ()


def read_planned_gpus(run_path: Path, host: str) -> dict[int, tuple[int, str, str]]:
    """Return index, UUID and PCI address of each local rank's GPU; none if the plan cannot be read."""
    try:
        plan = load(PlannedRanks, read_file(run_path / name_plan_file(host), LARGEST, own=True))
    except (OSError, ValueError):
        return {}
    return {rank.local_rank: (rank.gpu.index, rank.gpu.uuid, rank.gpu.pci) for rank in plan.ranks if rank.gpu}


class GpuReader:
    """Gives the last reading of the GPUs, and never waits for one."""

    def __init__(self, open_gpus: Callable[[], ReadGpus | None], interval: float) -> None:
        """`open_gpus` is called in the thread; it returns None if there is nothing to be read."""
        self.open_gpus = open_gpus
        self.interval = interval
        self.last: Mapping[int, GpuSample] = {}
        self.time = 0.0
        self.thread = threading.Thread(target=self.run, name="gpus", daemon=True)
        self.thread.start()

    def run(self) -> None:
        """Read again and again, until nothing is to be read."""
        read = self.open_gpus()
        while read is not None and (found := read()):
            self.last, self.time = found, time.monotonic()
            time.sleep(self.interval)

    def latest(self) -> Mapping[int, GpuSample]:
        """Return the last reading by local rank; nothing if it is too old, as with a driver that is stuck."""
        return self.last if time.monotonic() - self.time < FRESH * self.interval else {}
