"""What preflight finds on a node: facts of its hardware and software, and the results of short work.

launcher.probe reads the facts, `python -m launcher.programs.node_work` does the work, launcher.preflight
brings both together on a node, and launcher.doctor judges the nodes of a job beside each other. None is what
could not be read; `unchecked` says why.
"""

from dataclasses import dataclass

from launcher.doctor.finding import Finding


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    name: str
    memory_mib: int | None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU as NVML shows it."""

    index: int
    uuid: str
    name: str
    pci: str = ""
    memory_mib: int = 0
    used_mib: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    problem: str = ""
    """What NVML says in place of answers (`GPU is lost`); empty for a GPU that answers."""
    recovery_action: str | None = None
    """`none`, `gpu_reset`, `node_reboot`, `drain_p2p`, `drain_and_reset` (driver 570 and later), and newer
    drivers' `recover_imex_domain`, `bus_reset`, `system_reboot`."""
    ecc_uncorrected: int | None = None
    """Uncorrected errors since the driver was loaded."""
    remapped_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    clock_reasons: tuple[str, ...] = ()
    """Clock event reasons by their names in NVML, lower case, without prefix: `hw_slowdown`."""
    sm_clock: int | None = None
    max_sm_clock: int | None = None
    temperature: int | None = None
    power: float | None = None
    nvlinks: int | None = None
    """Links that are active."""
    max_nvlinks: int | None = None
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    peers: tuple[int, ...] | None = None
    """Indices of the node's other GPUs that it can read and write directly."""


@dataclass(frozen=True, slots=True)
class NicFacts:
    """A port of an RDMA device."""

    name: str
    """`mlx5_0:1`."""
    state: str
    """As sysfs has it: `ACTIVE`, `DOWN`, `INIT`."""
    rate_gbps: float
    link_downed: int | None = None


@dataclass(frozen=True, slots=True)
class PathFacts:
    """A path that the job needs, as a child that can be killed found it."""

    path: str
    purpose: str
    """`run directory`, `working directory`, `checkpoints`, `data`, `temporary directory`, `home`."""
    state: str
    """`ok`, `missing`, `denied`, `read_only`, `stuck` (no answer in time) or `failed`."""
    seconds: float = 0.0
    free_kib: int | None = None
    free_inodes: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class KernelXid:
    """An XID of a GPU in the kernel's log."""

    pci: str
    number: int
    text: str = ""
    age: float | None = None
    """Seconds since it was logged."""


@dataclass(frozen=True, slots=True)
class WorkResult:
    """A measured piece of work."""

    measure: str
    """`matmul` (TFLOPS), `copy_to`, `copy_from`, `memory`, `peer_copy`, `all_reduce`, `pair` (all GB/s)."""
    where: str
    """`GPU 3`, `CPU` (all of them together), `node`, or `n1-n2` for a pair."""
    value: float | None
    """None if it failed; see `problem`."""
    unit: str = ""
    checksum: str = ""
    """Of the result's bits, for work that gives the same on equal devices; empty if it does not."""
    problem: str = ""
    """How it failed, which speaks against the device."""
    reason: str = ""
    """Why it was not measured, if that says nothing of the device: no time was left."""
    device: str = ""
    """Kind of device, as `NVIDIA H100 80GB HBM3`: only the same kind is compared."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node of a job before its program starts."""

    host: str
    node_rank: int
    time: float
    """Of this node's clock: seconds since the epoch when the facts were read."""
    asked: float | None = None
    """Of the clock of the job's first node, when it asked: with `answered` it bounds the skew."""
    answered: float | None = None
    """Of the clock of the job's first node, when it had these facts."""
    gpus: tuple[GpuFacts, ...] = ()
    """The GPUs of the job, or the node's if these are not known."""
    lost_gpus: tuple[str, ...] = ()
    """PCI addresses of GPUs that the driver has and this process may open, but NVML does not list."""
    gpu_problem: str = ""
    """Why NVML tells nothing of GPUs though their driver is there: it fails, or hangs."""
    nics: tuple[NicFacts, ...] = ()
    paths: tuple[PathFacts, ...] = ()
    xids: tuple[KernelXid, ...] | None = None
    driver: str = ""
    """Version of the NVIDIA driver."""
    cuda_driver: str = ""
    """CUDA version that the driver supports."""
    torch: str = ""
    """Version of torch that the ranks' interpreter would import, with its local part: `2.8.0+cu128`."""
    torch_cuda: str = ""
    """CUDA version that torch was built for; empty for a CPU build."""
    kernel: str = ""
    boot_id: str = ""
    """Of the running kernel: nodes that have the same one are one machine, as on the sandbox."""
    cpus: int = 0
    """CPUs that the job may use."""
    memory_kib: int = 0
    free_memory_kib: int | None = None
    shm_kib: int | None = None
    free_shm_kib: int | None = None
    load: float | None = None
    """Share of the job's CPUs' time that others used, or the hypervisor took, while the facts were read."""
    work: tuple[WorkResult, ...] = ()
    unchecked: tuple[str, ...] = ()
    """What could not be checked, and why."""
    seconds: float = 0.0
    """That the node's checks took."""


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """What the judgement of a job's nodes depends on beside the facts."""

    gpus: int | None = None
    """GPUs that the job needs on each node; None if that is not known."""
    min_free_kib: float = 1 << 20
    """Free space below which a folder that is written to is short of it (`preflight.min_free_gib`)."""
    tolerance: float = 0.93
    """Share of the median of the job's devices below which one is slow (`preflight.tolerance`)."""


@dataclass(frozen=True, slots=True)
class NodeFinding:
    """A finding about one node of a job."""

    host: str
    """Empty for the job as a whole."""
    finding: Finding
    """An `error` makes the node sick: the program would fail or be held up; see launcher.doctor.finding."""


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """What preflight found on all nodes of a job."""

    kind: str
    """`light` or `deep`."""
    nodes: tuple[NodeFacts, ...]
    findings: tuple[NodeFinding, ...]
    silent: tuple[str, ...] = ()
    """Hosts that did not answer in time."""
    seconds: float = 0.0

    @property
    def sick(self) -> tuple[str, ...]:
        """Hosts with an error, and those that did not answer, in their order."""
        found = {one.host for one in self.findings if one.finding.level == "error" and one.host}
        hosts = (*(node.host for node in self.nodes if node.host in found), *self.silent)
        return tuple(dict.fromkeys(hosts))
