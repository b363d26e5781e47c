"""AMD GPUs, by the compute driver's topology and by the PCI bus."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.plan.model import Gpu
from launcher.probe.gpus import list_gpus
from launcher.probe.machine import probe
from launcher.probe.sysfs import Tree

from .machine_trees import link, put, write_device, write_small

KFD = "sys/devices/virtual/kfd/kfd"
NODES = f"{KFD}/topology/nodes"
INSTINCT = {
    "vendor": "0x1002",
    "device": "0x74a1",
    "class": "0x120000",
    "numa_node": "1",
    "local_cpulist": "2-3",
}


def write_gpu(root: Path, path: str, **files: str) -> None:
    write_device(root, path, **INSTINCT | files)


def write_node(root: Path, number: int, **fields: int) -> None:
    """Write a node of KFD's topology; its other values are a CPU's."""
    values = {"cpu_cores_count": 0, "simd_count": 0, "location_id": 0, "domain": 0, "unique_id": 0} | fields
    put(root, f"{NODES}/{number}/properties", "\n".join(f"{key} {value}" for key, value in values.items()))


def find(root: Path, *warnings: str) -> tuple[Gpu, ...]:
    """The GPUs of a tree; its warnings have the given parts."""
    if (root / KFD).exists() and not (root / "sys/class/kfd").exists():
        link(root, "sys/class/kfd/kfd", KFD)
    tree = Tree(root)
    gpus = list_gpus(tree, quick=False)
    found = tree.list_warnings()
    assert len(found) == len(warnings), found
    assert all(part in text for part, text in zip(warnings, found, strict=True)), found
    return gpus


def tell(gpus: tuple[Gpu, ...]) -> list[tuple[str, str]]:
    return [(gpu.pci, gpu.uuid) for gpu in gpus]


def test_kfd_has_the_order_and_the_ids(tmp_path: Path) -> None:
    write_gpu(tmp_path, "pci0000:05/0000:05:01.0/0000:06:00.0", product_name="AMD Instinct MI300X OAM")
    write_gpu(tmp_path, "pci0000:b0/0000:b0:01.0/0000:b1:00.0", mem_info_vram_total=str(192 << 30))
    write_node(tmp_path, 0, cpu_cores_count=96)
    write_node(tmp_path, 2, simd_count=1216, location_id=0xB100, unique_id=0xABCDEF0123456789)
    write_node(tmp_path, 10, simd_count=1216, location_id=0x0600, unique_id=5)
    gpus = find(tmp_path)
    assert tell(gpus) == [("0000:b1:00.0", "GPU-abcdef0123456789"), ("0000:06:00.0", "GPU-0000000000000005")]
    assert [(gpu.name, gpu.vendor, gpu.memory_mib) for gpu in gpus] == [
        ("AMD GPU 1002:74a1", "amd", 192 << 10),
        ("AMD Instinct MI300X OAM", "amd", 0),
    ]


def test_place_of_amds_gpus_is_found_as_of_any(tmp_path: Path) -> None:
    write_small(tmp_path, gpus=[])
    write_gpu(tmp_path, "pci0000:05/0000:05:01.0/0000:06:00.0")
    machine = probe(tmp_path)
    assert not machine.warnings
    gpu = machine.gpus[0]
    assert (gpu.index, gpu.node, gpu.local_cpus) == (0, 1, frozenset({2, 3}))
    assert gpu.path == ("pci0000:05", "0000:05:01.0")


def test_long_domain_and_function(tmp_path: Path) -> None:
    write_gpu(tmp_path, "pci10000:00/10000:06:1a.3")
    write_node(tmp_path, 1, simd_count=304, location_id=0x06D3, domain=0x10000, unique_id=1)
    assert tell(find(tmp_path)) == [("10000:06:1a.3", "GPU-0000000000000001")]


def test_partitions_of_one_device_are_devices_of_their_own(tmp_path: Path) -> None:
    write_gpu(tmp_path, "pci0000:05/0000:06:00.0")
    for partition in range(4):
        location = partition << 28 | 0x0600
        write_node(tmp_path, 2 + partition, simd_count=304, location_id=location, unique_id=7 + partition)
    assert tell(find(tmp_path)) == [("0000:06:00.0", f"GPU-{7 + n:016x}") for n in range(4)]


def test_partitions_numbered_as_functions_are_of_the_device_that_is_there(tmp_path: Path) -> None:
    write_gpu(tmp_path, "pci0000:05/0000:06:00.0")
    for partition in range(3):
        write_node(tmp_path, 2 + partition, simd_count=304, location_id=0x0600 | partition, unique_id=7)
    assert tell(find(tmp_path)) == [("0000:06:00.0", "")] * 3


@pytest.mark.parametrize(
    ("fields", "warnings"),
    [
        ({"simd_count": 0, "location_id": 0x0600}, ()),
        (
            {"simd_count": 304, "location_id": 0x0600, "domain": 1 << 32},
            ("KFD's nodes 1 have no PCI address",),
        ),
        ({"simd_count": 304, "location_id": -1}, ("KFD's nodes 1 have no PCI address",)),
    ],
)
def test_node_that_is_no_gpu(fields: Mapping[str, int], warnings: tuple[str, ...], tmp_path: Path) -> None:
    write_node(tmp_path, 1, **fields)
    assert find(tmp_path, *warnings) == ()


def test_nodes_that_the_device_cgroup_hides_are_not_the_jobs(tmp_path: Path) -> None:
    write_gpu(tmp_path, "pci0000:05/0000:06:00.0")
    write_gpu(tmp_path, "pci0000:05/0000:07:00.0")
    (tmp_path / NODES / "1/properties").mkdir(parents=True)  # reading fails, as with EPERM
    write_node(tmp_path, 2, simd_count=304, location_id=0x0700, unique_id=1)
    assert tell(find(tmp_path)) == [("0000:07:00.0", "GPU-0000000000000001")]


def test_device_without_sysfs_has_an_address_still(tmp_path: Path) -> None:
    write_node(tmp_path, 1, simd_count=304, location_id=0x0600)
    assert find(tmp_path) == (Gpu(0, "", "0000:06:00.0", None, name="AMD GPU", vendor="amd"),)


def test_bus_order_without_kfd(tmp_path: Path) -> None:
    write_gpu(tmp_path, "pci2000:00/2000:00:00.0", device="0x74a1")
    write_gpu(tmp_path, "pci10000:00/10000:00:04.1", **{"class": "0x038000"})
    write_gpu(tmp_path, "pci0000:e0/0000:e1:00.0", **{"class": "0x030000"})
    write_gpu(tmp_path, "pci0000:e0/0000:e1:00.1", **{"class": "0x040300"})  # its sound
    write_gpu(tmp_path, "pci0000:e0/0000:e2:00.0", vendor="0x8086")
    put(tmp_path, "sys/bus/pci/devices/stranger/vendor", "0x1002")
    assert tell(find(tmp_path)) == [("0000:e1:00.0", ""), ("2000:00:00.0", ""), ("10000:00:04.1", "")]


def test_one_beside_nvidias_is_left_out(tmp_path: Path) -> None:
    write_small(tmp_path)
    write_gpu(tmp_path, "pci0000:05/0000:06:00.0")
    write_node(tmp_path, 1, simd_count=8, location_id=0x0600)
    link(tmp_path, "sys/class/kfd/kfd", KFD)
    machine = probe(tmp_path)
    assert [gpu.vendor for gpu in machine.gpus] == ["nvidia", "nvidia"]
    assert not machine.warnings


def test_link_out_of_the_root_is_not_followed(tmp_path: Path) -> None:
    write_node(tmp_path / "outside", 1, simd_count=304, location_id=0x0600)
    (tmp_path / "root/sys/class/kfd").mkdir(parents=True)
    (tmp_path / "root/sys/class/kfd/kfd").symlink_to(tmp_path / "outside" / KFD)
    assert find(tmp_path / "root", "lead out of the root: planned without AMD GPUs") == ()


@pytest.mark.parametrize("sign", [True, False])
def test_real_machine_has_them_only_with_the_compute_drivers_device(
    sign: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without /dev/kfd it is a graphics card for the screen, which no program could compute on."""
    gpu = Gpu(0, "", "0000:06:00.0", None, vendor="amd")
    monkeypatch.setattr("launcher.probe.gpus.NVIDIA_SIGNS", ())
    monkeypatch.setattr("launcher.probe.gpus.AMD_SIGN", "proc/self/status" if sign else "proc/nothing")
    monkeypatch.setattr("launcher.probe.gpus.read_amd", lambda tree: (gpu,))
    assert list_gpus(Tree(), quick=False) == ((gpu,) if sign else ())
