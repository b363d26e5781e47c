"""GPUs in the order in which their runtime numbers them, and RDMA devices, with their places.

NVIDIA's GPUs by NVML or by the driver's files in /proc/driver/nvidia and sysfs, AMD's by their compute
driver's.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from launcher.plan.model import Gpu, Nic
from launcher.probe.sysfs import PCI, Tree, format_pci, normalise_pci, parse_number, split_path

TYPE_CHECKING = False

if TYPE_CHECKING:
    from launcher.doctor.model import NicFacts

GPUS = "proc/driver/nvidia/gpus/"
CAPABILITIES = "proc/driver/nvidia/capabilities"
DEVICE = "/dev/nvidia"
NVIDIA_SIGNS = ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg")
"""What shows a driver: on a host, in a container that hides /proc/driver, and in WSL."""
UUID = re.compile(r"GPU-[0-9a-fA-F-]+")
AMD_NODES = "sys/class/kfd/kfd/topology/nodes"
AMD_SIGN = "dev/kfd"
"""The compute driver's device: without it an AMD GPU is for the screen."""
Card = tuple[str, dict[str, str]]
"""PCI address of a GPU, and what the driver's file `information` says of it."""


def probe_gpus(tree: Tree, nodes: frozenset[int], quick: bool = False) -> tuple[Gpu, ...]:
    """NVIDIA's GPUs in PCI bus order; if there are none AMD's, in the compute driver's order.

    By NVML, else by the driver's files, which `quick` asks first. A build of torch serves one vendor, so that
    an AMD GPU beside NVIDIA's is for the screen.
    """
    signs = [f"/{sign}" for sign in NVIDIA_SIGNS if tree.is_real and tree.has(sign)]
    nvidia = read_driver(tree, only_whole=True) if signs and quick else None
    if signs and nvidia is None:
        from launcher.probe.nvml import read_nvml  # it takes longer to load than all else

        nvidia = read_nvml(tree)
    nvidia = read_driver(tree) if nvidia is None else nvidia
    found = nvidia or (read_amd(tree) if tree.has(AMD_SIGN) or not tree.is_real else ())
    if signs and nvidia is None and not found:
        tree.add_warning("a GPU driver is there ({items}) but no GPU was found: planned without GPUs", *signs)
    gpus = []
    for index, gpu in enumerate(found):
        node, path = _read_place(tree, f"{PCI}{gpu.pci}", gpu.pci, nodes)
        if not path:
            tree.add_warning("sysfs has no locality of GPUs {items}: their NUMA node is unknown", gpu.pci)
        gpus.append(replace(gpu, index=index, node=node, path=path[:-1]))
    return tuple(gpus)


def _read_place(
    tree: Tree, here: str, name: str, nodes: frozenset[int]
) -> tuple[int | None, tuple[str, ...]]:
    """A device's NUMA node (None for -1 and unknown) and its PCI path, which ends with it (empty: unknown).

    From sysfs, since NVML masks the node by the job's cpuset. A kernel without NUMA has no `numa_node`.
    """
    path = split_path(tree.resolve_links(here) or "")
    text = tree.read(f"{here}/numa_node") if path else None
    node = parse_number(text)
    if node in nodes or text in (None, "-1"):
        return node, path
    warning = "numa_node of devices {items} is {value}, which is not online: unknown"
    tree.add_warning(warning, name, value=text)
    return None, path


def sort_gpus(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    """GPUs in PCI bus order; domains have four to eight digits."""
    return tuple(sorted(gpus, key=lambda gpu: (len(gpu.pci), gpu.pci)))


def read_driver(tree: Tree, *, only_whole: bool = False) -> tuple[Gpu, ...] | None:
    """NVIDIA's GPUs by /proc/driver/nvidia, which some containers hide; None if it is not there.

    MIG instances are not in these files. `only_whole` is for what tells as much as NVML: all GPUs have a
    UUID, and none has MIG instances; else None.
    """
    cards = list_cards(tree)
    if only_whole:
        numbers = tree.list_numbers(CAPABILITIES, "gpu")
        has_mig = any(tree.list_numbers(f"{CAPABILITIES}/gpu{number}/mig", "gi") for number in numbers)
        if has_mig or not cards or not all(UUID.fullmatch(card.get("GPU UUID", "")) for _, card in cards):
            return None
    found = []
    for pci, fields in cards or ():
        if not is_open(tree, fields):
            continue
        uuid, model = fields.get("GPU UUID", ""), fields.get("Model", "")
        if not UUID.fullmatch(uuid):
            # The driver writes question marks until something has opened the GPU.
            text = "GPU UUID of {items} is {value}: these GPUs can be named by index only"
            tree.add_warning(text, pci, value=fields.get("GPU UUID"))
            uuid = ""
        found.append(Gpu(index=0, uuid=uuid, pci=pci, name="".join(filter(str.isprintable, model))))
    return None if cards is None else sort_gpus(found)


def list_cards(tree: Tree) -> list[Card] | None:
    """The GPUs of /proc/driver/nvidia/gpus but those that the driver excludes; None if it is missing."""
    names = tree.list_directory(GPUS)
    cards = [(normalise_pci(name) or "", tree.read_fields(f"{GPUS}{name}/information")) for name in names]
    return (
        [(pci, card) for pci, card in cards if pci and card.get("GPU Excluded") != "Yes"] if names else None
    )


def is_open(tree: Tree, fields: dict[str, str]) -> bool:
    """Whether this process may open a GPU's device: NVML leaves out those that it may not.

    /proc shows a container or a job of SLURM's ConstrainDevices all GPUs of the node. access(2) asks the
    device cgroup too, of version 1 and 2, and also for root: inode_permission in the kernel's fs/namei.c
    calls devcgroup_inode_permission, which runs both. True if the machine is a written-out one.
    """
    minor = parse_number(fields.get("Device Minor"))
    return not tree.is_real or minor is None or os.access(f"{DEVICE}{minor}", os.R_OK | os.W_OK)


def read_gpu_memory_nodes(tree: Tree) -> frozenset[int]:
    """NUMA nodes that are memory of an NVIDIA GPU (GH200, GB200, POWER9), online or not yet."""
    states = [tree.read_fields(f"{GPUS}{name}/numa_status") for name in tree.list_directory(GPUS)]
    nodes = [parse_number(state.get("Node")) for state in states if state.get("Status") != "disabled"]
    return frozenset(node for node in nodes if node is not None)


def read_amd(tree: Tree) -> tuple[Gpu, ...]:
    """The GPUs that HIP would number, in its order and without their place.

    The runtime takes the compute driver's (KFD's) nodes that have SIMD units, in the order of their
    numbers. Nodes that the device cgroup keeps from the job cannot be read (kfd_devcgroup_check_permission
    in kfd_topology.c), and are not the runtime's either.
    """
    gpus = []
    inside = tree.resolve_links(AMD_NODES) is not None
    for number in tree.list_numbers(AMD_NODES, "") if inside else ():
        lines = (tree.read(f"{AMD_NODES}/{number}/properties") or "").splitlines()
        fields = {key: parse_number(text) for key, _, text in (line.partition(" ") for line in lines)}
        location, unique = fields.get("location_id"), fields.get("unique_id")
        if not fields.get("simd_count") or location is None:
            continue
        # Bits 28 to 31 number a device's partition; the rest is bus, device and function.
        bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
        pci = format_pci(fields.get("domain") or 0, bus, device, function)
        name = "".join(filter(str.isprintable, tree.read(f"{PCI}{pci}/product_name") or ""))[:100]
        size = tree.read_number(f"{PCI}{pci}/mem_info_vram_total") or 0
        uuid = f"GPU-{unique:016x}" if unique else ""
        gpus.append(Gpu(0, uuid, pci, name=name or "AMD GPU", vendor="amd", memory_mib=size >> 20))
    # The partitions of a device may all have its own id, which then names none of them.
    times = Counter(gpu.uuid for gpu in gpus)
    return tuple(gpu if times[gpu.uuid] == 1 else replace(gpu, uuid="") for gpu in gpus)


NICS = "sys/class/infiniband/"
RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) Gb/sec.*", re.DOTALL)
"""A port's `rate`, as `400 Gb/sec (4X NDR)`."""
LAYERS = ("InfiniBand", "Ethernet")
"""What `link_layer` may say; EFA has another of its own."""


def read_nics(tree: Tree, nodes: frozenset[int]) -> tuple[Nic, ...]:
    """The RDMA devices; one that is no PCI device, such as soft RoCE, has no place.

    Of several ports the fastest of the active ones counts; one that does not tell its state is active.
    """
    nics = []
    for name, ports in _list_ports(tree):
        node, path = _read_place(tree, f"{NICS}{name}/device", name, nodes)
        states = [(state in ("", "ACTIVE"), rate, port) for port, state, rate in ports]
        active, rate, port = max(states, default=(True, 0.0, ""))
        layer = tree.read(f"{port}link_layer") or ""
        layer = layer if layer in LAYERS else ""
        nics.append(Nic(name, path[-1] if path else "", node, path[:-1], layer, rate, active))
    return tuple(nics)


def _list_ports(tree: Tree) -> Iterator[tuple[str, list[tuple[str, str, float]]]]:
    """Each device, mlx5_2 before mlx5_10, with the folder, state (`ACTIVE`) and rate in Gb/s of its ports."""

    def split_numbers(name: str) -> list[str | int]:
        return [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", name)]

    names = (name for name in tree.list_directory(NICS) if name.isascii() and name.isprintable())
    for name in sorted(names, key=split_numbers):
        ports = []
        for number in tree.list_numbers(f"{NICS}{name}/ports", ""):
            here = f"{NICS}{name}/ports/{number}/"
            state = (tree.read(f"{here}state") or "").rpartition(":")[2].strip()
            rate = RATE.fullmatch(tree.read(f"{here}rate") or "")
            ports.append((here, state if state.isidentifier() else "", float(rate[1]) if rate else 0.0))
        yield name, ports


def read_nic_ports(tree: Tree) -> "tuple[NicFacts, ...]":
    """Every port of every device: state, rate, and how often the link has gone down."""
    from launcher.doctor.model import NicFacts  # plans do without the doctor

    return tuple(
        NicFacts(
            name=f"{name}:{here.split('/')[-2]}",
            state=state,
            rate_gbps=rate,
            link_downed=tree.read_number(f"{here}counters/link_downed"),
        )
        for name, ports in _list_ports(tree)
        for here, state, rate in ports
    )
