"""The process that a run hangs on, named so that a later one with the same PID is never taken for it."""

import os
from collections.abc import Mapping
from pathlib import Path

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
    """Return when a process started; raises OSError where there is none, or where it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *rest = fields.rpartition(")")[2].split()
        start = int(rest[START_FIELD - 4])
    except (IndexError, ValueError) as error:
        raise ProcessLookupError(f"/proc/{pid}/stat: {error}") from None
    if state in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return start


def check_process(record: Mapping[str, object]) -> bool | None:
    """Tell whether a process that was identified so is alive; None where that cannot be seen here."""
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


def open_process(record: Mapping[str, object]) -> int:
    """Return a pidfd of a process that was identified so; raises ProcessLookupError where it is gone.

    The check comes after the opening: from then on, the descriptor stands for this very process.
    """
    descriptor = os.pidfd_open(int(str(record["pid"])))
    if check_process(record):
        return descriptor
    os.close(descriptor)
    raise ProcessLookupError(f"process {record['pid']} is another one, or has ended")
