"""The machines that are booted: from a shape to an initramfs and QEMU's command line, to a guest's report.

A shape is also described in the lab's form.

The initramfs holds this interpreter with its library, the launcher as it is now, and the guest program.
"""

import ctypes
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import asdict, dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

import launcher
from launcher.cpulist import format_cpulist, parse_cpulist

from .guest.init import Scenario

Data = dict[str, Any]
"""A machine description in the lab's form."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A machine as QEMU is asked for it.

    Dies, cores and threads are powers of two, so that APIC ids leave no gaps and are QEMU's CPU numbers.
    """

    name: str
    scenarios: tuple[Scenario, ...]
    packages: int = 2
    dies: int = 1
    """Dies of a package; each has a last-level cache, and is a NUMA node."""
    cores: int = 4
    """Cores of a die."""
    threads: int = 2
    numbering: str = "far"
    """How the firmware lists threads: `far` (siblings N/2 apart, as on servers), `adjacent`, or `odd-even`
    (far, and the packages in turn)."""
    memory: tuple[int, ...] = (512, 256)
    """MiB of each NUMA node: those of the dies, 0 for one without memory, then any without CPUs."""
    numa: bool = True
    """Whether the firmware tells of NUMA at all."""
    distance: tuple[int, int] = (12, 21)
    """To other NUMA nodes of the same package, and to another package's."""
    gpus: tuple[int, ...] = ()
    """NUMA node of each GPU, in PCI order."""
    isolated: str = ""
    """`isolcpus` of the kernel's command line."""
    cgroup: int = 2
    """Version of the control groups."""

    @property
    def count(self) -> int:
        """Hardware threads."""
        return self.packages * self.dies * self.cores * self.threads

    def order(self) -> tuple[int, ...]:
        """APIC ids in the order of the firmware's table, in which the kernel numbers CPUs."""
        packages, cores, threads = range(self.packages), range(self.dies * self.cores), range(self.threads)
        if self.numbering == "odd-even":
            places = [(package, core, thread) for thread, core, package in product(threads, cores, packages)]
        elif self.numbering == "far":
            places = [(package, core, thread) for thread, package, core in product(threads, packages, cores)]
        else:
            places = list(product(packages, cores, threads))
        return tuple(
            (package * len(cores) + core) * self.threads + thread for package, core, thread in places
        )

    def node_of(self, apic: int) -> int:
        """NUMA node of a CPU."""
        return apic // (self.cores * self.threads) if self.numa else 0

    def package_of(self, node: int) -> int:
        """Package of a NUMA node; one without CPUs is beside the last package."""
        return min(node // self.dies, self.packages - 1)

    def distance_of(self, one: int, other: int) -> int:
        """SLIT distance."""
        near, far = self.distance
        if one == other:
            return 10
        return near if self.package_of(one) == self.package_of(other) else far

    def list_common(self) -> frozenset[int]:
        """CPUs of a process that no cpuset narrows: the kernel keeps isolated ones from the first one on."""
        return frozenset(range(self.count)) - parse_cpulist(self.isolated)

    def list_bridges(self) -> list[tuple[int | None, int, list[int]]]:
        """Host bridges with GPUs: the node, the bus number, and the bus of each GPU."""
        if not self.numa:
            return [(None, 0, list(range(1, len(self.gpus) + 1)))] if self.gpus else []
        runs = [(node, len(list(run))) for node, run in groupby(self.gpus)]
        return [
            (node, bus, list(range(bus + 1, bus + 1 + size)))
            for (node, size), bus in zip(runs, range(16, 256, 16), strict=False)
        ]

    def describe(self, scenario: Scenario) -> Data:
        """The machine with what a scenario leaves of it, in the lab's form."""
        order, half = self.order(), self.count // 2
        cpus = [
            frozenset(cpu for cpu, apic in enumerate(order) if self.node_of(apic) == node)
            for node in range(len(self.memory))
        ]
        threads = {"adjacent": 2} if self.numbering == "adjacent" else {"offset": half}
        with_memory = frozenset(node for node, mib in enumerate(self.memory) if mib)
        return {
            "name": self.name,
            "numa": [
                {
                    "id": node,
                    "package": self.package_of(node),
                    "cpus": format_cpulist(cpus[node]),
                    "gib": mib / 1024,
                    "kind": "normal" if cpus[node] else "memory",
                }
                for node, mib in enumerate(self.memory)
            ],
            "threads": threads if self.threads > 1 else {"none": True},
            "distance": list(self.distance),
            "gpus": self.describe_gpus(),
            "offline": format_cpulist(frozenset(scenario.offline)),
            "isolated": self.isolated,
            "allowed_cpus": scenario.cpus or format_cpulist(self.list_common() - frozenset(scenario.offline)),
            "allowed_mems": scenario.mems or format_cpulist(with_memory),
        }

    def describe_gpus(self) -> list[Data]:
        """The GPUs in PCI order; -1 is the kernel's word for a device without a node."""
        return [
            {"bdf": f"0000:{bus:02x}:00.0", "numa": -1 if node is None else node, "model": "QEMU virtio-gpu"}
            for node, _, buses in self.list_bridges()
            for bus in buses
        ]


def load_shapes() -> tuple[Shape, ...]:
    """Read tests/data/kernels.toml."""

    def freeze(row: dict[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}

    rows = tomllib.loads((Path(__file__).parents[1] / "data/kernels.toml").read_text())["shape"]
    jobs = [tuple(Scenario(**freeze(job)) for job in row.pop("scenarios")) for row in rows]
    return tuple(Shape(scenarios=own, **freeze(row)) for row, own in zip(rows, jobs, strict=True))


SHAPES = load_shapes()
PATIENCE = 300
"""Seconds that a guest may take; without KVM it takes about 10."""
TAIL = 40
"""Lines of a guest's console that a failure shows."""
LEFT_OUT = {"test", "site-packages", "dist-packages", "idlelib", "tkinter", "lib2to3", "ensurepip", "venv"}
LEFT_OUT |= {"pydoc_data", "distutils", "unittest", "asyncio", "sqlite3", "xml", "xmlrpc", "turtledemo"}
"""Folders of the standard library that nothing here imports: half of it, and memory in a guest."""
EXTENSIONS = {
    *("_ctypes", "_struct", "_posixsubprocess", "_json", "_random", "_bisect", "_heapq", "_datetime"),
    *("_opcode", "_socket", "array", "binascii", "fcntl", "math", "mmap", "resource", "select", "zlib"),
}
"""Extension modules that are taken, where they are not built in: the others drag in many libraries."""
INTERPRETER = Path(sys.executable).resolve()
"""Behind the links of a virtual environment."""
INIT = """\
#!{program} -IS
import sys
sys.path.insert(0, "/lab")
from guest.init import main
main()
"""


def pack_interpreter(target: Path) -> Path:
    """Archive the running interpreter under its own paths, with the libraries that it needs."""
    library = Path(sysconfig.get_path("stdlib"))
    suffixes = (".py", f".{sys.implementation.cache_tag}.pyc")
    files: set[Path] = set()
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        files.update(Path(folder, name) for name in names if name.endswith(suffixes))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = [library / "lib-dynload" / f"{name}{suffix}" for name in EXTENSIONS]
    for binary in (INTERPRETER, *(module for module in modules if module.exists())):
        done = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False)
        files |= {binary, *(Path(word) for word in done.stdout.split() if word.startswith("/"))}
    parents = {parent for file in files for parent in file.parents}
    return write_cpio(
        target, Path("/"), sorted(str(path)[1:] for path in files | parents if path != Path("/"))
    )


def write_cpio(target: Path, folder: Path, names: list[str]) -> Path:
    """Archive files of a folder as the kernel takes them; links are followed, and root owns everything."""
    with target.open("wb") as file:
        subprocess.run(
            ["cpio", "--quiet", "-o", "-L", "-H", "newc", "-R", "0:0"],
            cwd=folder,
            input="".join(f"{name}\n" for name in names).encode(),
            stdout=file,
            check=True,
        )
    return target


def pack_programs(target: Path, stage: Path) -> Path:
    """Archive the launcher and the guest program as they are now, so that all guests run the same."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(launcher.__file__).parent, stage / "lab/launcher", ignore=ignore)
    shutil.copytree(Path(__file__).parent / "guest", stage / "lab/guest", ignore=ignore)
    (stage / "lab/tests/rank").mkdir(parents=True)
    shutil.copy(Path(__file__).parents[1] / "rank/start_shim.py", stage / "lab/tests/rank")
    init = stage / "init"
    init.write_text(INIT.format(program=INTERPRETER))
    init.chmod(0o755)
    return write_cpio(target, stage, list_names(stage))


def list_names(folder: Path) -> list[str]:
    """Names of everything below a folder, parents first."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def write_initramfs(shape: Shape, archives: tuple[Path, ...], folder: Path) -> Path:
    """Add a guest's orders to the archives; the kernel takes one after another."""
    orders = {"cgroup": shape.cgroup, "scenarios": [asdict(scenario) for scenario in shape.scenarios]}
    stage = folder / "stage"
    (stage / "lab").mkdir(parents=True)
    (stage / "lab/scenarios.json").write_text(json.dumps(orders))
    last = write_cpio(folder / "orders.cpio", stage, list_names(stage))
    whole = folder / "initramfs"
    with whole.open("wb") as file:
        for part in (*archives, last):
            file.write(part.read_bytes())
    return whole


class GuestError(Exception):
    """A guest ended without a report; the text has the end of its console."""


def boot(shape: Shape, kernel: Path, initramfs: Path, folder: Path) -> dict[str, Any]:
    """Boot the machine, wait for its end, and return its report. Raises GuestError."""
    console, report = folder / "console", folder / "report"
    # One thread for all CPUs: with one each, a guest on a busy host has hung in stop_machine(), and the many
    # threads cost a quarter more CPU time.
    words = [
        *("qemu-system-x86_64", "-accel", "tcg,thread=single", "-machine", "q35", "-cpu", "Skylake-Server"),
        *("-nodefaults", "-display", "none", "-vga", "none", "-no-reboot"),
        *("-kernel", str(kernel), "-initrd", str(initramfs), "-append", list_boot_options(shape)),
        *("-serial", f"file:{console}", "-serial", f"file:{report}"),
        *list_processors(shape, folder),
        *list_nodes(shape),
        *list_devices(shape),
    ]
    try:
        # `run` kills the guest where it takes too long, and at Ctrl-C.
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=PATIENCE, check=False, preexec_fn=die_with_parent
        )
        complaints = [line for line in done.stderr.splitlines() if "TCG doesn't support" not in line]
        why = f"QEMU ended with status {done.returncode} {' '.join(complaints)}"
    except subprocess.TimeoutExpired:
        why = f"not done after {PATIENCE} s"
    try:
        return dict(json.loads(report.read_text()))
    except (OSError, ValueError):
        raise GuestError(f"{shape.name}: no report; {why}\n{read_tail(console)}") from None


def die_with_parent() -> None:
    """Let the kernel end QEMU where this process is killed: prctl(2), PR_SET_PDEATHSIG."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def read_tail(console: Path) -> str:
    """The last lines of a guest's console."""
    lines = console.read_text(errors="replace").splitlines() if console.exists() else []
    return "\n".join(lines[-TAIL:]) or "nothing on its console"


def list_boot_options(shape: Shape) -> str:
    """The kernel's command line."""
    # On a busy host, the kernel's test of its timer may fail, which ends it.
    words = ["console=ttyS0", "panic=-1", "rdinit=/init", "mitigations=off", "no_timer_check"]
    if shape.numbering != "adjacent":
        # The second MADT is the one that `-acpitable` adds.
        words.append("acpi_apic_instance=2")
    if shape.isolated:
        words.append(f"isolcpus={shape.isolated}")
    return " ".join(words)


def list_processors(shape: Shape, folder: Path) -> list[str]:
    """CPUs, numbered by a table of our own where QEMU's order is not wanted."""
    sizes = f"sockets={shape.packages},dies={shape.dies},cores={shape.cores},threads={shape.threads}"
    words = ["-smp", f"{shape.count},{sizes}", "-m", str(sum(shape.memory))]
    if shape.numbering != "adjacent":
        table = folder / "madt"
        table.write_bytes(write_madt(shape.order()))
        words += ["-acpitable", f"sig=APIC,rev=1,data={table}"]
    return words


def write_madt(order: tuple[int, ...]) -> bytes:
    """The body of a MADT (ACPI 6.5, 5.2.12) for q35 that lists processors in this order.

    The kernel numbers CPUs as the firmware lists them, so this is what makes odd and even sockets.
    """
    local_apics = [struct.pack("<BBBBI", 0, 8, uid, apic, 1) for uid, apic in enumerate(order)]
    io_apic = struct.pack("<BBBBII", 1, 12, 0, 0, 0xFEC00000, 0)
    # ISA interrupts as q35 routes them: the timer on 2, the PCI links level-triggered (0xD).
    routes = ((0, 2, 0), (5, 5, 0xD), (9, 9, 0xD), (10, 10, 0xD), (11, 11, 0xD))
    overrides = [struct.pack("<BBBBIH", 2, 10, 0, irq, pin, flags) for irq, pin, flags in routes]
    nmi = struct.pack("<BBBHB", 4, 6, 0xFF, 0, 1)
    return b"".join((struct.pack("<II", 0xFEE00000, 1), *local_apics, io_apic, *overrides, nmi))


def list_nodes(shape: Shape) -> list[str]:
    """NUMA nodes with their memory, CPUs and distances."""
    if not shape.numa:
        return []
    words = []
    for node, mib in enumerate(shape.memory):
        cpus = "".join(f",cpus={apic}" for apic in range(shape.count) if shape.node_of(apic) == node)
        if mib:
            words += ["-object", f"memory-backend-ram,id=m{node},size={mib}M"]
        words += ["-numa", f"node,nodeid={node}{f',memdev=m{node}' if mib else ''}{cpus}"]
    for one in range(len(shape.memory)):
        for other in range(one + 1, len(shape.memory)):
            words += ["-numa", f"dist,src={one},dst={other},val={shape.distance_of(one, other)}"]
    return words


def list_devices(shape: Shape) -> list[str]:
    """A host bridge on each node with GPUs, and below it a root port for each GPU."""
    words = []
    for node, bus, gpus in shape.list_bridges():
        bridge = "pcie.0" if node is None else f"bridge{bus}"
        if node is not None:
            words += ["-device", f"pxb-pcie,id={bridge},bus=pcie.0,bus_nr={bus},numa_node={node}"]
        for gpu in gpus:
            words += ["-device", f"pcie-root-port,id=port{gpu},bus={bridge},chassis={gpu}"]
            words += ["-device", f"virtio-gpu-pci,bus=port{gpu}"]
    return words
