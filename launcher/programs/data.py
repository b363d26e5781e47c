"""Sequences of bytes, and their order: a pure function of the seed and the position."""

import ctypes
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from launcher.programs.options import OptionError

MASK = (1 << 64) - 1


class Windows(Dataset[torch.Tensor]):
    """The text cut into windows of seq_len + 1 bytes, each overlapping the next by one; uint8."""

    def __init__(self, path: Path, seq_len: int) -> None:
        self.path, self.seq_len = path, seq_len
        self.size = path.stat().st_size
        self.text: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def __len__(self) -> int:
        return max(0, self.size - 1) // self.seq_len

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.text is None:
            self.text = np.memmap(self.path, dtype=np.uint8, mode="r")
        start = index * self.seq_len
        return torch.from_numpy(np.array(self.text[start : start + self.seq_len + 1]))

    def __getstate__(self) -> dict[str, Any]:
        # Spawned workers map the file themselves: pickling a map copies all of it.
        return {**self.__dict__, "text": None}


@dataclass(frozen=True, slots=True)
class Split:
    """Which windows are for training: all but each `stride`-th, which is for validation."""

    windows: int
    stride: int
    """0 if nothing is held out."""

    @property
    def validation(self) -> int:
        """Windows held out."""
        return self.windows // self.stride if self.stride else 0

    @property
    def training(self) -> int:
        """Windows to train on."""
        return self.windows - self.validation

    def train_window(self, index: int) -> int:
        """Give the window of a training index below `training`."""
        return index + index // (self.stride - 1) if self.stride else index

    def validation_window(self, index: int) -> int:
        """Give the window of a validation index below `validation`."""
        return (index + 1) * self.stride - 1


def split_windows(windows: Windows, fraction: float) -> Split:
    """Hold out a share of the windows, evenly spread; raises OptionError if the text is too short."""
    stride = max(2, round(1 / fraction)) if fraction else 0
    if len(windows) < max(stride, 1):
        least = max(stride, 1) * windows.seq_len + 1
        raise OptionError(
            f"{windows.path} has {windows.size} bytes, but sequences of {windows.seq_len} need {least}: "
            "give more text, a smaller --seq-len, or a larger --data.val_fraction"
        )
    return Split(len(windows), stride)


@dataclass(frozen=True, slots=True)
class TrainingText:
    """The text of a run."""

    windows: Windows
    split: Split


def hash_bits(value: int, key: int) -> int:
    """Hash 64 bits (the finaliser of splitmix64, Steele et al. 2014)."""
    value = (value + key + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Give the place of `index` in a permutation of range(size) chosen by `key`, without storing it.

    A balanced Feistel network of six rounds over the next even number of bits, walked until it lands
    inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(6):
            left, right = right, left ^ (hash_bits(right, key + turn * 0xD6E8FEB86659FD93) & mask)
        index = (left << half) | right
        if index < size:
            return index


def choose_index(position: int, size: int, seed: int) -> int:
    """Give the training index at a position of the endless global order: each epoch a new permutation."""
    epoch, index = divmod(position, size)
    return permute(index, size, hash_bits(epoch, hash_bits(seed, 0)))


@dataclass(frozen=True, slots=True)
class Schedule(Sampler[list[int]]):
    """The windows of one rank, a list for each micro-step, from `first` on.

    A global batch takes the next `world_size * accumulation * batch_size` positions; all ranks' shares of a
    micro-step lie side by side. The order depends on neither the world size nor where a run was resumed.
    """

    split: Split
    seed: int
    first: int
    """Position of the first sequence: those already consumed by all ranks."""
    micro_steps: int
    batch_size: int
    rank: int
    world_size: int

    def __len__(self) -> int:
        return self.micro_steps

    def __iter__(self) -> Iterator[list[int]]:
        for micro_step in range(self.micro_steps):
            start = self.first + (micro_step * self.world_size + self.rank) * self.batch_size
            yield [self.find_window(position) for position in range(start, start + self.batch_size)]

    def find_window(self, position: int) -> int:
        """Give the window at a position of the global order."""
        return self.split.train_window(choose_index(position, self.split.training, self.seed))


def start_worker(_: int) -> None:
    """Tie a DataLoader worker to its rank: it ends with the rank, and ignores signals of its own.

    A signal to the whole process group would otherwise end the workers before the rank's checkpoint.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if os.getppid() == 1:
        os._exit(1)


def make_loader(windows: Windows, schedule: Schedule, workers: int, *, pin: bool) -> DataLoader[torch.Tensor]:
    """Make the loader of (batch_size, seq_len + 1) bytes, in the schedule's order."""
    return DataLoader(
        windows,
        batch_sampler=schedule,
        num_workers=workers,
        pin_memory=pin,
        persistent_workers=workers > 0,
        worker_init_fn=start_worker,
    )
