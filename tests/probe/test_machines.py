"""The lab's machines, field by field; the machine that runs the tests, and what the probe opens and loads."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.model import Cache, Machine, Nic
from launcher.probe.machine import locate_malloc, probe
from tests.plan.lab_machines import Data, convert, fsroot, load

from .machine_trees import find_path, short_lived, write_small


def expect(description: Data) -> Machine:
    """The machine that a description means, with what the planner's tests do without."""
    lab, made = fsroot.Description(description), convert(description)
    tail = fsroot.hash_name(description["name"]) % 16**12
    gpus = [
        replace(
            gpu, uuid=entry.get("uuid") or f"GPU-{at:08x}-1111-2222-3333-{tail:012x}", path=find_path(entry)
        )
        for at, (gpu, entry) in enumerate(zip(made.gpus, lab.gpus, strict=True))
    ]
    nics = [
        Nic(nic["name"], nic["bdf"], nic["numa"] if nic["numa"] >= 0 else None, find_path(nic))
        for nic in lab.nics
    ]
    return replace(
        made,
        nodes=tuple(replace(node, normal=node.normal and node.memory_kib > 0) for node in made.nodes),
        gpus=tuple(gpus),
        nics=tuple(nics),
        caches=tuple(Cache(lowest, 3, 32768) for lowest in sorted({cpu.l3 for cpu in made.cpus})),
        memory_kib=sum(node.memory_kib for node in made.nodes if lab.kind[node.id] != "gpu"),
    )


@pytest.fixture
def root() -> Iterator[Path]:
    with short_lived() as folder:
        yield folder


@pytest.mark.parametrize(
    "name", ["a100-nosmt", "aws-p3.16xlarge", "dgx-a100", "gb200-nvl4", "gh200", "slurm-30plus2"]
)
def test_machine_is_read_as_described(name: str, root: Path) -> None:
    description = load(name)
    fsroot.materialize(description, root)
    assert probe(root) == expect(description)


def test_a_root_may_be_text_and_a_link(root: Path) -> None:
    fsroot.materialize(load("workstation-1plus4"), root / "tree")
    (root / "link").symlink_to("tree")
    assert probe(root / "link") == probe(str(root / "tree")) == probe(root / "tree")


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


WATCHED = """
import json, os, sys
from launcher.probe.machine import probe
os.sched_getaffinity = os.cpu_count = os.getenv = None
seen = []
sys.addaudithook(lambda event, args: seen.append([event, str(args[:1])[1:-1].strip("',")]))
try:
    probe(sys.argv[1])
finally:
    seen = list(seen)
print(json.dumps(seen))
"""
LOADED = """
import json, sys
import launcher.plan.model
before = set(sys.modules)
from launcher.probe.machine import probe
probe(sys.argv[1])
print(json.dumps(sorted(set(sys.modules) - before)))
"""
PINNED = """
import os, sys
from launcher.probe.machine import probe
os.sched_setaffinity(0, {int(sys.argv[1])})
print(sorted(probe().allowed_cpus))
"""


def run(program: str, *args: str) -> Any:
    """What a program of its own process prints."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error", "-c", program, *args]
    return json.loads(subprocess.run(command, env=environ, check=True, capture_output=True).stdout)


def test_this_machine_is_what_the_kernel_says() -> None:
    machine = probe()
    assert machine.allowed_cpus == os.sched_getaffinity(0)
    assert len(machine.cpus) == os.sysconf("SC_NPROCESSORS_ONLN")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert abs(machine.memory_kib * 1024 - pages) < 1 << 20
    assert {cpu.node for cpu in machine.cpus} <= {node.id for node in machine.nodes}
    assert machine.allowed_mems <= {node.id for node in machine.nodes}
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert machine.limits.files == (None if hard == resource.RLIM_INFINITY else hard)
    space = os.statvfs("/dev/shm")
    assert machine.limits.shm_kib == space.f_blocks * space.f_frsize // 1024


def test_narrowed_process_is_allowed_what_it_has() -> None:
    cpu = max(os.sched_getaffinity(0))
    assert run(PINNED, str(cpu)) == [cpu]


def test_nothing_outside_the_root_is_opened_or_started(tmp_path: Path) -> None:
    root = write_small(tmp_path)
    seen = run(WATCHED, str(root))
    files = [name for event, name in seen if event in ("open", "os.listdir", "os.scandir")]
    assert len(files) > 50
    assert [name for name in files if not name.startswith(str(root))] == []
    assert {event for event, _ in seen} <= {"open", "os.listdir"}
    opened = [name for event, name in seen if event == "open"]
    assert {Path(name).name for name in opened if opened.count(name) > 1} <= {"online"}, "read twice"


def test_nothing_but_this_package_is_loaded(tmp_path: Path) -> None:
    loaded = run(LOADED, str(write_small(tmp_path)))
    assert "launcher.probe.machine" in loaded
    assert [name for name in loaded if not name.startswith("launcher")] == []


def test_the_library_of_a_malloc_is_the_one_nearest_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.probe.machine.USUAL", (str(tmp_path / "usual"),))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(sys, "base_prefix", "/no/such")
    monkeypatch.setattr(sys.implementation, "_multiarch", "no-such", raising=False)
    folders = ("usual", "given", "venv/lib", "conda/lib")
    given = f":relative:{tmp_path / 'a b'}:{tmp_path / 'given'}"
    environ = {"CONDA_PREFIX": str(tmp_path / "conda"), "LD_LIBRARY_PATH": given}
    monkeypatch.chdir(tmp_path)
    for folder in ("relative", "a b", *folders):  # what cannot be preloaded is passed over
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("relative", "a b"):
        (tmp_path / folder / "libjemalloc.so.2").touch()
    (tmp_path / "given/libjemalloc.so.2").mkdir()
    assert locate_malloc("jemalloc", environ, "/") == locate_malloc("tcmalloc", environ, "/") == ""
    for folder in folders:
        path = tmp_path / folder / "libtcmalloc_minimal.so.4"
        path.touch()
        assert locate_malloc("tcmalloc", environ, "/") == str(path)
    assert locate_malloc("system", environ, "/") is None
    assert locate_malloc("tcmalloc", environ, str(tmp_path)) is None, "another machine's files are not here"
