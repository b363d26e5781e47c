"""The order in which nodes get their ranks: neighbours in rank are neighbours in the network."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import SchedulerError
from launcher.slurm.commands import expand_hosts, make_natural_key, run_slurm
from launcher.text import name_some

GROUP = re.compile(r"(?:^|\s)(?:SwitchName|BlockName|AggregatedBlock)=(\S+)")
NODES = re.compile(r"(?:^|\s)Nodes=(\S+)")
SHOWN = 3
"""Names of nodes that a message tells."""
TOPOLOGY_TIMEOUT = 10.0
"""Seconds that SLURM has to tell of its switches: a job starts without, if slurmctld is busy."""
FLAT = "node"
"""SLURM_TOPOLOGY_ADDR_PATTERN if there are no switches: then SLURM need not be asked (srun(1))."""

Groups = tuple[tuple[str, frozenset[str]], ...]
"""Nodes that are near each other, those below a switch or of a block, with its name."""


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


def parse_topology(text: str) -> Groups:
    """Read what `scontrol show topology` prints: a line for each switch, block or aggregated block.

    What is between the groups need not be told: that follows from the nodes that they have in common. A line
    that cannot be read is left out, since an order is no reason to end a job.
    """
    groups = []
    for line in text.splitlines():
        name, nodes = GROUP.search(line), NODES.search(line)
        with contextlib.suppress(ValueError):
            if name and nodes and nodes[1] != "(null)" and (found := frozenset(expand_hosts(nodes[1]))):
                groups.append((name[1], found))
    return tuple(groups)


def order_nodes(hosts: Sequence[str], groups: Groups) -> tuple[str, ...]:
    """Return the nodes so that those of each group follow each other, at every level of the network.

    A level's groups, and the nodes of the lowest, are in the natural order of their names, with numbers
    as numbers: n2 comes before n10. Nodes in no group come last.
    """
    paths: dict[str, list[tuple[tuple[int, int, str], ...]]] = {host: [] for host in hosts}
    # Of the groups that a node is in, the largest is the highest switch: all paths begin there.
    for name, nodes in sorted(groups, key=lambda group: (-len(group[1]), make_natural_key(group[0]))):
        for host in nodes & paths.keys():
            paths[host].append(make_natural_key(name))
    return tuple(sorted(hosts, key=lambda host: (not paths[host], paths[host], make_natural_key(host))))


def keep_order(hosts: Sequence[str], why: str, *, warns: bool = False) -> NodeOrder:
    """Return SLURM's own order, and why; `warns` if something else was asked for."""
    warnings = (f"{why}: the nodes stay in SLURM's order",) if warns else ()
    return NodeOrder(tuple(hosts), "slurm", why, warnings)


def find_node_order(
    setting: str, hosts: Sequence[str], environ: Mapping[str, str], directory: str
) -> NodeOrder:
    """Return the order that `cluster.node_order` asks for. What cannot be had is told of, and ends no job.

    `directory` is where the path of a file starts.
    """
    if len(hosts) < 2 or setting == "slurm":
        return keep_order(hosts, "one node" if len(hosts) < 2 else "cluster.node_order=slurm")
    if setting not in ("auto", "topology"):
        return order_by_file(hosts, setting, directory)
    groups, why = Groups(), "SLURM knows of no switches or blocks with this job's nodes"
    if environ.get("SLURM_TOPOLOGY_ADDR_PATTERN") != FLAT:
        try:
            text = run_slurm(("scontrol", "show", "topology"), environ, timeout=TOPOLOGY_TIMEOUT)
            groups = tuple(group for group in parse_topology(text) if group[1].intersection(hosts))
        except SchedulerError as error:
            why = f"the switches are not known ({error})"
    if not groups:
        return keep_order(hosts, why, warns=setting == "topology")
    placed = frozenset[str]().union(*(nodes for _, nodes in groups))
    left = [host for host in hosts if host not in placed]
    last = f"{name_some(left, SHOWN)}: on none of SLURM's switches, and so last in the order"
    why = f"SLURM's topology, {len(groups)} groups"
    return NodeOrder(order_nodes(hosts, groups), "topology", why, (last,) if left else ())


def order_by_file(hosts: Sequence[str], setting: str, directory: str) -> NodeOrder:
    """Order a job's nodes as a file of the user's names them; those that it does not name come last.

    Each line of the file has a node, or SLURM's form for several; `#` begins a comment. Nodes that the job
    does not have are passed over: the file can be that of a whole cluster.
    """
    path, names = Path(directory, Path(setting).expanduser()), list[str]()
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            text = line.partition("#")[0].strip()
            if " " in text or not text.isprintable():
                raise ValueError(f"{text[:80]!r} is no node")
            names += expand_hosts(text)
    except (OSError, ValueError) as error:
        return keep_order(hosts, f"cluster.node_order={setting}: {error}", warns=True)
    places = {name: place for place, name in reversed([*enumerate(names)])}  # the first place counts
    left = [host for host in hosts if host not in places]
    if len(left) == len(hosts):
        return keep_order(hosts, f"{setting} names none of the job's nodes, such as {hosts[0]}", warns=True)
    ordered = sorted(hosts, key=lambda host: (places.get(host, len(names)), make_natural_key(host)))
    last = f"{setting} does not name {name_some(left, SHOWN)}, which come last"
    return NodeOrder(tuple(ordered), "file", setting, (last,) if left else ())
