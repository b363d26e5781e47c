"""Interrupts of GPUs and NICs: whether they go to CPUs next to the device."""

from collections.abc import Iterator

from launcher.cpulist import format_cpulist
from launcher.doctor.finding import Case, Finding, pass_check, skip_check
from launcher.probe.health import Device

INTERRUPTS = "interrupts"
RUNNING = {
    True: "irqbalance runs",
    False: "irqbalance does not run",
    None: "irqbalance cannot be seen from here",
}


def judge_interrupts(case: Case) -> Iterator[Finding]:
    """Where the interrupts of each device with a known NUMA node go."""
    machine = case.machine
    places = {gpu.node for gpu in machine.gpus} | {nic.node for nic in machine.nics}
    nodes = {cpu.node for cpu in machine.cpus}
    shown = [device for device in case.health.devices if device.node is not None and device.interrupts]
    if places <= {None} or len(nodes) < 2:
        reason = "one NUMA node" if len(nodes) < 2 else "no GPU or NIC with a known NUMA node"
        yield pass_check(INTERRUPTS, f"{reason}: nowhere is far ({RUNNING[case.health.irqbalance]})")
    elif not shown:
        reason = f"sysfs or /proc/irq does not show them; {RUNNING[case.health.irqbalance]}"
        yield skip_check(case, INTERRUPTS, "interrupts of GPUs and NICs", reason)
    else:
        found = [finding for device in shown if (finding := judge_device(case, device))]
        yield from found
        if not found:
            running = RUNNING[case.health.irqbalance]
            yield pass_check(INTERRUPTS, f"{len(shown)} GPUs and NICs are served next to them; {running}")


def judge_device(case: Case, device: Device) -> Finding | None:
    """A device of whose interrupts most go to CPUs of other NUMA nodes alone; None where all is well."""
    near = frozenset(cpu.id for cpu in case.machine.cpus if cpu.node == device.node)
    far = [cpus for cpus in device.interrupts if near.isdisjoint(cpus)]
    if not near or 2 * len(far) <= len(device.interrupts):
        return None
    took = format_cpulist(frozenset().union(*far))
    return Finding(
        "warning" if device.nic else "note",
        INTERRUPTS,
        f"{len(far)} of {len(device.interrupts)} interrupts of {device.name}, on NUMA node {device.node}, go "
        f"to CPUs {took} of other nodes; {RUNNING[case.health.irqbalance]}",
        "each completion crosses the link between the nodes, and takes time of other ranks' cores",
        f"sudo systemctl restart irqbalance, or write {format_cpulist(near)} to their "
        "/proc/irq/N/smp_affinity_list",
    )
