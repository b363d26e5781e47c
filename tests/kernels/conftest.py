"""Boots each machine once in a session, when its first test asks for it, and one at a time."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .machine import GuestError, boot, pack_interpreter, pack_programs, write_initramfs
from .shapes import Shape

Report = dict[str, Any]
CACHE = Path(__file__).parents[2] / ".cache" / "kernels"
"""Where a downloaded kernel is kept."""


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """A kernel image and what runs on it; a skip that says why where they can't be had."""
    command = [str(Path(__file__).with_name("get-kernel")), str(CACHE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        (pytest.fail if os.environ.get("LAUNCH_CI") else pytest.skip)(done.stderr.splitlines()[-1])
    folder = tmp_path_factory.mktemp("lab")
    programs = pack_programs(folder / "programs.cpio", folder / "stage")
    return Path(done.stdout.strip()), pack_interpreter(folder / "python.cpio"), programs


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
