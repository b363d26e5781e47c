"""GPUs in the order in which their runtime numbers them, and RDMA devices, with their places.

NVIDIA's GPUs by NVML or by the driver's files in /proc/driver/nvidia and sysfs, AMD's by their compute
driver's.
"""

import os
import re
from dataclasses import replace

from launcher.plan.model import Gpu, Nic
from launcher.probe.sysfs import (
    PCI,
    Tree,
    find_node,
    format_pci,
    normalise_pci,
    order_pci,
    parse_number,
    read_locality,
    split_path,
)

TYPE_CHECKING = False

if TYPE_CHECKING:
    from launcher.doctor.model import NicFacts

GPUS = "proc/driver/nvidia/gpus/"
CAPABILITIES = "proc/driver/nvidia/capabilities"
BOUND = "sys/bus/pci/drivers/nvidia/"
DEVICE = "/dev/nvidia"
NVIDIA_SIGNS = ("proc/driver/nvidia", "dev/nvidiactl", "dev/dxg")
"""What shows a driver: on a host, in a container that hides /proc/driver, and in WSL."""
UUID = re.compile(r"GPU-[0-9a-fA-F-]+")
AMD_NODES = "sys/class/kfd/kfd/topology/nodes"
AMD_SIGN = "dev/kfd"
"""The compute driver's device: without it an AMD GPU is for the screen."""
AMD_VENDOR = "0x1002"
AMD_CLASSES = ("0x03", "0x1200")
"""PCI classes of a GPU: display controllers, and processing accelerators as the MI300."""
Card = tuple[str, dict[str, str]]
"""PCI address of a GPU, and what the driver's file `information` says of it."""


def probe_gpus(
    tree: Tree, nodes: frozenset[int], online: frozenset[int], quick: bool = False
) -> tuple[Gpu, ...]:
    """NVIDIA's GPUs in PCI bus order; if there are none AMD's, in the compute driver's order.

    A build of torch serves one vendor, so that an AMD GPU beside NVIDIA's is for the screen.
    """
    gpus = []
    for index, gpu in enumerate(list_gpus(tree, quick)):
        node, cpus, path = read_locality(tree, gpu.pci, nodes, online)
        gpus.append(replace(gpu, index=index, node=node, local_cpus=cpus, path=path))
    return tuple(gpus)


def list_gpus(tree: Tree, quick: bool) -> tuple[Gpu, ...]:
    """GPUs in order, without their place: by NVML, else by the driver's files, which `quick` asks first."""
    if not tree.is_real:
        return read_driver(tree) or read_amd(tree)
    signs = [f"/{sign}" for sign in NVIDIA_SIGNS if tree.has(sign)]
    nvidia: tuple[Gpu, ...] | None = None if signs else ()
    if signs and quick:
        nvidia = read_driver(tree, only_whole=True)
    if nvidia is None:
        from launcher.probe.nvml import read_nvml  # it takes longer to load than all else

        nvidia = read_nvml(tree)
    if nvidia is None:
        nvidia = read_driver(tree)
    gpus = nvidia or (read_amd(tree) if tree.has(AMD_SIGN) else ())
    if nvidia is None and not gpus:
        tree.add_warning("a GPU driver is there ({items}) but no GPU was found: planned without GPUs", *signs)
    return gpus


def sort_gpus(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    """GPUs in PCI bus order, each once."""
    found = {gpu.pci: gpu for gpu in gpus}
    return tuple(found[pci] for pci in sorted(found, key=order_pci))


def read_driver(tree: Tree, *, only_whole: bool = False) -> tuple[Gpu, ...] | None:
    """NVIDIA's GPUs by /proc/driver/nvidia, else the PCI devices bound to the driver; None if there are none.

    MIG instances are not in these files. `only_whole` is for what tells as much as NVML: all GPUs have a
    UUID, and none has MIG instances; else None.
    """
    cards = list_cards(tree)
    if only_whole:
        names = [name for name in tree.list_directory(CAPABILITIES) if name.startswith("gpu")]
        parts = (part for name in names for part in tree.list_directory(f"{CAPABILITIES}/{name}/mig"))
        has_mig = any(part.startswith("gi") for part in parts)
        if has_mig or not cards or not all(UUID.fullmatch(card.get("GPU UUID", "")) for _, card in cards):
            return None
    found = []
    if cards is not None:
        for pci, fields in cards:
            if not is_open(tree, fields):
                continue
            uuid, model = fields.get("GPU UUID", ""), fields.get("Model", "")
            if not UUID.fullmatch(uuid):
                # The driver writes question marks until something has opened the GPU.
                text = "GPU UUID of {items} is {value}: these GPUs can be named by index only"
                tree.add_warning(text, pci, value=fields.get("GPU UUID"))
                uuid = ""
            found.append(Gpu(index=0, uuid=uuid, pci=pci, name="".join(filter(str.isprintable, model))))
        return sort_gpus(found)
    for name in tree.list_directory(BOUND):  # some containers hide the driver's /proc files
        address = normalise_pci(name)
        # NVSwitches (class 0x0680) are bound to the same driver.
        if address and (tree.read(f"{PCI}{address}/class") or "").startswith("0x03"):
            tree.add_warning(f"{GPUS} is not there: the UUIDs of the GPUs {{items}} are unknown", address)
            found.append(Gpu(index=0, uuid="", pci=address))
    return sort_gpus(found) or None


def list_cards(tree: Tree) -> list[Card] | None:
    """The GPUs of /proc/driver/nvidia/gpus but those that the driver leaves out; None if it is missing."""
    names = tree.list_directory(GPUS)
    cards = []
    for name in names:
        pci = normalise_pci(name)
        if pci is None:
            tree.add_warning(f"{GPUS} has {{value}}, which is no PCI address: left out", value=name)
            continue
        fields = tree.read_fields(f"{GPUS}{name}/information")
        if fields.get("GPU Excluded") == "Yes":
            tree.add_warning("the driver excludes the GPUs {items} (NVreg_ExcludedGpus): left out", pci)
            continue
        cards.append((pci, fields))
    return cards if names else None


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
    in kfd_topology.c), and are not the runtime's either. Without the driver's files, AMD's GPUs in PCI order.
    """
    numbers = tree.list_numbers(AMD_NODES, "")
    if not numbers:
        names = [name for name in tree.list_directory(PCI) if tree.read(f"{PCI}{name}/vendor") == AMD_VENDOR]
        names = [n for n in names if (tree.read(f"{PCI}{n}/class") or "").startswith(AMD_CLASSES)]
        addresses = [pci for name in names if (pci := normalise_pci(name))]
        return tuple(_build_amd_gpu(tree, pci, "") for pci in sorted(addresses, key=order_pci))
    if tree.resolve_links(AMD_NODES) is None:
        tree.add_warning(f"links of {AMD_NODES} lead out of the root: planned without AMD GPUs")
        return ()
    found = [place for number in numbers if (place := _read_amd_node(tree, number))]
    uuids = [uuid for _, uuid in found]
    # The partitions of a device may all have its own id, which then names none of them.
    return tuple(_build_amd_gpu(tree, pci, uuid if uuids.count(uuid) == 1 else "") for pci, uuid in found)


def _read_amd_node(tree: Tree, number: int) -> tuple[str, str] | None:
    """Address and UUID of a node's GPU; None for a CPU, and for what the job may not see."""
    lines = (tree.read(f"{AMD_NODES}/{number}/properties") or "").splitlines()
    fields = {key: parse_number(text) for key, _, text in (line.partition(" ") for line in lines)}
    if not fields.get("simd_count"):
        return None
    location, domain = fields.get("location_id"), fields.get("domain") or 0
    if location is None or domain >= 1 << 32:
        tree.add_warning("KFD's nodes {items} have no PCI address: left out", number)
        return None
    # Bits 28 to 31 number a device's partition; the rest is bus, device and function.
    bus, device = location >> 8 & 0xFF, location >> 3 & 0x1F
    pci, first = format_pci(domain, bus, device, location & 7), format_pci(domain, bus, device)
    if not tree.has(f"{PCI}{pci}") and tree.has(f"{PCI}{first}"):
        # Kernels about 6.6 have the partition's number in the function's place.
        pci = first
    unique = fields.get("unique_id") or 0
    return pci, f"GPU-{unique:016x}" if 0 < unique < 1 << 64 else ""


def _build_amd_gpu(tree: Tree, pci: str, uuid: str) -> Gpu:
    here = f"{PCI}{pci}/"
    if tree.resolve_links(here) is None:
        return Gpu(index=0, uuid=uuid, pci=pci, node=None, vendor="amd")
    name = "".join(filter(str.isprintable, tree.read(f"{here}product_name") or ""))
    if not name:
        device = (tree.read(f"{here}device") or "").removeprefix("0x")
        name = f"AMD GPU 1002:{device}" if device.isalnum() and len(device) == 4 else "AMD GPU"
    size = parse_number(tree.read(f"{here}mem_info_vram_total")) or 0
    return Gpu(index=0, uuid=uuid, pci=pci, node=None, name=name[:100], vendor="amd", memory_mib=size >> 20)


NICS = "sys/class/infiniband/"
STATE = re.compile(r"([0-5]):.*", re.DOTALL)
"""A port's `state`, as `4: ACTIVE`; the number is ib_port_state of include/rdma/ib_verbs.h."""
ACTIVE = "4"
STATE_WORD = re.compile(r"[A-Za-z_]{1,20}")
RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) Gb/sec.*", re.DOTALL)
"""A port's `rate`, as `400 Gb/sec (4X NDR)`."""
NAME_PARTS = re.compile(r"([0-9]+)|([^0-9]+)")
LAYERS = ("InfiniBand", "Ethernet")
"""What `link_layer` may say; EFA has another of its own."""


def _list_names(tree: Tree) -> list[str]:
    """The devices in natural order: mlx5_2 before mlx5_10."""
    names = []
    for name in tree.list_directory(NICS):
        if name.isascii() and name.isprintable():
            names.append(name)
        else:
            tree.add_warning(f"{NICS} has {{value}}, which is no device's name: left out", value=name)

    def split_numbers(name: str) -> list[tuple[bool, int, str]]:
        return [(bool(digits), int(digits or 0), text) for digits, text in NAME_PARTS.findall(name)]

    return sorted(names, key=split_numbers)


def read_nics(tree: Tree, nodes: frozenset[int]) -> tuple[Nic, ...]:
    """The RDMA devices; one that is no PCI device, such as soft RoCE, has no place."""
    return tuple(_read_nic(tree, name, nodes) for name in _list_names(tree))


def _read_nic(tree: Tree, name: str, nodes: frozenset[int]) -> Nic:
    here = f"{NICS}{name}/"
    real = tree.resolve_links(f"{here}device")
    if real is None:
        text = "sysfs links of RDMA devices {items} lead out of the root: their place is unknown"
        tree.add_warning(text, name)
        return Nic(name, "", None)
    path, node = split_path(real), None
    if path:
        numa_node = tree.read(f"{here}device/numa_node")
        if numa_node is None and not tree.has(f"{here}device"):
            text = "the PCI devices of the RDMA devices {items} are not in sysfs: NUMA node unknown"
            tree.add_warning(text, name)
        node = find_node(tree, "RDMA devices", name, numa_node, nodes)
    ports = []
    for number in tree.list_numbers(f"{here}ports", ""):
        port = f"{here}ports/{number}/"
        active = _read_active(tree, name, f"{port}state")
        layer = tree.read(f"{port}link_layer") or ""
        ports.append((active, _read_rate(tree, name, f"{port}rate"), layer if layer in LAYERS else ""))
    # The fastest of the active ports, else of all.
    active, rate, layer = max(ports, key=lambda port: port[:2], default=(True, 0.0, ""))
    return Nic(name, path[-1] if path else "", node, path[:-1], layer, rate, active)


def _read_active(tree: Tree, name: str, path: str) -> bool:
    """Whether a port is active; true if it is unknown."""
    text = tree.read(path)
    found = STATE.fullmatch(f"{text}:")
    if found:
        return found[1] == ACTIVE
    if text is not None:
        tree.add_warning("port state of RDMA devices {items} is {value}: taken as active", name, value=text)
    return True


def _read_rate(tree: Tree, name: str, path: str) -> float:
    """A port's rate in Gb/s; 0 if it is unknown."""
    text = tree.read(path)
    if found := RATE.fullmatch(text or ""):
        return float(found[1])
    if text is not None:
        tree.add_warning("port rate of RDMA devices {items} is {value}: unknown", name, value=text)
    return 0.0


def read_nic_ports(tree: Tree) -> "tuple[NicFacts, ...]":
    """Every port of every device: state, rate, and how often the link has gone down."""
    from launcher.doctor.model import NicFacts  # plans do without the doctor

    ports = []
    for name in _list_names(tree):
        for number in tree.list_numbers(f"{NICS}{name}/ports", ""):
            here = f"{NICS}{name}/ports/{number}/"
            word = (tree.read(f"{here}state") or "").rpartition(":")[2].strip()
            ports.append(
                NicFacts(
                    name=f"{name}:{number}",
                    state=word if STATE_WORD.fullmatch(word) else "",
                    rate_gbps=_read_rate(tree, name, f"{here}rate"),
                    link_downed=parse_number(tree.read(f"{here}counters/link_downed")),
                )
            )
    return tuple(ports)
