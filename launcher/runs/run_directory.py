"""The run directory, `RUNS_DIR/NAME/ID/`: made once, and the same for every rank and attempt."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.files import (
    DIRECTORY,
    ON_THE_WAY,
    Descriptor,
    make_inner,
    open_directory,
    open_inner,
    open_own,
    write_whole,
)
from launcher.protocol import LOGS, name_plan_file, name_rank_log

OURS = ("agent-", "slurm-")
"""How the logs begin that are no rank's."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """Where everything of a run is kept; all of it is readable by its owner alone."""

    path: Path
    first_attempt: int = 0
    """Number of this start's first attempt, after those of earlier starts into the same directory."""

    node_rank: int = 0
    """Number of this node in a job that is started by hand, whose nodes may share the directory."""

    @property
    def manifest_path(self) -> Path:
        """The manifest; nodes above 0 of a job that is started by hand have their own."""
        return self.path / ("manifest.json" if self.node_rank == 0 else f"manifest-{self.node_rank}.json")

    @property
    def id(self) -> str:
        """The run's identifier, unique among runs of its name."""
        return self.path.name

    def plan_path(self, host: str) -> Path:
        """The plan of one node."""
        return self.path / name_plan_file(host)

    def agent_log(self, host: str) -> Path:
        """What the agent on one node printed; without torchrun, what ranks printed before they had logs."""
        return self.path / LOGS / f"agent-{host}.log"

    def rank_log(self, rank: int, attempt: int, ending: str) -> Path:
        """Output of one rank: `ending` is `out` or `err`."""
        return self.path / LOGS / str(attempt) / name_rank_log(rank, ending)


class RunIdTakenError(Exception):
    """Another run of the name has begun in the same second and has the ID."""


def create_run_dir(path: Path) -> RunDir:
    """Make RUNS_DIR/NAME/ID; raises RunIdTakenError if it is there, else OSError.

    RUNS_DIR and NAME may be symbolic links of this user's or root's; NAME is this user's directory.
    """
    above, runs_dir = path.parent, path.parent.parent
    with contextlib.suppress(FileExistsError):
        runs_dir.mkdir(parents=True)
    with full_names(runs_dir), open_directory(runs_dir, flags=ON_THE_WAY) as at:
        with contextlib.suppress(FileExistsError):
            os.mkdir(above.name, 0o700, dir_fd=at)
        above_at = open_own(above.name, at=at)
    with above_at as inner, full_names(above):
        try:
            os.mkdir(path.name, 0o700, dir_fd=inner)
        except FileExistsError:
            raise RunIdTakenError(path) from None
        try:
            prepare_folders(open_inner(inner, path.name), path)
        except OSError:
            import shutil

            shutil.rmtree(path, ignore_errors=True)
            raise
    return RunDir(path)


def open_run_dir(path: Path, node_rank: int | None) -> RunDir:
    """Open a run directory by name, making it if need be; raises OSError.

    One that another user owns is refused, and one whose folders for logs are symbolic links. A later start
    goes on counting attempts where the last one ended. Nodes that are started by hand, with a `node_rank`,
    may share the directory and all count from 0, since none knows which came first.
    """
    path = path.absolute()
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    with full_names(path):
        earlier = prepare_folders(open_own(path), path)
    if node_rank is not None:
        return RunDir(path, 0, node_rank)
    return RunDir(path, max(earlier, default=-1) + 1)


def list_logs(path: Path, *inner: str) -> list[str]:
    """Return the names in a run's `logs`, or in a folder there; symbolic links are left out.

    Empty if it cannot be read, as in a network filesystem's hiccup.
    """
    try:
        found = open_directory(path)
        for name in (LOGS, *inner):
            with found as at:
                found = Descriptor(os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=at))
        with found as at, os.scandir(at) as entries:
            return [entry.name for entry in entries if not entry.is_symlink()]
    except (OSError, ValueError):
        return []


def prepare_folders(run: Descriptor, path: Path) -> list[int]:
    """Close a run directory to others, make its folder for logs, and return the attempts that have one there.

    The descriptor is closed. Raises OSError, also for a link in the place of a log.
    """
    found = []
    with run as at:
        os.fchmod(at, 0o700)
        logs = make_inner(at, LOGS)
    with logs as at, full_names(path / LOGS), os.scandir(at) as entries:
        for entry in entries:
            name = entry.name
            if entry.is_symlink() and (name.isdecimal() or name.startswith(OURS)):
                raise OSError(errno.ELOOP, "a symbolic link, which a run directory cannot have there", name)
            found += [int(name)] if name.isdecimal() else []
    return found


@contextlib.contextmanager
def full_names(above: Path) -> Iterator[None]:
    """Give errors on files that are opened from a directory the whole name."""
    try:
        yield
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else ""
        raise OSError(error.errno, error.strerror, str(above / name)) from None


def write_private(path: Path, text: str) -> None:
    """Write a file of a run directory, for its owner alone, whole or not at all; raises OSError."""
    with full_names(path.parent), open_own(path.parent) as at:
        write_whole(at, path.name, text.encode("utf-8", "surrogateescape"))


def write_json(path: Path, value: object) -> None:
    """Write a JSON file of a run directory, as `write_private` does; raises OSError."""
    write_private(path, json.dumps(value, indent=1) + "\n")


SIZE = 256 << 10
"""Bytes that are held: a manifest of some hundred attempts, the last lines of the log, records."""
TRIAL = 4 << 10
"""Bytes that are written to see whether that is possible."""
FULL = "the run directory's disk is full"
REMOVED = "the run directory was removed during the run"
held: dict[Path, int] = {}
"""What holds the space of each run: a file without a name, so that nothing is left of it after a SIGKILL."""


def reserve_space(run: RunDir, size: int = SIZE) -> None:
    """Take some bytes while there are any, which `release_space` gives back; else there are none."""
    if run.path not in held:
        with contextlib.suppress(OSError):
            held[run.path] = write_nameless(run, size)


def release_space(run: RunDir) -> str:
    """Give back what was held, when the ranks have ended, who would use it up.

    Returns why nothing could be written any more before that, in words; empty if it could.
    """
    trouble = ""
    try:
        os.close(write_nameless(run, TRIAL))
    except OSError as error:
        trouble = explain_write_error(run, error)
    if run.path in held:
        os.close(held.pop(run.path))
    return trouble


def explain_write_error(run: RunDir, error: OSError) -> str:
    """Say what the error of a write means for a run directory."""
    if error.errno == errno.EDQUOT:
        return f"your quota on the run directory's disk is used up ({run.path})"
    if error.errno == errno.ENOSPC:
        return f"{FULL} ({run.path})"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"{REMOVED} ({run.path})"
    return f"the run directory cannot be written ({run.path}: {error.strerror})"


def is_full(run: RunDir) -> bool:
    """Tell whether the run directory's disk has no room; a quota is not seen so, and nothing is written."""
    with contextlib.suppress(OSError):
        found = os.statvfs(run.path)
        return found.f_bavail * found.f_frsize < TRIAL
    return False


def write_nameless(run: RunDir, count: int) -> int:
    """Return a descriptor of a new file without a name that has some bytes; raises OSError.

    They are random: no filesystem makes them smaller.
    """
    import tempfile  # not for programs that read runs alone

    with tempfile.TemporaryFile(dir=run.path, buffering=0) as file:
        file.write(os.urandom(count))
        os.fsync(file.fileno())  # network filesystems tell of a full disk late
        return os.dup(file.fileno())
