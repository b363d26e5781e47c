"""A machine as hwloc shows it: packages, NUMA nodes, last-level caches, cores and devices.

`launch topo` prints it as a tree, with the distances between NUMA nodes; `charts.draw_machine` draws it.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from launcher.cpulist import format_cpulist
from launcher.plan.model import Cpu, Gpu, Machine, Nic
from launcher.text import clean_text, count_things, format_size, shorten_cpulist

Device = Gpu | Nic
_GAP = "  "
_MOST_DISTANCES = 15
"""Rows of the largest matrix of distances that fits 80 columns."""


def divide(cpus: Sequence[Cpu], level: str) -> dict[int, list[Cpu]]:
    """Return CPUs by a field of theirs: `package`, `node`, `l3` or `core`."""
    shares: dict[int, list[Cpu]] = {}
    for cpu in cpus:
        shares.setdefault(getattr(cpu, level), []).append(cpu)
    return shares


def list_devices(machine: Machine, place: int | None) -> list[Device]:
    """Return the GPUs and NICs that are next to a NUMA node; those of unknown place for None."""
    known = {node.id for node in machine.nodes} | {cpu.node for cpu in machine.cpus}
    devices: list[Device] = [*machine.gpus, *machine.nics]
    return [device for device in devices if (device.node if device.node in known else None) == place]


def describe_device(device: Device) -> tuple[str, ...]:
    """Return what is known of a device: name, address, and what it is."""
    if isinstance(device, Gpu):
        memory = format_size(device.memory_mib * 1024) if device.memory_mib else ""
        mig = count_things(len(device.mig), "MIG instance") if device.mig else ""
        name = clean_text(device.name) or ("AMD GPU" if device.vendor == "amd" else "")
        return f"GPU {device.index}", clean_text(device.pci), *filter(None, (name, memory, mig))
    rate = f"{device.rate_gbps:g} Gb/s" if device.rate_gbps else ""
    link = clean_text(f"{device.link_layer} {rate}")
    state = "active" if link and device.active else "" if device.active else "down"
    return f"NIC {clean_text(device.name)}", clean_text(device.pci), *filter(None, (link, state))


def describe_machine(machine: Machine) -> list[str]:
    """Return name, memory, and what a machine has of each."""
    counts = {
        "package": len({cpu.package for cpu in machine.cpus}),
        "NUMA node": len({cpu.node for cpu in machine.cpus} | {node.id for node in machine.nodes}),
        "core": len({cpu.core for cpu in machine.cpus}),
        "PU": len(machine.cpus),
    }
    size = format_size(machine.memory_kib) if machine.memory_kib else ""
    words = ", ".join(count_things(number, noun) for noun, number in counts.items())
    return [word for word in (clean_text(machine.name), size, words) if word]


def describe_allowed(machine: Machine) -> str:
    """Say in a sentence what the job may use."""
    online = frozenset(cpu.id for cpu in machine.cpus)
    allowed = online & machine.allowed_cpus
    nodes = frozenset(node.id for node in machine.nodes if node.memory_kib)
    mems = nodes & machine.allowed_mems
    part = f"{len(allowed)} of {count_things(len(online), 'PU')} ({shorten_cpulist(allowed)})"
    cpus = part if allowed != online else f"all {count_things(len(online), 'PU')}"
    memory = "all NUMA nodes" if mems == nodes else f"NUMA nodes {format_cpulist(mems) or '(none)'}"
    spared = allowed & machine.isolated
    rest = (
        f"; the isolated PUs {shorten_cpulist(spared)} are left alone" if spared and spared < allowed else ""
    )
    return f"may use {cpus} and the memory of {memory}{rest}"


def divide_caches(machine: Machine, cpus: Sequence[Cpu]) -> dict[str, list[list[Cpu]]]:
    """Return the CPUs of each last-level cache by what it is, `L3 32 MiB`; none if caches are assumed."""
    known = {cache.id: cache for cache in machine.caches}
    found: dict[str, list[list[Cpu]]] = {}
    for l3, share in divide(cpus, "l3").items() if known else ():
        cache = known.get(l3)
        name = f"L{cache.level} {format_size(cache.size_kib)}" if cache else "LLC"
        shared = any(cpu.l3 == l3 and cpu.node != share[0].node for cpu in machine.cpus)
        found.setdefault(f"shared {name}" if shared else name, []).append(share)
    return found


# The tree


def print_topology(console: Console, machine: Machine, *, explain: bool = False) -> None:
    """Print the tree, what the job may use of it, distances, limits, and the probe's warnings.

    `explain` shows every core by itself.
    """
    tree = Tree(Text(_GAP.join(("Machine", *describe_machine(machine))), style="bold"), guide_style="dim")
    packages: dict[tuple[int, ...], Tree] = {}
    with_cpus = divide(machine.cpus, "node")
    for number in with_cpus | dict.fromkeys(node.id for node in machine.nodes):
        cpus = with_cpus.get(number, [])
        above = tuple({cpu.package for cpu in cpus})
        if len(above) == 1 and above not in packages:
            packages[above] = tree.add(Text(f"Package {above[0]}"))
        _add_node(packages.get(above, tree), machine, number, cpus, explain=explain)
    _add_devices(tree, list_devices(machine, None))
    console.print(tree)
    limits = machine.limits
    known = {
        "CPU time of": None if limits.cpus is None else f"{limits.cpus:g} CPUs",
        "memory": None if limits.memory_kib is None else format_size(limits.memory_kib),
        "/dev/shm": None if limits.shm_kib is None else format_size(limits.shm_kib),  # noqa: S108  a heading
    }
    rest = {
        "job": [describe_allowed(machine)],
        "limits": [", ".join(f"{name} {value}" for name, value in known.items() if value)],
        "distances": list(_list_distances(machine)),
        "source": [clean_text(machine.source, 1000)],
    }
    for name, lines in rest.items():
        for at, line in enumerate(filter(None, lines)):
            console.print(Text(f"{'' if at else name:<10} {line}"))
    for warning in machine.warnings:
        console.print(Text(f"warning: {clean_text(warning, 400)}", style="yellow"))


def name_node(machine: Machine, number: int) -> list[str]:
    """Return the name of a NUMA node, and its memory if it has some."""
    sizes = [node.memory_kib for node in machine.nodes if node.id == number and node.memory_kib]
    return [f"NUMANode {number}", *map(format_size, sizes)]


def _add_node(branch: Tree, machine: Machine, number: int, cpus: Sequence[Cpu], *, explain: bool) -> None:
    """Add a NUMA node with a line for each kind of cache, or for each core, and its devices.

    The only cache stands on the node's line. A node without CPUs, memory and devices is left out.
    """
    devices, title = list_devices(machine, number), name_node(machine, number)
    if not cpus:
        if len(title) > 1 or devices:
            # Memory that was plugged in as movable (CXL, persistent) is not normal either.
            is_normal = all(node.normal for node in machine.nodes if node.id == number)
            line = Text(_GAP.join([*title, "no CPUs" if is_normal else "no CPUs, GPU or expansion memory"]))
            if number not in machine.allowed_mems:
                line.append(f"{_GAP}(memory not allowed)", style="yellow")
            _add_devices(branch.add(line), devices)
        return
    kinds = divide_caches(machine, cpus)
    is_only = len(kinds) == 1 and all(len(shares) == 1 for shares in kinds.values()) and not explain
    twig = branch.add(_write_line(machine, [*title, *(kinds if is_only else ())], cpus))
    if explain:
        for name, shares in (kinds or {"": [list(cpus)]}).items():
            for share in shares:
                leaf = twig.add(_write_line(machine, [name], share)) if name else twig
                for core, pus in divide(share, "core").items():
                    leaf.add(_write_line(machine, [f"Core {core}"], pus))
    elif not is_only:
        for name, shares in kinds.items():
            several = f"{len(shares)} x {name}" if len(shares) > 1 else name
            twig.add(_write_line(machine, [several], [cpu for share in shares for cpu in share]))
    _add_devices(twig, devices)


def _add_devices(branch: Tree, devices: Sequence[Device], depth: int = 2) -> None:
    """Add devices, those behind one PCI switch together.

    What shares the first bridge below the host bridge, a root port with one link, is behind one switch: they
    are grouped by the first `depth` entries of their path. Devices of unknown path stand alone, as do the
    functions of one card.
    """
    groups: dict[tuple[str, ...], list[Device]] = {}
    for at, device in enumerate(devices):
        known = len(device.path) >= depth
        groups.setdefault(device.path[:depth] if known else ("", str(at)), []).append(device)
    for members in groups.values():
        if len({device.pci.partition(".")[0] for device in members}) > 1:
            levels = zip(*(device.path for device in members), strict=False)
            bridges = [at[0] for at in takewhile(lambda at: len({*at}) == 1, levels)]
            twig = branch.add(Text(f"PCI switch {clean_text(bridges[-1])}"))
            _add_devices(twig, members, len(bridges) + 1)
            continue
        for device in members:
            style = "green" if isinstance(device, Gpu) else "cyan"
            branch.add(Text(_GAP.join(describe_device(device)), style=style))


def _write_line(machine: Machine, title: Sequence[str], cpus: Sequence[Cpu]) -> Text:
    """Return the line of a part with its CPUs, and what of them the job may not use, or stays free of."""
    pus = frozenset(cpu.id for cpu in cpus)
    cores = [] if title[0].startswith("Core") else [count_things(len({cpu.core for cpu in cpus}), "core")]
    line = Text(_GAP.join([*title, *cores, f"PU{'s' if len(pus) > 1 else ''} {shorten_cpulist(pus)}"]))
    if not pus <= machine.allowed_cpus:
        allowed = shorten_cpulist(pus & machine.allowed_cpus)
        line.append(f"{_GAP}({f'allowed {allowed}' if allowed else 'not allowed'})", style="yellow")
    if isolated := pus & machine.isolated:
        which = "" if isolated == pus else f" {shorten_cpulist(isolated)}"
        line.append(f"{_GAP}(isolated{which})", style="yellow")
    return line


def _list_distances(machine: Machine) -> Iterator[str]:
    """Give the matrix of the nodes that have memory; a sentence if all are as far from each other."""
    nodes = [node for node in machine.nodes if node.memory_kib]
    within = {node.distance(node.id) for node in nodes}
    apart = {node.distance(other.id) for node in nodes for other in nodes if node is not other}
    if len(apart) == 1 and len(within) == 1:
        yield f"{min(within)} within a NUMA node, {min(apart)} between nodes"
    elif len(nodes) > _MOST_DISTANCES:
        yield f"{min(apart)} to {max(apart)} between nodes: format=json has them all"
    elif len(nodes) > 1:
        yield "node" + "".join(f"{node.id:>4}" for node in nodes)
        for node in nodes:
            yield f"{node.id:>4}" + "".join(f"{node.distance(other.id):>4}" for other in nodes)
