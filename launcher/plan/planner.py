"""From a machine and a request to the placement of every rank on the node, and why it is so."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.cpulist import format_cpulist
from launcher.errors import MachineError, UsageError
from launcher.plan.devices import NicChoice, resolve_visible, spread_devices
from launcher.plan.model import BINDINGS, Gpu, Machine, Plan, PlanWarning, Request, warn
from launcher.plan.resources import (
    MIN_CORES_PER_RANK,
    ROUNDING,
    Cores,
    Placement,
    WorkerBudget,
    build_rank_plan,
    choose_memory,
    count_cores,
    count_rank_cores,
    count_requested_workers,
)
from launcher.plan.topology import (
    Topology,
    assign_ranks,
    build_topology,
    find_usable,
    gather_pus,
    place_ranks,
)
from launcher.plan.variables import COUNTS, find_binders, read_host, read_variable_count
from launcher.protocol import LAUNCH_NIC


def plan(machine: Machine, request: Request) -> Plan:
    """Place every rank of a node. Depends on its arguments alone.

    Raises UsageError for a binding that does not exist, MachineError if nothing can run, or if the placement
    falls short and `binding.strict` is set.
    """
    binding = request.binding.policy
    if binding not in BINDINGS:
        raise UsageError(f"binding={binding} is unknown: use one of {', '.join(BINDINGS)}")
    visible = resolve_visible(machine.gpus, request.environ)
    topology = build_topology(machine, 0 if binding == "none" else request.binding.reserve_cores)
    enough = count_rank_cores(count_requested_workers(request))
    if request.devices == "spread":
        visible = spread_devices(machine, topology, visible, request, enough)
    devices = visible.devices
    ranks = range(request.nproc_per_node or len(devices) or len(topology.cores))
    # Programs choose device `local_rank` modulo their number.
    gpus = [devices[rank % len(devices)] if devices else None for rank in ranks]
    assignment = assign_ranks(topology, gpus, enough if binding == "exclusive" else 0)
    sets = place_ranks(binding, topology, assignment)
    links = NicChoice(machine, topology, request.environ).choose(machine, gpus)
    local = assignment.local_nodes_by_rank
    memories = [choose_memory(machine, topology, sets[rank].node, local[rank]) for rank in ranks]
    placements = [
        Placement(gpus[rank], local[rank], sets[rank], memories[rank], links[rank]) for rank in ranks
    ]
    placed = _NodePlacement(machine, topology, binding, placements)
    shortfalls = [*placed.find_shortfalls(request.binding.reserve_cores)]
    if request.binding.strict and shortfalls:
        raise MachineError(str(shortfalls[0]))
    cores = count_cores(topology, sets)
    quota = machine.limits.cpus
    within = [have.within(None if quota is None else quota / len(ranks)) for have in cores]
    budget = WorkerBudget(request, machine, within)
    made = tuple(
        build_rank_plan(
            request,
            machine.kernel,
            rank,
            placements[rank],
            visible.gpu_variables[rank % len(devices)] if devices else None,
            cores=within[rank],
            workers=budget.choose(within[rank]),
            why=why,
        )
        for rank, why in enumerate(placed.explain())
    )
    warnings = (
        *(warn("machine", text=text) for text in machine.warnings),
        *visible.warnings,
        *_find_advice(request, machine, devices, cores),
        *budget.find_shortages(),
        *shortfalls,
    )
    return Plan(machine, made, warnings)


@dataclass(frozen=True, slots=True)
class _NodePlacement:
    """The placement of all ranks of a node."""

    machine: Machine
    topology: Topology
    binding: str
    ranks: Sequence[Placement]
    """In the order of local ranks."""

    def group_by_node(self) -> dict[int, set[int]]:
        """Local ranks by NUMA node."""
        groups = defaultdict[int, set[int]](set)
        for rank, placement in enumerate(self.ranks):
            if placement.sets.node is not None:
                groups[placement.sets.node].add(rank)
        return groups

    def explain(self) -> Iterator[str]:
        """A sentence for each rank: GPU and node, cores, caches, workers' cores, memory, NIC."""
        core_of, on_node = self.topology.core_of, self.group_by_node()
        users = defaultdict[int, set[int]](set)
        """Ranks by last-level cache."""
        for rank, placement in enumerate(self.ranks):
            for pu in placement.sets.cpus:
                users[core_of[pu].l3].add(rank)
        for rank, placement in enumerate(self.ranks):
            sets, gpu, link, memory = placement.sets, placement.gpu, placement.link, placement.memory.nodes
            parts = ["no GPU"]
            if gpu is not None:
                name = f"GPU {gpu.index} ({gpu.pci})"
                unknown = f"the firmware names no NUMA node for {name}"
                parts = [unknown if gpu.node is None else f"{name} is on NUMA node {gpu.node}"]
            if sets.node is not None and (gpu is None or gpu.node != sets.node):
                far = gpu is not None and gpu.node is not None
                distance = self.topology.distance(gpu.node or 0, sets.node) if gpu and far else 0
                parts.append(f"it runs on node {sets.node}{f' (distance {distance})' if far else ''}")
            if sets.why:
                parts.append(f"it has {sets.why}")
            else:
                total, peers = len(self.topology.cores[sets.node or 0]), len(on_node[sets.node or 0])
                own = len({core_of[pu] for pu in sets.cpus})
                among = f", as one of {peers} ranks there" if peers > 1 else ""
                parts.append(f"it has {own} of the node's {_count_noun(total, 'usable core')}{among}")
                sharers = set().union(*(users[core_of[pu].l3] for pu in sets.cpus)) - {rank}
                if sharers:
                    parts.append(f"it shares last-level caches with ranks {format_cpulist(sharers)}")
            extra = Counter(core.node for core in {core_of[pu] for pu in sets.worker_cpus - sets.cpus})
            if extra:
                lent = [f"{_count_noun(extra[node], 'core')} of node {node}" for node in sorted(extra)]
                parts.append(f"its workers also have {', '.join(lent)}")
            if sets.node is None:
                parts.append("no memory policy")
            else:
                source = f"from node {format_cpulist(memory)}" if memory else "wherever the kernel finds it"
                parts.append(f"memory {source}")
            if link:
                parts.append(f"NIC {link.nic.name}, {link.why}")
            yield "; ".join(parts)

    def find_shortfalls(self, reserve: int) -> Iterator[PlanWarning]:
        """What the machine could not give."""
        if self.binding != "none":
            yield from self._find_remote()
            yield from self._find_left_over(reserve)
        for node, ranks in self.group_by_node().items() if self.binding == "exclusive" else ():
            cores = self.topology.cores[node]
            if len(ranks) > len(cores):
                yield warn("crowded", ranks=ranks, count=len(cores), cpus=gather_pus(cores), node=node)
        if self.binding == "exclusive":
            yield from self._find_uneven()

    def _find_remote(self) -> Iterator[PlanWarning]:
        """Ranks whose cpuset has no CPU next to their GPU, or not the memory of their node."""
        machine, usable = self.machine, frozenset(self.topology.core_of)
        by_node = defaultdict[int | None, set[int]](set)
        for cpu in machine.cpus:
            by_node[cpu.node].add(cpu.id)
        wanted = defaultdict[frozenset[int], set[int]](set)
        for rank, placement in enumerate(self.ranks):
            if gpu := placement.gpu:
                wanted[frozenset(by_node.get(gpu.node, gpu.local_cpus))].add(rank)
        for local_cpus, ranks in wanted.items():
            if local_cpus and local_cpus.isdisjoint(usable):
                yield warn("remote", ranks=ranks, wanted=local_cpus, usable=usable)
        there = {entry.id for entry in machine.nodes if entry.normal and entry.memory_kib}
        for node, found in self.group_by_node().items():
            ranks = {rank for rank in found if node in self.ranks[rank].local_nodes}
            if node in there - machine.allowed_mems and ranks:
                allowed = machine.allowed_mems or "none"
                yield warn("foreign_memory", ranks=ranks, node=node, allowed=allowed)

    def _find_left_over(self, reserve: int) -> Iterator[PlanWarning]:
        """A job that may use isolated CPUs only, and reserved cores that could not be kept back."""
        machine, usable = self.machine, find_usable(self.machine)
        if usable <= machine.isolated:
            yield warn("isolated", usable=usable)
        total = len({cpu.core for cpu in machine.cpus if cpu.id in usable})
        kept = total - sum(map(len, self.topology.cores.values()))
        if kept < reserve:
            yield warn("reserve", reserve=reserve, kept=kept, total=total)

    def _find_uneven(self) -> Iterator[PlanWarning]:
        """Ranks that have few cores next to their GPUs, and at most half as many as others.

        Nothing if there are more ranks than cores, which `crowded` tells.
        """
        sizes = {node: len(cores) for node, cores in self.topology.cores.items()}
        groups = defaultdict[frozenset[int], set[int]](set)
        for rank, placement in enumerate(self.ranks):
            groups[placement.local_nodes].add(rank)
        cores = {local_nodes: sum(sizes[node] for node in local_nodes) for local_nodes in groups}
        each = {local_nodes: cores[local_nodes] / len(ranks) for local_nodes, ranks in groups.items()}
        largest = max(each.values())
        for nodes, ranks in groups.items() if sum(sizes.values()) >= len(self.ranks) else ():
            if each[nodes] < MIN_CORES_PER_RANK and 2 * each[nodes] <= largest:
                values = {"cores": cores[nodes], "each": each[nodes], "largest": largest}
                yield warn("uneven", ranks=ranks, nodes=nodes, **values)


def _find_advice(
    request: Request, machine: Machine, visible: Sequence[Gpu], cores: Sequence[Cores]
) -> Iterator[PlanWarning]:
    """Warn of settings that are legal but seldom meant; `cores` are those of each rank."""
    environ, count = request.environ, len(cores)
    if visible and count > len(visible):
        yield warn("shared_gpus", ranks=count, gpus=len(visible))
    if len(visible) > 1 and request.devices != "own" and any(gpu.uuid.startswith("MIG-") for gpu in visible):
        yield warn("mig")
    order = environ.get("CUDA_DEVICE_ORDER") or "PCI_BUS_ID"
    if order != "PCI_BUS_ID" and len({gpu.name for gpu in visible}) > 1:
        yield warn("device_order", order=order)
    for name, minimum in COUNTS.items():
        if environ.get(name) and read_variable_count(environ, name) is None:
            yield warn("no_number", name=name, value=environ[name], minimum=minimum)
    for name in find_binders(environ):
        yield warn("binds", name=name, value=environ[name])
    nic, known = environ.get(LAUNCH_NIC), [device.name for device in machine.nics]
    if nic and nic not in known:
        yield warn("nic", nic=nic, known=", ".join(known) or "none found")
    quota, total = machine.limits.cpus, sum(each.own_cores + each.worker_cores for each in cores)
    if quota is not None and quota < total - ROUNDING:
        yield warn("quota", quota=quota, total=total, each=quota / count, ranks=count)
    host = read_host(request.allocator)
    if host != "system" and request.host_library == "":
        yield warn("no_malloc", host=host)


def _count_noun(number: int, what: str) -> str:
    """A number of things; `launcher.text` would load logging in each rank's shim."""
    return f"{number} {what}{'' if number == 1 else 's'}"
