"""What the doctor takes and what it gives: the facts of a node, its rules, and findings.

`launcher.probe` reads facts, `python -m launcher.programs.node_work` measures, and nothing here reads a
machine. None, or an empty tuple, is what could not be read; `Facts.unchecked` says why.
"""

import string
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from launcher.codec import to_plain
from launcher.cpulist import format_cpulist
from launcher.programs.measurement import Measurement
from launcher.text import count_things, describe_time, escape_text, format_size, name_some

LEVELS = ("error", "warning", "note", "unknown", "ok")
"""Worst first. `unknown` is a check that could not be made. An error on a node of a job makes the node sick:
the program would fail there or be held up."""
FAILING = ("error", "warning")
"""Levels that make `launch doctor` end with 1."""
LISTED = 4
"""Names of a list that a text holds."""


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
    persistence: bool | None = None
    """The driver keeps it initialized while nobody uses it."""

    @property
    def label(self) -> str:
        """Its name for people: `GPU 3 (0000:04:00.0)`."""
        place = self.pci or self.uuid
        return f"GPU {self.index}" + (f" ({place})" if place else "")


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
class Unchecked:
    """A check that could not be made."""

    check: str
    """The rule `unchecked.CHECK` tells it: `gpus`, `gpu_state`, `gpu_memory`, `xids`, `paths`, `torch`,
    `work`, `pairs`."""
    reason: str
    of: str = ""
    """Which of several, as the number of a GPU."""


@dataclass(frozen=True, slots=True)
class Clock:
    """How the frequency of some CPUs is chosen, by sysfs' `cpufreq`."""

    cpus: frozenset[int]
    driver: str
    governor: str
    preference: str = ""
    """`energy_performance_preference`; empty if the driver has none."""


@dataclass(frozen=True, slots=True)
class Link:
    """The PCI link of a GPU or NIC."""

    name: str
    """For people: `GPU 0`, `mlx5_0`."""
    width: int | None = None
    """Lanes in use now."""
    max_width: int | None = None
    """Lanes that the device has."""


@dataclass(frozen=True, slots=True)
class Health:
    """Limits of a process, settings of the kernel, clocks and links, at one moment."""

    live: bool = False
    """Read from the running machine rather than from another one's files or snapshot."""
    files: tuple[int | None, ...] = ()
    """RLIMIT_NOFILE, soft and hard; None is unlimited, and empty unknown."""
    locked: tuple[int | None, ...] = ()
    """RLIMIT_MEMLOCK, in bytes."""
    processes: tuple[int | None, ...] = ()
    """RLIMIT_NPROC, which counts threads."""
    pids_max: int | None = None
    """The lowest `pids.max` of the job's cgroup and those above it."""
    capabilities: int = 0
    """Effective capabilities as a mask (`CapEff`)."""
    numa_balancing: int | None = None
    zone_reclaim: int | None = None
    swap_kib: int | None = None
    """Swap in use."""
    transparent: str = ""
    """Transparent hugepages: `always`, `madvise` or `never`."""
    defrag: str = ""
    """When a page fault waits for a transparent hugepage."""
    hugepages_kib: int = 0
    """Reserved as huge pages that nobody uses."""
    clocks: tuple[Clock, ...] = ()
    links: tuple[Link, ...] = ()
    driver_gpus: tuple[str, ...] = ()
    """PCI addresses of the NVIDIA driver's GPUs in /proc."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A node: this machine, or one of a job before its program starts."""

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
    work: tuple[Measurement, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()
    health: Health | None = None
    """Read on this machine by `launch doctor`; None for a node of a job."""
    seconds: float = 0.0
    """That the node's checks took."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the judgement depends on beside the facts."""

    gpus: int | None = None
    """GPUs that the job needs on each node; None if that is not known."""
    min_free_kib: float = 1 << 20
    """Free space below which a folder that is written to is short of it (`preflight.min_free_gib`)."""
    tolerance: float = 0.93
    """Share of the median of the job's devices below which one is slow (`preflight.tolerance`)."""


@cache
def read_rules() -> Mapping[str, Mapping[str, str]]:
    """Read the table of rules, by their names: `gpu.recovery`; see the head of the file for their texts."""
    groups = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
    return {f"{group}.{name}": texts for group, rules in groups.items() for name, texts in rules.items()}


@cache
def read_tables() -> Mapping[str, Mapping[str, Any]]:
    """Read the tables that findings are decided by."""
    return tomllib.loads(Path(__file__).with_name("tables.toml").read_text())


class _Formatter(string.Formatter):
    """`str.format` with formats for people.

    `size` is of KiB, `time` of seconds, `cpus` of a set of numbers, `list` of some texts, `names` of many,
    `three` writes three digits, and `#core` counts.
    """

    def format_field(self, value: Any, format_spec: str) -> str:  # noqa: ANN401 - as the base class has it
        if format_spec.startswith("#"):
            return count_things(value, format_spec[1:])
        if format_spec in _FORMATS:
            return str(_FORMATS[format_spec](value))
        return escape_text(value) if isinstance(value, str) else str(super().format_field(value, format_spec))


_FORMATS: Mapping[str, Any] = {
    "size": format_size,
    "time": describe_time,
    "cpus": lambda numbers: format_cpulist(frozenset(numbers)) or "none",
    "list": lambda names: ", ".join(escape_text(str(name), 80) for name in names),
    "names": lambda names: name_some([escape_text(str(name), 80) for name in names], LISTED),
    "three": lambda number: f"{number:.0f}" if number >= 100 else f"{number:.3g}",
}
_formatter = _Formatter()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked: two findings are the same if their rules and values are."""

    rule: str
    """Its name in the table of rules."""
    level: str
    """One of `LEVELS`."""
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    host: str = ""
    """The node of a job that it is about; empty for the job as a whole, and for this machine."""

    @property
    def subject(self) -> str:
        """What it is about, in a word."""
        return read_rules()[self.rule]["subject"]

    @property
    def what(self) -> str:
        """What was found, with the values."""
        return (self.level == "ok" and self._fill("ok")) or self._fill("what")

    @property
    def why(self) -> str:
        """Why it matters to a job; empty if all is well."""
        return "" if self.level == "ok" else self._fill("why")

    @property
    def fix(self) -> str:
        """A command or a setting; empty if all is well."""
        return "" if self.level == "ok" else self._fill("fix")

    def _fill(self, part: str) -> str:
        text = read_rules()[self.rule].get(part, "")
        return _formatter.vformat(text, (), {**self.values, "host": self.host or self.values.get("host", "")})

    def to_json(self) -> dict[str, Any]:
        """Return it for programs: the texts, and what they are made of."""
        names = ("level", "subject", "what", "why", "fix", "rule")
        return {**{name: getattr(self, name) for name in names}, "values": to_plain(dict(self.values))}


def found(rule: str, level: str, host: str = "", /, **values: object) -> Finding:
    """Return a finding, of a node of a job if `host` is given."""
    return Finding(rule, level, values, host)


def or_ok(
    problems: Iterable[Finding], rule: str, *, if_known: object = True, **values: object
) -> list[Finding]:
    """Return the problems; if there are none, and that is known, that a matter is as it should be."""
    listed = [*problems]
    return listed or ([found(rule, "ok", **values)] if if_known else [])


def choose_exit_code(findings: Collection[Finding]) -> int:
    """Return 1 if a finding is an error or a warning, else 0."""
    return int(any(finding.level in FAILING for finding in findings))


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """What preflight found on all nodes of a job."""

    kind: str = "light"
    """`light` or `deep`."""
    hosts: tuple[str, ...] = ()
    """All nodes that were asked, by their ranks."""
    silent: tuple[str, ...] = ()
    """Hosts that did not answer in time."""
    seconds: float = 0.0
    nodes: tuple[Facts, ...] = ()
    """Those that answered."""
    findings: tuple[Finding, ...] = ()

    @property
    def sick(self) -> tuple[str, ...]:
        """Hosts with an error, and those that did not answer, in their order."""
        bad = {one.host for one in self.findings if one.level == "error" and one.host}
        hosts = (*(node.host for node in self.nodes if node.host in bad), *self.silent)
        return tuple(dict.fromkeys(hosts))
