"""A machine as hwloc shows it: packages, NUMA nodes, last-level caches, cores and devices.

`launch topo` prints it as a tree, with the distances between NUMA nodes; `render_machine` draws its NUMA
nodes with their cores, GPUs and NICs in the colours of the ranks that have them.
"""

import io
import warnings
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from itertools import takewhile

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from launcher.cpulist import format_cpulist
from launcher.errors import MachineError
from launcher.plan.model import Cpu, Gpu, Machine, Nic, Plan, RankPlan
from launcher.text import clean_text, count_things, format_size, shorten_cpulist

Device = Gpu | Nic
_GAP = "  "
_MOST_DISTANCES = 15
"""Rows of the largest matrix of distances that fits 80 columns."""

DRAWS = find_spec("matplotlib") is not None
PALETTE = (
    *("#88ccee", "#cc6677", "#ddcc77", "#117733", "#332288"),
    *("#44aa99", "#aa4499", "#999933", "#882255"),
)
"""Paul Tol's "muted" scheme (https://personal.sron.nl/~pault/, SRON/EPS/TN/09-002); ranks beyond the ninth
begin again, with their own numbers."""
_FREE, _FORBIDDEN, _ISOLATED = "#ffffff", "#e0e0e0", "#c0c0c0"
"""Colours of what is no rank's; outside the job's cpuset; set apart at boot, and left alone."""
_OTHERS = {
    _FORBIDDEN: "not allowed: outside this job's cpuset",
    _ISOLATED: "isolated at boot, left alone",
    _FREE: "no rank's",
}
_MOST_RANKS, _LONGEST_LINE = 64, 120
"""Ranks that are listed below a picture, characters of a line in it."""
_FEWEST_CORES, _MOST_CORES = 22, 36
"""Cores side by side, for which there is room."""
_CORE, _LINE = 35, 16
"""Width of a core and height of a line in pixels, at 72 dots an inch."""


def _divide(cpus: Sequence[Cpu], level: str) -> dict[int, list[Cpu]]:
    """Return CPUs by a field of theirs: `package`, `node`, `l3` or `core`."""
    shares: dict[int, list[Cpu]] = {}
    for cpu in cpus:
        shares.setdefault(getattr(cpu, level), []).append(cpu)
    return shares


def _list_devices(machine: Machine, place: int | None) -> list[Device]:
    """Return the GPUs and NICs that are next to a NUMA node; those of unknown place for None."""
    known = {node.id for node in machine.nodes} | {cpu.node for cpu in machine.cpus}
    found: list[Device] = []
    devices: list[Device] = [*machine.gpus, *machine.nics]
    for device in devices:
        node = device.node if device.node in known else None
        if node is None and isinstance(device, Gpu) and len(machine.nodes) > 1:
            near = {cpu.node for cpu in machine.cpus if cpu.id in device.local_cpus}
            node = min(near) if len(near) == 1 else None
        found += [device] if node == place else []
    return found


def _describe_device(device: Device) -> tuple[str, ...]:
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


def _divide_caches(machine: Machine, cpus: Sequence[Cpu]) -> dict[str, list[list[Cpu]]]:
    """Return the CPUs of each last-level cache by what it is, `L3 32 MiB`; none if caches are assumed."""
    known = {cache.id: cache for cache in machine.caches}
    found: dict[str, list[list[Cpu]]] = {}
    for l3, share in _divide(cpus, "l3").items() if known else ():
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
    with_cpus = _divide(machine.cpus, "node")
    for number in with_cpus | dict.fromkeys(node.id for node in machine.nodes):
        cpus = with_cpus.get(number, [])
        above = tuple({cpu.package for cpu in cpus})
        if len(above) == 1 and above not in packages:
            packages[above] = tree.add(Text(f"Package {above[0]}"))
        _add_node(packages.get(above, tree), machine, number, cpus, explain=explain)
    _add_devices(tree, _list_devices(machine, None))
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


def _add_node(branch: Tree, machine: Machine, number: int, cpus: Sequence[Cpu], *, explain: bool) -> None:
    """Add a NUMA node with a line for each kind of cache, or for each core, and its devices.

    The only cache stands on the node's line. A node without CPUs, memory and devices is left out.
    """
    known = next((node for node in machine.nodes if node.id == number), None)
    devices, title = _list_devices(machine, number), [f"NUMANode {number}"]
    title += [format_size(known.memory_kib)] if known and known.memory_kib else []
    if not cpus:
        if len(title) > 1 or devices:
            # Memory that was plugged in as movable (CXL, persistent) is not normal either.
            is_normal = known is None or known.normal
            line = Text(_GAP.join([*title, "no CPUs" if is_normal else "no CPUs, GPU or expansion memory"]))
            if number not in machine.allowed_mems:
                line.append(f"{_GAP}(memory not allowed)", style="yellow")
            _add_devices(branch.add(line), devices)
        return
    kinds = _divide_caches(machine, cpus)
    is_only = len(kinds) == 1 and all(len(shares) == 1 for shares in kinds.values()) and not explain
    twig = branch.add(_write_line(machine, [*title, *(kinds if is_only else ())], cpus))
    if explain:
        for name, shares in (kinds or {"": [list(cpus)]}).items():
            for share in shares:
                leaf = twig.add(_write_line(machine, [name], share)) if name else twig
                for core, pus in _divide(share, "core").items():
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
            branch.add(Text(_GAP.join(_describe_device(device)), style=style))


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


# The picture


def render_machine(plan: Plan, note: str, form: str) -> bytes:
    """Draw a plan's machine and its ranks as `svg`, `png` or `pdf`; `note` stands below the title.

    Raises MachineError without matplotlib.
    """
    if not DRAWS:
        install = "pip install 'launch-ranks[report]'"
        raise MachineError(f"a picture needs matplotlib, which is not installed: {install}")
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    machine, owners = plan.machine, _find_owners(plan)
    numbers = sorted({cpu.node for cpu in machine.cpus} | {node.id for node in machine.nodes})
    parts = {node: _describe_node(plan, node) for node in (*numbers, None)}
    rows = {node: _arrange_cells([cpu for cpu in machine.cpus if cpu.node == node]) for node in parts}
    shown = [node for node in parts if rows[node] or _list_devices(machine, node)]
    listed = [(find_colour(one.local_rank), _describe_rank(one)) for one in plan.ranks[:_MOST_RANKS]]
    if left := len(plan.ranks) - len(listed):
        listed.append((_FREE, f"and {left} more ranks: launch plan lists them all"))
    if workers := [colour for colour, label in owners.values() if label.startswith("w")]:
        listed.append((workers[0], "light: cores of a rank's DataLoader workers alone"))
    listed += [(colour, text) for colour, text in _OTHERS.items() if (colour, "") in owners.values()]
    name, *words = describe_machine(machine)
    told = ", ".join(filter(None, [*words, count_things(len(plan.ranks), "rank"), note]))
    lines = sum(len(parts[node].splitlines()) + len(rows[node]) + 1 for node in shown)
    widest = max(_FEWEST_CORES, *(len(row) for node in shown for row in rows[node]))
    output = io.BytesIO()
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks
        mpl.rcdefaults()
        mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "launch", "text.parse_math": False})
        size = (widest * _CORE / 72, _LINE * (lines + len(listed) + 4) / 72)
        figure = Figure(size, dpi=72, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(f"{name[:_LONGEST_LINE]}\n{told[:_LONGEST_LINE]}", x=0.01, ha="left")
        ratios = [len(rows[node]) or 0.1 for node in shown]
        grid = figure.subplots(len(shown), 1, squeeze=False, height_ratios=ratios)[:, 0]
        for axes, node in zip(grid, shown, strict=True):
            axes.set_title(parts[node], loc="left", fontsize=9)
            axes.set_axis_off()
            axes.set_xlim(0, widest)
            axes.set_ylim(len(rows[node]), 0)
            for y, row in enumerate(rows[node]):
                colours = [owners[pu][0] for pu in row]
                cells = ListedColormap(colours)
                axes.pcolormesh(range(len(row) + 1), (y, y + 1), [range(len(row))], cmap=cells, ec="#888888")
                for x, pu in enumerate(row):
                    ink = "#ffffff" if sum(bytes.fromhex(colours[x][1:])) < 400 else "#222222"
                    text = f"{owners[pu][1]}:{pu}".removeprefix(":")
                    axes.text(x + 0.5, y + 0.5, text, fontsize=7, color=ink, ha="center", va="center")
        marks = [Patch(facecolor=colour, edgecolor="#888888", label=text) for colour, text in listed]
        figure.legend(handles=marks, loc="outside lower left", fontsize=9, frameon=False)
        metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[form]
        figure.savefig(output, format=form, dpi=144, facecolor="white", metadata=metadata)
    return output.getvalue()


def _arrange_cells(cpus: Sequence[Cpu]) -> list[list[int]]:
    """Return rows of PUs: those of a core below each other, cores of a cache side by side."""
    cores = [core for share in _divide(cpus, "l3").values() for core in _divide(share, "core").values()]
    rows = []
    for at in range(0, len(cores), _MOST_CORES):
        some = cores[at : at + _MOST_CORES]
        for level in range(max(map(len, some))):
            rows.append([core[level].id for core in some if level < len(core)])
    return rows


def _describe_node(plan: Plan, place: int | None) -> str:
    """Return lines on a NUMA node and its devices, or on devices of unknown place, with who uses them."""
    machine, users = plan.machine, [one for one in plan.ranks if place in one.memory.nodes]
    cpus = [cpu for cpu in machine.cpus if cpu.node == place]
    memory = next((one.memory_kib for one in machine.nodes if one.id == place), 0)
    words = [
        f"Package {format_cpulist(frozenset(cpu.package for cpu in cpus))}" if cpus else "",
        "devices of unknown place" if place is None else f"NUMANode {place}",
        format_size(memory) if memory else "",
        *(f"{len(shares)} x {name}" for name, shares in _divide_caches(machine, cpus).items()),
        f"memory of {_name_ranks('R', [one.local_rank for one in users])}" if users else "",
    ]
    lines = [", ".join(filter(None, words))]
    for device in _list_devices(machine, place):
        if isinstance(device, Gpu):
            used = [one.local_rank for one in plan.ranks if one.gpu and one.gpu.pci == device.pci]
        else:
            used = [one.local_rank for one in plan.ranks if one.nic == device.name]
        lines.append(f"{_name_ranks('R', used)}: " if used else "")
        lines[-1] += ", ".join(_describe_device(device))
    return "\n".join(line[:_LONGEST_LINE] for line in lines)


def _find_owners(plan: Plan) -> dict[int, tuple[str, str]]:
    """Return by PU its colour, that of the first of its ranks, and a short name of them."""
    machine, owners = plan.machine, dict[int, tuple[str, str]]()
    for pu in (cpu.id for cpu in machine.cpus):
        ranks = [rank.local_rank for rank in plan.ranks if pu in rank.cpus]
        workers = [rank.local_rank for rank in plan.ranks if pu in rank.worker_cpus]
        owners[pu] = (_FREE if pu in machine.allowed_cpus else _FORBIDDEN), ""
        if ranks:
            owners[pu] = find_colour(min(ranks)), _name_ranks("R", ranks)
        elif pu in machine.isolated:
            owners[pu] = _ISOLATED, ""
        elif workers:
            owners[pu] = lighten(find_colour(min(workers))), _name_ranks("w", workers)
    return owners


def find_colour(rank: int) -> str:
    """Return the colour of a rank."""
    return PALETTE[rank % len(PALETTE)]


def lighten(colour: str) -> str:
    """Return the light tint of a colour."""
    return "#" + "".join(f"{255 - (255 - value) * 3 // 10:02x}" for value in bytes.fromhex(colour[1:]))


def _name_ranks(letter: str, ranks: Collection[int]) -> str:
    """Return a short name for some ranks: `R0`, `w2-5`; `R0+3` is rank 0 and three more."""
    text = format_cpulist(frozenset(ranks))
    return f"{letter}{text if len(text) <= 5 else f'{min(ranks)}+{len(ranks) - 1}'}"


def _describe_rank(rank: RankPlan) -> str:
    """Return what a rank has: GPU, CPUs, workers' CPUs, memory, NIC."""
    apart, nodes = rank.worker_cpus - rank.cpus, shorten_cpulist(rank.memory.nodes)
    cells = (
        f"rank {rank.local_rank}",
        f"GPU {rank.gpu.index} {rank.gpu.pci}" if rank.gpu else "no GPU",
        f"PU{'s' if len(rank.cpus) > 1 else ''} {shorten_cpulist(rank.cpus)}",
        f"workers also {shorten_cpulist(apart)}" if apart else "",
        f"memory on node {nodes} ({rank.memory.policy})" if nodes else "memory anywhere",
        f"NIC {rank.nic}" if rank.nic else "",
    )
    return "   ".join(clean_text(cell, 48) for cell in cells if cell)
