"""Reads the settings of this machine that `launch doctor` judges: limits, kernel settings, clocks, links."""

import re

from launcher.doctor.model import Ceiling, Clock, Device, Health, Hugepages
from launcher.plan.model import Machine
from launcher.probe.cpus import CPU, STATUS
from launcher.probe.gpus import GPUS, list_cards
from launcher.probe.limits import FILES, RESOURCES, find_resource, read_pids_max
from launcher.probe.sysfs import PCI, Tree, parse_number

WIDEST = 32
"""Lanes of the widest PCI Express link; a virtual machine may show 0, 63 or 255 for unknown."""
POOLS = "sys/kernel/mm/hugepages"
TRANSPARENT = "sys/kernel/mm/transparent_hugepage/"
WORD = re.compile(r"[A-Za-z0-9_-]{0,39}")
CHOICE = re.compile(r"[^\[]*\[([A-Za-z+]{1,20})\].*", re.DOTALL)
"""One of several words, as in `always [madvise] never`."""
CAPABILITIES = re.compile(r"[0-9a-fA-F]{1,16}")


def read_health(root: str, machine: Machine) -> Health:
    """Read what the doctor judges of `machine`, which was probed below the same root.

    Nothing raises: what is missing is None or empty, and what is not understood is told in `oddities`.
    """
    tree = Tree(root)
    ceilings = [_read_ceiling(tree, name) for name in (FILES, "Max locked memory", "Max processes")]
    memory = tree.read_meminfo()
    total, free = memory.get("SwapTotal"), memory.get("SwapFree")
    return Health(
        live=tree.is_real,
        files=ceilings[0],
        locked=ceilings[1],
        processes=ceilings[2],
        pids_max=read_pids_max(tree),
        capabilities=read_capabilities(tree),
        numa_balancing=_read_setting(tree, "proc/sys/kernel/numa_balancing"),
        zone_reclaim=_read_setting(tree, "proc/sys/vm/zone_reclaim_mode"),
        swappiness=_read_setting(tree, "proc/sys/vm/swappiness"),
        swap_kib=None if total is None or free is None else max(0, total - free),
        transparent=_read_word(tree, f"{TRANSPARENT}enabled", CHOICE),
        defrag=_read_word(tree, f"{TRANSPARENT}defrag", CHOICE),
        hugepages=_read_hugepages(tree),
        clocks=_read_clocks(tree, machine.allowed_cpus),
        devices=_read_devices(tree, machine),
        irqbalance=_find_irqbalance(tree),
        # What is odd in these files the probe tells already.
        driver_gpus=tuple(pci for pci, _ in list_cards(Tree(root)) or ()) if tree.has(GPUS) else None,
        oddities=tree.list_warnings(),
    )


def _read_ceiling(tree: Tree, name: str) -> Ceiling | None:
    """A resource limit by the kernel's name for it; None if the file is not there."""
    text = tree.read(RESOURCES)
    if text is None:
        return None
    line = find_resource(text, name)
    limits = []
    for word in line.removeprefix(name).split()[:2]:
        number = parse_number(word)
        if number is not None or word == "unlimited":
            limits.append(number)
    if len(limits) == 2:
        return Ceiling(*limits)
    tree.add_warning(f"{RESOURCES} has {{value}} for {name}, which is no limit", value=line)
    return None


def _read_setting(tree: Tree, path: str) -> int | None:
    """A number; None if there is none, with a note if there is something else."""
    number = tree.read_number(path)
    if number is None and tree.has(path):
        tree.add_warning(f"{path} is {{value}}, which is no number", path=path)
    return number


def _read_word(tree: Tree, path: str, pattern: re.Pattern[str] = WORD) -> str:
    """What a pattern finds in a file; empty if there is none, with a note if there is something else."""
    text = tree.read(path)
    found = pattern.fullmatch(text or "")
    if found:
        return found[pattern.groups]
    if text is not None:
        tree.add_warning(f"{path} is {{value}}, which is not understood", path=path)
    return ""


def read_capabilities(tree: Tree) -> int:
    """`CapEff` of this process as a mask; 0 if it is not shown."""
    text = tree.read_fields(STATUS).get("CapEff", "")
    return int(text, 16) if CAPABILITIES.fullmatch(text) else 0


def _read_hugepages(tree: Tree) -> tuple[Hugepages, ...] | None:
    """The pools of all sizes; None if the kernel has none to show."""
    if not tree.has(POOLS):
        return None
    pools = []
    for name in tree.list_directory(POOLS):
        size = parse_number(name.removeprefix("hugepages-").removesuffix("kB"))
        free = _read_setting(tree, f"{POOLS}/{name}/free_hugepages")
        if size is not None and free is not None:
            pools.append(Hugepages(size, free))
    return tuple(pools)


def _read_clocks(tree: Tree, cpus: frozenset[int]) -> tuple[Clock, ...]:
    """How the frequency of these CPUs is chosen, CPUs of one way together; none in most virtual machines."""
    ways: dict[tuple[str, str, str], set[int]] = {}
    for cpu in sorted(cpus):
        here = f"{CPU}cpu{cpu}/cpufreq/"
        if governor := _read_word(tree, f"{here}scaling_governor"):
            driver = _read_word(tree, f"{here}scaling_driver")
            way = (driver, governor, _read_word(tree, f"{here}energy_performance_preference"))
            ways.setdefault(way, set()).add(cpu)
    return tuple(Clock(frozenset(ways[way]), *way) for way in sorted(ways))


def _read_devices(tree: Tree, machine: Machine) -> tuple[Device, ...]:
    """Links and interrupts of the GPUs, then of the NICs, as far as sysfs has them.

    An interrupt's CPUs are those it really goes to, else those it may go to: the kernel's
    Documentation/core-api/irq/irq-affinity.rst.
    """
    found = [(f"GPU {gpu.index}", gpu.pci, gpu.node, False) for gpu in machine.gpus]
    found += [(nic.name, nic.pci, nic.node, True) for nic in machine.nics]
    devices = []
    for name, pci, node, is_nic in found:
        here = f"{PCI}{pci}/"
        if not pci or not tree.resolve_links(here):
            continue
        widths = [tree.read_number(f"{here}{which}_link_width") for which in ("current", "max")]
        known = [width if width and width <= WIDEST else None for width in widths]
        interrupts = []
        for number in tree.list_numbers(f"{here}msi_irqs", ""):
            irq = f"proc/irq/{number}/"
            cpus = tree.read_list(f"{irq}effective_affinity_list")
            cpus = cpus or tree.read_list(f"{irq}smp_affinity_list")
            interrupts += [cpus] if cpus else []
        devices.append(Device(name, node, is_nic, known[0], known[1], tuple(interrupts)))
    return tuple(devices)


def _find_irqbalance(tree: Tree) -> bool | None:
    """Whether irqbalance runs; None if /proc shows the processes of a container alone."""
    names = (tree.read(f"proc/{pid}/comm") for pid in tree.list_numbers("proc", ""))
    if "irqbalance" in names:
        return True
    return False if tree.read("proc/2/comm") == "kthreadd" else None
