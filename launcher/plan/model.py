"""The values that the planner takes and gives: a machine, a request, a plan.

CPU numbers are the kernel's, NUMA node numbers too. All values are immutable and hold no open resource.
"""

from dataclasses import dataclass, field

from launcher.plan.gc_policy import GcPolicy

SCHEMA = 1
"""Version of the JSON form of plans and machine snapshots."""


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
    local_cpus: frozenset[int] = frozenset()
    """The device's `local_cpulist`; empty if unknown."""
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
    kernel: str = ""
    """Release of its kernel, which on WSL2 has `microsoft` in it; empty if unknown."""
    source: str = ""
    """Where a shipped machine's facts come from; empty for a machine that was probed."""
    warnings: tuple[str, ...] = ()
    """What the probe could not read or found contradictory."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the job asks of one node."""

    nproc_per_node: int | None = None
    """Ranks on the node; None for the visible GPUs, else one for each NUMA node with usable CPUs."""
    binding: str = "exclusive"
    """A policy's name: `exclusive`, `numa`, `socket`, `l3` or `none`."""
    strict: bool = False
    """A placement that falls short of the policy is an error rather than a warning."""
    reserve_cores: int = 0
    """Physical cores left for the system, spread over the NUMA nodes."""
    devices: str = "all"
    """`all`: every rank sees the job's GPUs; `own`: each rank sees its own alone; `spread`: as `all`, but of
    more GPUs than ranks the job has those that are spread over packages and NICs."""
    workload: str = "text"
    """Name of what `num_workers` was chosen for, for people."""
    num_workers: int = 2
    """DataLoader workers that each rank asks for; the plan gives fewer if cores are short."""
    worker_gib: float = 0.0
    """Memory of a worker in GiB; 0 if it is not known."""
    worker_shm_mib: float = 0.0
    """Shared memory for the batches of a worker in MiB; 0 if it is not known."""
    loader_default: bool = False
    """A `DataLoader(...)` without num_workers gets the plan's."""
    measured: bool = False
    """`num_workers` has been measured, and is not bounded."""
    gc: GcPolicy = field(default_factory=GcPolicy)
    """Garbage collection in the ranks."""
    allocator: str = "expandable_segments:True"
    """Settings of PyTorch's allocator, as PYTORCH_CUDA_ALLOC_CONF has them."""
    host_allocator: str = "system"
    """What serves malloc: `system`, `tcmalloc` or `jemalloc`."""
    host_library: str | None = None
    """Path of its library on the node; empty if there is none, None if nobody has looked."""
    nic: bool = False
    """Offer each rank its NIC as `NCCL_IB_HCA` too."""
    caches: str = ""
    """Folder on the node for the compilers' caches; empty for their own."""
    environ: tuple[tuple[str, str], ...] = ()
    """The environment, the configuration's variables in it, as far as the plan depends on it (`HONOURED`)."""
    configured: tuple[tuple[str, str], ...] = field(default=(), metadata={"json_object": True})
    """Variables that the configuration sets (`env.X`), by their names, secrets masked: for people."""


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
    source: str = field(metadata={"json_key": "from"})
    """`plan`, `configuration` (`env.NAME`, `env.from_file`) or `user` (the environment of the command)."""
    why: str = ""
    """In a few words; empty if there is nothing to say."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank of the node is started with."""

    local_rank: int
    gpu: Gpu | None
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
    env: tuple[tuple[str, str], ...] = field(default=(), metadata={"json_object": True})
    """Variables that the shim sets, in the order of their names."""
    notes: tuple[str, ...] = ()
    """What a person should know of this rank's placement."""
    variables: tuple[Variable, ...] = ()
    """Those of `env`, of the configuration, and of the user's that count, in the order of their names."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The placement of all ranks on one node."""

    machine: Machine
    ranks: tuple[RankPlan, ...]
    warnings: tuple[str, ...] = ()
