"""XIDs of NVIDIA's driver in the kernel's log."""

import os
import re
import time
from collections.abc import Iterator

from launcher.doctor.model import KernelXid
from launcher.probe.pci import normalise_pci
from launcher.probe.sysfs import Tree

LOG = "dev/kmsg"
RECORD = 8192
"""Bytes of a record at most: CONSOLE_EXT_LOG_MAX; a shorter buffer makes read(2) fail."""
MOST_RECORDS = 200_000
"""More than the largest log buffer holds (2^25 bytes)."""
MOST_XIDS = 256
"""The last ones that are kept."""
LONGEST = 200
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d{1,6})\b,?\s*(.*)")


def read_kernel_xids(tree: Tree) -> tuple[KernelXid, ...] | None:
    """Read the XIDs that are in the log, oldest first; None if this user may not read it.

    With `kernel.dmesg_restrict` it is for root, or CAP_SYSLOG, alone.
    """
    try:
        handle = os.open(f"{tree.prefix}/{LOG}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # The log counts from the boot; another machine's boot is not known.
        now = time.monotonic() if tree.is_real else None
        found = [xid for record in read_records(handle) if (xid := parse_record(record, now))]
    except OSError:
        return None
    finally:
        os.close(handle)
    return tuple(found[-MOST_XIDS:])


def read_records(handle: int) -> Iterator[str]:
    """Read all records there are: the device gives one at each read, a copy of it as a file many."""
    rest = b""
    for _ in range(MOST_RECORDS):
        try:
            data = os.read(handle, RECORD)
        except BlockingIOError:
            break
        except BrokenPipeError:  # The kernel has overwritten the record: the next read is of the oldest.
            continue
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in lines)
    yield rest.decode("utf-8", "replace")


def parse_record(record: str, now: float | None) -> KernelXid | None:
    """Read `PRIORITY,SEQUENCE,MICROSECONDS,…;TEXT` (Documentation/ABI/testing/dev-kmsg); None for no XID.

    What users write to the device is of another facility than the kernel's, which is 0.
    """
    head, _, text = record.partition(";")
    fields = head.split(",")
    found = XID.search(text)
    if not found or len(fields) < 3 or not all(is_xid_number(field) for field in fields[:3]):
        return None
    pci = normalise_pci(found[1])
    if int(fields[0]) >> 3 or pci is None:
        return None
    age = None if now is None else max(0.0, round(now - int(fields[2]) / 1e6, 1))
    message = "".join(char if char.isprintable() else "?" for char in found[3][:LONGEST])
    return KernelXid(pci, int(found[2]), message, age)


def is_xid_number(text: str) -> bool:
    """Whether a text is a number as the kernel writes it."""
    return text.isascii() and text.isdecimal() and len(text) <= 20
