"""The machine as a tree of text."""

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from launcher.cli.topo import number_classes
from launcher.plan.model import Cpu, Machine, NumaNode
from launcher.report.machine_tree import print_topology
from tests.plan.lab_machines import NAMES, fsroot, load
from tests.probe.machine_trees import short_lived
from tests.report import full_machines
from tests.seam import Result


def show(machine: Machine, *, explain: bool = False, encoding: str = "utf-8", width: int = 160) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=file, width=width, highlight=False)
    print_topology(console, machine, number_classes(machine), explain=explain)
    file.flush()
    return "".join(f"{line.rstrip()}\n" for line in raw.getvalue().decode(encoding).splitlines())


GH200 = """\
Machine  480 GiB  1 package, 9 NUMA nodes, 72 cores, 72 PUs
├── Package 0
│   └── NUMANode 0  480 GiB  L3 32 MiB  72 cores  PUs 0-71
│       └── GPU 0  0009:01:00.0  NVIDIA GH200 480GB
├── NUMANode 1  96 GiB  no CPUs, GPU or expansion memory
└── NUMANodes 2-8  no CPUs, no memory
job        may use all 72 PUs and the memory of all NUMA nodes
distances  10 within a NUMA node, 80 between nodes
"""
SLURM = """\
Machine  1 TiB  2 packages, 2 NUMA nodes, 56 cores, 112 PUs
├── Package 0
│   └── NUMANode 0  512 GiB  L3 32 MiB  28 cores  PUs 0-27,56-83  (allowed 0-15,56-71)
│       ├── GPU 0  0000:07:00.0  NVIDIA A100 80GB PCIe
│       ├── GPU 1  0000:17:00.0  NVIDIA A100 80GB PCIe
│       ├── GPU 2  0000:27:00.0  NVIDIA A100 80GB PCIe
│       └── GPU 3  0000:37:00.0  NVIDIA A100 80GB PCIe
└── Package 1
    └── NUMANode 1  512 GiB  L3 32 MiB  28 cores  PUs 28-55,84-111  (not allowed)
        ├── GPU 4  0000:47:00.0  NVIDIA A100 80GB PCIe
        ├── GPU 5  0000:57:00.0  NVIDIA A100 80GB PCIe
        ├── GPU 6  0000:67:00.0  NVIDIA A100 80GB PCIe
        └── GPU 7  0000:77:00.0  NVIDIA A100 80GB PCIe
job        may use 32 of 112 PUs (0-15,56-71) and the memory of all NUMA nodes
distances  10 within a NUMA node, 21 between nodes
"""


@pytest.mark.parametrize(("name", "text"), [("gh200", GH200), ("a100-slurm-32of112", SLURM)])
def test_a_probed_machine(name: str, text: str, launch: Callable[..., Result]) -> None:
    with short_lived() as root:
        fsroot.materialize(load(name), root)
        done = launch("topo", f"machine.root={root}")
    assert (done.code, done.err) == (0, "")
    assert "".join(f"{line.rstrip()}\n" for line in done.out.splitlines()) == text


DGX = """\
Machine  dgx-a100  1 TiB  2 packages, 8 NUMA nodes, 128 cores, 256 PUs
├── Package 0  64 cores  PUs 0-63,128-191
│   ├── NUMANode 0  128 GiB  16 cores  PUs 0-15,128-143
│   │   └── 4 x L3 32 MiB  4 cores each  PUs 0-3,128-131 to 12-15,140-143
│   ├── NUMANode 1  128 GiB  16 cores  PUs 16-31,144-159
│   │   ├── 4 x L3 32 MiB  4 cores each  PUs 16-19,144-147 to 28-31,156-159
│   │   └── PCI switch 0000:44:00.0
│   │       ├── GPU 2  0000:47:00.0  NVIDIA A100-SXM4-40GB  40 GiB
│   │       ├── GPU 3  0000:4e:00.0  NVIDIA A100-SXM4-40GB  40 GiB
│   │       ├── NIC mlx5_2  0000:4b:00.0  InfiniBand 200 Gb/s  active
│   │       └── NIC mlx5_3  0000:54:00.0  InfiniBand 200 Gb/s  active
"""


def test_a_dgx_fits_a_screen() -> None:
    text = show(full_machines.lab("dgx-a100"), width=80)
    assert text.startswith(DGX)
    assert text.endswith(
        "job        may use all 256 PUs and the memory of all NUMA nodes\n"
        "distances  nodes  0-3  4-7\n"
        "             0-3   12   32\n"
        "             4-7   32   12\n"
    )
    assert len(text.splitlines()) <= 50


ODD = """\
Machine  R750 <&> 'quoted' ?[31m 中  1 TiB  2 packages, 3 NUMA nodes, 56 cores, 112 PUs
├── Package 0
│   └── NUMANode 0  512 GiB  L3 32 MiB  28 cores  PUs 0-27,56-83  (allowed 0-15,56-71)  (isolated 4-7)
│       ├── GPU 0  0000:07:00.0  NVIDIA A100 80GB PCIe  40 GiB
│       ├── GPU 1  0000:17:00.0  NVIDIA A100 80GB PCIe  40 GiB
│       ├── GPU 2  0000:27:00.0  NVIDIA A100 80GB PCIe  40 GiB
│       ├── GPU 3  0000:37:00.0  NVIDIA A100 80GB PCIe  40 GiB
│       └── NIC mlx5_0  0000:17:00.0  Ethernet 100 Gb/s  down
├── Package 1
│   └── NUMANode 1  512 GiB  L3 32 MiB  28 cores  PUs 28-55,84-111  (not allowed)
│       ├── GPU 4  0000:47:00.0  NVIDIA A100 80GB PCIe  40 GiB
│       ├── GPU 5  0000:57:00.0  NVIDIA A100 80GB PCIe  40 GiB
│       ├── GPU 6  0000:67:00.0  NVIDIA A100 80GB PCIe  40 GiB
│       └── GPU 7  0000:77:00.0  NVIDIA A100 80GB PCIe  40 GiB
├── NUMANode 2  256 GiB  no CPUs  (memory not allowed)
└── NIC mlx5_1  0000:17:00.1
job        may use 32 of 112 PUs (0-15,56-71) and the memory of NUMA nodes 0-1; the isolated PUs 4-7 are left alone
limits     CPU time of 16 CPUs, memory 64 GiB, /dev/shm 64 MiB
distances  nodes   0   1   2
               0  10  21  14
               1  21  10  24
               2  14  24  10
warning: numa_node of 0000:17:00.1 is -1
"""  # noqa: E501  as it is printed


def test_what_is_out_of_the_ordinary_is_told() -> None:
    assert show(full_machines.odd()) == ODD


HYBRID = """\
Machine  Desktop  64 GiB  1 package, 1 NUMA node, 16 cores, 24 PUs
├── Package 0
│   └── NUMANode 0  64 GiB  L3 36 MiB  16 cores  PUs 0-23
│       ├── performance (capacity 1024)  8 cores  PUs 0-15
│       └── efficiency (capacity 640)  8 cores  PUs 16-23
└── GPU 0  0000:01:00.0  NVIDIA GeForce RTX 4090  24 GiB
job        may use all 24 PUs and the memory of all NUMA nodes
"""


def test_classes_of_cores_and_a_gpu_of_unknown_place() -> None:
    assert show(full_machines.hybrid()) == HYBRID


def test_a_gpu_without_a_node_stands_by_the_cpus_next_to_it() -> None:
    machine = full_machines.lab("a100-slurm-32of112")
    far = frozenset(cpu.id for cpu in machine.cpus if cpu.node == 1)
    gpus = tuple(replace(gpu, node=None, local_cpus=far) if gpu.node else gpu for gpu in machine.gpus)
    assert show(replace(machine, gpus=gpus)) == show(machine)


def test_favoured_cores_are_no_class_of_their_own() -> None:
    machine = full_machines.hybrid()
    cpus = tuple(replace(cpu, capacity=1024 - cpu.id % 3) for cpu in machine.cpus)
    assert "capacity" not in show(replace(machine, cpus=cpus))


def test_explain_shows_each_cache_and_core() -> None:
    lines = show(full_machines.lab("dgx-a100"), explain=True).splitlines()
    assert sum("L3 32 MiB" in line for line in lines) == 32
    cores = [line.partition("Core ")[2] for line in lines if "Core " in line]
    assert cores == [f"{core}  PUs {core},{core + 128}" for core in range(128)]


def test_nodes_without_cpus_that_are_alike_share_a_line() -> None:
    text = show(full_machines.lab("gb200-nvl4"))
    assert "NUMANodes 2,10,18,26  186 GiB each  no CPUs, GPU or expansion memory\n" in text
    assert "NUMANodes 3-9,11-17,19-25,27-33  no CPUs, no memory\n" in text
    assert text.endswith("nodes  0-1  2-33\n             0-1   40    80\n            2-33   80    80\n")


def test_packages_of_a_virtual_machine_stand_in_its_one_node() -> None:
    cpus = tuple(Cpu(at, at, package=at, node=0, l3=at) for at in range(64))
    node = NumaNode(0, 1 << 20, normal=True, distances=((0, 10),))
    machine = Machine(cpus, (node,), (), frozenset(range(64)), frozenset({0}), memory_kib=1 << 20)
    assert show(machine).splitlines()[1:3] == [
        "└── NUMANode 0  1 GiB  64 cores  PUs 0-63",
        "    └── 64 x Package  1 core each  PUs 0 to 63",
    ]


def test_a_cache_above_two_nodes_is_called_shared() -> None:
    machine = full_machines.lab("azure-ndv4")
    low = {cpu.node for cpu in machine.cpus if cpu.package == 0}
    cpus = tuple(replace(cpu, l3=0) if cpu.node in low else cpu for cpu in machine.cpus)
    text = show(replace(machine, cpus=cpus))
    assert text.count("shared L3 32 MiB") == len(low) == 2


def test_alike_neighbours_of_which_one_is_partly_allowed_stand_apart() -> None:
    machine = full_machines.lab("dgx-a100")
    text = show(replace(machine, allowed_cpus=machine.allowed_cpus - {5}))
    assert "├── L3 32 MiB  4 cores  PUs 4-7,132-135  (allowed 4,6-7,132-135)\n" in text
    assert "2 x L3 32 MiB  4 cores each  PUs 8-11,136-139 to 12-15,140-143\n" in text


def test_gaps_in_the_numbers_are_named() -> None:
    machine = full_machines.hybrid()
    cpus = tuple(cpu for cpu in machine.cpus if cpu.id != 20)
    assert "not online PUs 20 (offline, or no such CPUs)\n" in show(replace(machine, cpus=cpus))


def test_a_machine_that_may_use_nothing_is_shown() -> None:
    machine = replace(full_machines.hybrid(), allowed_cpus=frozenset(), allowed_mems=frozenset())
    assert "may use 0 of 24 PUs () and the memory of NUMA nodes (none)" in show(machine)


@pytest.mark.parametrize("name", [*NAMES, "hybrid", "huge", "odd"])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_it_fits_80_columns_and_plain_terminals(name: str, encoding: str) -> None:
    makers = {"hybrid": full_machines.hybrid, "huge": full_machines.huge, "odd": full_machines.odd}
    machine = replace(makers[name]() if name in makers else full_machines.lab(name), name=name)
    text = show(machine, encoding=encoding, width=80)
    assert max(map(len, text.splitlines())) <= 80
    for gpu in machine.gpus:
        assert f"GPU {gpu.index}  {gpu.pci}" in text
    for nic in machine.nics:
        assert f"NIC {nic.name}" in text
