"""The text as sequences of bytes, and their order: a pure function of the seed and the position."""

import ctypes
import hashlib
import multiprocessing
import os
import signal
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from launcher.programs.options import OptionError

EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Directories of Python's library that are not taken: tests, and what was installed into it."""


def find_text(path: str | None) -> Path:
    """Return the file to train on: the user's, the files of the user's directory in one, or Python's library.

    Files are gathered in this user's cache, under a name that changes with any of them. Raises OptionError if
    there is none or it cannot be read.
    """
    source = Path(sysconfig.get_path("stdlib")) if path is None else Path(path).expanduser()
    try:
        if not source.is_dir():
            with source.open("rb"):
                return source
        files, digest = [], hashlib.sha256()
        for folder, folders, names in os.walk(source):
            folders[:] = sorted(
                set(folders) - (EXCLUDED if path is None else set())
            )  # the same order anywhere
            for file in (Path(folder, name) for name in sorted(names)):
                if file.is_file() and (path is not None or file.suffix == ".py"):
                    files.append(file)
                    found = file.stat()
                    digest.update(os.fsencode(file.resolve()))
                    digest.update(f"\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
        if not files:
            raise OptionError(f"--data.path {source} holds no files: give a directory with text in it")
        target = _find_cache() / f"directory-{digest.hexdigest()[:16]}.txt"
        if not target.exists():
            # Ranks that start at once each write a file of their own and rename it: the last one stays.
            with (
                tempfile.TemporaryDirectory(dir=target.parent) as part,
                Path(part, "text").open("wb") as text,
            ):
                for file in files:
                    text.write(file.read_bytes())
                text.flush()
                Path(text.name).rename(target)
        return target
    except OSError as error:
        raise OptionError(f"--data.path {source}: {error.strerror}: give one that can be read") from None


def _find_cache() -> Path:
    """Return a directory of this user's for derived files."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path.expanduser raises if there is no home
    for base in (Path(home), Path(tempfile.gettempdir(), f"cache-{os.getuid()}")):
        folder = base / "launch-text"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        # Another user's directory in a shared /tmp could hold anything.
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise OptionError(f"neither {home} nor {tempfile.gettempdir()} can be written: set XDG_CACHE_HOME")


class Windows(Dataset[torch.Tensor]):
    """The text cut into windows of seq_len + 1 bytes, each overlapping the next by one; uint8.

    The first `training` are for training, the last `validation` are held out.
    """

    def __init__(self, path: Path, seq_len: int, val_fraction: float) -> None:
        """Raises OptionError if the text is too short."""
        self.path, self.seq_len = path, seq_len
        self.size = path.stat().st_size
        count = max(0, self.size - 1) // seq_len
        self.validation = max(1, round(count * val_fraction)) if val_fraction else 0
        self.training = count - self.validation
        self.text: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        if self.training < 1:
            least = (2 if val_fraction else 1) * seq_len + 1
            raise OptionError(
                f"{path} has {self.size} bytes, but sequences of {seq_len} need {least}: "
                "give more text, or a smaller --seq-len"
            )

    def __len__(self) -> int:
        return self.training + self.validation

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.text is None:
            self.text = np.memmap(self.path, dtype=np.uint8, mode="r")
        start = index * self.seq_len
        return torch.from_numpy(np.array(self.text[start : start + self.seq_len + 1]))

    def __getstate__(self) -> dict[str, Any]:
        # Spawned workers map the file themselves: pickling a map copies all of it.
        return {**self.__dict__, "text": None}


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

    def __len__(self) -> int:
        return self.micro_steps

    def __iter__(self) -> Iterator[list[int]]:
        size, epoch, order = self.windows.training, -1, torch.empty(0)
        for micro_step in range(self.micro_steps):
            start = self.first + (micro_step * self.world_size + self.rank) * self.batch_size
            chosen = []
            for position in range(start, start + self.batch_size):
                if position // size != epoch:
                    epoch = position // size
                    seed = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                    order = torch.randperm(size, generator=seed)
                chosen.append(int(order[position % size]))
            yield chosen

    def make_loader(self, workers: int, *, pin: bool) -> DataLoader[torch.Tensor]:
        """Make the loader of (batch_size, seq_len + 1) bytes, in this order."""
        return DataLoader(
            self.windows,
            batch_sampler=self,
            num_workers=workers,
            pin_memory=pin,
            persistent_workers=workers > 0,
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
