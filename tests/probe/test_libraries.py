"""Where a library that serves malloc is looked for, and what counts as one."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from launcher.probe import malloc_library
from launcher.probe.malloc_library import (
    find_malloc_library,
    list_configured,
    list_library_folders,
    read_elf_kind,
)

OWN = Path(sys.executable).resolve()
NAME = "libtcmalloc_minimal.so.4"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own folders are not looked into."""
    monkeypatch.setattr(malloc_library, "USUAL", ())
    monkeypatch.setattr(malloc_library, "CONFIGURATION", "/no/such")
    monkeypatch.setattr(sys, "prefix", "/no/such")
    monkeypatch.setattr(sys, "base_prefix", "/no/such")
    monkeypatch.setattr(sys.implementation, "_multiarch", "", raising=False)


def put(folder: Path, name: str = NAME) -> Path:
    """A file that is an ELF of this machine's kind."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(OWN.read_bytes()[:64])
    return path


@pytest.mark.usefixtures("alone")
def test_the_nearest_to_the_user_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"CONDA_PREFIX": str(tmp_path / "conda"), "LD_LIBRARY_PATH": f":relative:{tmp_path / 'given'}"}
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(malloc_library, "USUAL", (str(tmp_path / "usual"),))
    assert find_malloc_library("tcmalloc", environ) == ""
    for folder in ("usual", "given", "venv/lib", "conda/lib"):
        path = put(tmp_path / folder)
        assert find_malloc_library("tcmalloc", environ) == str(path)
    assert "relative" not in list(list_library_folders(environ))
    assert find_malloc_library("jemalloc", environ) == "" == find_malloc_library("system", environ)


@pytest.mark.usefixtures("alone")
def test_folders_of_the_linkers_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/a.conf").write_text(f"# comment\n  \n{tmp_path}/far \ninclude x\n")
    (tmp_path / "conf/b.conf").mkdir()
    monkeypatch.setattr(malloc_library, "CONFIGURATION", str(tmp_path / "conf"))
    assert list(list_configured()) == [f"{tmp_path}/far"]
    assert find_malloc_library("jemalloc", {"LD_LIBRARY_PATH": ""}) == ""
    path = put(tmp_path / "far", "libjemalloc.so.2")
    assert find_malloc_library("jemalloc", {}) == str(path)


@pytest.mark.usefixtures("alone")
def test_only_an_elf_of_this_machines_kind_counts(tmp_path: Path) -> None:
    environ = {"LD_LIBRARY_PATH": str(tmp_path)}
    path = put(tmp_path)
    whole = path.read_bytes()
    foreign = whole[:18] + bytes([whole[18] ^ 1]) + whole[19:]
    short = whole[:4] + bytes([3 - whole[4]]) + whole[5:]
    for data in (b"", b"INPUT ( -ltcmalloc )", whole[:19], foreign, short):
        path.write_bytes(data)
        assert find_malloc_library("tcmalloc", environ) == "", data
    path.write_bytes(whole)
    assert find_malloc_library("tcmalloc", environ) == str(path)


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_preloaded_is_passed_over(tmp_path: Path) -> None:
    spaced, plain = put(tmp_path / "a b"), put(tmp_path / "plain")
    environ = {"CONDA_PREFIX": "/no/such", "LD_LIBRARY_PATH": f"{spaced.parent}:{plain.parent}"}
    assert find_malloc_library("tcmalloc", environ) == str(plain)
    plain.unlink()
    os.mkfifo(plain)
    (plain.parent / "libtcmalloc.so.4").mkdir()
    assert find_malloc_library("tcmalloc", environ) == ""


def test_the_kind_of_this_interpreter(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copy(OWN, copy)
    assert read_elf_kind(str(copy)) == read_elf_kind("/proc/self/exe") != ()
    assert read_elf_kind(str(tmp_path)) == read_elf_kind("/no/such") == ()
