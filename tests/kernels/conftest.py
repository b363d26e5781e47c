"""Boots each machine once in a session, when its first test asks for it, and one at a time.

QEMU, cpio and a kernel are found, and got from Debian where they are missing.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from .machine import GuestError, boot, pack_interpreter, pack_programs, write_initramfs
from .shapes import Shape

Report = dict[str, Any]
CACHE = Path(__file__).parents[2] / ".cache" / "kernels"
"""Where a downloaded kernel is kept."""
KERNEL = "linux-image-cloud-amd64"
PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "cpio": "cpio", "ldd": "libc-bin"}
"""What the lab runs, and the Debian package of each."""
PATIENCE = 600
HINT = (
    f"on Debian: apt-get install --no-install-recommends {' '.join(PROGRAMS.values())}; "
    f"elsewhere: install them, and name a kernel image for x86-64 (for example that of Debian's {KERNEL}) "
    "in LAUNCH_TEST_KERNEL"
)


class NoLabError(Exception):
    """The lab cannot run here; the text says what is missing and how to get it."""


def get_tools() -> None:
    """Install what is missing of the programs; raises NoLabError where that cannot be done."""
    if platform.machine() != "x86_64":
        raise NoLabError(f"guests run this interpreter, which is for {platform.machine()}, not x86-64")
    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    if not missing:
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        raise NoLabError(f"{', '.join(missing)} missing, and not root with apt-get: {HINT}")
    run_tool("apt-get", "update", "-q")
    run_tool("apt-get", "install", "-q", "-y", "--no-install-recommends", *missing)


def get_kernel() -> Path:
    """A kernel image: the one that LAUNCH_TEST_KERNEL names, the cached one, or Debian's downloaded now.

    Raises NoLabError where there is none to be had.
    """
    if named := os.environ.get("LAUNCH_TEST_KERNEL"):
        if not Path(named).is_file():
            raise NoLabError(f"LAUNCH_TEST_KERNEL={named} is no file: name a kernel image, or unset it")
        return Path(named)
    cached = sorted(CACHE.glob("vmlinuz-*"))
    return cached[-1] if cached else download_kernel()


def download_kernel() -> Path:
    """Fetch Debian's kernel for virtual machines, and keep its image; nothing is installed."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise NoLabError(f"no kernel image, and no apt-get to download one: {HINT}")
    if os.geteuid() == 0:
        # Old lists name a kernel that the mirror has dropped. Where there is no update, they may still do.
        run_tool("apt-get", "update", "-q", check=False)
    package = find_package()
    with TemporaryDirectory() as folder:
        run_tool("apt-get", "download", "-q", package, cwd=folder)
        (archive,) = Path(folder).glob("*.deb")
        run_tool("dpkg-deb", "-x", str(archive), f"{folder}/unpacked")
        (image,) = Path(folder).glob("unpacked/boot/vmlinuz-*")
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = CACHE / f"draft-{os.getpid()}"
        shutil.copyfile(image, draft)
        return draft.rename(CACHE / image.name)


def find_package() -> str:
    """The package that holds the kernel now: the other one only depends on it."""
    done = run_tool("apt-cache", "depends", KERNEL, check=False)
    for line in done.splitlines():
        if "Depends: linux-image-" in line:
            return line.split()[-1]
    raise NoLabError(f"apt knows no {KERNEL}: {HINT}")


def run_tool(*words: str, cwd: str | None = None, check: bool = True) -> str:
    """Run a tool of Debian's; return its output. Raises NoLabError with its last words."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoLabError(f"`{' '.join(words)}` took more than {PATIENCE} s: {HINT}") from None
    if check and done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise NoLabError(f"`{' '.join(words)}` failed ({' '.join(last)}): {HINT}")
    return done.stdout


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """A kernel image and what runs on it; a skip that says why where they can't be had."""
    try:
        get_tools()
        kernel = get_kernel()
    except NoLabError as error:
        if os.environ.get("LAUNCH_CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("lab")
    programs = pack_programs(folder / "programs.cpio", folder / "stage")
    return kernel, pack_interpreter(folder / "python.cpio"), programs


@pytest.fixture(scope="session")
def report_of(lab: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Shape], Report]:
    """The report of a shape's guest."""
    reports: dict[str, Report | GuestError] = {}

    def find(shape: Shape) -> Report:
        if shape.name not in reports:
            folder = tmp_path_factory.mktemp(shape.name)
            initramfs = write_initramfs(shape, lab[1:], folder)
            try:
                reports[shape.name] = boot(shape, lab[0], initramfs, folder)
            except GuestError as error:
                reports[shape.name] = error
            initramfs.unlink()
        report = reports[shape.name]
        if isinstance(report, GuestError):
            reports[shape.name] = GuestError(f"{shape.name}: no report, as shown above")
            pytest.fail(str(report), pytrace=False)
        return report

    return find
