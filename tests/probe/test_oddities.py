"""A sysfs that is partial, stale or odd: the probe goes on, and says so."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from launcher.errors import LaunchError, MachineError, UsageError
from launcher.plan.model import Cache, Machine
from launcher.probe.machine import probe

from .machine_trees import CPU, GPUS, NODE, PCI, STATUS, put, spoilt, write_small

GPU0, GPU1 = "0000:07:00.0", "0000:47:00.0"
Content = str | bytes | None


class Oddity(NamedTuple):
    name: str
    edits: dict[str, Content]
    holds: Callable[[Machine, Machine], bool]
    """What must be so of the odd machine, given the sound one."""
    warning: tuple[str, ...] = ()
    """Parts of the warnings; none where the oddity is nothing to warn of."""


def same(odd: Machine, sound: Machine) -> bool:
    return replace(odd, warnings=()) == sound


def on_nodes(machine: Machine) -> dict[int, int]:
    return {cpu.id: cpu.node for cpu in machine.cpus}


def cores(machine: Machine) -> dict[int, int]:
    return {cpu.id: cpu.core for cpu in machine.cpus}


def caches(machine: Machine) -> list[int]:
    return [cpu.l3 for cpu in machine.cpus]


def for_all(path: str, content: Content, count: int = 16) -> dict[str, Content]:
    return {path.format(n): content for n in range(count)}


THREADS = CPU + "/cpu{}/topology/thread_siblings_list"
CORES = CPU + "/cpu{}/topology/core_cpus_list"
LAST_CACHE = CPU + "/cpu{}/cache/index3"
STATUS_TEXT = "Cpus_allowed_list:\t{}\nMems_allowed_list:\t{}"

ODDITIES = [
    # CPU sets
    Oddity("isolated missing", {f"{CPU}/isolated": None}, same),
    Oddity("isolated", {f"{CPU}/isolated": "2-3"}, lambda m, s: m.isolated == {2, 3}),
    Oddity("isolated garbage", {f"{CPU}/isolated": "?"}, same, ("isolated is '?'", "no CPU is taken")),
    Oddity(
        "possible CPUs beyond the online ones are allowed",
        {STATUS: STATUS_TEXT.format("0-255", "0-1023")},
        same,
    ),
    Oddity(
        "cpuset",
        {STATUS: STATUS_TEXT.format("3-5,99", "1,7")},
        lambda m, s: m.allowed_cpus == {3, 4, 5} and m.allowed_mems == {1} and m.cpus == s.cpus,
    ),
    Oddity(
        "online is another container's",
        {f"{CPU}/online": "64-67"},
        same,
        ("0-15", "/online ('64-67')", "taken as online"),
    ),
    Oddity("online missing", {f"{CPU}/online": None}, same, ("online is missing", "CPUs 0-15 are used")),
    Oddity("online a page of noughts", {f"{CPU}/online": bytes(4096)}, same, ("online is '\\x00", "0-15")),
    Oddity("online beyond any kernel", {f"{CPU}/online": "0-1048575"}, same, ("'0-1048575'", "0-15")),
    Oddity(
        "online missing and CPU 3 without topology",
        {f"{CPU}/online": None, f"{CPU}/cpu3/topology": None},
        lambda m, s: {cpu.id for cpu in m.cpus} == set(range(16)) - {3},
        ("online is missing", "CPUs 0-2,4-15 are used", "cpulist of NUMA nodes 1", "left out"),
    ),
    Oddity(
        "status without lists",
        {STATUS: "Name:\tlaunch\nMems_allowed_list:\t0-3"},
        same,
        ("Cpus_allowed_list of proc/self/status is missing", "all online CPUs"),
    ),
    Oddity(
        "Mems_allowed_list disjoint from the nodes",
        {STATUS: STATUS_TEXT.format("0-15", "9")},
        same,
        ("Mems_allowed_list", "'9'", "every NUMA node"),
    ),
    # Cores, packages, caches
    Oddity("siblings under the new name only", for_all(THREADS, None), same),
    Oddity("one CPU's siblings garbage, its sibling's sound", {THREADS.format(0): "x"}, same),
    Oddity("one CPU's siblings without itself", {THREADS.format(0): "8"}, same),
    Oddity(
        "no siblings",
        for_all(THREADS, None)
        | for_all(CORES, None)
        | for_all(THREADS.removesuffix("_list"), None)
        | for_all(CORES.removesuffix("_list"), None),
        lambda m, s: cores(m) == {n: n for n in range(16)} and on_nodes(m) == on_nodes(s),
        ("thread_siblings_list of CPUs 0-15 is missing", "core of its own"),
    ),
    Oddity(
        "siblings on two NUMA nodes",
        {THREADS.format(0): "0,4,8"},
        same,
        ("CPUs 4", "another NUMA node"),
    ),
    Oddity(
        "two cores claim a thread",
        {THREADS.format(1): "1,8-9"},
        same,
        ("CPUs 8 are in the thread_siblings_list of several CPUs", "the first is taken"),
    ),
    Oddity(
        "two caches claim a core",
        {LAST_CACHE.format(2) + "/shared_cpu_list": "0,2-3,10-11"},
        same,
        ("CPUs 0 are in the last-level cache of several CPUs",),
    ),
    Oddity(
        "package unknown",
        for_all(CPU + "/cpu{}/topology/physical_package_id", "-1"),
        lambda m, s: [cpu.package for cpu in m.cpus] == [cpu.node for cpu in m.cpus],
        ("physical_package_id of CPUs 0-7 is '-1'", "one package a NUMA node"),
    ),
    Oddity(
        "no caches",
        for_all(CPU + "/cpu{}/cache", None),
        lambda m, s: caches(m) == [0, 0, 2, 2, 4, 4, 6, 6] * 2 and m.caches == (),
        ("last-level cache of CPUs 0-7", "one for each NUMA node"),
    ),
    Oddity("one CPU's cache missing, its peers' sound", {f"{CPU}/cpu0/cache": None}, same),
    Oddity(
        "the last level is the second",
        for_all(LAST_CACHE, None),
        lambda m, s: (
            caches(m) == [cpu.core for cpu in m.cpus]
            and m.caches == tuple(Cache(cpu, 2, 1024) for cpu in range(8))
        ),
    ),
    Oddity(
        "the last level has the lowest index",
        for_all(CPU + "/cpu{}/cache/index0/level", "4")
        | for_all(CPU + "/cpu{}/cache/index0/shared_cpu_list", "0-15"),
        lambda m, s: caches(m) == [0] * 16,
    ),
    Oddity(
        "big and little cores",
        for_all(CPU + "/cpu{}/cpu_capacity", "1024") | for_all(CPU + "/cpu{}/cpu_capacity", "446", 4),
        lambda m, s: [cpu.capacity for cpu in m.cpus] == ([446] * 4 + [1024] * 4) * 2,
    ),
    Oddity(
        "capacity garbage",
        for_all(CPU + "/cpu{}/cpu_capacity", "1024") | {f"{CPU}/cpu2/cpu_capacity": "-5"},
        same,
        ("cpu_capacity of CPUs 2 is '-5'", "big core"),
    ),
    Oddity(
        "cache sizes in every unit",
        {f"{LAST_CACHE.format(0)}/size": "36M", f"{LAST_CACHE.format(2)}/size": "512K"},
        lambda m, s: [cache.size_kib for cache in m.caches] == [36 << 10, 512, 32768, 32768],
    ),
    Oddity(
        "no cache sizes",
        for_all(LAST_CACHE + "/size", None),
        lambda m, s: [cache.size_kib for cache in m.caches] == [0] * 4 and m.cpus == s.cpus,
    ),
    Oddity(
        "cache size garbage",
        {f"{LAST_CACHE.format(2)}/size": "big"},
        lambda m, s: m.caches[1] == Cache(2, 3, 0) and m.caches[0] == s.caches[0],
        ("size of the last-level caches of CPUs 2 is 'big'", "0 is shown"),
    ),
    Oddity(
        "interleaved caches, one CPU's missing",
        {
            f"{CPU}/cpu0/cache": None,
            f"{LAST_CACHE.format(1)}/shared_cpu_list": "1,9",
            f"{LAST_CACHE.format(2)}/shared_cpu_list": "0,2-3,8,10-11",
        },
        lambda m, s: [cache.id for cache in m.caches] == [0, 1, 4, 6],
    ),
    Oddity(
        "efficiency cores by their PMU",
        {"sys/devices/cpu_core/cpus": "0-3,8-11", "sys/devices/cpu_atom/cpus": "4-7,12-15"},
        lambda m, s: [cpu.capacity for cpu in m.cpus] == ([1024] * 4 + [616] * 4) * 2,
    ),
    Oddity(
        "low-power cores too",
        {
            "sys/devices/cpu_core/cpus": "0-3,8-11",
            "sys/devices/cpu_atom/cpus": "4-6,12-14",
            "sys/devices/cpu_lowpower/cpus": "7,15",
        },
        lambda m, s: [cpu.capacity for cpu in m.cpus] == ([1024] * 4 + [616] * 3 + [405]) * 2,
    ),
    Oddity(
        "the kernel's own capacity before the PMUs'",
        for_all(CPU + "/cpu{}/cpu_capacity", "1024")
        | {"sys/devices/cpu_core/cpus": "0-3,8-11", "sys/devices/cpu_atom/cpus": "4-7,12-15"},
        same,
    ),
    Oddity("cpu_atom without cpu_core", {"sys/devices/cpu_atom/cpus": "0-15"}, same),
    Oddity(
        "cpu_atom garbage",
        {"sys/devices/cpu_core/cpus": "0-3,8-11", "sys/devices/cpu_atom/cpus": "?"},
        same,
        ("sys/devices/cpu_atom/cpus is '?'", "big ones"),
    ),
    # NUMA nodes
    Oddity(
        "cpulist with CPUs that are offline",
        {f"{NODE}/node0/cpulist": "0-1,8-9,40"},
        same,
        ("cpulist of NUMA nodes 0 ('0-1,8-9,40')", "left out"),
    ),
    Oddity(
        "two nodes claim CPUs",
        {f"{NODE}/node1/cpulist": "0-3,10-11"},
        same,
        ("CPUs 0-1 are in the cpulist of several", "one is taken"),
    ),
    Oddity(
        "has_cpu garbage",
        {f"{NODE}/has_cpu": "?"},
        same,
    ),
    Oddity("has_cpu empty", {f"{NODE}/has_cpu": ""}, same),
    Oddity(
        "distance short",
        {f"{NODE}/node1/distance": "10 20"},
        lambda m, s: (
            m.nodes[1].distances == ((0, 20), (1, 10), (2, 20), (3, 20))
            and m.nodes[2] == s.nodes[2]
            and m.cpus == s.cpus
        ),
        ("distance of NUMA nodes 1 is '10 20'", "10 and 20 are assumed"),
    ),
    Oddity(
        "distance that the kernel refuses",
        {f"{NODE}/node0/distance": "20 10 10 10"},
        lambda m, s: m.nodes[0].distances == ((0, 10), (1, 20), (2, 20), (3, 20)),
        ("'20 10 10 10'",),
    ),
    Oddity(
        "no meminfo",
        {f"{NODE}/node2/meminfo": None},
        lambda m, s: (m.nodes[2].memory_kib, m.nodes[2].normal) == (0, True),
        ("meminfo of NUMA nodes 2 is missing", "0 is shown"),
    ),
    Oddity(
        "no has_normal_memory", {f"{NODE}/has_normal_memory": None}, same, ("has_normal_memory is missing",)
    ),
    Oddity(
        "neither meminfo nor has_normal_memory",
        {f"{NODE}/has_normal_memory": None, f"{NODE}/node2/meminfo": None},
        lambda m, s: all(node.normal for node in m.nodes),
        ("meminfo of NUMA nodes 2 is missing", "has_normal_memory is missing"),
    ),
    Oddity(
        "a node with CPUs has movable memory alone",
        {f"{NODE}/has_normal_memory": "0-2", f"{NODE}/has_memory": "0-3"},
        same,
    ),
    Oddity(
        "node online garbage",
        {f"{NODE}/online": "zero"},
        same,
        ("node/online is 'zero'", "nodes 0-3 are used"),
    ),
    Oddity(
        "kernel without NUMA",
        {"sys/devices/system/node": None, f"{PCI}/{GPU0}/numa_node": None, f"{PCI}/{GPU1}/numa_node": "-1"},
        lambda m, s: (
            set(on_nodes(m).values()) == {0}
            and [(n.id, n.memory_kib, n.normal, n.distances) for n in m.nodes]
            == [(0, s.memory_kib, True, ((0, 10),))]
            and [gpu.node for gpu in m.gpus] == [None, None]
            and m.allowed_mems == {0}
        ),
    ),
    Oddity(
        "MemTotal missing", {"proc/meminfo": "MemFree: 1 kB"}, lambda m, s: m.memory_kib == 0, ("MemTotal",)
    ),
    Oddity(
        "memory of a GPU",
        {f"{GPUS}/{GPU0}/numa_status": "Node:      2\nStatus:    online\nAddress:   0\nSize:      0"},
        lambda m, s: [node.normal for node in m.nodes] == [True, True, False, True],
    ),
    Oddity(
        "memory of a GPU, disabled",
        {f"{GPUS}/{GPU0}/numa_status": "Node:      0\nStatus:    disabled"},
        same,
    ),
    # GPUs
    Oddity(
        "numa_node -1",
        {f"{PCI}/{GPU0}/numa_node": "-1"},
        lambda m, s: m.gpus[0] == replace(s.gpus[0], node=None) and m.gpus[1] == s.gpus[1],
    ),
    Oddity(
        "numa_node not online",
        {f"{PCI}/{GPU0}/numa_node": "7"},
        lambda m, s: m.gpus[0] == replace(s.gpus[0], node=None),
        (f"numa_node of GPUs {GPU0} is '7'", "not online"),
    ),
    Oddity(
        "local_cpulist garbage",
        {f"{PCI}/{GPU0}/local_cpulist": "ff"},
        lambda m, s: m.gpus[0] == replace(s.gpus[0], local_cpus=frozenset()),
        (f"local_cpulist of GPUs {GPU0} is 'ff'",),
    ),
    Oddity("local_cpulist with CPUs that are offline", {f"{PCI}/{GPU0}/local_cpulist": "2-3,10-11,99"}, same),
    Oddity(
        "no PCI device",
        {f"{PCI}/{GPU1}": None},
        lambda m, s: m.gpus[1] == replace(s.gpus[1], node=None, local_cpus=frozenset(), path=()),
        (f"no locality of GPUs {GPU1}",),
    ),
    Oddity(
        "no information",
        {f"{GPUS}/{GPU0}/information": None},
        lambda m, s: m.gpus[0] == replace(s.gpus[0], uuid="", name=""),
        (f"GPU UUID of {GPU0} is missing", "by index only"),
    ),
    Oddity(
        "a GPU that nobody has opened",
        {f"{GPUS}/{GPU0}/information": "Model: \t\t A\x1b[31m\nGPU UUID: \t GPU-????????-????"},
        lambda m, s: m.gpus[0] == replace(s.gpus[0], uuid="", name="A[31m"),
        ("GPU-????????",),
    ),
    Oddity(
        "a GPU that the driver excludes",
        {f"{GPUS}/{GPU0}/information": "GPU UUID: \t GPU-1\nGPU Excluded:\t Yes"},
        lambda m, s: m.gpus == (replace(s.gpus[1], index=0),),
        (GPU0, "excludes"),
    ),
    Oddity("a stranger among the GPUs", {f"{GPUS}/readme/information": "x"}, same, ("'readme'", "left out")),
    Oddity(
        "the driver's /proc files hidden",
        {
            GPUS: None,
            f"sys/bus/pci/drivers/nvidia/{GPU1}": "",
            f"sys/bus/pci/drivers/nvidia/{GPU0}": "",
            "sys/bus/pci/drivers/nvidia/0000:c5:00.0": "",
            f"{PCI}/0000:c5:00.0/class": "0x068000",
            "sys/bus/pci/drivers/nvidia/a:b:c": "",
            "sys/bus/pci/drivers/nvidia/new_id": "",
        },
        lambda m, s: m.gpus == tuple(replace(gpu, uuid="", name="") for gpu in s.gpus),
        (f"{GPU0}, {GPU1}", "UUIDs"),
    ),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("tree"))


@pytest.fixture
def sound(tree: Path) -> Machine:
    machine = probe(tree)
    assert not machine.warnings
    return machine


@pytest.mark.parametrize("oddity", ODDITIES, ids=lambda oddity: oddity.name.replace(" ", "-"))
def test_oddity(oddity: Oddity, sound: Machine, tree: Path) -> None:
    machine = read_odd(tree, oddity.edits)
    assert oddity.holds(machine, sound), machine
    if oddity.warning:
        assert all(part in "\n".join(machine.warnings) for part in oddity.warning), machine.warnings
    else:
        assert not machine.warnings


def read_odd(root: Path, edits: dict[str, Content]) -> Machine:
    with spoilt(root, edits):
        return probe(root)


def test_node_without_directory_loses_its_cpus_to_the_first(sound: Machine, tree: Path) -> None:
    machine = read_odd(tree, {f"{NODE}/node3": None})
    assert on_nodes(machine) == on_nodes(sound) | dict.fromkeys((6, 7, 14, 15), 0)
    assert machine.gpus[1].node is None
    text = "\n".join(machine.warnings)
    assert "NUMA nodes 3 of" in text
    assert "CPUs 6-7,14-15 are in no NUMA node's cpulist: taken as node 0's" in text


@pytest.mark.parametrize("content", [None, "garbage"])
def test_only_node_without_readable_list_gets_the_homeless(
    content: Content, sound: Machine, tree: Path
) -> None:
    machine = read_odd(tree, {f"{NODE}/node1/cpulist": content, f"{NODE}/node1/cpumap": None})
    assert same(machine, sound)
    assert "cpulist of NUMA nodes 1 is" in machine.warnings[0]
    assert "taken as node 1's" in machine.warnings[1]


def test_masks_say_the_same_as_lists(sound: Machine, tmp_path: Path) -> None:
    write_small(tmp_path)
    for stem in ("thread_siblings_list", "core_cpus_list", "shared_cpu_list", "cpulist"):
        for path in tmp_path.rglob(stem):
            path.unlink()
    for gpu, mask in ((GPU0, "0c0c"), (GPU1, "0000,0000c0c0")):
        (tmp_path / PCI / gpu / "local_cpulist").unlink()
        put(tmp_path, f"{PCI}/{gpu}/local_cpus", mask)
    assert probe(tmp_path) == sound


@pytest.mark.parametrize("mask", ["", "x", "0,,1", "000000001", "-1", "0x1", ",", "1" + 2048 * ",00000000"])
def test_mask_that_is_none_is_as_good_as_no_list(mask: str, tree: Path) -> None:
    machine = read_odd(tree, {f"{NODE}/node1/cpulist": None, f"{NODE}/node1/cpumap": mask})
    assert "cpulist of NUMA nodes 1 is missing" in machine.warnings[0]


def test_a_kernel_without_lists_of_cpus_has_their_directories(tree: Path) -> None:
    lists = {f"{CPU}/{name}": None for name in ("online", "present", "possible")}
    machine = read_odd(tree, {**lists, STATUS: None, f"{CPU}/cpu3/topology": None})
    assert [cpu.id for cpu in machine.cpus] == [0, 1, 2, *range(4, 16)]
    assert machine.allowed_cpus == set(on_nodes(machine))
    assert "online is missing: CPUs 0-2,4-15 are used" in machine.warnings[0]


def test_captures_with_a_nul_after_each_text(sound: Machine, tmp_path: Path) -> None:
    write_small(tmp_path)
    for path in (tmp_path / "sys").rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.write_bytes(path.read_bytes() + b"\0")
    assert probe(tmp_path) == sound


def test_no_readable_cpulist_leaves_all_to_the_first_node(tree: Path) -> None:
    machine = read_odd(tree, for_all(NODE + "/node{}/cpulist", b"\xff\xfe", 4))
    assert set(on_nodes(machine).values()) == {0}
    assert "cpulist of NUMA nodes 0-3 is" in machine.warnings[0]


def test_has_cpu_decides_over_a_stale_cpulist(sound: Machine, tree: Path) -> None:
    edits: dict[str, Content] = {f"{NODE}/has_cpu": "1-3", f"{NODE}/node0/cpulist": "0-3,8-9"}
    machine = read_odd(tree, edits)
    assert on_nodes(machine) == on_nodes(sound)
    assert any("NUMA nodes 0 have a cpulist but are not in" in text for text in machine.warnings)


def test_offline_cpu_0(tmp_path: Path) -> None:
    machine = probe(write_small(tmp_path, offline="0"))
    assert cores(machine)[8] == 8
    assert min(cpu.l3 for cpu in machine.cpus) == 1
    assert 0 not in machine.allowed_cpus
    assert not machine.warnings


def test_offline_cpu_in_stale_lists_leads_no_core(tmp_path: Path) -> None:
    write_small(tmp_path, offline="0")
    put(tmp_path, f"{NODE}/node0/cpulist", "0-1,8-9")
    put(tmp_path, THREADS.format(8), "0,8")
    put(tmp_path, f"{LAST_CACHE.format(8)}/shared_cpu_list", "0-1,8-9")
    machine = probe(tmp_path)
    assert cores(machine)[8] == 8
    assert min(cpu.l3 for cpu in machine.cpus) == 1


def test_one_warning_tells_of_many_cpus(tree: Path) -> None:
    machine = read_odd(tree, for_all(CPU + "/cpu{}/topology", None) | for_all(CPU + "/cpu{}/cache", None))
    assert len(machine.warnings) == 3
    assert all("0-15" in text for text in machine.warnings)


def test_container_that_hides_sysfs_has_a_core_for_each_cpu(tmp_path: Path) -> None:
    put(tmp_path, STATUS, STATUS_TEXT.format("4-6", "0"))
    put(tmp_path, "proc/meminfo", "MemTotal:  1024 kB")
    machine = probe(tmp_path)
    assert [(cpu.id, cpu.core, cpu.node) for cpu in machine.cpus] == [(4, 4, 0), (5, 5, 0), (6, 6, 0)]
    assert machine.allowed_cpus == {4, 5, 6}
    assert [node.id for node in machine.nodes] == [0]
    assert machine.warnings


def test_pipe_does_not_hang(tmp_path: Path) -> None:
    put(tmp_path, STATUS, STATUS_TEXT.format("0-1", "0"))
    (tmp_path / CPU).mkdir(parents=True)
    os.mkfifo(tmp_path / CPU / "online")
    assert "online is empty" in probe(tmp_path).warnings[0]


def test_link_out_of_the_root_is_not_followed(sound: Machine, tree: Path, tmp_path: Path) -> None:
    put(tmp_path, "numa_node", "1")
    put(tmp_path, "local_cpulist", "2-3")
    with spoilt(tree, {f"{PCI}/{GPU0}": None}):
        (tree / PCI / GPU0).symlink_to(tmp_path)
        machine = probe(tree)
        (tree / PCI / GPU0).unlink()
    assert machine.gpus[0] == replace(sound.gpus[0], node=None, local_cpus=frozenset(), path=())
    assert f"links of GPUs {GPU0} lead out of the root" in machine.warnings[0]


@pytest.mark.parametrize("root", ["", "nothing", "file", "\0"])
def test_root_that_is_no_directory_is_a_usage_error(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "file", "")
    with pytest.raises(UsageError, match=r"machine\.root=.* is not a directory: name one that"):
        probe(root)


@pytest.mark.parametrize("online", [None, "", "none", "5-1"])
def test_no_cpu_at_all_is_a_machine_error(online: str | None, tmp_path: Path) -> None:
    if online is not None:
        put(tmp_path, f"{CPU}/online", online)
    with pytest.raises(MachineError, match=r"no usable CPU below .*: give machine\.root") as raised:
        probe(tmp_path)
    assert isinstance(raised.value, LaunchError)
    assert "\n" not in str(raised.value)
