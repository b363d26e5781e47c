"""Boots each machine once in a session, when its first test asks for it, and one at a time."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .image import pack_interpreter, pack_programs, write_initramfs
from .machine import GuestError, boot
from .shapes import Shape
from .tools import NoLabError, get_kernel, get_tools

Report = dict[str, Any]


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
