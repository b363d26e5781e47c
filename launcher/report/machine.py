"""A machine as hwloc shows it: packages, NUMA nodes, last-level caches, cores and devices.

`launch topo` prints it as a tree, with the distances between NUMA nodes; `render_machine` draws its NUMA
nodes with their cores, GPUs and NICs in the colours of the ranks that have them.
"""

import io
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby, takewhile

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
_Fills = tuple[str, ...]
"""Colours side by side."""
_FREE: _Fills = ("#ffffff",)
_FORBIDDEN: _Fills = ("#e0e0e0",)
_ISOLATED: _Fills = ("#c0c0c0",)
"""Fills of what is no rank's; outside the job's cpuset; set apart at boot, and left alone."""
_MOST_RANKS = 64
"""Ranks that are listed below a picture."""
_WIDTH, _CORE, _LINE, _CARD, _SPACE, _EDGE = 1240, 33, 15, 297, 8, "#888888"
"""Pixels: the width of a picture, of a core and of a card, the height of a line, gaps; colour of borders."""
_MOST_CORES, _MOST_CARDS = 35, 4
"""Cores and cards in a row."""


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


def _describe_machine(machine: Machine) -> list[str]:
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


def _describe_caches(machine: Machine, cpus: Sequence[Cpu]) -> dict[str, list[tuple[int, list[Cpu]]]]:
    """Return the last-level caches of CPUs by what they are, `L3 32 MiB`; none if they are assumed."""
    known = {cache.id: cache for cache in machine.caches}
    found: dict[str, list[tuple[int, list[Cpu]]]] = {}
    for l3, share in _divide(cpus, "l3").items() if known else ():
        cache = known.get(l3)
        name = f"L{cache.level} {format_size(cache.size_kib)}" if cache else "LLC"
        shared = any(cpu.l3 == l3 and cpu.node != share[0].node for cpu in machine.cpus)
        found.setdefault(f"shared {name}" if shared else name, []).append((l3, share))
    return found


# The tree


def print_topology(console: Console, machine: Machine, *, explain: bool = False) -> None:
    """Print the tree, what the job may use of it, distances, limits, and the probe's warnings.

    `explain` shows every core by itself.
    """
    tree = Tree(Text(_GAP.join(("Machine", *_describe_machine(machine))), style="bold"), guide_style="dim")
    crossed = any(len(_divide(cpus, "package")) > 1 for cpus in _divide(machine.cpus, "node").values())
    for package, cpus in _divide(machine.cpus, "package").items() if not crossed else ():
        nodes = _divide(cpus, "node")
        name = f"Package {package}"
        twig = tree.add(_write_line(machine, [name], cpus) if len(nodes) > 1 else Text(name))
        for node, share in nodes.items():
            _add_node(twig, machine, node, share, explain=explain)
    for node, share in _divide(machine.cpus, "node").items() if crossed else ():
        _add_node(tree, machine, node, share, explain=explain)  # a virtual machine has packages in a node
    _add_nodes_without_cpus(tree, machine)
    _add_devices(tree, _list_devices(machine, None))
    console.print(tree)
    limits = machine.limits
    known = {
        "CPU time of": None if limits.cpus is None else f"{limits.cpus:g} CPUs",
        "memory": None if limits.memory_kib is None else format_size(limits.memory_kib),
        "/dev/shm": None if limits.shm_kib is None else format_size(limits.shm_kib),  # noqa: S108  a heading
    }
    online = frozenset(cpu.id for cpu in machine.cpus)
    absent = frozenset(range(max(online, default=-1) + 1)) - online
    rest = {
        "job": [_describe_allowed(machine, online)],
        "limits": [", ".join(f"{name} {value}" for name, value in known.items() if value)],
        "not online": [f"PUs {shorten_cpulist(absent)} (offline, or no such CPUs)" if absent else ""],
        "distances": list(_list_distances(machine)),
        "source": [clean_text(machine.source, 1000)],
    }
    for name, lines in rest.items():
        for at, line in enumerate(filter(None, lines)):
            console.print(Text(f"{'' if at else name:<10} {line}"))
    for warning in machine.warnings:
        console.print(Text(f"warning: {clean_text(warning, 400)}", style="yellow"))


def _add_node(branch: Tree, machine: Machine, node: int, cpus: Sequence[Cpu], *, explain: bool) -> None:
    """Hang a NUMA node on its package: a line for caches that are alike, or for each core, then devices.

    The only cache stands on the node's line.
    """
    size = next(
        (format_size(one.memory_kib) for one in machine.nodes if one.id == node and one.memory_kib), ""
    )
    title = [f"NUMANode {node}", *([size] if size else [])]
    kinds = _describe_caches(machine, cpus)
    only = len(kinds) == 1 and all(len(caches) == 1 for caches in kinds.values()) and not explain
    twig = branch.add(_write_line(machine, [*title, *(kinds if only else ())], cpus))
    if explain:
        for name, caches in (kinds or {"": [(0, list(cpus))]}).items():
            for _, share in caches:
                leaf = twig.add(_write_line(machine, [name], share)) if name else twig
                for core, pus in _divide(share, "core").items():
                    leaf.add(_write_line(machine, [f"Core {core}"], pus))
    for name, caches in kinds.items() if not (only or explain) else ():
        for (_, marks), group in groupby(caches, lambda one: (len(one[1]), _list_marks(machine, one[1]))):
            shares = [share for _, share in group]
            if len(shares) > 1 and not any("allowed " in mark for mark in marks):
                twig.add(_write_line(machine, [f"{len(shares)} x {name}"], *shares))
                continue
            for share in shares:
                twig.add(_write_line(machine, [name], share))
    _add_devices(twig, _list_devices(machine, node))


def _add_nodes_without_cpus(tree: Tree, machine: Machine) -> None:
    """Hang the NUMA nodes without CPUs on the tree; a line for those that are alike."""
    groups: dict[tuple[int, str], list[int]] = {}
    for node in machine.nodes:
        if all(cpu.node != node.id for cpu in machine.cpus):
            # Memory that was plugged in as movable (CXL, persistent) is not normal either.
            label = "no CPUs" if node.normal else "no CPUs, GPU or expansion memory"
            label = label if node.memory_kib else "no CPUs, no memory"
            groups.setdefault((node.memory_kib, label), []).append(node.id)
    for (size, label), numbers in groups.items():
        title = f"NUMANode{'s' if len(numbers) > 1 else ''} {format_cpulist(frozenset(numbers))}"
        each = f"{format_size(size)}{' each' if len(numbers) > 1 else ''}" if size else ""
        line = Text(_GAP.join(filter(None, (title, each, label))))
        if size and machine.allowed_mems.isdisjoint(numbers):
            line.append(f"{_GAP}(memory not allowed)", style="yellow")
        twig = tree.add(line)
        for number in numbers:
            _add_devices(twig, _list_devices(machine, number))


def _add_devices(branch: Tree, devices: Sequence[Device], depth: int = 2) -> None:
    """Hang devices on a branch, those behind one PCI switch together.

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


def _write_line(machine: Machine, title: Sequence[str], *shares: Sequence[Cpu]) -> Text:
    """Return the line of a part with its CPUs, or of several that are alike."""
    first, last, several = shares[0], shares[-1], len(shares) > 1
    words = list(title)
    if not title[0].startswith("Core"):
        words.append(count_things(len({cpu.core for cpu in first}), "core") + (" each" if several else ""))
    span = " to ".join(
        shorten_cpulist([cpu.id for cpu in share]) for share in ([first, last] if several else [first])
    )
    words.append(f"{'PUs' if several or len(first) > 1 else 'PU'} {span}")
    line = Text(_GAP.join(words))
    for mark in _list_marks(machine, first):
        line.append(f"{_GAP}({mark})", style="yellow")
    return line


def _list_marks(machine: Machine, cpus: Sequence[Cpu]) -> list[str]:
    """Say what of some CPUs the job may not use, or stays free of at boot."""
    pus = frozenset(cpu.id for cpu in cpus)
    allowed, isolated = pus & machine.allowed_cpus, pus & machine.isolated
    marks = []
    if allowed != pus:
        marks.append(f"allowed {shorten_cpulist(allowed)}" if allowed else "not allowed")
    if isolated:
        marks.append("isolated" if isolated == pus else f"isolated {shorten_cpulist(isolated)}")
    return marks


def _describe_allowed(machine: Machine, online: frozenset[int]) -> str:
    """Say in a sentence what the job may use."""
    allowed = online & machine.allowed_cpus
    nodes = frozenset(node.id for node in machine.nodes if node.memory_kib)
    mems = nodes & machine.allowed_mems
    part = f"{len(allowed)} of {count_things(len(online), 'PU')} ({shorten_cpulist(allowed)})"
    cpus = part if allowed != online else f"all {count_things(len(online), 'PU')}"
    memory = "all NUMA nodes" if mems == nodes else f"NUMA nodes {format_cpulist(mems) or '(none)'}"
    spared = allowed & machine.isolated
    left = spared and spared < allowed
    rest = f"; the isolated PUs {shorten_cpulist(spared)} are left alone" if left else ""
    return f"may use {cpus} and the memory of {memory}{rest}"


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
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    output, y = io.BytesIO(), 0.0
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font lacks
        mpl.rcdefaults()
        mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "launch", "text.parse_math": False})
        figure = Figure()
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        for rows in _list_parts(plan, note):
            top = y
            y += _SPACE
            for row in rows:
                x, lines = 2.0 * _SPACE, max(box.text.count("\n") + 1 for box in row)
                for box in row:
                    stripe = box.width / max(1, len(box.fills))
                    for at, fill in enumerate(box.fills):
                        patch = Rectangle((x + at * stripe, y), stripe, lines * _LINE, facecolor=fill)
                        axes.add_patch(patch).set_gid(f"{box.name}-{at}" if box.name else None)
                    if box.fills:
                        border = Rectangle((x, y), box.width, lines * _LINE, fill=False, edgecolor=_EDGE)
                        axes.add_patch(border).set_linewidth(0.7)
                    # Black or white, whichever reads better (relative luminance of WCAG 2, simplified).
                    colours = [bytes.fromhex(fill[1:]) for fill in box.fills]
                    light = sum(0.2 * red + 0.7 * green + 0.1 * blue for red, green, blue in colours)
                    ink = "#ffffff" if colours and light / len(colours) < 125 else "#222222"
                    most = max(1, int((box.width - 4) / (0.58 * box.size)))
                    short = [
                        one if len(one) <= most else f"{one[: most - 1]}…" for one in box.text.split("\n")
                    ]
                    is_cell = box.width <= _CORE
                    where = (x + box.width / 2 if is_cell else x + 4, y + lines * _LINE / 2)
                    text = axes.text(*where, "\n".join(short), fontsize=box.size, color=ink, va="center")
                    text.set_horizontalalignment("center" if is_cell else "left")
                    x += box.width + 1
                y += lines * _LINE + 1
            y += _SPACE
            frame = Rectangle((_SPACE, top), _WIDTH - 2 * _SPACE, y - top, fill=False, edgecolor=_EDGE)
            axes.add_patch(frame).set_linewidth(0.7)
        axes.set(xlim=(0, _WIDTH), ylim=(y, 0))
        axes.axis("off")
        figure.set_size_inches(_WIDTH / 72, y / 72)  # 72 dots an inch: a dot is a pixel
        metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[form]
        figure.savefig(output, format=form, dpi=144, facecolor="white", metadata=metadata)
    return output.getvalue()


@dataclass(frozen=True, slots=True)
class _Box:
    """A rectangle in stripes of its colours with lines of text; without colours the text alone."""

    width: float
    text: str = ""
    fills: _Fills = ()
    name: str = ""
    """Identifies it in an SVG."""
    size: int = 9
    """Of the letters."""


def _list_parts(plan: Plan, note: str) -> Iterator[list[list[_Box]]]:
    """Give the parts of a picture, each as rows of boxes: title, NUMA nodes, lone devices, legend."""
    machine, room = plan.machine, _WIDTH - 4 * _SPACE
    name, *words = _describe_machine(machine)
    told = ", ".join(filter(None, [*words, count_things(len(plan.ranks), "rank"), note]))
    yield [[_Box(room, name, size=16)], [_Box(room, told, size=11)]]
    owners = _find_owners(plan)
    for node in sorted({cpu.node for cpu in machine.cpus} | {node.id for node in machine.nodes}):
        cpus, cards = [cpu for cpu in machine.cpus if cpu.node == node], _list_cards(plan, node)
        if not cpus and not cards:
            continue
        memory = next((one.memory_kib for one in machine.nodes if one.id == node), 0)
        users = [rank.local_rank for rank in plan.ranks if node in rank.memory.nodes]
        words = [
            f"Package {format_cpulist(frozenset(cpu.package for cpu in cpus))}" if cpus else "",
            f"NUMANode {node}",
            format_size(memory) if memory else "",
            *(f"{len(caches)} x {name}" for name, caches in _describe_caches(machine, cpus).items()),
            f"memory of {_name_ranks('R', users)}" if users else "",
        ]
        rows = [[_Box(room, ", ".join(filter(None, words)))]]
        columns: list[list[_Box]] = []
        for share in _divide(cpus, "l3").values():
            columns += [[_Box(_SPACE)]] if columns else []  # caches stand apart
            for pus in _divide(share, "core").values():
                names = [owners[cpu.id][1] for cpu in pus]
                column = [_Box(_CORE, max(names, key=lambda name: (name[:1] == "R", name[:1] == "w")))]
                column += [_Box(_CORE, str(cpu.id), owners[cpu.id][0], f"pu{cpu.id}") for cpu in pus]
                columns.append(column)
        for at in range(0, len(columns), _MOST_CORES):
            some = columns[at : at + _MOST_CORES]
            for level in range(max(map(len, some))):
                rows.append([each[level] if level < len(each) else _Box(each[0].width) for each in some])
        yield rows + cards
    if cards := _list_cards(plan, None):
        yield cards
    yield _list_legend(plan, owners)


def _find_owners(plan: Plan) -> dict[int, tuple[_Fills, str]]:
    """Return by PU its fills and a short name of the ranks that have it."""
    machine, owners = plan.machine, dict[int, tuple[_Fills, str]]()
    for pu in (cpu.id for cpu in machine.cpus):
        ranks = [rank.local_rank for rank in plan.ranks if pu in rank.cpus]
        workers = [rank.local_rank for rank in plan.ranks if pu in rank.worker_cpus]
        owners[pu] = (_ISOLATED, "iso") if pu in machine.isolated else (_FREE, "")
        if ranks:
            owners[pu] = _colour(ranks), _name_ranks("R", ranks)
        elif workers:
            owners[pu] = tuple(map(lighten, _colour(workers))), _name_ranks("w", workers)
        elif pu not in machine.allowed_cpus:
            owners[pu] = _FORBIDDEN, ""
    return owners


def _list_cards(plan: Plan, place: int | None) -> list[list[_Box]]:
    """Return rows of the devices next to a NUMA node, or of unknown place, with the ranks that use them."""
    cards = []
    for device in _list_devices(plan.machine, place):
        name, pci, *more = _describe_device(device)
        if isinstance(device, Gpu):
            used = [one.local_rank for one in plan.ranks if one.gpu and one.gpu.pci == device.pci]
        else:
            used = [one.local_rank for one in plan.ranks if one.nic == device.name]
        kind = "gpu" if isinstance(device, Gpu) else "nic"
        owner = f"{_name_ranks('R', used)}: " if used else ""
        text = f"{owner}{name}\n{', '.join((pci, *more))}"
        tag = f"{kind}{clean_text(device.pci)}" if used else ""
        cards.append(_Box(_CARD, text, _colour(used) or _FREE, tag))
    return [cards[at : at + _MOST_CARDS] for at in range(0, len(cards), _MOST_CARDS)]


def _list_legend(plan: Plan, owners: Mapping[int, tuple[_Fills, str]]) -> list[list[_Box]]:
    """Return a row for each rank, and for the other marks that occur."""
    rows: list[tuple[str, _Fills, str]] = [
        (f"R{one.local_rank}", _colour([one.local_rank]), _describe_rank(one)) for one in plan.ranks
    ]
    if len(rows) > _MOST_RANKS:
        more = f"and {len(rows) - _MOST_RANKS} more ranks: launch plan lists them all"
        rows = [*rows[:_MOST_RANKS], ("", _FREE, more)]
    found = set(owners.values())
    if any(name.startswith("w") for _, name in found):
        rank = min(one.local_rank for one in plan.ranks if one.worker_cpus - one.cpus)
        light: _Fills = (lighten(find_colour(rank)),)
        rows.append((f"w{rank}", light, f"DataLoader workers of rank {rank} alone"))
    for fills, label, text in (
        (_FORBIDDEN, "", "not allowed: outside this job's cpuset"),
        (_ISOLATED, "iso", "isolated at boot, left alone"),
        (_FREE, "", "no rank's"),
    ):
        rows += [(label, fills, text)] if (fills, label) in found else []
    room = _WIDTH - 5 * _SPACE - _CORE
    return [[_Box(_CORE, label, fills), _Box(room, text)] for label, fills, text in rows]


def find_colour(rank: int) -> str:
    """Return the colour of a rank."""
    return PALETTE[rank % len(PALETTE)]


def lighten(colour: str) -> str:
    """Return the light tint of a colour."""
    return "#" + "".join(f"{255 - (255 - value) * 3 // 10:02x}" for value in bytes.fromhex(colour[1:]))


def _colour(ranks: Collection[int]) -> _Fills:
    """Return the colours of some ranks, each once."""
    return tuple(dict.fromkeys(find_colour(rank) for rank in sorted(ranks)))


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
