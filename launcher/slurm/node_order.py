"""The order in which nodes get their ranks: neighbours in rank are neighbours in the network. Pure."""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import SchedulerError
from launcher.files import read_file
from launcher.slurm.commands import run_slurm
from launcher.slurm.notation import expand_hosts
from launcher.text import name_some

GROUP = re.compile(r"(?:^|\s)(?:SwitchName|BlockName|AggregatedBlock)=(\S+)")
NODES = re.compile(r"(?:^|\s)Nodes=(\S+)")
NUMBERS = re.compile(r"([0-9]+)")
SHOWN = 3
"""Names of nodes that a message tells."""

NaturalKey = tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes that are near each other: those below a switch, or those of a block."""

    name: str
    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """The nodes of a job in the order of their ranks, and why they have it."""

    hosts: tuple[str, ...]
    source: str
    """`slurm`, `topology` or `file`."""
    why: str
    """For people: what gave the order."""
    warnings: tuple[str, ...] = ()
    """What is wrong with what was asked for."""


def parse_topology(text: str) -> tuple[NodeGroup, ...]:
    """Read what `scontrol show topology` prints: a line for each switch, block or aggregated block.

    What is between the groups need not be told: that follows from the nodes that they have in common. A line
    that cannot be read is left out, since an order is no reason to end a job.
    """
    return tuple(group for line in text.splitlines() if (group := parse_group(line)))


def parse_group(line: str) -> NodeGroup | None:
    """Read a line as `SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[0-1]`; None for any other."""
    name, nodes = GROUP.search(line), NODES.search(line)
    try:
        found = frozenset(expand_hosts(nodes[1])) if name and nodes and nodes[1] != "(null)" else frozenset()
    except ValueError:
        return None
    return NodeGroup(name[1], found) if name and found else None


def order_nodes(hosts: Sequence[str], groups: Iterable[NodeGroup]) -> tuple[str, ...]:
    """Return the nodes so that those of each group follow each other, at every level of the network.

    A level's groups, and the nodes of the lowest, are in the natural order of their names, with numbers
    as numbers: n2 comes before n10. Nodes in no group come last.
    """
    paths: dict[str, list[NaturalKey]] = {host: [] for host in hosts}
    # Of the groups that a node is in, the largest is the highest switch: all paths begin there.
    for group in sorted(groups, key=lambda group: (-len(group.nodes), make_natural_key(group.name))):
        name = make_natural_key(group.name)
        for host in group.nodes & paths.keys():
            paths[host].append(name)
    return tuple(sorted(hosts, key=lambda host: (not paths[host], paths[host], make_natural_key(host))))


def make_natural_key(name: str) -> NaturalKey:
    """Return what sorts names by the numbers in them, then as text: n2, n02, n10, rack1n3."""
    parts = NUMBERS.split(name)
    numbered = tuple((1, int(part), "") if odd % 2 else (0, 0, part) for odd, part in enumerate(parts))
    return (*numbered, (2, 0, name))


def order_by_topology(hosts: Sequence[str], groups: Collection[NodeGroup], *, asked: bool) -> NodeOrder:
    """Order a job's nodes by SLURM's switches or blocks; without any in SLURM's own order.

    `asked` says that somebody wants this order, and has to be told if it cannot be had.
    """
    placed = {host for group in groups for host in group.nodes}.intersection(hosts)
    if not placed:
        missing = "SLURM knows of no switches or blocks" + (" with this job's nodes" if groups else "")
        return keep_order(hosts, missing, warns=asked)
    count = sum(1 for group in groups if group.nodes.intersection(hosts))
    left = [host for host in hosts if host not in placed]
    last = f"{name_some(left, SHOWN)}: on none of SLURM's switches, and so last in the order"
    why = f"SLURM's topology, {count} groups"
    return NodeOrder(order_nodes(hosts, groups), "topology", why, (last,) if left else ())


def order_by_names(hosts: Sequence[str], names: Sequence[str], path: str) -> NodeOrder:
    """Order a job's nodes as a file names them; those that it does not name come last, by their names.

    Nodes of the file that the job does not have are passed over: the file can be that of a whole cluster.
    """
    positions: dict[str, int] = {}
    for number, name in enumerate(names):
        positions.setdefault(name, number)
    left = [host for host in hosts if host not in positions]
    if len(left) == len(hosts):
        return keep_order(hosts, f"{path} names none of the job's nodes, such as {hosts[0]}", warns=True)
    ordered = sorted(hosts, key=lambda host: (positions.get(host, len(names)), make_natural_key(host)))
    counts = Counter(names)
    twice = [host for host in ordered if counts[host] > 1]
    warnings = []
    if left:
        warnings.append(f"{path} does not name {name_some(left, SHOWN)}, which come last")
    if twice:
        warnings.append(f"{path} names {name_some(twice, SHOWN)} more than once: the first place counts")
    return NodeOrder(tuple(ordered), "file", path, tuple(warnings))


def parse_host_file(text: str) -> tuple[str, ...]:
    """Read a file with a node, or SLURM's form for several, on each line; `#` begins a comment.

    Raises ValueError for a line that is no list of nodes.
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return tuple(host for line in lines if line for host in expand_line(line))


def expand_line(line: str) -> tuple[str, ...]:
    """Return the nodes of a line; raises ValueError."""
    try:
        hosts = expand_hosts(line)
    except ValueError:
        hosts = ()
    if not hosts or not line.isprintable() or len(line.split()) > 1:
        raise ValueError(f"{line[:80]!r} is no node")
    return hosts


def keep_order(hosts: Sequence[str], why: str, *, warns: bool = False) -> NodeOrder:
    """Return SLURM's own order, and why; `warns` if something else was asked for."""
    return NodeOrder(
        tuple(hosts), "slurm", why, (f"{why}: the nodes stay in SLURM's order",) if warns else ()
    )


TOPOLOGY_TIMEOUT = 10.0
"""Seconds that SLURM has to tell of its switches: a job starts without, if slurmctld is busy."""
LARGEST_FILE = 16 << 20
"""Bytes of a file of nodes."""
FLAT = "node"
"""SLURM_TOPOLOGY_ADDR_PATTERN if there are no switches: then SLURM need not be asked (srun(1))."""


def find_node_order(
    setting: str, hosts: Sequence[str], environ: Mapping[str, str], directory: str
) -> NodeOrder:
    """Return the order that `cluster.node_order` asks for. What cannot be had is told of, and ends no job.

    `directory` is where a relative path starts.
    """
    if len(hosts) < 2 or setting == "slurm":
        return keep_order(hosts, "one node" if len(hosts) < 2 else "cluster.node_order=slurm")
    if setting not in ("auto", "topology"):
        return order_by_file(hosts, setting, directory)
    asked = setting == "topology"
    if environ.get("SLURM_TOPOLOGY_ADDR_PATTERN") == FLAT:
        return order_by_topology(hosts, (), asked=asked)
    try:
        text = run_slurm(("scontrol", "show", "topology"), environ, timeout=TOPOLOGY_TIMEOUT)
    except SchedulerError as error:
        return keep_order(hosts, f"the switches are not known ({error})", warns=asked)
    return order_by_topology(hosts, parse_topology(text), asked=asked)


def order_by_file(hosts: Sequence[str], setting: str, directory: str) -> NodeOrder:
    """Order nodes by a file of the user's."""
    path = os.path.join(directory, Path(setting).expanduser())  # noqa: PTH118 - the directory can be relative
    try:
        names = parse_host_file(read_file(path, LARGEST_FILE, follow=True).decode("utf-8", "replace"))
    except OSError as error:
        return keep_order(hosts, f"cluster.node_order={setting}: {error.strerror}", warns=True)
    except ValueError as error:
        return keep_order(hosts, f"cluster.node_order={setting}: {error}", warns=True)
    return order_by_names(hosts, names, setting)
