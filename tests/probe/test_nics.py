"""RDMA devices and PCI paths, in trees with links as sysfs has them."""

from pathlib import Path

import pytest

from launcher.plan.model import Machine, Nic
from launcher.probe.machine import probe
from launcher.probe.pci import split_path

from .machine_trees import NICS, PCI, STATUS, link, put, write_device, write_nic, write_small

PORT = "pci0000:17/0000:17:01.0"
NDR = ("4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand")
ROCE = ("4: ACTIVE", "100 Gb/sec (4X EDR)", "Ethernet")
DOWN = ("1: DOWN", "10 Gb/sec (4X SDR)", "InfiniBand")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two NUMA nodes, of which a node 1 device is told by `numa_node`."""
    put(tmp_path, STATUS, "Cpus_allowed_list:\t0-1\nMems_allowed_list:\t0-1")
    put(tmp_path, "proc/meminfo", "MemTotal:  1024 kB")
    for node in (0, 1):
        put(tmp_path, f"sys/devices/system/node/node{node}/cpulist", str(node))
        put(tmp_path, f"sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal: 512 kB")
        put(tmp_path, f"sys/devices/system/node/node{node}/distance", "10 20" if node == 0 else "20 10")
    put(tmp_path, "sys/devices/system/node/online", "0-1")
    put(tmp_path, "sys/devices/system/node/has_normal_memory", "0-1")
    put(tmp_path, "sys/devices/system/cpu/online", "0-1")
    for cpu in (0, 1):
        put(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", str(cpu))
        put(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", "0")
        put(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/cache/index0/level", "1")
        put(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/cache/index0/shared_cpu_list", str(cpu))
    return tmp_path


def read(root: Path, *warnings: str) -> Machine:
    """The machine, whose warnings are one for each of the given parts."""
    machine = probe(root)
    assert len(machine.warnings) == len(warnings), machine.warnings
    assert all(part in text for part, text in zip(warnings, machine.warnings, strict=True)), machine.warnings
    return machine


def test_device_with_its_place_and_its_port(root: Path) -> None:
    write_nic(root, "mlx5_0", write_device(root, f"{PORT}/0000:18:00.0", numa_node="1"), NDR)
    path = ("pci0000:17", "0000:17:01.0")
    assert read(root).nics == (Nic("mlx5_0", "0000:18:00.0", 1, path, "InfiniBand", 400, True),)


def test_gpu_and_nic_under_one_switch_have_the_switch_in_common(root: Path) -> None:
    switch = f"{PORT}/0000:18:00.0"
    write_device(root, f"{switch}/0000:19:00.0/0000:1a:00.0", numa_node="0", local_cpulist="0")
    put(root, "proc/driver/nvidia/gpus/0000:1a:00.0/information", "GPU UUID: \t GPU-1")
    nic = write_device(root, f"{switch}/0000:19:01.0/0000:1b:00.0", numa_node="0")
    write_nic(root, "mlx5_0", nic, NDR)
    machine = read(root)
    assert machine.gpus[0].path == ("pci0000:17", "0000:17:01.0", "0000:18:00.0", "0000:19:00.0")
    assert machine.nics[0].path == ("pci0000:17", "0000:17:01.0", "0000:18:00.0", "0000:19:01.0")


def test_numbers_in_names_count_as_numbers(root: Path) -> None:
    names = [
        "mlx5_10",
        "mlx5_2",
        "mlx5_bond_0",
        "efa_0",
        "rdmap16s27",
        "rdmap9s27",
        "mlx4_0",
        "7a",
        "mlx5_02",
    ]
    for at, name in enumerate(names):
        write_nic(root, name, write_device(root, f"{PORT}/0000:18:{at:02x}.0", numa_node="0"), ROCE)
    found = [nic.name for nic in read(root).nics]
    assert found == [
        "efa_0", "mlx4_0", "mlx5_02", "mlx5_2", "mlx5_10", "mlx5_bond_0", "rdmap9s27", "rdmap16s27", "7a",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ports", "layer", "rate", "active"),
    [
        ((), "", 0, True),
        ((DOWN,), "InfiniBand", 10, False),
        ((("2: INIT", "2.5 Gb/sec (1X SDR)", "Ethernet"),), "Ethernet", 2.5, False),
        ((DOWN, ROCE), "Ethernet", 100, True),
        ((("1: DOWN", "400 Gb/sec (4X NDR)", "InfiniBand"), ROCE), "Ethernet", 100, True),
        ((("5: ACTIVE_DEFER", "200 Gb/sec (4X HDR)", "InfiniBand"),), "InfiniBand", 200, False),
        ((("4: ACTIVE", "100 Gb/sec (4X EDR)", "Unknown"),), "", 100, True),
    ],
)
def test_ports(
    ports: tuple[tuple[str, str, str], ...], layer: str, rate: float, active: bool, root: Path
) -> None:
    write_nic(root, "mlx5_0", write_device(root, f"{PORT}/0000:18:00.0", numa_node="0"), *ports)
    nic = read(root).nics[0]
    assert (nic.link_layer, nic.rate_gbps, nic.active) == (layer, rate, active)


def test_port_that_says_nonsense_is_taken_as_active_and_told(root: Path) -> None:
    device = write_device(root, f"{PORT}/0000:18:00.0", numa_node="0")
    write_nic(root, "mlx5_0", device, ("up", "fast", "InfiniBand"))
    nic = read(root, "port state of RDMA devices mlx5_0 is 'up'", "port rate of RDMA devices mlx5_0").nics[0]
    assert (nic.link_layer, nic.rate_gbps, nic.active) == ("InfiniBand", 0, True)


def test_ports_without_files_are_unknown(root: Path) -> None:
    real = write_nic(root, "mlx5_0", write_device(root, f"{PORT}/0000:18:00.0", numa_node="0"))
    (root / real / "ports/1").mkdir(parents=True)
    nic = read(root).nics[0]
    assert (nic.link_layer, nic.rate_gbps, nic.active) == ("", 0, True)


def test_virtual_function_in_a_32_bit_domain(root: Path) -> None:
    device = write_device(root, "pci10000:e0/10000:e0:02.0/10000:e1:00.3", numa_node="-1")
    write_nic(root, "mlx5_4", device, NDR)
    nic = read(root).nics[0]
    assert (nic.pci, nic.node, nic.path) == ("10000:e1:00.3", None, ("pci10000:e0", "10000:e0:02.0"))


def test_soft_device_has_no_place(root: Path) -> None:
    write_nic(root, "rxe0", "sys/devices/virtual", ROCE)
    assert read(root).nics == (Nic("rxe0", "", None, (), "Ethernet", 100, True),)


def test_node_that_is_not_online_is_unknown(root: Path) -> None:
    write_nic(root, "mlx5_0", write_device(root, f"{PORT}/0000:18:00.0", numa_node="7"), NDR)
    nic = read(root, "numa_node of RDMA devices mlx5_0 is '7', which is not online").nics[0]
    assert (nic.node, nic.pci) == (None, "0000:18:00.0")


def test_link_to_a_device_that_is_gone(root: Path) -> None:
    link(root, f"{NICS}/mlx5_0/device", f"sys/devices/{PORT}/0000:18:00.0")
    nic = read(root, "the PCI devices of the RDMA devices mlx5_0 are not in sysfs").nics[0]
    assert nic == Nic("mlx5_0", "0000:18:00.0", None, ("pci0000:17", "0000:17:01.0"))


def test_dangling_and_looping_names(root: Path) -> None:
    link(root, f"{NICS}/mlx5_0", "sys/devices/nothing")
    link(root, f"{NICS}/mlx5_1", f"{NICS}/mlx5_1")
    assert read(root).nics == (Nic("mlx5_0", "", None), Nic("mlx5_1", "", None))


def test_link_out_of_the_root_is_not_followed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    device = write_device(outside, f"{PORT}/0000:18:00.0", numa_node="1")
    write_nic(outside, "mlx5_0", device, NDR)
    (root / NICS).mkdir(parents=True)
    (root / NICS / "mlx5_0").symlink_to(outside / NICS / "mlx5_0")
    machine = read(root, "links of RDMA devices mlx5_0 lead out of the root")
    assert machine.nics == (Nic("mlx5_0", "", None),)


def test_name_that_is_none_is_left_out(root: Path) -> None:
    write_nic(root, "mlx5_0", write_device(root, f"{PORT}/0000:18:00.0", numa_node="0"), NDR)
    (root / NICS / "a\udcffb").mkdir()
    (root / NICS / "a\nb").mkdir()
    assert len(read(root, "which is no device's name").nics) == 1


def test_ethernet_without_rdma_is_not_listed(root: Path) -> None:
    write_device(root, f"{PORT}/0000:18:00.0", **{"class": "0x020000", "numa_node": "0", "vendor": "0x8086"})
    assert read(root).nics == ()


@pytest.mark.parametrize(
    ("real", "path"),
    [
        ("sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:00 0000:00:01.0 0000:01:00.0"),
        ("sys/devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/f8b3-1/pci0001:00/0001:00:00.0",
         "pci0001:00 0001:00:00.0"),
        ("sys/devices/platform/40000000.pcie/pci0000:00/0000:00:02.0", "pci0000:00 0000:00:02.0"),
        ("sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:01.0/10000:e1:00.0",
         "pci0000:00 0000:00:0e.0 pci10000:e0 10000:e0:01.0 10000:e1:00.0"),
        ("sys/devices/pci0000:00/0000:00:03.0/mlx5_core.rdma.0", "pci0000:00 0000:00:03.0"),
        ("sys/bus/pci/devices/0000:00:03.0", "0000:00:03.0"),
        ("sys/devices/virtual/net/lo", ""),
        ("sys/devices/pci0000:00", ""),
        ("sys/devices/pci\udcff0:00/0000:00:03.0", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_pci_part_of_a_path(real: str, path: str) -> None:
    assert split_path(real) == tuple(path.split())


def test_paths_of_the_small_machine(tmp_path: Path) -> None:
    machine = probe(write_small(tmp_path))
    assert [gpu.path for gpu in machine.gpus] == [
        ("pci0000:07", "0000:07:1f.7"),
        ("pci0000:47", "0000:47:1f.7"),
    ]
    assert not (tmp_path / PCI / "0000:07:1f.7").exists()
