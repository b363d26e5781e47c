"""Reads what is judged of a node: limits, kernel settings, links; before a job GPUs, paths, load, XIDs."""

import contextlib
import errno
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NoReturn, TypeVar

from launcher.doctor.model import Clock, Facts, Health, KernelXid, Link, PathFacts, Unchecked
from launcher.doctor.node import WRITTEN
from launcher.errors import MachineError
from launcher.plan.model import Machine
from launcher.probe.devices import list_cards, read_nic_ports
from launcher.probe.limits import (
    FILES,
    SHM,
    STATUS,
    read_capabilities,
    read_limits,
    read_pids_max,
    read_resource,
)
from launcher.probe.machine import CPU, read_cpu_sets
from launcher.probe.nvml import import_nvml, read_gpu_facts
from launcher.probe.sysfs import PCI, Tree, normalise_pci, parse_number

PATIENCE = 5.0
"""Seconds that a path, a driver or an interpreter may take: an automounter's first mount is among them."""
DRIVER_VERSION = re.compile(r"\b(\d{3,4}(?:\.\d{1,4}){1,2})\b")
SHORTEST = 0.3
"""Seconds over which the load is measured at least: the kernel counts hundredths."""
SAMPLE = bytes(4096)
"""What is written on trial: a block, which takes space where an empty file would not."""
STATES = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "read_only",
}
LOG_RECORD = 8192
"""Bytes of a record of the kernel's log at most: CONSOLE_EXT_LOG_MAX; a shorter buffer makes read(2) fail."""
MOST_XIDS = 256
"""The last ones that are kept."""
XID = re.compile(
    r"^(\d{1,20}),\d{1,20},(\d{1,20})(?:,[^;\n]*)?;.*?"
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d{1,6})\b,?[^\S\n]*(.{0,200})",
    re.MULTILINE | re.ASCII,
)
"""`PRIORITY,SEQUENCE,MICROSECONDS,…;TEXT` (Documentation/ABI/testing/dev-kmsg) with an XID in the text."""
LOCATE_TORCH = (
    "import importlib.util as u; s = u.find_spec('torch'); print((s.origin or '') if s else '', end='')"
)
TORCH = re.compile(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"\s]{1,80})['\"]", re.MULTILINE)
TORCH_CUDA = re.compile(r"^cuda\s*(?::[^=]*)?=\s*['\"]([0-9.]{1,20})['\"]", re.MULTILINE)
HIGHEST = 1 << 20
"""Descriptors from here on are not looked for: the usual hard limit."""
GRACE = 0.05
"""Seconds in which a killed child is gone, unless it is in state D."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What became of a call."""

    value: T | None
    """None if it failed or did not answer."""
    seconds: float
    stuck: bool = False
    """It had not answered at the limit."""
    problem: str = ""
    """The error that it ended with, or the signal that ended its process."""


def read_node_facts(
    root: str | os.PathLike[str] = "/",
    paths: Sequence[tuple[str, str]] = (),
    *,
    host: str = "",
    python: str | None = None,
    gpus: str | None = None,
    nvml: ModuleType | None = None,
    patience: float = PATIENCE,
) -> Facts:
    """Read the facts of the node whose files are below `root`; `paths` are given with their purposes.

    `python` is the ranks' interpreter (default: this one), `gpus` the job's CUDA_VISIBLE_DEVICES.
    With another root than `/` nothing outside is consulted: paths, torch and the load are left out, and the
    time is 0.
    What may hang (paths, NVML, another interpreter) runs in children, all at once, for `patience` seconds.
    Nothing raises: what cannot be read is None or empty, and `unchecked` says why.
    """
    begin, tree = time.monotonic(), Tree(root)
    unchecked: list[Unchecked] = []
    try:
        cpus = read_cpu_sets(tree, tree.read_fields(STATUS))[1]
    except MachineError:
        cpus = frozenset()
    before = _read_others_time(tree, cpus)
    live_paths = paths if tree.is_real else ()
    calls: list[Callable[[], Any]] = [
        # NVML's library is not to be this process's, nor its hanging.
        lambda: read_gpu_facts(tree, nvml or (import_nvml() if tree.is_real else None), gpus),
        lambda: read_torch(python) if tree.is_real else ("", ""),
        *(partial(read_path, *entry) for entry in live_paths),
    ]
    gpu_answer, torch_answer, *looks = call_in_children(calls, patience)
    gpu_fields, (torch, torch_cuda) = gpu_answer.value, torch_answer.value or ("", "")
    if gpu_fields is None:
        problem = f"NVML: {gpu_answer.problem}"
        gpu_fields = {
            "gpu_problem": problem if gpu_answer.stuck else "",
            "unchecked": [Unchecked("gpus", problem)],
        }
    unchecked += gpu_fields.pop("unchecked", ())
    if torch_answer.value is None:
        unchecked.append(Unchecked("torch", torch_answer.problem))
    xids = read_kernel_xids(tree)
    if xids is None:
        closed = "this user may not read the kernel's log (/dev/kmsg; kernel.dmesg_restrict)"
        unchecked.append(Unchecked("xids", closed if tree.is_real else "not in these files"))
    if paths and not tree.is_real:
        unchecked.append(Unchecked("paths", "not in these files"))
    looked_at = []
    for entry, look in zip(live_paths, looks, strict=True):
        path = look.value or PathFacts(*entry, "stuck" if look.stuck else "failed", detail=look.problem)
        looked_at.append(replace(path, seconds=round(look.seconds, 3)))
    limits, memory = read_limits(tree), tree.read_meminfo()
    memory_kib = min(memory.get("MemTotal", 0), limits.memory_kib or sys.maxsize)
    free_kib = memory.get("MemAvailable")
    space = os.statvfs(SHM) if tree.is_real and os.path.isdir(SHM) else None
    driver = DRIVER_VERSION.search((tree.read("proc/driver/nvidia/version") or "").partition("\n")[0])
    kernel = "proc/sys/kernel/"
    return Facts(
        host=host or (tree.read(f"{kernel}hostname") or ""),
        node_rank=0,
        time=time.time() if tree.is_real else 0.0,
        nics=read_nic_ports(tree),
        paths=tuple(looked_at),
        xids=xids,
        driver=driver[1] if driver else "",
        torch=torch,
        torch_cuda=torch_cuda,
        kernel=(tree.read(f"{kernel}osrelease") or "")[:80],
        boot_id=(tree.read(f"{kernel}random/boot_id") or "")[:80],
        cpus=len(cpus),
        memory_kib=memory_kib,
        free_memory_kib=None if free_kib is None else min(free_kib, memory_kib),
        shm_kib=limits.shm_kib,
        free_shm_kib=space.f_bavail * space.f_frsize // 1024 if space else None,
        load=_measure_load(tree, cpus, before),
        unchecked=tuple(unchecked),
        seconds=round(time.monotonic() - begin, 3),
        **gpu_fields,
    )


def _read_others_time(tree: Tree, cpus: frozenset[int]) -> tuple[float, float] | None:
    """Read this moment, and the seconds until then that others used these CPUs, or a hypervisor took.

    Others are all but this process and its children that have ended. None if the kernel does not show the
    times of the CPUs, or it is another machine.
    """
    if not tree.is_real:
        return None
    names = {f"cpu{cpu}" for cpu in cpus}
    lines = (tree.read("proc/stat") or "").splitlines()
    rows = [line.split() for line in lines if line.partition(" ")[0] in names]
    if not rows:
        return None
    # User, nice and system; interrupts, softirqs and steal. What guests use is in `user` too.
    ticks = sum(int(word) for row in rows for word in row[1:4] + row[6:9])
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK") - own


def _measure_load(tree: Tree, cpus: frozenset[int], before: tuple[float, float] | None) -> float | None:
    """Return the share of the CPUs' time since `before` that others used; None if it cannot be told."""
    if before is None:
        return None
    time.sleep(max(0.0, before[0] + SHORTEST - time.monotonic()))
    after = _read_others_time(tree, cpus)
    if after is None:
        return None
    share = (after[1] - before[1]) / ((after[0] - before[0]) * len(cpus))
    return round(min(1.0, max(0.0, share)), 3)


def read_kernel_xids(tree: Tree) -> tuple[KernelXid, ...] | None:
    """Read the XIDs of NVIDIA's driver in the kernel's log, oldest first; None if it may not be read.

    With `kernel.dmesg_restrict` it is for root, or CAP_SYSLOG, alone.
    """
    log = bytearray()
    try:
        handle = os.open(f"{tree.prefix}/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(handle, "rb", buffering=0) as file:
        data = b"-"
        while data:
            try:
                data = os.read(file.fileno(), LOG_RECORD)
            except BrokenPipeError:  # The kernel has overwritten the record: the next read is of the oldest.
                continue
            except BlockingIOError:  # the end
                break
            except OSError:
                return None
            log += data
    # The log counts from the boot; another machine's boot is not known.
    now = time.monotonic() if tree.is_real else None
    xids = []
    for priority, microseconds, place, number, text in XID.findall(log.decode("utf-8", "replace")):
        pci = normalise_pci(place)
        # What users write to the device is of another facility than the kernel's, which is 0.
        if pci and int(priority) >> 3 == 0:
            age = None if now is None else max(0.0, round(now - int(microseconds) / 1e6, 1))
            message = "".join(char if char.isprintable() else "?" for char in text)
            xids.append(KernelXid(pci, int(number), message, age))
    return tuple(xids[-MOST_XIDS:])


def read_path(path: str, purpose: str) -> PathFacts:
    """Look at one path: whether it answers, and what is free there; this may hang."""
    free_kib = free_inodes = None
    try:
        mode = os.stat(path).st_mode
        space = os.statvfs(path)
        free_kib = space.f_bavail * space.f_frsize >> 10
        free_inodes = space.f_favail if space.f_files else None  # Btrfs and others have no table of inodes.
        if purpose in WRITTEN:
            with tempfile.TemporaryFile(dir=path, buffering=0) as sample:
                sample.write(SAMPLE)
        elif stat.S_ISREG(mode):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.read(descriptor, len(SAMPLE))
            finally:
                os.close(descriptor)
        elif stat.S_ISDIR(mode) and not os.access(path, os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        code = getattr(error, "errno", None) or 0
        reason = getattr(error, "strerror", None) or str(error)
        return PathFacts(path, purpose, STATES.get(code, "failed"), 0.0, free_kib, free_inodes, reason)
    return PathFacts(path, purpose, "ok", 0.0, free_kib, free_inodes)


def read_torch(python: str | None = None) -> tuple[str, str]:
    """Return the version of torch and that of the CUDA that it was built for, both empty if there is none.

    Torch is not imported: that takes seconds. `python` is the ranks' interpreter, by default this one.
    Raises OSError or SubprocessError if it does not run.
    """
    # From the root, where no folder is `torch`.
    command = [python or sys.executable, "-c", LOCATE_TORCH]
    done = subprocess.run(
        command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=True
    )
    origin = done.stdout.decode("utf-8", "replace").rpartition("\n")[2]
    if not origin:
        return "", ""
    text = Path(origin).with_name("version.py").read_text(encoding="utf-8", errors="replace")
    version, cuda = (next(iter(pattern.findall(text)), "") for pattern in (TORCH, TORCH_CUDA))
    return version, cuda


def call_in_children(calls: Sequence[Callable[[], T]], limit: float) -> tuple[Answer[T], ...]:
    """Make all calls at once, each in a child of its own, and wait `limit` seconds for their answers.

    For what may never return, such as calls of a file system or driver that hangs. A process that waits in
    the kernel without interruption (state D) cannot be killed, and whoever waits for it waits too: a child
    that does not answer in time is killed and left behind. Results are what pickle can carry.
    """
    begin = time.monotonic()
    children: dict[Connection, int] = {}
    answers: dict[Connection, Answer[T]] = {}
    missing: list[Answer[T]] = []
    try:
        for call in calls:
            receiver, sender = Pipe(duplex=False)
            with sender:
                pid = os.fork()
                if pid == 0:
                    _run_child(call, sender)
            children[receiver] = pid
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # Here too: the child may not have come to it when it is killed.
    except OSError as error:
        problem = f"no process can be made ({error.strerror})"
        missing = [Answer(None, 0.0, problem=problem)] * (len(calls) - len(children))
    try:
        waiting = set(children)
        while waiting and (left := begin + limit - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)  # noqa: S101 - for mypy
                waiting.remove(pipe)
                try:
                    value, problem = pipe.recv()
                except (EOFError, OSError):
                    value, problem = None, f"its process ended with {_reap(children[pipe]) or 'no answer'}"
                answers[pipe] = Answer(value, time.monotonic() - begin, problem=problem)
    finally:
        for pipe, pid in children.items():
            pipe.close()
            if pipe not in answers:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
        for pid in children.values():
            _reap(pid)
    stuck: Answer[T] = Answer(None, limit, stuck=True, problem=f"no answer in {limit:g} s")
    return (*(answers.get(pipe, stuck) for pipe in children), *missing)


def _run_child(call: Callable[[], Any], pipe: Connection) -> NoReturn:
    """Make the call and end; nothing else of this process is kept open, since the child may stay for ever."""
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.closerange(3, pipe.fileno())
        os.closerange(pipe.fileno() + 1, HIGHEST)
        try:
            result: tuple[Any, str] = call(), ""
        except Exception as error:  # It is told to the parent.
            result = None, f"{type(error).__name__}: {error}"
        pipe.send(result)
    finally:
        os._exit(0)


def _reap(pid: int) -> str:
    """Wait a moment for a child to be gone; return the signal that ended it, if one has."""
    end = time.monotonic() + GRACE
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else ""
            time.sleep(0.001)
    return ""


WIDEST = 32
"""Lanes of the widest PCI Express link; a virtual machine may show 0, 63 or 255 for unknown."""
POOLS = "sys/kernel/mm/hugepages"
TRANSPARENT = "sys/kernel/mm/transparent_hugepage/"
CHOICE = re.compile(r"[^\[]*\[([A-Za-z+]{1,20})\].*", re.DOTALL)
"""One of several words, as in `always [madvise] never`."""


def read_health(root: str, machine: Machine) -> Health:
    """Read what the doctor judges of `machine`, which was probed below the same root.

    Nothing raises: what is missing or is not understood is None or empty.
    """
    tree = Tree(root)
    memory = tree.read_meminfo()
    total, free = memory.get("SwapTotal"), memory.get("SwapFree")
    pools = tree.list_directory(POOLS)
    sizes = {pool: parse_number(pool.removeprefix("hugepages-").removesuffix("kB")) or 0 for pool in pools}
    idle = [size * (tree.read_number(f"{POOLS}/{pool}/free_hugepages") or 0) for pool, size in sizes.items()]
    modes = [CHOICE.fullmatch(tree.read(f"{TRANSPARENT}{name}") or "") for name in ("enabled", "defrag")]
    return Health(
        live=tree.is_real,
        files=read_resource(tree, FILES),
        locked=read_resource(tree, "Max locked memory"),
        processes=read_resource(tree, "Max processes"),
        pids_max=read_pids_max(tree),
        capabilities=read_capabilities(tree),
        numa_balancing=tree.read_number("proc/sys/kernel/numa_balancing"),
        zone_reclaim=tree.read_number("proc/sys/vm/zone_reclaim_mode"),
        swap_kib=None if total is None or free is None else max(0, total - free),
        transparent=modes[0][1] if modes[0] else "",
        defrag=modes[1][1] if modes[1] else "",
        hugepages_kib=sum(idle),
        clocks=_read_clocks(tree, machine.allowed_cpus),
        links=_read_links(tree, machine),
        driver_gpus=tuple(pci for pci, _ in list_cards(tree) or ()),
    )


def _read_clocks(tree: Tree, cpus: frozenset[int]) -> tuple[Clock, ...]:
    """How the frequency of these CPUs is chosen, CPUs of one way together; none in most virtual machines."""
    ways: dict[tuple[str, str, str], set[int]] = {}
    for cpu in sorted(cpus):
        here = f"{CPU}cpu{cpu}/cpufreq/"
        names = ("scaling_driver", "scaling_governor", "energy_performance_preference")
        driver, governor, preference = ((tree.read(here + name) or "")[:40] for name in names)
        if governor:
            ways.setdefault((driver, governor, preference), set()).add(cpu)
    return tuple(Clock(frozenset(ways[way]), *way) for way in sorted(ways))


def _read_links(tree: Tree, machine: Machine) -> tuple[Link, ...]:
    """PCI links of the GPUs, then of the NICs, as far as sysfs has them."""
    found = [(f"GPU {gpu.index}", gpu.pci) for gpu in machine.gpus]
    found += [(nic.name, nic.pci) for nic in machine.nics]
    links = []
    for name, pci in found:
        widths = [tree.read_number(f"{PCI}{pci}/{which}_link_width") for which in ("current", "max")]
        known = [width if width and width <= WIDEST else None for width in widths]
        links.append(Link(name, known[0], known[1]))
    return tuple(links)
