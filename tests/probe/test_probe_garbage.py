"""Random bytes and lines in any file: a machine that holds together, or a clear error."""

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import LaunchError
from launcher.plan.model import Machine
from launcher.probe.machine import probe

from .probe_trees import GPUS, put, spoilt, write_small

LINES = (
    "", "-1", "0", "1", "3-1", "0-3", "2-5,9", "0-15:2/4", "0-15:4/2", "0-15:2/", "0-70000", "0-1048575",
    "99999999999999999999", "9" * 5000, "0x10", "1e3", "\u0663", "1_0", "10 20", "10 20 20 20", "255 10",
    "Cpus_allowed_list:\t", "Cpus_allowed_list:\t0-1", "Cpus_allowed_list:\t99", "Mems_allowed_list:\t3",
    "MemTotal:", "MemTotal: x kB", "Node 0 MemTotal: 1 kB", "Node: 1", "Node: -1\nStatus: online",
    "GPU UUID: {items}", "GPU UUID: GPU-12", "GPU Excluded: Yes", "Model: \x1b[2J{value}",
)  # fmt: skip
WORDS = st.sampled_from(LINES) | st.text(string.digits + ",-:/ \n", max_size=30)
CONTENT = st.binary(max_size=80) | st.lists(WORDS, max_size=3).map("\n".join).map(str.encode)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_small(tmp_path_factory.mktemp("tree"))
    put(root, f"{GPUS}/0000:07:00.0/numa_status", "Node: 3\nStatus: online")
    for cpu in range(16):
        put(root, f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", "1024")
    return root


@pytest.fixture(scope="module")
def files(tree: Path) -> list[str]:
    """The files that the probe may read: not the hexadecimal maps, which only make the list longer."""
    skipped = ("siblings", "core_cpus", "package_cpus", "size", "type", "id", "core_id")
    found = (path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    read = (path for path in found if path.name not in skipped and not path.name.endswith("map"))
    return sorted(str(path.relative_to(tree)) for path in read)


@pytest.fixture(scope="module")
def folders(tree: Path) -> list[str]:
    return sorted(
        str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_dir() and not path.is_symlink()
    )


def check(machine: Machine) -> None:
    """What the planner takes for granted."""
    cpus = {cpu.id: cpu for cpu in machine.cpus}
    nodes = {node.id for node in machine.nodes}
    assert list(cpus) == sorted(cpus) and machine.allowed_cpus <= cpus.keys() and machine.allowed_cpus
    assert machine.isolated <= cpus.keys() and machine.allowed_mems <= nodes and machine.allowed_mems
    for cpu in machine.cpus:
        first = cpus[cpu.core]
        assert first.core == cpu.core <= cpu.id
        assert (first.node, first.package, first.l3, first.capacity) == (
            cpu.node, cpu.package, cpu.l3, cpu.capacity,
        )  # fmt: skip
        assert cpu.node in nodes and cpus[cpu.l3].l3 == cpu.l3 and 0 < cpu.capacity <= 1024
    for node in machine.nodes:
        assert {other for other, _ in node.distances} == nodes and node.distance(node.id) == 10
    for index, gpu in enumerate(machine.gpus):
        assert gpu.index == index and (gpu.node is None or gpu.node in nodes)
        assert gpu.local_cpus <= cpus.keys() and gpu.name.isprintable() and gpu.uuid.isascii()
    for text in machine.warnings:
        assert text.isprintable() and text.encode() and len(text) < 2000


def probe_and_check(root: Path) -> None:
    try:
        machine = probe(root)
    except LaunchError as error:
        assert str(error).isprintable()
    else:
        check(machine)


def test_the_sound_machine_passes_the_check(tree: Path) -> None:
    machine = probe(tree)
    check(machine)
    assert not machine.warnings


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_garbage_in_any_files(tree: Path, files: list[str], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=4, unique=True))
    edits = {path: data.draw(CONTENT) for path in chosen}
    with spoilt(tree, edits):
        probe_and_check(tree)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_garbage_in_every_file_of_a_name(tree: Path, files: list[str], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted({Path(path).name for path in files})))
    chosen = [path for path in files if Path(path).name == name]
    with spoilt(tree, dict.fromkeys(chosen, data.draw(CONTENT))):
        probe_and_check(tree)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_missing_files(tree: Path, folders: list[str], data: st.DataObject) -> None:
    """Any directory may be out of sight, as in containers and partial copies."""
    with spoilt(tree, {data.draw(st.sampled_from(folders)): None}):
        probe_and_check(tree)
