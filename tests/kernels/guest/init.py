"""The first process of a guest: sets each scenario up, runs it, reports over a serial line, powers off."""

import ctypes
import json
import os
import platform
import stat
import subprocess
import sys
import traceback
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAB = Path(__file__).parents[1]
SHIM = (sys.executable, "-I", "-S", str(LAB / "launcher/rank/__main__.py"))
PROGRAM = (sys.executable, "-I", "-S", str(LAB / "guest/rank.py"))
PLAN, RESULT, REPORT = Path("/tmp/plan.json"), Path("/tmp/result.json"), Path("/dev/ttyS1")
LIBC = ctypes.CDLL(None, use_errno=True)
POWER_OFF = 0x4321FEDC
"""LINUX_REBOOT_CMD_POWER_OFF, reboot(2)."""
CGROUPS = Path("/sys/fs/cgroup")
PERIOD = 100_000
VIRTIO_GPU = ["0x1af4", "0x1050"]
NVIDIA_MAJOR = 195
INFORMATION = (
    "Model: \t\t QEMU virtio-gpu\nIRQ:   \t\t {irq}\n"
    "GPU UUID: \t GPU-{minor:08x}-0000-0000-0000-000000000000\n"
    "Bus Type: \t PCIe\nBus Location: \t {address}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
)
"""The NVIDIA driver's file about a GPU."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job and its limits; the host writes it, the guest sets it up, and the host judges what came out."""

    name: str
    binding: str = "exclusive"
    nproc_per_node: int | None = None
    environ: dict[str, str] = field(default_factory=dict)
    """The user's variables."""
    cpus: str = ""
    """`cpuset.cpus` of the job's cgroup; empty for all."""
    mems: str = ""
    """`cpuset.mems` of the job's cgroup; empty for all."""
    quota: float | None = None
    """CPU time that the cgroup leaves, in CPUs."""
    memory_mib: int | None = None
    """Memory limit of the cgroup."""
    offline: tuple[int, ...] = ()
    """CPUs that are taken offline while the job runs."""
    deny_mempolicy: bool = False
    """A seccomp filter refuses the calls for memory policies with EPERM, as Docker's does."""
    deny_gpus: tuple[int, ...] = ()
    """GPUs whose device nodes the device controller refuses to the job (cgroup v1)."""
    alone: bool = False
    """Start the ranks a second time without LAUNCH_PLAN: each plans for itself."""

    @property
    def in_cgroup(self) -> bool:
        """Whether the job has a cgroup of its own."""
        return bool(self.cpus or self.mems or self.quota or self.memory_mib or self.deny_gpus)


def main() -> None:
    """Run everything that the host asks for; whatever goes wrong is in the report."""
    try:
        report = run_all(json.loads((LAB / "scenarios.json").read_text()))
    except Exception:
        report = {"error": traceback.format_exc()}
    REPORT.write_text(json.dumps(report))
    os.sync()
    LIBC.reboot(POWER_OFF)


def mount(kind: str, target: str, options: str = "") -> None:
    """Mount a file system of this kind; the target is made where it is missing."""
    Path(target).mkdir(parents=True, exist_ok=True)
    if LIBC.mount(b"none", target.encode(), kind.encode(), 0, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {target}")


def run_all(orders: dict[str, Any]) -> dict[str, Any]:
    """Bring the system up and run the scenarios, each in a process of its own."""
    for kind, target in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/tmp")):
        mount(kind, target)
    mount("tmpfs", "/dev/shm", "size=64m")
    if orders["cgroup"] == 2:
        mount("cgroup2", str(CGROUPS))
        (CGROUPS / "cgroup.subtree_control").write_text("+cpuset +cpu +memory")
    else:
        mount("tmpfs", str(CGROUPS))
        for controller in ("cpuset", "cpu", "memory", "devices"):
            mount("cgroup", str(CGROUPS / controller), controller)
    pretend_driver()
    scenarios = [Scenario(**entry) for entry in orders["scenarios"]]
    results = {scenario.name: run_apart(scenario, orders["cgroup"]) for scenario in scenarios}
    return {"kernel": platform.release(), "scenarios": results}


def pretend_driver() -> None:
    """Add what an NVIDIA driver would for the graphics devices that the kernel found.

    Of all that a guest shows, this alone is made up. The PCI devices behind it are QEMU's, and their
    addresses, paths, NUMA nodes and local CPUs the kernel's.
    """
    devices = sorted(Path("/sys/bus/pci/devices").iterdir())
    names = ("vendor", "device")
    kinds = {each.name: [(each / name).read_text().strip() for name in names] for each in devices}
    found = [address for address, kind in kinds.items() if kind == VIRTIO_GPU]
    if not found:
        return
    mount("tmpfs", "/proc/driver")
    for minor, address in enumerate(found):
        folder = Path("/proc/driver/nvidia/gpus", address)
        folder.mkdir(parents=True)
        text = INFORMATION.format(irq=100 + minor, minor=minor, address=address)
        (folder / "information").write_text(text)
        os.mknod(f"/dev/nvidia{minor}", 0o666 | stat.S_IFCHR, os.makedev(NVIDIA_MAJOR, minor))
    os.mknod("/dev/nvidiactl", 0o666 | stat.S_IFCHR, os.makedev(NVIDIA_MAJOR, 255))


def run_apart(scenario: Scenario, version: int) -> dict[str, Any]:
    """Run one scenario in a child, which alone enters the cgroup and takes the filter on."""
    print(f"lab: {scenario.name}", flush=True)
    RESULT.unlink(missing_ok=True)
    switch(scenario.offline, on=False)
    child = os.fork()
    if child == 0:
        try:
            result = run_job(scenario, version)
        except BaseException:
            result = {"error": traceback.format_exc()}
        RESULT.write_text(json.dumps(result))
        os._exit(0)
    os.waitpid(child, 0)
    switch(scenario.offline, on=True)
    result = json.loads(RESULT.read_text())
    if "error" in result:
        print(result["error"], flush=True)
    return dict(result)


def switch(cpus: tuple[int, ...], on: bool) -> None:
    """Take CPUs offline, or back."""
    for cpu in cpus:
        Path(f"/sys/devices/system/cpu/cpu{cpu}/online").write_text(str(int(on)))


def enter_cgroup(scenario: Scenario, version: int) -> None:
    """Make the job's cgroup by the kernel's controllers, and move this process into it."""
    sets = {"cpuset.cpus": scenario.cpus, "cpuset.mems": scenario.mems}
    quota, memory = int((scenario.quota or 0) * PERIOD), (scenario.memory_mib or 0) << 20
    files: dict[str, list[tuple[str, str]]]
    if version == 2:
        limits = {"cpu.max": quota and f"{quota} {PERIOD}", "memory.max": memory}
        files = {"": [(name, str(value)) for name, value in {**sets, **limits}.items() if value]}
    else:  # a cpuset of version 1 must be filled before it takes a process
        filled = [(name, value or (CGROUPS / "cpuset" / name).read_text()) for name, value in sets.items()]
        cpu = [("cpu.cfs_period_us", str(PERIOD)), ("cpu.cfs_quota_us", str(quota))]
        files = {
            "cpuset": filled,
            "cpu": cpu if quota else [],
            "memory": [("memory.limit_in_bytes", str(memory))] if memory else [],
            "devices": [("devices.deny", f"c 195:{minor} rwm") for minor in scenario.deny_gpus],
        }
    for controller, values in files.items():
        folder = CGROUPS / controller / scenario.name
        folder.mkdir(parents=True)
        for name, value in values:
            (folder / name).write_text(value)
        (folder / "cgroup.procs").write_text(str(os.getpid()))


def run_job(scenario: Scenario, version: int) -> dict[str, Any]:
    """Probe, plan, and start the ranks by the plan; then, where asked for, once more without it.

    The launcher is imported here, so that one which cannot be imported is in the report too.
    """
    from launcher.plan.model import BindingConfig, Request, plan_to_json
    from launcher.plan.planner import plan
    from launcher.plan.variables import HONOURED
    from launcher.probe.machine import probe
    from launcher.protocol import find_user_set

    if scenario.in_cgroup:
        enter_cgroup(scenario, version)
    if scenario.deny_mempolicy:
        from tests.rank.start_shim import forbid

        forbid("set_mempolicy", "get_mempolicy")
    request = Request(
        nproc_per_node=scenario.nproc_per_node,
        binding=BindingConfig(scenario.binding),
        environ=find_user_set(scenario.environ, HONOURED),
    )
    made = plan(probe("/"), request)
    PLAN.write_text(json.dumps(plan_to_json(made)))
    binding = {"LAUNCH_BINDING": scenario.binding}
    return {
        "plan": plan_to_json(made),
        "ranks": run_ranks(made, scenario, {"LAUNCH_PLAN": str(PLAN)}),
        "alone": run_ranks(made, scenario, binding) if scenario.alone else [],
    }


def run_ranks(plan: Any, scenario: Scenario, extra: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run every rank through the real shim, all at once as a job does; return a report of each."""
    from launcher.cpulist import parse_cpulist

    started = []
    for rank in plan.ranks:
        lists = [f"/sys/devices/system/node/node{node}/cpulist" for node in rank.memory.nodes]
        near = frozenset().union(*(parse_cpulist(Path(path).read_text()) for path in lists))
        far = plan.machine.allowed_cpus - near if lists else ()
        environ = {
            **scenario.environ,
            **extra,
            "LOCAL_RANK": str(rank.local_rank),
            "RANK": str(rank.local_rank),
            "LOCAL_WORLD_SIZE": str(len(plan.ranks)),
            "LAB_FAR_CPUS": " ".join(map(str, sorted(far))),
        }
        pipe = subprocess.PIPE
        started.append(subprocess.Popen((*SHIM, *PROGRAM), env=environ, stdout=pipe, stderr=pipe, text=True))
    reports = []
    for process in started:
        out, err = process.communicate(timeout=120)
        program = literal_eval(out.splitlines()[-1]) if out else None
        reports.append({"pid": process.pid, "exit": process.returncode, "shim": err, "program": program})
    return reports
