"""Reads the facts that the doctor judges, all below the machine's root."""

import os

from launcher.plan.model import Machine
from launcher.probe.allowed_cpus import CPU, STATUS
from launcher.probe.health import Clock, Health, Hugepages
from launcher.probe.nvidia_driver import list_cards
from launcher.probe.nvml import read_persistence
from launcher.probe.pci_links import read_device_links
from launcher.probe.process_limits import read_ceilings, read_pids_max
from launcher.probe.sysfs import Tree

POOLS = "sys/kernel/mm/hugepages"
TRANSPARENT = "sys/kernel/mm/transparent_hugepage/"
MOST = 1 << 62
"""A number from here on is garbage."""


def read_health(root: str, machine: Machine) -> Health:
    """Read what the doctor judges of `machine`, which was probed below the same root.

    Nothing raises: what is missing is None or empty, and what is not understood is told in `oddities`.
    """
    tree = Tree(root)
    limits = read_ceilings(tree)
    return Health(
        live=tree.is_real,
        files=limits.get("Max open files"),
        locked=limits.get("Max locked memory"),
        processes=limits.get("Max processes"),
        pids_max=read_pids_max(tree),
        capabilities=read_capabilities(tree),
        shm_free_kib=read_shm_free(tree),
        numa_balancing=read_nonnegative(tree, "proc/sys/kernel/numa_balancing"),
        zone_reclaim=read_nonnegative(tree, "proc/sys/vm/zone_reclaim_mode"),
        swappiness=read_nonnegative(tree, "proc/sys/vm/swappiness"),
        swap_kib=read_swap(tree),
        transparent=read_choice(tree, f"{TRANSPARENT}enabled"),
        defrag=read_choice(tree, f"{TRANSPARENT}defrag"),
        hugepages=read_hugepages(tree),
        clocks=read_clocks(tree, machine.allowed_cpus),
        devices=read_device_links(tree, machine),
        irqbalance=find_irqbalance(tree),
        driver_gpus=read_driver_gpus(tree),
        persistence=read_persistence() if tree.is_real and machine.gpus else (),
        oddities=tree.list_warnings(),
    )


def read_nonnegative(tree: Tree, path: str) -> int | None:
    """A number of at least 0; None where there is none, with a note where there is something else."""
    number = tree.read_int(path)
    if number is not None and 0 <= number < MOST:
        return number
    if tree.has(path):
        tree.add_warning(f"{path} is {{value}}, which is no number", path=path)
    return None


def read_word(tree: Tree, path: str) -> str:
    """One word; empty where there is none, with a note where there is something else."""
    text = tree.read(path) or ""
    if text.isascii() and len(text) < 40 and all(char.isalnum() or char in "_-" for char in text):
        return text
    tree.add_warning(f"{path} is {{value}}, which is not understood", path=path)
    return ""


def read_choice(tree: Tree, path: str) -> str:
    """The word in brackets of `always [madvise] never`."""
    text = tree.read(path)
    if text is None:
        return ""
    chosen = text.partition("[")[2].partition("]")[0]
    if not chosen.replace("+", "").isalpha() or len(chosen) > 20 or not chosen.isascii():
        tree.add_warning(f"{path} is {{value}}, which is not understood", path=path)
        return ""
    return chosen


def read_capabilities(tree: Tree) -> int:
    """`CapEff` of this process as a mask; 0 where it is not shown."""
    text = tree.read_fields(STATUS).get("CapEff", "0")
    digits = set(text.lower()) <= set("0123456789abcdef") and 0 < len(text) <= 16
    return int(text, 16) if digits else 0


def read_shm_free(tree: Tree) -> int | None:
    """Free space of the running machine's /dev/shm in KiB."""
    try:
        found = os.statvfs("/dev/shm") if tree.is_real else None  # noqa: S108  # its size is what is asked
    except OSError:
        return None
    return found.f_bavail * found.f_frsize // 1024 if found else None


def read_swap(tree: Tree) -> int | None:
    """Swap in use in KiB."""
    fields = tree.read_fields("proc/meminfo")
    words = [fields.get(name, "").split() for name in ("SwapTotal", "SwapFree")]
    sizes = [int(word[0]) for word in words if word and word[0].isdecimal() and len(word[0]) < 18]
    return max(0, sizes[0] - sizes[1]) if len(sizes) == 2 else None


def read_hugepages(tree: Tree) -> tuple[Hugepages, ...] | None:
    """The pools of all sizes; None where the kernel has none to show."""
    if not tree.has(POOLS):
        return None
    pools = []
    for name in tree.list_directory(POOLS):
        size = name.removeprefix("hugepages-").removesuffix("kB")
        free = read_nonnegative(tree, f"{POOLS}/{name}/free_hugepages")
        if size.isascii() and size.isdecimal() and len(size) < 12 and free is not None:
            pools.append(Hugepages(int(size), free))
    return tuple(pools)


def read_clocks(tree: Tree, cpus: frozenset[int]) -> tuple[Clock, ...]:
    """How the frequency of these CPUs is chosen, CPUs of one way together; none in most virtual machines."""
    ways: dict[tuple[str, str, str], set[int]] = {}
    for cpu in sorted(cpus):
        here = f"{CPU}cpu{cpu}/cpufreq/"
        if governor := read_word(tree, f"{here}scaling_governor"):
            driver = read_word(tree, f"{here}scaling_driver")
            way = (driver, governor, read_word(tree, f"{here}energy_performance_preference"))
            ways.setdefault(way, set()).add(cpu)
    return tuple(Clock(frozenset(ways[way]), *way) for way in sorted(ways))


def find_irqbalance(tree: Tree) -> bool | None:
    """Whether irqbalance runs; None where /proc shows the processes of a container alone."""
    names = (tree.read(f"proc/{pid}/comm") for pid in tree.list_numbers("proc", ""))
    if "irqbalance" in names:
        return True
    return False if tree.read("proc/2/comm") == "kthreadd" else None


def read_driver_gpus(tree: Tree) -> tuple[str, ...] | None:
    """PCI addresses of the GPUs in /proc/driver/nvidia; None where it is not there."""
    if not tree.has("proc/driver/nvidia/gpus"):
        return None
    # What is odd in these files the probe tells already.
    return tuple(pci for pci, _ in list_cards(Tree(tree.prefix or "/")) or ())
