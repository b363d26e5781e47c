"""The machine that the tests run on, what the probe opens, and what it loads."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.probe import machine as machine_module
from launcher.probe.machine import locate_malloc, probe
from launcher.probe.sysfs import Tree

from .machine_trees import write_small

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


def test_cores_and_caches_agree_with_every_cpus_own_files() -> None:
    """The probe reads a set's files at one member; here each CPU's are read."""
    tree = Tree()
    cpus = probe().cpus
    online = {cpu.id for cpu in cpus}
    for cpu in cpus:
        here = f"sys/devices/system/cpu/cpu{cpu.id}"
        siblings = tree.read_list(f"{here}/topology/thread_siblings_list")
        assert siblings is None or cpu.core == min(siblings & online)
        shared = tree.read_list(f"{here}/cache/index3/shared_cpu_list")
        assert shared is None or cpu.l3 == min(shared & online)


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


def test_no_file_is_read_twice(tmp_path: Path) -> None:
    seen = run(WATCHED, str(write_small(tmp_path)))
    files = [name for event, name in seen if event == "open"]
    twice = {name for name in files if files.count(name) > 1}
    assert {Path(name).name for name in twice} <= {"online"}


def test_nothing_but_this_package_is_loaded(tmp_path: Path) -> None:
    loaded = run(LOADED, str(write_small(tmp_path)))
    assert "launcher.probe.machine" in loaded
    assert [name for name in loaded if not name.startswith("launcher")] == []


def test_the_library_of_a_malloc_is_the_one_nearest_to_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "USUAL", (str(tmp_path / "usual"),))
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
