"""The text as sequences of bytes, and their order: a pure function of the seed and the position."""

import ctypes
import multiprocessing
import os
import signal
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from launcher.programs.options import OptionError

EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Directories of Python's library that are not taken: tests, and what was installed into it."""


def find_files(path: str | None) -> list[Path]:
    """Return the files to train on that can be read, in order: the user's, or those of Python's library."""
    source = Path(path or sysconfig.get_path("stdlib")).expanduser()
    files = [] if source.is_dir() else [source]
    for folder, folders, names in os.walk(source):  # which is nothing for a file
        folders[:] = sorted(set(folders) - (EXCLUDED if path is None else set()))
        files += [Path(folder, name) for name in sorted(names) if path or name.endswith(".py")]
    files = [file for file in files if file.is_file() and os.access(file, os.R_OK)]
    if not files:
        raise OptionError(f"--data.path {source} is no file that can be read, and no directory with some")
    return files


class Windows(Dataset[torch.Tensor]):
    """The text, one file after the other, cut into windows of seq_len + 1 bytes that overlap by one; uint8.

    The first `training` are for training, the last `validation` are held out.
    """

    def __init__(self, path: str | None, seq_len: int, val_fraction: float) -> None:
        """Take the user's file or directory, or Python's library; raises OptionError if that is too short."""
        self.files, self.seq_len = find_files(path), seq_len
        self.ends = list(accumulate(file.stat().st_size for file in self.files))
        """Of each file, in the text."""
        self.size = self.ends[-1]
        count = max(0, self.size - 1) // seq_len
        self.validation = max(1, round(count * val_fraction)) if val_fraction else 0
        self.training = count - self.validation
        if self.training < 1:
            raise OptionError(
                f"the text has {self.size} bytes, too few for sequences of {seq_len}: give more text"
            )

    def __len__(self) -> int:
        return self.training + self.validation

    def __getitem__(self, index: int) -> torch.Tensor:
        start, data = index * self.seq_len, bytearray()
        number = bisect_right(self.ends, start)
        while len(data) <= self.seq_len:
            with self.files[number].open("rb") as file:
                file.seek(start + len(data) - (self.ends[number - 1] if number else 0))
                data += file.read(self.seq_len + 1 - len(data))
            number += 1
        return torch.frombuffer(data, dtype=torch.uint8)


@lru_cache(maxsize=1)
def shuffle(size: int, seed: int) -> torch.Tensor:
    """Give the order of an epoch's windows; the last one is kept."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


@dataclass
class Schedule(Sampler[list[int]]):
    """The windows of one rank, a list for each micro-step, from `first` on.

    A global batch takes the next `world_size * accumulation * batch_size` positions; all ranks' shares of a
    micro-step lie side by side. The order depends on neither the world size nor where a run was resumed:
    each epoch is a permutation that the seed and the epoch's number decide.
    """

    windows: Windows
    seed: int
    first: int
    """Position of the first sequence: those already consumed by all ranks."""
    micro_steps: int
    batch_size: int
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[list[int]]:
        for micro_step in range(self.micro_steps):
            start = self.first + (micro_step * self.world_size + self.rank) * self.batch_size
            yield [self.choose_window(position) for position in range(start, start + self.batch_size)]

    def choose_window(self, position: int) -> int:
        """Give the number of the window at a position."""
        epoch, place = divmod(position, self.windows.training)
        return int(shuffle(self.windows.training, self.seed * 1_000_003 + epoch)[place])

    def make_loader(self, workers: int, *, pin: bool) -> DataLoader[torch.Tensor]:
        """Make the loader of (batch_size, seq_len + 1) bytes, in this order."""
        return DataLoader(
            self.windows,
            batch_sampler=self,
            num_workers=workers,
            pin_memory=pin,
            worker_init_fn=_start_worker,
        )


def _start_worker(_: int) -> None:
    """Tie a DataLoader worker to its rank: it ends with the rank, and ignores signals of its own.

    A signal to the whole process group would otherwise end the workers before the rank's checkpoint.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    rank = multiprocessing.parent_process()
    if rank and os.getppid() != rank.pid:  # it has died before
        os._exit(1)
