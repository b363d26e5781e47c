"""What the doctor judges beside the machine itself: limits, kernel settings, clocks, links, interrupts.

launcher.probe.system_facts reads them. None, or an empty tuple, is what could not be read: such a check is
reported as not done.
"""

from dataclasses import dataclass

CAP_IPC_LOCK, CAP_SYS_RESOURCE = 14, 24
"""Capabilities that lift RLIMIT_MEMLOCK and RLIMIT_NPROC (capabilities(7))."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A resource limit of this process (getrlimit(2)); None is unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True)
class Clock:
    """How the frequency of some CPUs is chosen, by sysfs' `cpufreq`."""

    cpus: frozenset[int]
    driver: str
    governor: str
    preference: str = ""
    """`energy_performance_preference`; empty if the driver has none."""


@dataclass(frozen=True, slots=True)
class Hugepages:
    """The pool of one size of huge pages."""

    size_kib: int
    free: int
    """Pages that nobody uses."""


@dataclass(frozen=True, slots=True)
class Device:
    """The PCI link and the interrupts of a GPU or NIC."""

    name: str
    """For people: `GPU 0`, `mlx5_0`."""
    node: int | None
    nic: bool
    width: int | None = None
    """Lanes in use now."""
    max_width: int | None = None
    """Lanes that the device has."""
    interrupts: tuple[frozenset[int], ...] = ()
    """CPUs that each of its interrupts goes to."""


@dataclass(frozen=True, slots=True)
class Health:
    """Facts of one moment; nothing here is judged."""

    live: bool = False
    """Read from the running machine rather than from another one's files or snapshot."""
    files: Ceiling | None = None
    """RLIMIT_NOFILE."""
    locked: Ceiling | None = None
    """RLIMIT_MEMLOCK, in bytes."""
    processes: Ceiling | None = None
    """RLIMIT_NPROC, which counts threads."""
    pids_max: int | None = None
    """The lowest `pids.max` of the job's cgroup and those above it."""
    capabilities: int = 0
    """Effective capabilities as a mask (`CapEff`)."""
    shm_free_kib: int | None = None
    """Free space of /dev/shm."""
    numa_balancing: int | None = None
    zone_reclaim: int | None = None
    swappiness: int | None = None
    swap_kib: int | None = None
    """Swap in use."""
    transparent: str = ""
    """Transparent hugepages: `always`, `madvise` or `never`."""
    defrag: str = ""
    """When a page fault waits for a transparent hugepage."""
    hugepages: tuple[Hugepages, ...] | None = None
    clocks: tuple[Clock, ...] = ()
    devices: tuple[Device, ...] = ()
    irqbalance: bool | None = None
    """Whether irqbalance runs; None if other processes cannot be seen."""
    driver_gpus: tuple[str, ...] | None = None
    """PCI addresses of the NVIDIA driver's GPUs in /proc."""
    persistence: tuple[tuple[str, bool], ...] = ()
    """NVIDIA persistence mode by PCI address."""
    oddities: tuple[str, ...] = ()
    """Files whose content is not understood."""
