"""Reading ahead: which files a process brings into the page cache, and when there is no need for one."""

import os
import sys
from pathlib import Path

import pytest

from launcher.launch.warm.read_ahead import reading_ahead, start_read_ahead
from tests.seam import clean_environ

LIBRARY = "torch/lib/libtorch_cpu.so"
BYTECODE = "torch/nn/__pycache__/module.cpython-311.pyc"
MIB = 1 << 20


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with files named as torch's, of which nothing is in the page cache."""
    for name, size in ((LIBRARY, 20 * MIB), (BYTECODE, 1 << 16)):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(os.urandom(1 << 16) * (size >> 16))
        for _ in range(3):  # a page that another CPU has just touched stays
            drop(path)
        if is_cached(path, 0):
            pytest.skip("the kernel keeps what is written to this filesystem")
    (tmp_path / "uses.py").write_text("import torch\n")
    (tmp_path / "plain.py").write_text("print()\n")
    return tmp_path


def drop(path: Path) -> None:
    """Write a file to its disk, and have the kernel forget it."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(path: Path, offset: int) -> bool:
    """Ask by a read that does not wait."""
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


def test_files_are_read_if_they_are_not_cached(packages: Path) -> None:
    environ = {**clean_environ(), "PYTHONPATH": f"relative:{packages}"}
    uses, plain = ((sys.executable, str(packages / name)) for name in ("uses.py", "plain.py"))
    assert start_read_ahead("off", uses, environ) is None
    assert start_read_ahead("auto", plain, environ) is None
    reader = start_read_ahead("auto", uses, environ)
    assert reader
    with reading_ahead("auto", uses, environ, reader) as pids:
        assert pids == (reader.pid,)
        assert reader.wait(60) == 0
    assert all(is_cached(packages / LIBRARY, at) for at in (0, 15 * MIB, 20 * MIB - 1))
    assert is_cached(packages / BYTECODE, 0)
    with reading_ahead("auto", uses, environ) as pids:
        assert not pids
    with reading_ahead("on", plain, environ) as pids:
        (pid,) = pids
    assert not Path(f"/proc/{pid}").exists()
    drop(packages / LIBRARY)
    with (packages / LIBRARY).open("rb") as file:  # its first page is there, the rest is not
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(1)
    with reading_ahead("auto", uses, environ) as pids:
        assert pids
