"""The lab itself, without booting: what it asks QEMU for, and what it says where it cannot run."""

import os
import platform
import shutil
from pathlib import Path

import pytest

from . import machine, tools
from .guest.scenario import Scenario
from .machine import GuestError, boot, list_devices, list_nodes
from .shapes import SHAPES, Shape
from .tools import NoLabError, get_kernel, get_tools

WHOLE = Scenario("whole")
SMALL = Shape("small", (WHOLE,), packages=1, memory=(64,))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_cpu_is_listed_once(shape: Shape) -> None:
    assert sorted(shape.order()) == list(range(shape.count))


def test_odd_and_even_cpus_are_of_different_packages() -> None:
    shape = Shape("", (WHOLE,), numbering="odd-even")
    assert [entry["cpus"] for entry in shape.describe(WHOLE)["numa"]] == [
        "0,2,4,6,8,10,12,14",
        "1,3,5,7,9,11,13,15",
    ]
    assert shape.order()[:3] == (0, 8, 2)


def test_a_node_beyond_the_dies_has_memory_only() -> None:
    shape = Shape("", (WHOLE,), threads=1, memory=(64, 64, 32))
    words = list_nodes(shape)
    assert "node,nodeid=2,memdev=m2" in words
    assert [word for word in words if word.startswith("dist")] == [
        "dist,src=0,dst=1,val=21",
        "dist,src=0,dst=2,val=21",
        "dist,src=1,dst=2,val=12",
    ]


def test_gpus_of_one_node_share_a_host_bridge() -> None:
    shape = Shape("", (WHOLE,), gpus=(1, 1, 0))
    assert [gpu["bdf"] for gpu in shape.describe(WHOLE)["gpus"]] == [
        "0000:11:00.0",
        "0000:12:00.0",
        "0000:21:00.0",
    ]
    assert [word for word in list_devices(shape) if word.startswith("pxb")] == [
        "pxb-pcie,id=bridge16,bus=pcie.0,bus_nr=16,numa_node=1",
        "pxb-pcie,id=bridge32,bus=pcie.0,bus_nr=32,numa_node=0",
    ]


def test_missing_programs_are_named_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "cpio" else f"/bin/{program}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        NoLabError, match=r"^cpio missing, and not root with apt-get: on Debian: apt-get install"
    ):
        get_tools()


def test_another_processor_cannot_run_the_guests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(NoLabError, match="for aarch64, not x86-64"):
        get_tools()


def test_a_kernel_that_is_named_but_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_TEST_KERNEL", "/nowhere/vmlinuz")
    with pytest.raises(NoLabError, match=r"^LAUNCH_TEST_KERNEL=/nowhere/vmlinuz is no file"):
        get_kernel()


def test_without_apt_there_is_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LAUNCH_TEST_KERNEL", raising=False)
    monkeypatch.setattr(tools, "CACHE", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(NoLabError, match="LAUNCH_TEST_KERNEL"):
        get_kernel()


def fake_qemu(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A QEMU that fails as the real one cannot be made to."""
    program = folder / "bin" / "qemu-system-x86_64"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_a_guest_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_qemu(
        tmp_path,
        monkeypatch,
        f"echo $$ > {tmp_path}/pid; echo last words > {tmp_path}/console; exec sleep 600",
    )
    monkeypatch.setattr(machine, "PATIENCE", 1)
    with pytest.raises(GuestError, match=r"small: no report; not done after 1 s\nlast words"):
        boot(SMALL, tmp_path / "kernel", tmp_path / "initramfs", tmp_path)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_a_qemu_that_refuses_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_qemu(tmp_path, monkeypatch, "echo no such machine >&2; exit 1")
    with pytest.raises(GuestError, match="QEMU ended with status 1 no such machine"):
        boot(SMALL, tmp_path / "kernel", tmp_path / "initramfs", tmp_path)
