"""The values that the planner takes and gives (a machine, a request, a plan), and their JSON.

CPU numbers are the kernel's, NUMA node numbers too. All values are immutable and hold no open resource.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from launcher.codec import KEY, OBJECT, ONLY, OPTIONAL, convert, parse_json, to_plain
from launcher.cpulist import format_cpulist
from launcher.errors import UsageError
from launcher.fields import setting

SCHEMA = 1
"""Version of the JSON form of plans and machine snapshots."""
KIND = "machine"
"""What a snapshot says that it is."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """An online processing unit (PU, in hwloc's terms: a hardware thread)."""

    id: int
    core: int
    """Lowest-numbered online PU of the same physical core: equal for SMT siblings, unique for a core."""
    package: int
    """Physical package (socket) number."""
    node: int
    """NUMA node that holds the PU."""
    l3: int
    """Lowest-numbered online PU under the same last-level cache."""
    capacity: int = 1024
    """The kernel's `cpu_capacity`: 1024 for the biggest core, less for efficiency cores."""


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node; it may have no CPUs, no memory, or memory that is a GPU's."""

    id: int
    memory_kib: int
    """MemTotal of the node in KiB; 0 if it has none."""
    normal: bool
    """Ordinary memory that may be a target of binding: not a GPU's (GH200, GB200, POWER9)."""
    distances: tuple[tuple[int, int], ...]
    """(other node, SLIT distance) for every node, itself (10) included."""

    def distance(self, other: int) -> int:
        """SLIT distance to another node; 255 (unreachable) if the table has no entry."""
        return dict(self.distances).get(other, 255)


@dataclass(frozen=True, slots=True)
class Cache:
    """A last-level cache."""

    id: int
    """Lowest-numbered online PU under it, as in `Cpu.l3`."""
    level: int
    size_kib: int
    """0 if unknown."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG instance of one, as the driver enumerates them in PCI order."""

    index: int
    """Position among the machine's GPUs in PCI bus order (`CUDA_DEVICE_ORDER=PCI_BUS_ID`)."""
    uuid: str
    """`GPU-…` or `MIG-…`."""
    pci: str
    """PCI address in sysfs form, lower case, domain of at least four digits: `0000:07:00.0`."""
    node: int | None = None
    """NUMA node, None if the firmware says nothing (-1)."""
    name: str = ""
    """Product name, for people."""
    mig: tuple[str, ...] = ()
    """UUIDs of its MIG instances, in the driver's order; empty if MIG is off."""
    vendor: str = "nvidia"
    """`nvidia` or `amd`."""
    path: tuple[str, ...] = ()
    """PCI path from the root: the host bridge (`pci0000:00`), then each bridge; empty if unknown."""
    memory_mib: int = 0
    """Its own memory; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device (InfiniBand, RoCE, EFA)."""

    name: str
    """As in /sys/class/infiniband: `mlx5_0`."""
    pci: str
    """PCI address in sysfs form, empty if it has none."""
    node: int | None
    """NUMA node, None if the firmware says nothing (-1)."""
    path: tuple[str, ...] = ()
    """PCI path from the root, as `Gpu.path`."""
    link_layer: str = ""
    """`InfiniBand` or `Ethernet`; empty if unknown."""
    rate_gbps: float = 0
    """Rate of its fastest port; 0 if unknown."""
    active: bool = True
    """Whether a port is active; true if unknown."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the job's cgroup and mounts leave it; None if nothing limits or nothing is known."""

    cpus: float | None = None
    """CPU time, in CPUs: the cgroup's quota over its period."""
    memory_kib: int | None = None
    """Memory limit of the cgroup."""
    shm_kib: int | None = None
    """Size of /dev/shm."""
    files: int | None = None
    """Descriptors that a process may open at most (the hard limit)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a node has and what this job may use of it."""

    cpus: tuple[Cpu, ...]
    """Online CPUs in ascending order."""
    nodes: tuple[NumaNode, ...]
    """Online NUMA nodes in ascending order; a machine without NUMA has one."""
    gpus: tuple[Gpu, ...]
    """GPUs in PCI bus order, before CUDA_VISIBLE_DEVICES is applied."""
    allowed_cpus: frozenset[int]
    """CPUs of the job's cpuset (`Cpus_allowed_list`), online ones only."""
    allowed_mems: frozenset[int]
    """NUMA nodes of the job's cpuset (`Mems_allowed_list`)."""
    isolated: frozenset[int] = frozenset()
    """CPUs set apart at boot (`isolcpus`)."""
    memory_kib: int = 0
    """MemTotal of the machine in KiB."""
    nics: tuple[Nic, ...] = ()
    """RDMA devices in the order of their names, numbers in them compared as numbers."""
    caches: tuple[Cache, ...] = ()
    """Last-level caches in the order of their ids; empty if unknown."""
    limits: Limits = Limits()
    name: str = ""
    """The product's name (DMI), or a shipped machine's; empty if unknown."""
    kernel: str = field(default="", metadata={OPTIONAL: True})
    """Release of its kernel, which on WSL2 has `microsoft` in it; empty if unknown."""
    source: str = ""
    """Where a shipped machine's facts come from; empty for a machine that was probed."""
    warnings: tuple[str, ...] = ()
    """What the probe could not read or found contradictory."""


MAX_RANKS = 4096
"""Ranks of a node: several times the threads of the largest; a slip of the finger must not fill memory."""
BINDINGS = ("exclusive", "numa", "socket", "l3", "none")
"""The policies of `binding`."""
GC_POLICIES: Mapping[str, tuple[str, ...]] = {
    "synchronized": ("warmup", "every"),
    "disabled": ("every",),
    "frozen": ("warmup",),
    "default": (),
}
"""The policies for garbage collection, and the steps that each one uses."""


@dataclass
class BindingConfig:
    """How ranks are placed on cores."""

    policy: str = setting("exclusive", choices=BINDINGS)
    strict: bool = False
    """If the placement falls short: true ends the job, false warns."""
    reserve_cores: int = setting(0, minimum=0)
    """Cores left to the system, spread over NUMA nodes."""
    nic: bool = False
    """Set `NCCL_IB_HCA` to each rank's nearest NIC."""


@dataclass
class DataloaderConfig:
    """How many DataLoader workers a rank gets."""

    workload: str = "text"
    """What the number is for; empty if the command line sets it."""
    num_workers: int = setting(2, minimum=0, maximum=1024)
    """Workers of a rank. A workload's number is reduced if cores or memory are too few; yours is not."""
    worker_gib: float = setting(0.0, minimum=0)
    """Memory of a worker; 0: unknown, and no limit."""
    worker_shm_mib: float = setting(0.0, minimum=0)
    """Space in /dev/shm for a worker's batches; 0: unknown."""
    default: bool = False
    """A `DataLoader(...)` without num_workers gets that number."""
    measured: bool = False
    """The number was measured, as by `launch tune dataloader`: nothing reduces it."""


@dataclass
class GcConfig:
    """Garbage collection in the ranks, by steps of the optimizer."""

    policy: str = setting("synchronized", choices=tuple(GC_POLICIES))
    warmup: int = setting(30, minimum=0)
    """Steps before objects are frozen (`synchronized`, `frozen`)."""
    every: int = setting(50, minimum=0)
    """Steps between full collections, the same on all ranks (`synchronized`, `disabled`); 0: never."""
    log: bool = False
    """Ranks report collections on stderr."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a job asks of one node: sections of the configuration, and what is known of the node."""

    nproc_per_node: int | None = None
    """Ranks on the node; None for the visible GPUs, else one for each NUMA node with usable CPUs."""
    devices: str = "all"
    """`all`: every rank sees the job's GPUs; `own`: each rank sees its own alone; `spread`: as `all`, but of
    more GPUs than ranks the job has those that are spread over packages and NICs."""
    binding: BindingConfig = field(default_factory=BindingConfig)
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    gc: GcConfig = field(default_factory=GcConfig)
    allocator: Mapping[str, Any] = field(default_factory=lambda: {"expandable_segments": True})
    """Settings of PyTorch's allocator, and `host`: what serves malloc."""
    host_library: str | None = None
    """Path on the node of the library for malloc; empty if there is none, None if nobody has looked."""
    caches: str = ""
    """Folder on the node for the compilers' caches; empty for their own."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The environment, the configuration's variables in it, as far as the plan depends on it (`HONOURED`)."""
    configured: Mapping[str, str] = field(default_factory=dict)
    """Variables that the configuration sets (`env.X`), secrets masked: for people."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A NUMA memory policy, in the terms of set_mempolicy(2)."""

    policy: str
    """`preferred`, or `default` if nothing is set."""
    nodes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a rank's environment and who set it, for people and records."""

    name: str
    value: str
    """As the rank has it; secrets masked."""
    source: str = field(metadata={KEY: "from"})
    """`plan`, `configuration` (`env.NAME`, `env.from_file`) or `user` (the environment of the command)."""
    why: str = field(default="", metadata={OPTIONAL: True})
    """In a few words; empty if there is nothing to say."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank of the node is started with."""

    local_rank: int
    gpu: Gpu | None = field(metadata={ONLY: ("index", "uuid", "pci")})
    """In JSON what names it; the rest is in the machine."""
    cpus: frozenset[int]
    """CPU set of the rank's own process."""
    worker_cpus: frozenset[int]
    """CPU set of its DataLoader workers; contains `cpus`."""
    memory: Memory
    num_workers: int
    """DataLoader workers."""
    omp_num_threads: int
    """Threads for OpenMP: the rank's physical cores less its workers, at least 1."""
    nic: str | None = None
    """RDMA device next to the GPU."""
    env: tuple[tuple[str, str], ...] = field(default=(), metadata={OBJECT: True})
    """Variables that the shim sets, in the order of their names."""
    notes: tuple[str, ...] = ()
    """What a person should know of this rank's placement."""
    variables: tuple[Variable, ...] = ()
    """Those of `env`, of the configuration, and of the user's that count, in the order of their names."""


@dataclass(frozen=True, slots=True)
class PlanWarning:
    """Something that the plan could not give, or a setting that is seldom meant."""

    rule: str
    """A table of warnings.toml; `machine` is what the probe has told."""
    values: Mapping[str, object]
    """What its texts are filled with; sets are written as cpulists."""

    @property
    def what(self) -> str:
        """What happened."""
        return self._fill("what")

    @property
    def fix(self) -> str:
        """What to do about it; empty for the probe's."""
        return self._fill("fix")

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.what, self.fix)))

    def _fill(self, part: str) -> str:
        values = {
            name: format_cpulist(value) if isinstance(value, set | frozenset) else value
            for name, value in self.values.items()
        }
        return _read_rules()[self.rule][part].format(**values)


def warn(rule: str, **values: object) -> PlanWarning:
    """Return a warning of a rule."""
    return PlanWarning(rule, values)


@cache
def _read_rules() -> dict[str, dict[str, str]]:
    # Most ranks' plans warn of nothing.
    import tomllib  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    return tomllib.loads(Path(__file__).with_name("warnings.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Plan:
    """The placement of all ranks on one node."""

    machine: Machine
    ranks: tuple[RankPlan, ...]
    warnings: tuple[PlanWarning, ...] = ()


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as `launch plan format=json` prints it."""
    return {
        "schema": SCHEMA,
        "machine": machine_to_json(plan.machine),
        "ranks": to_plain(plan.ranks),
        "warnings": list(map(str, plan.warnings)),
    }


@dataclass(frozen=True, slots=True)
class _CoreGroup:
    """The cores that are in one place, as a snapshot has them."""

    package: int
    node: int
    l3: int
    capacity: int
    cores: tuple[frozenset[int], ...]
    """The PUs of each core."""


@dataclass(frozen=True, slots=True)
class _NodeEntry:
    """A NUMA node, as a snapshot has it."""

    id: int
    memory_kib: int
    normal: bool
    distances: tuple[int, ...]
    """To each node of the machine, in their order."""


def machine_to_json(machine: Machine) -> dict[str, Any]:
    """Return a machine as a snapshot holds it; `parse_machine` reads it back.

    Cores that are in one place stand together, and distances are a row without the nodes' numbers: files of
    machines with hundreds of CPUs stay short.
    """
    groups: dict[tuple[int, int, int, int], dict[int, set[int]]] = {}
    for cpu in machine.cpus:
        place = (cpu.package, cpu.node, cpu.l3, cpu.capacity)
        groups.setdefault(place, {}).setdefault(cpu.core, set()).add(cpu.id)
    ids = [node.id for node in machine.nodes]
    cores = [_CoreGroup(*place, tuple(map(frozenset, found.values()))) for place, found in groups.items()]
    nodes = [_NodeEntry(n.id, n.memory_kib, n.normal, tuple(map(n.distance, ids))) for n in machine.nodes]
    data = to_plain(replace(machine, cpus=(), nodes=())) | {
        "cores": to_plain(cores),
        "nodes": to_plain(nodes),
    }
    del data["cpus"]
    # What people look for comes first.
    first = ("name", "kernel", "source", "cores", "caches", "nodes", "gpus", "nics")
    ordered = {name: data[name] for name in first if name in data} | data
    return {"schema": SCHEMA, "kind": KIND, **ordered}


def parse_machine(text: str) -> Machine:
    """Read a snapshot's text, or that of a plan, which holds one.

    Raises UsageError for what is not a whole snapshot of a known schema.
    """
    try:
        data: Any = parse_json(text)
        data = data.get("machine") if isinstance(data, dict) and "ranks" in data else data
        if not isinstance(data, dict) or data.get("kind") != KIND:
            raise ValueError(f"its kind is not {KIND}")
        if data.get("schema") != SCHEMA:
            raise UsageError(
                f"the machine snapshot has schema {data.get('schema')!r}, and this version reads {SCHEMA}: "
                "update launch, or save it again"
            )
        groups = convert(tuple[_CoreGroup, ...], data.get("cores"), 0)
        entries = convert(tuple[_NodeEntry, ...], data.get("nodes"), 0)
        cpus = [
            Cpu(pu, min(core), group.package, group.node, group.l3, group.capacity)
            for group in groups
            for core in group.cores
            for pu in core
        ]
        ids = [entry.id for entry in entries]
        if not cpus or len({cpu.id for cpu in cpus}) < len(cpus) or len(set(ids)) < len(ids):
            raise ValueError("no CPUs, or a CPU or a node twice")
        nodes = [
            NumaNode(entry.id, entry.memory_kib, entry.normal, tuple(zip(ids, entry.distances, strict=True)))
            for entry in entries
        ]
        machine = convert(Machine, {**data, "cpus": [], "nodes": []}, 0)
    except ValueError as error:
        why = "not a machine snapshot, or damaged or cut short"
        raise UsageError(f"{why} ({error}): make one with `launch topo save=FILE`") from error
    return replace(machine, cpus=tuple(sorted(cpus, key=lambda cpu: cpu.id)), nodes=tuple(nodes))
