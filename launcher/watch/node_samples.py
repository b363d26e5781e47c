"""What the kernel says of a node between two samples: its network, what tasks waited for, and CPU quotas."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

Groups = tuple[int, Sequence[str]]
"""A hierarchy's version (1 or 2), and a process's cgroup in it with those above it, innermost first: paths of
directories below the root without a leading slash."""
FindCgroups = Callable[[int], Mapping[str, Groups]]
"""Gives the cgroups of a process (PID) by controller."""
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
LARGEST = 1 << 16
WORD = 4
"""Bytes: the unit of port_rcv_data and port_xmit_data (InfiniBand specification, PortCountersExtended)."""
LIST_AGAIN = 12
"""Samples after which network devices are listed anew."""
RESOURCES = ("memory", "cpu", "io")
INFINIBAND = (
    ("counters/port_rcv_data", "counters/port_xmit_data", WORD),
    ("hw_counters/rx_bytes", "hw_counters/tx_bytes", 1),
)
"""Received and sent, and their unit: as the InfiniBand core has them, else as EFA has them."""
Counters = tuple[str, int]
"""Files with bytes, and their unit."""


@dataclass(frozen=True, slots=True)
class NodeSample:
    """A node between two samples; None for what is not known (yet)."""

    nic_rates: tuple[tuple[str, float], ...] = ()
    """Bytes a second, received and sent, by device: RDMA devices, and physical network interfaces."""
    memory_pressure: float | None = None
    cpu_pressure: float | None = None
    io_pressure: float | None = None
    """Share of the last 10 s that some task waited for it: in the ranks' common cgroup, else on the node."""
    throttled: float | None = None
    """Seconds per second, summed over CPUs, that a quota held back the ranks' common cgroup or one above."""


class NodeReader:
    """Reads the node's counters; each call says what has been since the one before."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.number = 0
        self.devices: dict[str, list[Counters]] = {}
        self.before: dict[str, int] = {}

    def sample(self, folders: Sequence[str], elapsed: float, throttled: float | None) -> NodeSample:
        """Sample the node; `folders` are the ranks' common cgroup and those above it, of version 2."""
        if self.number % LIST_AGAIN == 0:
            self.devices = {**list_infiniband(self.root), **list_interfaces(self.root)}
        self.number += 1
        counts = {
            name: count for name, files in self.devices.items() if (count := sum_bytes(files)) is not None
        }
        rates = tuple(
            (name, max(0, count - self.before[name]) / elapsed)
            for name, count in counts.items()
            if name in self.before and elapsed > 0
        )
        self.before = counts
        memory, cpu, io = (read_pressure(self.root, folders, resource) for resource in RESOURCES)
        return NodeSample(rates, memory, cpu, io, throttled)


class CgroupReader:
    """Reads how long CPU quotas held back the cgroups of the ranks, and of all above them."""

    def __init__(self, find_cgroups: FindCgroups | None, root: str) -> None:
        self.find_cgroups = find_cgroups
        self.root = root
        self.names: dict[int, tuple[str, Groups]] = {}
        """By rank (PID): what /proc says, and the folders that were found for that."""
        self.before: dict[str, float] = {}
        self.shares: dict[str, float] = {}

    def update(self, pids: Iterable[int], elapsed: float) -> None:
        """Read the counters of these ranks' cgroups; `elapsed` is the time since the last call, in s."""
        self.names = {pid: found for pid in pids if (found := self.find_folders(pid))}
        versions = {folder: version for _, (version, folders) in self.names.values() for folder in folders}
        counts = {
            folder: count
            for folder, version in versions.items()
            if (count := read_throttled(f"{self.root}/{folder}", version)) is not None
        }
        self.shares = {
            folder: max(0.0, count - self.before[folder]) / elapsed
            for folder, count in counts.items()
            if folder in self.before and elapsed > 0
        }
        self.before = counts

    def find_folders(self, pid: int) -> tuple[str, Groups] | None:
        """Return a rank's CPU cgroups; they are looked up only if it was moved to another one."""
        text = read_kernel_text(f"/proc/{pid}/cgroup")
        if self.find_cgroups is None or text is None:
            return None
        known = self.names.get(pid)
        if known and known[0] == text:
            return known
        return text, self.find_cgroups(pid).get("cpu", (2, ()))

    def throttled(self, pid: int) -> float | None:
        """Return what the strictest quota on a rank's way did; None if nothing is known of any."""
        _, (_, folders) = self.names.get(pid, ("", (2, ())))
        return self.find_strictest(folders)

    def find_strictest(self, folders: Iterable[str]) -> float | None:
        """Return the most that one of these cgroups was held back."""
        return max((self.shares[folder] for folder in folders if folder in self.shares), default=None)

    def list_common(self) -> tuple[int, list[str]]:
        """Return the version, and the cgroups that all ranks are in, innermost first."""
        chains = [groups for _, groups in self.names.values()]
        if not chains:
            return 2, []
        version, first = chains[0]
        return version, [folder for folder in first if all(folder in folders for _, folders in chains)]

    def common_folders(self) -> list[str]:
        """Return the cgroups of version 2 that all ranks are in, which tell of pressure."""
        version, folders = self.list_common()
        return folders if version == 2 else []

    def common_throttled(self) -> float | None:
        """Return what the strictest quota did that holds for all ranks."""
        return self.find_strictest(self.list_common()[1])


def read_kernel_text(path: str) -> str | None:
    """Return the text of a small file of procfs or sysfs; None if it cannot be read."""
    try:
        descriptor = os.open(path, READ)
    except (OSError, ValueError):
        return None
    try:
        return os.read(descriptor, LARGEST).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)


def list_numbers(folder: str) -> list[int]:
    """Return the names in a directory that are numbers, as processes and threads in /proc."""
    try:
        return [int(name) for name in os.listdir(folder) if name.isdecimal()]  # noqa: PTH208 - counts microseconds
    except OSError:
        return []


def list_folder(folder: str) -> list[str]:
    """Return the names in a directory, sorted; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return []


def read_count(path: str) -> int | None:
    """Return a file's whole number; None if it has none."""
    text = (read_kernel_text(path) or "").strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def list_infiniband(root: str) -> dict[str, list[Counters]]:
    """Return the counters of each RDMA device's ports: InfiniBand and RoCE, which interfaces do not count."""
    found: dict[str, list[Counters]] = {}
    top = f"{root}/sys/class/infiniband"
    for name in list_folder(top):
        for port in list_folder(f"{top}/{name}/ports"):
            here = f"{top}/{name}/ports/{port}"
            for received, sent, unit in INFINIBAND:
                if read_count(f"{here}/{received}") is not None:
                    found.setdefault(name, []).extend(
                        ((f"{here}/{received}", unit), (f"{here}/{sent}", unit))
                    )
                    break
    return found


def list_interfaces(root: str) -> dict[str, list[Counters]]:
    """Return the counters of physical network interfaces; of all but the loopback if none is physical.

    A container's interface is a virtual one, and the only one that it sees.
    """
    top = f"{root}/sys/class/net"
    names = [name for name in list_folder(top) if name != "lo"]
    physical = [name for name in names if os.path.exists(f"{top}/{name}/device")]  # noqa: PTH110
    here = f"{top}/{{}}/statistics/{{}}"
    return {
        name: [(here.format(name, file), 1) for file in ("rx_bytes", "tx_bytes")]
        for name in physical or names
    }


def sum_bytes(files: Iterable[Counters]) -> int | None:
    """Add up counters; None if one cannot be read."""
    total = 0
    for path, unit in files:
        count = read_count(path)
        if count is None:
            return None
        total += count * unit
    return total


def read_pressure(root: str, folders: Iterable[str], resource: str) -> float | None:
    """Return the share of the last 10 s that some task waited for a resource.

    It is that of the innermost cgroup that tells, else the node's; None if the kernel has no PSI. Source: the
    kernel's Documentation/accounting/psi.rst.
    """
    paths = [f"{root}/{folder}/{resource}.pressure" for folder in folders]
    for path in (*paths, f"{root}/proc/pressure/{resource}"):
        text = read_kernel_text(path)
        if text and text.startswith("some avg10="):
            share = text.removeprefix("some avg10=").partition(" ")[0]
            return float(share) / 100 if share.replace(".", "", 1).isdecimal() else None
    return None


def read_throttled(folder: str, version: int) -> float | None:
    """Return the seconds that a quota has held back a cgroup in all; None if it has no such count.

    Version 1 has nanoseconds as `throttled_time`, version 2 microseconds as `throttled_usec`. The kernel adds
    up the run queues of all CPUs (Documentation/scheduler/sched-bwc.rst).
    """
    name, unit = ("throttled_time", 1e9) if version == 1 else ("throttled_usec", 1e6)
    for line in (read_kernel_text(f"{folder}/cpu.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value) / unit
    return None
