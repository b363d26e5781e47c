"""GPUs and NICs: driver and NVML agree, places are known, links are whole, interrupts go to near CPUs."""

from collections.abc import Iterator

from launcher.cpulist import format_cpulist
from launcher.doctor.facts import Device
from launcher.doctor.finding import Case, Finding, report_ok, report_unchecked

GPUS = "GPUs"
INTERRUPTS = "interrupts"
RUNNING = {
    True: "irqbalance runs",
    False: "irqbalance does not run",
    None: "irqbalance cannot be seen from here",
}


def judge_devices(case: Case) -> Iterator[Finding]:
    """The GPUs that were found against those that the driver shows in /proc."""
    machine, shown = case.machine, case.health.driver_gpus
    nvidia = [gpu.pci for gpu in machine.gpus if gpu.vendor == "nvidia"]
    if not machine.gpus and not shown:
        yield report_ok(GPUS, "none, and no driver that would show some")
        return
    lost = [pci for pci in shown or () if pci not in nvidia]
    extra = [pci for pci in nvidia if shown and pci not in shown]
    if lost:
        yield Finding(
            "warning" if not nvidia else "note",
            GPUS,
            f"the driver has {len(shown or ())} GPUs, and {len(nvidia)} can be opened: not {', '.join(lost)}",
            "a job gets the others alone: that is right where a scheduler gave it those, and wrong where one "
            "fell off the bus",
            "compare with SLURM's --gpus or docker's --gpus; `sudo dmesg | grep -i xid` shows lost GPUs",
        )
    if extra:
        yield Finding(
            "note",
            GPUS,
            f"NVML shows {', '.join(extra)}, which /proc/driver/nvidia/gpus does not",
            "the two disagree about which GPUs there are, so a plan that is made without NVML would differ",
            "give the container all of its GPUs' files (nvidia-container-toolkit), or restart it",
        )
    if not lost and not extra:
        count, used = len(machine.gpus), len(case.gpus)
        named = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus if gpu.name))
        yield report_ok(GPUS, f"{used} of {count} used" + (f": {named}" if named else ""))


def judge_places(case: Case) -> Iterator[Finding]:
    """GPUs whose NUMA node the firmware does not tell."""
    nodes = {cpu.node for cpu in case.machine.cpus}
    lost = [gpu for gpu in case.gpus if gpu.node is None and not gpu.local_cpus]
    if not case.gpus or len(nodes) < 2:
        return
    if not lost:
        yield report_ok(GPUS, "the NUMA node of each is known")
        return
    yield Finding(
        "warning",
        GPUS,
        f"the NUMA node of GPU {', '.join(str(gpu.index) for gpu in lost)} is unknown (numa_node=-1), and "
        f"there are {len(nodes)}",
        "ranks are spread evenly over the nodes, so some are far from their GPU",
        "update the firmware; in a virtual machine, let the hypervisor pass the topology on (vNUMA)",
    )


def judge_links(case: Case) -> Iterator[Finding]:
    """PCI links with fewer lanes than the device has; their speed drops at idle, and says nothing."""
    known = [device for device in case.health.devices if device.width and device.max_width]
    narrow = [device for device in known if (device.width or 0) < (device.max_width or 0)]
    for device in narrow:
        yield report_narrow_link(device.name, device.width or 0, device.max_width or 0)
    if (case.machine.gpus or case.machine.nics) and not known:
        yield report_unchecked(case, GPUS, "PCI link width", "sysfs does not show it (a virtual machine?)")
    elif known and not narrow:
        yield report_ok(GPUS, f"PCI links of {len(known)} GPUs and NICs at full width")


def report_narrow_link(name: str, width: int, max_width: int, level: str = "warning") -> Finding:
    """Return the finding of a PCI link with fewer lanes than the device has."""
    return Finding(
        level,
        GPUS,
        f"{name} has a PCI link of x{width}, and can do x{max_width}",
        "copies between main memory and the device take that much longer",
        "check slot, riser and BIOS bifurcation; `sudo lspci -vv` shows LnkSta against LnkCap",
    )


def judge_persistence(case: Case) -> Iterator[Finding]:
    """Persistence mode. Source: NVIDIA's "Driver Persistence" guide."""
    used = {gpu.pci: gpu.index for gpu in case.gpus if gpu.vendor == "nvidia"}
    modes = {pci: mode for pci, mode in case.health.persistence if pci in used}
    off = [str(used[pci]) for pci, mode in modes.items() if not mode]
    if not used:
        return
    if not modes:
        yield report_unchecked(case, GPUS, "persistence mode", "NVML does not answer")
    elif off:
        yield Finding(
            "note",
            GPUS,
            f"persistence mode of GPU {', '.join(off)} is off",
            "the driver sets the GPU up anew at each job's start: seconds, and its settings are lost",
            "sudo systemctl enable --now nvidia-persistenced (or: sudo nvidia-smi -pm 1)",
        )
    else:
        yield report_ok(GPUS, "persistence mode is on")


def judge_interrupts(case: Case) -> Iterator[Finding]:
    """Where the interrupts of each device with a known NUMA node go."""
    machine = case.machine
    places = {gpu.node for gpu in machine.gpus} | {nic.node for nic in machine.nics}
    nodes = {cpu.node for cpu in machine.cpus}
    shown = [device for device in case.health.devices if device.node is not None and device.interrupts]
    if places <= {None} or len(nodes) < 2:
        reason = "one NUMA node" if len(nodes) < 2 else "no GPU or NIC with a known NUMA node"
        yield report_ok(INTERRUPTS, f"{reason}: nowhere is far ({RUNNING[case.health.irqbalance]})")
    elif not shown:
        reason = f"sysfs or /proc/irq does not show them; {RUNNING[case.health.irqbalance]}"
        yield report_unchecked(case, INTERRUPTS, "interrupts of GPUs and NICs", reason)
    else:
        found = [finding for device in shown if (finding := judge_device(case, device))]
        yield from found
        if not found:
            running = RUNNING[case.health.irqbalance]
            yield report_ok(INTERRUPTS, f"{len(shown)} GPUs and NICs are served next to them; {running}")


def judge_device(case: Case, device: Device) -> Finding | None:
    """A device of whose interrupts most go to CPUs of other NUMA nodes alone; None if all is well."""
    near_cpus = frozenset(cpu.id for cpu in case.machine.cpus if cpu.node == device.node)
    far = [cpus for cpus in device.interrupts if near_cpus.isdisjoint(cpus)]
    if not near_cpus or 2 * len(far) <= len(device.interrupts):
        return None
    took = format_cpulist(frozenset().union(*far))
    return Finding(
        "warning" if device.nic else "note",
        INTERRUPTS,
        f"{len(far)} of {len(device.interrupts)} interrupts of {device.name}, on NUMA node {device.node}, go "
        f"to CPUs {took} of other nodes; {RUNNING[case.health.irqbalance]}",
        "each completion crosses the link between the nodes, and takes time of other ranks' cores",
        f"sudo systemctl restart irqbalance, or write {format_cpulist(near_cpus)} to their "
        "/proc/irq/N/smp_affinity_list",
    )
