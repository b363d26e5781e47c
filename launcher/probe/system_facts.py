"""Reads the facts that the doctor judges, all below the machine's root."""

import os

from launcher.doctor.model import Ceiling, Clock, Device, Health, Hugepages
from launcher.plan.model import Machine
from launcher.probe.cgroups import list_cgroups
from launcher.probe.cpus import CPU, STATUS
from launcher.probe.limits import FILES, RESOURCES, find_resource
from launcher.probe.nvidia_gpus import list_cards, read_persistence
from launcher.probe.pci import PCI
from launcher.probe.sysfs import Tree, parse_unsigned

WIDEST = 32
"""Lanes of the widest PCI Express link; a virtual machine may show 0, 63 or 255 for unknown."""
POOLS = "sys/kernel/mm/hugepages"
TRANSPARENT = "sys/kernel/mm/transparent_hugepage/"
MOST = 1 << 62
"""A number from here on is garbage."""


def read_device_links(tree: Tree, machine: Machine) -> tuple[Device, ...]:
    """The GPUs, then the NICs, as far as sysfs has them."""
    found = [(f"GPU {gpu.index}", gpu.pci, gpu.node, False) for gpu in machine.gpus]
    found += [(nic.name, nic.pci, nic.node, True) for nic in machine.nics]
    return tuple(
        read_device_link(tree, *entry)
        for entry in found
        if entry[1] and tree.resolve_links(f"{PCI}{entry[1]}")
    )


def read_device_link(tree: Tree, name: str, pci: str, node: int | None, nic: bool) -> Device:
    """One device's link and interrupts."""
    here = f"{PCI}{pci}/"
    width, max_width = (
        read_width(tree, f"{here}current_link_width"),
        read_width(tree, f"{here}max_link_width"),
    )
    return Device(name, node, nic, width, max_width, read_interrupts(tree, here))


def read_width(tree: Tree, path: str) -> int | None:
    """Lanes of a link; None if unknown."""
    lanes = tree.read_int(path)
    return lanes if lanes is not None and 1 <= lanes <= WIDEST else None


def read_interrupts(tree: Tree, here: str) -> tuple[frozenset[int], ...]:
    """CPUs of each message-signalled interrupt: those it really goes to, else those it may go to.

    Source: the kernel's Documentation/core-api/irq/irq-affinity.rst.
    """
    found = []
    for number in tree.list_numbers(f"{here}msi_irqs", ""):
        irq = f"proc/irq/{number}/"
        cpus = tree.read_list(f"{irq}effective_affinity_list") or tree.read_list(f"{irq}smp_affinity_list")
        found += [cpus] if cpus else []
    return tuple(found)


def read_ceilings(tree: Tree) -> dict[str, Ceiling]:
    """The resource limits by the kernel's names (`Max open files`); none if the file is not there."""
    text = tree.read(RESOURCES)
    if text is None:
        return {}
    found = {}
    for name in (FILES, "Max locked memory", "Max processes"):
        line = find_resource(text, name)
        words = line.removeprefix(name).split()
        if len(words) >= 2 and all(is_limit(word) for word in words[:2]):
            found[name] = Ceiling(read_limit(words[0]), read_limit(words[1]))
        else:
            tree.add_warning(f"{RESOURCES} has {{value}} for {name}, which is no limit", value=line)
    return found


def is_limit(word: str) -> bool:
    """Whether a word is a number or `unlimited`."""
    return word == "unlimited" or (word.isascii() and word.isdecimal() and len(word) <= 20)


def read_limit(word: str) -> int | None:
    """A limit's number; None for no limit."""
    return None if word == "unlimited" else int(word)


def read_pids_max(tree: Tree) -> int | None:
    """The lowest `pids.max` of the job's cgroup and those above it; None if nothing limits.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/pids.rst.
    """
    _, paths = list_cgroups(tree, ("pids",)).get("pids", (2, []))
    found = [number for path in paths if (number := parse_unsigned(tree.read(f"{path}/pids.max") or ""))]
    return min(found, default=None)


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
    """A number of at least 0; None if there is none, with a note if there is something else."""
    number = tree.read_int(path)
    if number is not None and 0 <= number < MOST:
        return number
    if tree.has(path):
        tree.add_warning(f"{path} is {{value}}, which is no number", path=path)
    return None


def read_word(tree: Tree, path: str) -> str:
    """One word; empty if there is none, with a note if there is something else."""
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
    """`CapEff` of this process as a mask; 0 if it is not shown."""
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
    """The pools of all sizes; None if the kernel has none to show."""
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
    """Whether irqbalance runs; None if /proc shows the processes of a container alone."""
    names = (tree.read(f"proc/{pid}/comm") for pid in tree.list_numbers("proc", ""))
    if "irqbalance" in names:
        return True
    return False if tree.read("proc/2/comm") == "kthreadd" else None


def read_driver_gpus(tree: Tree) -> tuple[str, ...] | None:
    """PCI addresses of the GPUs in /proc/driver/nvidia; None if it is not there."""
    if not tree.has("proc/driver/nvidia/gpus"):
        return None
    # What is odd in these files the probe tells already.
    return tuple(pci for pci, _ in list_cards(Tree(tree.prefix or "/")) or ())
