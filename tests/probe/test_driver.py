"""The driver's files on the machine itself, where a job may not have all of the GPUs that they show."""

import os
from pathlib import Path

import pytest

from launcher.probe.gpus import read_driver
from launcher.probe.sysfs import Tree

from .machine_trees import put


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three GPUs in files that stand for the real root's, with their devices."""
    for minor, bus in enumerate(("0f", "07", "47")):
        text = f"Model: \t\t X\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}"
        put(tmp_path, f"gpus/0000:{bus}:00.0/information", text)
        put(tmp_path, f"nvidia{minor}", "")
    monkeypatch.setattr("launcher.probe.gpus.GPUS", f"{tmp_path}/gpus/"[1:])
    monkeypatch.setattr("launcher.probe.gpus.CAPABILITIES", f"{tmp_path}/capabilities"[1:])
    monkeypatch.setattr("launcher.probe.gpus.DEVICE", f"{tmp_path}/nvidia")
    monkeypatch.setattr("launcher.probe.gpus.BOUND", "proc/nothing/")
    return tmp_path


def tell() -> tuple[list[str] | None, ...]:
    """UUIDs of the GPUs by the files, and by the files where they suffice."""
    tree = Tree()
    by_files, whole = read_driver(tree), read_driver(tree, only_whole=True)
    return tuple(None if gpus is None else [gpu.uuid for gpu in gpus] for gpus in (by_files, whole))


def test_all_that_can_be_opened(root: Path) -> None:
    assert tell() == (["GPU-1", "GPU-0", "GPU-2"],) * 2


def test_without_a_device_a_gpu_is_not_the_jobs(root: Path) -> None:
    (root / "nvidia0").unlink()
    assert tell() == (["GPU-1", "GPU-2"],) * 2


def test_device_that_may_not_be_opened_is_not_the_jobs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """access(2) says so where a device cgroup forbids it, to root too; asked for reading and writing."""

    def answer(path: str, mode: int) -> bool:
        assert mode == os.R_OK | os.W_OK
        return path != f"{root}/nvidia2"

    monkeypatch.setattr(os, "access", answer)
    assert tell() == (["GPU-1", "GPU-0"],) * 2


def test_job_without_gpus_on_a_machine_with_gpus(root: Path) -> None:
    for minor in range(3):
        (root / f"nvidia{minor}").unlink()
    assert tell() == ([], [])


def test_gpu_without_a_known_device_is_taken(root: Path) -> None:
    put(root, "gpus/0000:07:00.0/information", "GPU UUID: \t GPU-1")
    (root / "nvidia1").unlink()
    assert tell() == (["GPU-1", "GPU-0", "GPU-2"],) * 2


def test_written_out_machine_has_all_its_gpus(root: Path) -> None:
    put(
        root,
        "tree/proc/driver/nvidia/gpus/0000:07:00.0/information",
        "GPU UUID: \t GPU-1\nDevice Minor: \t 99",
    )
    assert list_uuids(root / "tree") == ["GPU-1"]


def list_uuids(top: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.probe.gpus.GPUS", "proc/driver/nvidia/gpus/")
        return [gpu.uuid for gpu in read_driver(Tree(top)) or ()]


@pytest.mark.parametrize("bus", ["07", "47"])
def test_files_do_not_suffice_where_a_uuid_is_unknown(bus: str, root: Path) -> None:
    put(root, f"gpus/0000:{bus}:00.0/information", "GPU UUID: \t GPU-????????-????\nDevice Minor: \t 1")
    assert tell()[1] is None


def test_files_do_not_suffice_where_there_are_mig_instances(root: Path) -> None:
    (root / "capabilities/gpu0/mig").mkdir(parents=True)
    (root / "capabilities/mig").mkdir()
    put(root, "capabilities/mig/config", "DeviceFileMinor: 1")
    assert tell()[1] is not None
    put(root, "capabilities/gpu1/mig/gi3/access", "DeviceFileMinor: 30")
    assert tell()[1] is None


def test_excluded_gpu_needs_no_uuid(root: Path) -> None:
    put(root, "gpus/0000:07:00.0/information", "GPU UUID: \t GPU-????????\nGPU Excluded:\t Yes")
    assert tell() == (["GPU-0", "GPU-2"],) * 2


def test_no_files_tell_nothing(root: Path) -> None:
    for path in sorted((root / "gpus").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert tell() == (None, None)
