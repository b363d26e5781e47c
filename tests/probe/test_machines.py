"""The lab's machines, field by field."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.plan.model import Cache, Cpu, Gpu, Machine, Nic, NumaNode
from launcher.probe.machine import probe
from tests.plan.lab_machines import NAMES, Data, fsroot, load

from .machine_trees import find_path, short_lived


def expect(description: Data) -> Machine:
    """The machine that a description means."""
    m = fsroot.Description(description)
    gib = {entry["id"]: entry.get("gib", 64) for entry in description["numa"]}
    uuid = "GPU-{:08x}-1111-2222-3333-{:012x}"
    tail = fsroot.hash_name(description["name"]) % 16**12
    return Machine(
        cpus=tuple(
            Cpu(
                id=cpu,
                core=min(m.siblings(cpu)),
                package=m.package[m.node_of(cpu)],
                node=m.node_of(cpu),
                l3=min(m.l3(cpu)),
            )
            for cpu in sorted(m.online)
        ),
        nodes=tuple(
            NumaNode(
                id=node,
                memory_kib=gib[node] << 20,
                normal=m.kind[node] != "gpu" and gib[node] > 0,
                distances=tuple((other, m.slit(node, other)) for other in sorted(m.nodes)),
            )
            for node in sorted(m.nodes)
        ),
        gpus=tuple(
            Gpu(
                index=index,
                uuid=gpu.get("uuid") or uuid.format(index, tail),
                pci=gpu["bdf"],
                node=gpu["numa"] if gpu["numa"] >= 0 else None,
                local_cpus=frozenset(m.nodes[gpu["numa"]] & m.online if gpu["numa"] >= 0 else m.online),
                name=gpu["model"],
                path=find_path(gpu),
            )
            for index, gpu in enumerate(m.gpus)
        ),
        allowed_cpus=frozenset(m.allowed & m.online),
        allowed_mems=frozenset(m.allowed_mems),
        isolated=frozenset(m.isolated),
        nics=tuple(
            Nic(nic["name"], nic["bdf"], nic["numa"] if nic["numa"] >= 0 else None, find_path(nic))
            for nic in m.nics
        ),
        caches=tuple(Cache(lowest, 3, 32768) for lowest in sorted({min(m.l3(cpu)) for cpu in m.online})),
        memory_kib=sum(gib[node] << 20 for node in m.nodes if m.kind[node] != "gpu"),
    )


@pytest.fixture
def root() -> Iterator[Path]:
    with short_lived() as folder:
        yield folder


def test_all_machines_of_the_lab_are_there() -> None:
    assert len(NAMES) == 14


@pytest.mark.parametrize("name", NAMES)
def test_machine_is_read_as_described(name: str, root: Path) -> None:
    description = load(name)
    fsroot.materialize(description, root)
    assert probe(root) == expect(description)


def test_root_may_be_text(root: Path) -> None:
    fsroot.materialize(load("workstation-1plus4"), root)
    assert probe(str(root)) == probe(root)


def test_link_to_a_root_is_followed(root: Path) -> None:
    fsroot.materialize(load("workstation-1plus4"), root / "tree")
    (root / "link").symlink_to("tree")
    assert probe(root / "link") == probe(root / "tree")


def test_sparse_cpus_memory_only_nodes_and_isolated(root: Path) -> None:
    description = {
        "name": "sparse",
        "numa": [
            {"id": 0, "package": 0, "cpus": "0-3"},
            {"id": 3, "package": 1, "cpus": "1500-1503"},
            {"id": 4, "package": 1, "cpus": "", "kind": "memory", "gib": 256},
            {"id": 255, "package": 1, "cpus": "", "kind": "gpu", "gib": 16},
        ],
        "threads": {"adjacent": 4},
        "isolated": "2-3",
        "allowed_cpus": "1-2,1501",
        "allowed_mems": "0,3",
        "offline": "0,1502",
        "gpus": [
            {"bdf": "0000:07:00.1", "numa": 0, "model": "A"},
            {"bdf": "10000:00:04.0", "numa": 3, "model": "B"},
        ],
    }
    fsroot.materialize(description, root)
    machine = probe(root)
    assert machine == expect(description)
    assert [cpu.core for cpu in machine.cpus] == [1, 1, 1, 1500, 1500, 1500]
    assert [node.normal for node in machine.nodes] == [True, True, True, False]
    assert [gpu.pci for gpu in machine.gpus] == ["0000:07:00.1", "10000:00:04.0"]


def test_gpus_come_in_pci_order_whatever_the_names_sort_to(root: Path) -> None:
    gpus = [
        {"bdf": bdf, "numa": 0, "model": "A"}
        for bdf in ("10000:00:04.0", "2000:00:00.0", "0000:e1:00.0", "0000:0f:00.0")
    ]
    fsroot.materialize({"name": "x", "numa": [{"id": 0, "package": 0, "cpus": "0"}], "gpus": gpus}, root)
    machine = probe(root)
    assert [gpu.pci for gpu in machine.gpus] == [
        "0000:0f:00.0",
        "0000:e1:00.0",
        "2000:00:00.0",
        "10000:00:04.0",
    ]
    assert [gpu.index for gpu in machine.gpus] == [0, 1, 2, 3]
