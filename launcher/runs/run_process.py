"""The process that a run hangs on, named so that a later one with the same PID is never taken for it."""

import os
from collections.abc import Mapping
from errno import EPERM
from pathlib import Path

from launcher.files import open_own, read_stat

START_FIELD = 22
"""Field of /proc/PID/stat with the start in clock ticks since boot (proc(5))."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/pid")


def identify_process(pid: int) -> dict[str, object]:
    """Return what tells a process of this host from all others, for the manifest; empty without /proc."""
    try:
        return {"host": os.uname().nodename, "pid": pid, "start": read_start(pid), **identify_place()}
    except OSError:
        return {}


def identify_place() -> dict[str, object]:
    """Return which kernel, since which boot, and whose PIDs (a container has its own); raises OSError."""
    return {"boot": BOOT.read_text(encoding="ascii").strip(), "namespace": str(NAMESPACE.readlink())}


def read_start(pid: int) -> int:
    """Return when a process started; raises OSError if there is none, or if it is a zombie."""
    _, fields = read_stat(pid)
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[START_FIELD - 3])


def check_process(record: Mapping[str, object]) -> bool | None:
    """Tell whether a process that was identified so is alive; None if that cannot be seen here."""
    try:
        place = identify_place()
        if record.get("host") != os.uname().nodename:
            return None
        if record.get("boot") != place["boot"]:
            return False  # none of the processes before a boot is left
        if record.get("namespace") != place["namespace"]:
            return None
        return read_start(int(str(record["pid"]))) == record.get("start")
    except OSError:
        return False
    except (KeyError, ValueError):
        return None


def hold_directory(path: Path) -> None:
    """Keep a run directory open until this process ends: by that it is known as the run's `launch`.

    Raises OSError. The descriptor is not passed on to other programs.
    """
    open_own(path)


def open_process(record: Mapping[str, object], path: Path) -> int:
    """Return a pidfd of the `launch` of a run, whose manifest identifies it so.

    Raises ProcessLookupError if it is gone, and PermissionError for a process that is another user's, or
    is not this run's: the record alone could name any process. The checks come after the opening: from then
    on, the descriptor stands for this very process.
    """
    pid = int(str(record["pid"]))
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        raise ProcessLookupError(f"process {pid}: {error.strerror}") from None
    try:
        if not check_process(record):
            raise ProcessLookupError(f"process {pid} is another one, or has ended")
        if Path(f"/proc/{pid}").stat().st_uid != os.geteuid():
            raise PermissionError(EPERM, f"process {pid} is another user's")
        if not holds_directory(pid, path):
            raise PermissionError(EPERM, f"process {pid} is not the launch of this run")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def holds_directory(pid: int, path: Path) -> bool:
    """Tell whether a process has a directory open, as a `launch` has that of its run; raises OSError."""
    wanted = path.stat()
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return any(is_same(entry, wanted) for entry in entries)
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} has ended") from None


def is_same(entry: "os.DirEntry[str]", wanted: os.stat_result) -> bool:
    """Tell whether a descriptor in /proc/PID/fd is open on this file."""
    try:
        return os.path.samestat(entry.stat(), wanted)
    except OSError:  # closed meanwhile
        return False
