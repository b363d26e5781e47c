"""A sysfs that is partial, stale or odd, or has random bytes: the probe goes on, and says so.

In data/odd_machines.json a case has a `base` ("small": the small machine; "two nodes"; "nothing") and
the `files` that differ from it: a text, null for what is not there, or what `put` takes; `cpu{0-3}` stands
for several. Of the result it has the `changes` from the base's machine (for "nothing" from that of "two
nodes"), the values in the `warnings`, or those in the `error`.
`python -m tests.golden machines` writes the results again.
"""

import json
import os
import re
import shutil
import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf, isfinite
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.codec import to_plain
from launcher.errors import LaunchError, UsageError
from launcher.plan.model import Machine, machine_to_json, parse_machine
from launcher.probe.limits import count_oom_kills
from launcher.probe.machine import probe
from launcher.probe.sysfs import Tree

from .machine_trees import (
    CPU,
    GPUS,
    NODE,
    expand,
    put,
    short_lived,
    spoilt,
    write_device,
    write_rich,
    write_small,
)

PATH = Path(__file__).parents[1] / "data" / "odd_machines.json"
VALUES = re.compile(r"(?<!\w)'(?:[^'\\]|\\.)*'(?!\w)|[\w/,:.-]*[0-9/_][\w/,:.-]*|\bmissing\b|\bempty\b")
Case = dict[str, Any]


def read_cases() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PATH.read_text())
    return found


def write_bases(folder: Path, bases: Mapping[str, Mapping[str, str]]) -> None:
    """Write the trees that cases begin with, by their names."""
    write_small(folder / "small")
    for name, files in bases.items():
        (folder / name).mkdir()
        for path, text in files.items():
            put(folder / name, path, text)


def list_values(text: str) -> str:
    """What of a message a person could look up: numbers, paths, names and contents."""
    return " ".join(VALUES.findall(text))


def flatten(value: Any, place: str = "") -> dict[str, Any]:
    """Each value in a machine by its place: `gpus.0.node`."""
    if not isinstance(value, dict | list):
        return {place: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, Any] = {place: len(value)} if isinstance(value, list) else {}
    for key, item in items:
        found |= flatten(item, f"{place}.{key}".lstrip("."))
    return found


def read_machine(root: Path) -> dict[str, Any]:
    """The values of the machine below a root, its warnings as what is in them; or what an error has."""
    try:
        machine: Machine = probe(root)
    except LaunchError as error:
        return {"error": list_values(str(error).replace(str(root), "ROOT"))}
    plain = to_plain(machine)
    warnings = [list_values(text) for text in plain.pop("warnings")]
    return {**flatten(plain), "warnings": warnings}


def judge(folder: Path, case: Case) -> dict[str, Any]:
    """What differs in a case from its base."""
    base = folder / case["base"]
    sound = read_machine(base if case["base"] != "nothing" else folder / "two nodes")
    with spoilt(base, dict(expand(case["files"]))):
        odd = read_machine(base)
    if "error" in odd:
        return odd
    changes = {key: value for key, value in odd.items() if sound.get(key) != value and key != "warnings"}
    result = {"changes": changes} if changes else {}
    return result | ({"warnings": odd["warnings"]} if odd["warnings"] else {})


def write() -> None:
    """Write the results again, a line for each part of a case."""
    data = read_cases()
    with short_lived() as folder:
        write_bases(folder, data["bases"])
        cases = {
            name: {**{key: case[key] for key in ("base", "files")}, **judge(folder, case)}
            for name, case in data["cases"].items()
        }
    lines = []
    for name, case in cases.items():
        parts = [f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in case.items()]
        lines.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n  }")
    bases = json.dumps(data["bases"], indent=1).replace("\n", "\n ")
    PATH.write_text(f'{{\n "bases": {bases},\n "cases": {{\n' + ",\n".join(lines) + "\n }\n}\n")


CASES = read_cases()["cases"]
THREADS = CPU + "/cpu{}/topology/thread_siblings_list"


@pytest.fixture(scope="module")
def bases() -> Iterator[Path]:
    with short_lived() as folder:
        write_bases(folder, read_cases()["bases"])
        assert probe(folder / "small").warnings == probe(folder / "two nodes").warnings == ()
        yield folder


@pytest.mark.parametrize("name", CASES)
def test_what_is_made_of_odd_files(bases: Path, name: str) -> None:
    case = CASES[name]
    expected = {key: value for key, value in case.items() if key not in ("base", "files")}
    assert judge(bases, case) == expected


@pytest.mark.parametrize("root", ["", "nothing", "file", "\0"])
def test_root_that_is_no_directory_is_a_usage_error(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(tmp_path, "file", "")
    with pytest.raises(UsageError, match=r"machine\.root=.* is not a directory: name one that"):
        probe(root)


@pytest.mark.parametrize("stale", [False, True])
def test_a_cpu_that_is_offline_leads_no_core(tmp_path: Path, stale: bool) -> None:
    write_small(tmp_path, offline="0")
    if stale:
        put(tmp_path, f"{NODE}/node0/cpulist", "0-1,8-9")
        put(tmp_path, THREADS.format(8), "0,8")
        put(tmp_path, f"{CPU}/cpu8/cache/index3/shared_cpu_list", "0-1,8-9")
    machine = probe(tmp_path)
    assert {cpu.id: cpu.core for cpu in machine.cpus}[8] == 8
    assert min(cpu.l3 for cpu in machine.cpus) == 1
    assert 0 not in machine.allowed_cpus
    assert machine.warnings == ()


@pytest.mark.parametrize(
    ("own", "path", "text", "count"),
    [
        ("0::/job/task", "job/task/memory.events", "low 0\noom 4\noom_kill 3\noom_group_kill 0", 3),
        ("0::/job/task", "job/memory.events", "oom_kill 3", 0),  # another task's
        ("4:memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2", 2),
        ("4:memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0", 0),
        ("4:memory:/job", "memory/job/memory.oom_control", "oom_kill many", 0),
        ("", "nothing", "", 0),
    ],
)
def test_processes_that_the_kernel_has_killed(
    own: str, path: str, text: str, count: int, tmp_path: Path
) -> None:
    top = "sys/fs/cgroup"
    files = {f"{top}/cgroup.controllers": "memory", "proc/self/cgroup": own, f"{top}/{path}": text}
    for name, content in files.items():
        put(tmp_path, name, content)
    assert count_oom_kills(Tree(tmp_path)) == count


def test_long_files_are_read_whole_and_endless_ones_are_not(tmp_path: Path) -> None:
    tree, numbers = Tree(tmp_path), range(0, 8192, 2)
    put(tmp_path, "list", ",".join(map(str, numbers)))
    assert tree.read_list("list") == frozenset(numbers)
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert len(tree.read("zero") or "") == 1 << 20


def test_notes_of_one_text_become_one_warning(tmp_path: Path) -> None:
    put(tmp_path, "odd", "x\x1b{items}" + "y" * 60)
    tree = Tree(tmp_path)
    tree.add_warning("{items} is {value}", 3, value=tree.read("odd"))
    tree.add_warning("{items} is {value}", 1, 2, "name", value="other")
    tree.add_warning("nothing else", value=None)
    first, second = tree.list_warnings()
    assert first == f"1-3, name is 'x\\x1b{{items}}{'y' * 31}…'"
    assert second == "nothing else"


def test_numbers_and_sizes_are_as_the_kernel_prints_them(tmp_path: Path) -> None:
    tree, numbers = Tree(tmp_path), {"0": 0, "18446744073709551615": 2**64 - 1, " 1": 1}
    for text in (*numbers, "-1", "", "1e3", "\u0663", "9" * 21, "1_0", "+1"):
        put(tmp_path, "number", text)
        assert tree.read_number("number") == numbers.get(text)
    memory = "MemTotal:       24684084 kB\nMemFree: 1 kB\nNode 0 MemUsed:       5204172 kB\nA:\nB: much"
    put(tmp_path, "meminfo", memory)
    sizes = {"MemTotal": 24684084, "MemFree": 1, "MemUsed": 5204172}
    assert tree.read_meminfo("meminfo") == sizes


PLACES = {
    "pci0000:00/0000:00:01.0/0000:01:00.0": "pci0000:00 0000:00:01.0",
    "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/f8b3-1/pci0001:00/0001:00:00.0": "pci0001:00",
    "platform/40000000.pcie/pci0000:00/0000:00:02.0": "pci0000:00",
    "pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:01.0/10000:e1:00.1": (
        "pci0000:00 0000:00:0e.0 pci10000:e0 10000:e0:01.0"
    ),
}
ODD = ("07:00.0", "0000:07:20.0", "0000:07:00.8", "0000:100:00.0", "x:07:00.0", "-1:0:0.0", "0:0:0:0")


def test_places_of_pci_devices(tmp_path: Path) -> None:
    """Names that are no addresses are no GPUs; the driver may write an address in capitals or in full."""
    write_small(tmp_path, gpus=[])
    for name in ODD:
        put(tmp_path, f"{GPUS}/{name}/information", "GPU UUID: GPU-9")
    paths: dict[str, tuple[str, ...]] = {}
    for real, path in PLACES.items():
        address = real.rpartition("/")[2]
        write_device(tmp_path, real, numa_node="1")
        put(tmp_path, f"{GPUS}/{address.upper().zfill(16)}/information", f"GPU UUID: GPU-{len(paths)}")
        paths[address] = tuple(path.split())
    assert {gpu.pci: gpu.path for gpu in probe(tmp_path).gpus} == paths


# Random bytes and lines in any file

LINES = (
    "", "-1", "0", "1", "3-1", "0-3", "2-5,9", "0-15:2/4", "0-15:4/2", "0-15:2/", "0-70000", "0-1048575",
    "99999999999999999999", "9" * 5000, "0x10", "1e3", "\u0663", "1_0", "10 20", "10 20 20 20", "255 10",
    "Cpus_allowed_list:\t", "Cpus_allowed_list:\t0-1", "Cpus_allowed_list:\t99", "Mems_allowed_list:\t3",
    "MemTotal:", "MemTotal: x kB", "Node 0 MemTotal: 1 kB", "Node: 1", "Node: -1\nStatus: online",
    "GPU UUID: {items}", "GPU UUID: GPU-12", "GPU Excluded: Yes", "Model: \x1b[2J{value}",
    "4: ACTIVE", "9: NONE", "400 Gb/sec (4X NDR)", "inf Gb/sec", "nan Gb/sec", "1.2.3 Gb/sec", "512K",
    "0::/..", "0::/job/../..", "0::/a\0b", "3:cpu:/x", "4:memory:/", "max 100000", "100000 0", "1 1",
    "9999999999G", "max max", "36 35 0:31 /.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
    "36 35 0:31 / /\0 rw - cgroup cgroup cpu,memory", "shm /dev/shm tmpfs size=9999999999999999999k",
    "shm /dev/shm tmpfs size=", "9223372036854771712",
    "simd_count 5", "location_id 99999999999", "domain 4294967295", "0x1002",
    "unique_id 18446744073709551615",
)  # fmt: skip
WORDS = st.sampled_from(LINES) | st.text(string.digits + ",-:/ \n", max_size=30)
CONTENT = st.binary(max_size=80) | st.lists(WORDS, max_size=3).map("\n".join).map(str.encode)


@pytest.fixture(scope="module", params=["nvidia", "amd"])
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rich(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def paths(tree: Path) -> dict[str, list[str]]:
    """Folders, links, and the files that the probe may read: hexadecimal maps only make the list longer."""
    skipped = ("siblings", "core_cpus", "package_cpus", "type", "id", "core_id")
    found: dict[str, list[str]] = {"files": [], "folders": [], "links": []}
    for path in sorted(tree.rglob("*")):
        kind = "links" if path.is_symlink() else "folders" if path.is_dir() else "files"
        if kind != "files" or not (path.name in skipped or path.name.endswith("map")):
            found[kind].append(str(path.relative_to(tree)))
    return found


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
        assert gpu.name.isprintable() and gpu.uuid.isascii()
        assert gpu.memory_mib >= 0 and gpu.vendor in ("nvidia", "amd")
    for nic in machine.nics:
        assert nic.node is None or nic.node in nodes
        assert isfinite(nic.rate_gbps) and nic.rate_gbps >= 0
    for cache in machine.caches:
        assert cpus[cache.id].l3 == cache.id and 0 < cache.level < 10 and cache.size_kib >= 0
    assert machine.limits.cpus is None or 0 < machine.limits.cpus < inf
    assert machine.name.isprintable() and len(machine.name) <= 100
    text = json.dumps(machine_to_json(machine))
    assert parse_machine(text) == machine and text.isascii()
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
    assert machine.gpus and machine.nics and machine.caches and machine.name == "Small"
    assert machine.limits.memory_kib == 8 << 20 and machine.limits.shm_kib == 65536


@pytest.mark.parametrize("seed", range(2))
def test_result_does_not_depend_on_the_order_of_files(
    tree: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not with oddities, which are told in one order."""
    odd = {"sys/devices/system/node/node1/cpulist": "x", "sys/devices/system/cpu/cpu3/topology": None}
    shuffler, listdir = Random(seed), os.listdir

    def shuffle(path: str) -> list[str]:
        names = sorted(listdir(path), reverse=True)
        shuffler.shuffle(names)
        return names

    with spoilt(tree, odd):
        expected = probe(tree)
        monkeypatch.setattr(os, "listdir", shuffle)
        assert probe(tree) == expected
        assert expected.warnings


@contextmanager
def turned_into(root: Path, path: str, kind: str, outside: Path) -> Iterator[None]:
    """A file, folder or link that is of another kind for a while."""
    here = root / path
    with spoilt(root, {path: None}):
        if kind == "folder":
            (here / "cpu0").mkdir(parents=True)
        elif kind == "file":
            here.write_text("0")
        elif kind == "pipe":
            os.mkfifo(here)
        else:
            targets = {"loop": here.name, "dangling": "nothing", "out": str(outside), "up": ".."}
            here.symlink_to(targets[kind])
        try:
            yield
        finally:
            shutil.rmtree(here) if here.is_dir() and not here.is_symlink() else here.unlink()


@given(data=st.data())
def test_garbage_in_files_and_files_that_are_gone(
    tree: Path, paths: dict[str, list[str]], data: st.DataObject
) -> None:
    """In some files, in all of a name, and a directory out of sight, as in containers and partial copies."""
    files = paths["files"]
    some = st.lists(st.sampled_from(files), min_size=1, max_size=4, unique=True)
    names = st.sampled_from(sorted({Path(path).name for path in files}))
    alike = names.map(lambda name: [path for path in files if Path(path).name == name])
    contents = st.fixed_dictionaries
    edits = data.draw(
        some.flatmap(lambda paths: contents(dict.fromkeys(paths, CONTENT)))
        | alike.flatmap(lambda paths: CONTENT.map(lambda content: dict.fromkeys(paths, content)))
        | st.sampled_from(paths["folders"]).map(lambda folder: {folder: None})
    )
    with spoilt(tree, edits):
        probe_and_check(tree)


@given(data=st.data())
def test_things_that_are_of_another_kind(
    tree: Path, paths: dict[str, list[str]], data: st.DataObject
) -> None:
    """Pipes, loops of links, folders for files, links to elsewhere, as broken copies of a tree have them."""
    path = data.draw(st.sampled_from([path for found in paths.values() for path in found]))
    kind = data.draw(st.sampled_from(["folder", "file", "pipe", "loop", "dangling", "out", "up"]))
    with turned_into(tree, path, kind, tree.parent):
        probe_and_check(tree)
