"""A sysfs that is partial, stale or odd: the probe goes on, and says so."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.errors import UsageError
from launcher.plan.model import Gpu
from launcher.probe.devices import list_gpus
from launcher.probe.limits import count_oom_kills
from launcher.probe.machine import probe
from launcher.probe.sysfs import PAGE, SIZE_LIMIT, Tree, normalise_pci, parse_number, split_path

from .machine_trees import CPU, NODE, PCI, put, short_lived, write_small
from .odd_machines import judge, read_cases, write_bases

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


def test_captured_machines_have_masks_for_lists_and_a_nul_after_each_text(tmp_path: Path) -> None:
    """As hwloc-gather-topology writes them."""
    sound = probe(write_small(tmp_path))
    for stem in ("thread_siblings_list", "core_cpus_list", "shared_cpu_list", "cpulist"):
        for path in tmp_path.rglob(stem):
            path.unlink()
    for pci, mask in (("0000:07:00.0", "0c0c"), ("0000:47:00.0", "0000,0000c0c0")):
        (tmp_path / PCI / pci / "local_cpulist").unlink()
        put(tmp_path, f"{PCI}/{pci}/local_cpus", mask)
    for path in (tmp_path / "sys").rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.write_bytes(path.read_bytes() + b"\0")
    assert probe(tmp_path) == sound


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
    assert bool(machine.warnings) == stale


@pytest.mark.parametrize("sign", [True, False])
def test_amds_gpus_count_only_with_the_compute_drivers_device(
    sign: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without /dev/kfd it is a graphics card for the screen, which no program could compute on."""
    gpu = Gpu(0, "", "0000:06:00.0", None, vendor="amd")
    monkeypatch.setattr("launcher.probe.devices.NVIDIA_SIGNS", ())
    monkeypatch.setattr("launcher.probe.devices.AMD_SIGN", "proc/self/status" if sign else "proc/nothing")
    monkeypatch.setattr("launcher.probe.devices.read_amd", lambda tree: (gpu,))
    assert list_gpus(Tree(), quick=False) == ((gpu,) if sign else ())


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


def test_long_files_are_read_whole_and_endless_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, numbers = Tree(tmp_path), range(0, 8192, 2)
    put(tmp_path, "list", ",".join(map(str, numbers)))
    assert (tmp_path / "list").stat().st_size > 4 * PAGE
    assert tree.read_list("list") == frozenset(numbers)
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert len(tree.read("zero") or "") == SIZE_LIMIT
    # Procfs ends a read of the mount table at a line's end (seq_file).
    read = os.read
    put(tmp_path, "mounts", "line\n" * 3000)
    short = SimpleNamespace(**{**vars(os), "read": lambda handle, size: read(handle, min(size, 4000))})
    monkeypatch.setattr("launcher.probe.sysfs.os", short)
    assert tree.read("mounts", lines=True) == ("line\n" * 3000).strip()


def test_notes_of_one_text_become_one_warning(tmp_path: Path) -> None:
    put(tmp_path, "odd", "x\x1b{items}" + "y" * 60)
    tree = Tree(tmp_path)
    tree.add_warning("{items} is {value}", 3, path="odd")
    tree.add_warning("{items} is {value}", 1, 2, "name", path="other")
    tree.add_warning("nothing else", value=None)
    first, second = tree.list_warnings()
    assert first == f"1-3, name is 'x\\x1b{{items}}{'y' * 31}…'"
    assert second == "nothing else"


def test_numbers_sizes_and_addresses_are_as_the_kernel_prints_them(tmp_path: Path) -> None:
    numbers = {"0": 0, "18446744073709551615": 2**64 - 1}
    for text in ("0", "18446744073709551615", "-1", "", None, "1e3", "\u0663", "9" * 21, "1_0", "+1", " 1"):
        assert parse_number(text) == numbers.get(text or "")
    memory = "MemTotal:       24684084 kB\nMemFree: 1 kB\nNode 0 MemUsed:       5204172 kB\nA:\nB: much"
    put(tmp_path, "meminfo", memory)
    sizes = {"MemTotal": 24684084, "MemFree": 1, "MemUsed": 5204172}
    assert Tree(tmp_path).read_meminfo("meminfo") == sizes
    addresses = {
        "0000:07:00.0": "0000:07:00.0", "00000000:0F:00.0": "0000:0f:00.0", "0008:01:00": "0008:01:00.0",
        "00010000:00:04.0": "10000:00:04.0", "10000:00:04.1": "10000:00:04.1", "0000:C1:1f.7": "0000:c1:1f.7",
    }  # fmt: skip
    odd = ("", "07:00.0", "0000:07:20.0", "0000:07:00.8", "0000:100:00.0", "x:07:00.0", "-1:0:0.0", "0:0:0:0")
    for text in (*addresses, *odd):
        assert normalise_pci(text) == addresses.get(text)


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
        ("sys/devices/virtual/net/lo", ""), ("sys/devices/pci0000:00", ""),
        ("sys/devices/pci\udcff0:00/0000:00:03.0", ""), ("", ""),
    ],
)  # fmt: skip
def test_pci_part_of_a_path(real: str, path: str) -> None:
    assert split_path(real) == tuple(path.split())
