"""Reads what preflight judges of a node before a job: GPUs, NICs, paths, memory, clock, versions."""

import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from launcher.doctor.model import Facts, Unchecked
from launcher.errors import MachineError
from launcher.probe.cpu_load import measure_load, read_cpu_times
from launcher.probe.cpus import STATUS, read_cpu_sets
from launcher.probe.gpu_facts import GpuState, read_gpu_state
from launcher.probe.gpu_samples import import_nvml
from launcher.probe.guarded_calls import Answer, call_in_children
from launcher.probe.kernel_log import read_kernel_xids
from launcher.probe.limits import read_limits
from launcher.probe.nic_ports import read_nic_ports
from launcher.probe.path_facts import describe_path, read_path
from launcher.probe.sysfs import Tree
from launcher.probe.system_facts import read_shm_free
from launcher.probe.torch_version import read_torch

PATIENCE = 5.0
"""Seconds that a path, a driver or an interpreter may take: an automounter's first mount is among them."""
DRIVER = "proc/driver/nvidia/version"
DRIVER_VERSION = re.compile(r"\b(\d{3,4}(?:\.\d{1,4}){1,2})\b")


@dataclass(frozen=True, slots=True)
class FactSources:
    """Where facts come from that a test, or a job with an interpreter of its own, has otherwise."""

    python: str | None = None
    """The ranks' interpreter, whose torch is looked at; None for this one."""
    gpus: Collection[str] | str | None = None
    """PCI addresses of the job's GPUs, or a value of CUDA_VISIBLE_DEVICES; None for all that NVML lists."""
    nvml: ModuleType | None = None
    """None for pynvml."""
    clock: Callable[[], float] = time.time
    """Seconds since the epoch."""
    patience: float = PATIENCE
    """Seconds in which a path, the driver and the interpreter have to answer."""


def read_node_facts(
    root: str | os.PathLike[str] = "/",
    paths: Sequence[tuple[str, str]] = (),
    *,
    host: str = "",
    node_rank: int = 0,
    sources: FactSources | None = None,
) -> Facts:
    """Read the facts of the node whose files are below `root`; `paths` are given with their purposes.

    With another root than `/` nothing outside is consulted: paths, torch and the load are left out, and the
    time is 0.
    What may hang (paths, NVML, another interpreter) runs in children, all at once. Nothing raises: what
    cannot be read is None or empty, and `unchecked` says why.
    """
    begin = time.monotonic()
    sources = sources or FactSources()
    tree = Tree(root)
    cpus = read_job_cpus(tree)
    before = read_cpu_times(tree, cpus)
    live_paths = paths if tree.is_real else ()
    calls: list[Callable[[], Any]] = [
        partial(read_gpus_here, tree, sources),
        partial(read_torch_here, tree, sources),
        *(partial(read_path, *entry) for entry in live_paths),
    ]
    gpus, torch, *others = call_guarded(calls, sources)
    facts = read_node_files(tree, host or (tree.read("proc/sys/kernel/hostname") or ""), node_rank, cpus)
    facts = add_gpus(facts, gpus)
    facts = add_torch(facts, torch)
    if paths and not tree.is_real:
        facts = add_unchecked(facts, Unchecked("paths", "not in these files"))
    return replace(
        facts,
        time=sources.clock() if tree.is_real else 0.0,
        paths=tuple(describe_path(*entry, answer) for entry, answer in zip(live_paths, others, strict=True)),
        load=measure_load(tree, cpus, before),
        seconds=round(time.monotonic() - begin, 3),
    )


def read_job_cpus(tree: Tree) -> frozenset[int]:
    """The CPUs that the job may use; none if the kernel names none."""
    try:
        return read_cpu_sets(tree, tree.read_fields(STATUS))[1]
    except MachineError:
        return frozenset()


def read_gpus_here(tree: Tree, sources: FactSources) -> GpuState:
    """Read the GPUs: in a child, so that neither NVML's library nor its hanging is this process's."""
    return read_gpu_state(tree, sources.nvml or (import_nvml() if tree.is_real else None), sources.gpus)


def read_torch_here(tree: Tree, sources: FactSources) -> tuple[str, str]:
    """Read the versions of torch and its CUDA; empty for another machine's files."""
    return read_torch(sources.python) if tree.is_real else ("", "")


def call_guarded(calls: Sequence[Callable[[], Any]], sources: FactSources) -> tuple[Answer[Any], ...]:
    """Make the calls in children; if the node can have no more processes, all have failed."""
    try:
        return call_in_children(calls, sources.patience)
    except OSError as error:
        return tuple(Answer(None, 0.0, problem=f"no process can be made ({error.strerror})") for _ in calls)


def read_node_files(tree: Tree, host: str, node_rank: int, cpus: frozenset[int]) -> Facts:
    """Read what the kernel's files tell, which do not hang."""
    limits = read_limits(tree)
    total = tree.read_mem_total("proc/meminfo") or 0
    memory = total if limits.memory_kib is None else min(total, limits.memory_kib)
    available = read_free_kib(tree)
    xids = read_kernel_xids(tree)
    facts = Facts(
        host=host,
        node_rank=node_rank,
        time=0.0,
        nics=read_nic_ports(tree),
        xids=xids,
        driver=read_driver_version(tree),
        kernel=(tree.read("proc/sys/kernel/osrelease") or "")[:80],
        boot_id=(tree.read("proc/sys/kernel/random/boot_id") or "")[:80],
        cpus=len(cpus),
        memory_kib=memory,
        free_memory_kib=None if available is None else min(available, memory),
        shm_kib=limits.shm_kib,
        free_shm_kib=read_shm_free(tree),
    )
    return facts if xids is not None else add_unchecked(facts, Unchecked("xids", explain_log(tree)))


def explain_log(tree: Tree) -> str:
    """Say why the kernel's log could not be read."""
    if not tree.is_real:
        return "not in these files"
    return "this user may not read the kernel's log (/dev/kmsg; kernel.dmesg_restrict)"


def read_free_kib(tree: Tree) -> int | None:
    """MemAvailable in KiB: free memory, and what the kernel can take back at once."""
    words = tree.read_fields("proc/meminfo").get("MemAvailable", "").split()
    return int(words[0]) if words and words[0].isdecimal() and len(words[0]) < 18 else None


def read_driver_version(tree: Tree) -> str:
    """The NVIDIA driver's version, from the first line of its file; empty without the driver."""
    lines = (tree.read(DRIVER) or "").splitlines()
    found = DRIVER_VERSION.search(lines[0]) if lines else None
    return found[1] if found else ""


def add_gpus(facts: Facts, answer: Answer[GpuState]) -> Facts:
    """Add the GPUs, or why they are not known."""
    state = answer.value
    if state is None:
        hangs = f"NVML: {answer.problem}" if answer.stuck else ""
        return replace(add_unchecked(facts, Unchecked("gpus", f"NVML: {answer.problem}")), gpu_problem=hangs)
    facts = replace(facts, gpus=state.gpus, lost_gpus=state.lost, gpu_problem=state.problem)
    return add_unchecked(replace(facts, cuda_driver=state.cuda_driver), *state.unchecked)


def add_torch(facts: Facts, answer: Answer[tuple[str, str]]) -> Facts:
    """Add torch's versions, or why they are not known."""
    if answer.value is None:
        return add_unchecked(facts, Unchecked("torch", answer.problem))
    version, cuda = answer.value
    return replace(facts, torch=version, torch_cuda=cuda)


def add_unchecked(facts: Facts, *checks: Unchecked) -> Facts:
    """Add what was not checked."""
    return replace(facts, unchecked=(*facts.unchecked, *checks))
