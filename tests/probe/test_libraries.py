"""Where a library that serves malloc is looked for, and what counts as one."""

import os
import sys
from pathlib import Path

import pytest

from launcher.probe import malloc_library
from launcher.probe.malloc_library import locate_malloc

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
    assert locate_malloc("tcmalloc", environ, "/") == ""
    for folder in ("usual", "given", "venv/lib", "conda/lib"):
        path = put(tmp_path / folder)
        assert locate_malloc("tcmalloc", environ, "/") == str(path)
    put(tmp_path / "here/relative", "libjemalloc.so.2")
    monkeypatch.chdir(tmp_path / "here")
    assert locate_malloc("jemalloc", environ, "/") == ""
    assert locate_malloc("system", environ, "/") is None
    assert locate_malloc("tcmalloc", environ, str(tmp_path)) is None, "another machine's files are not here"


@pytest.mark.usefixtures("alone")
def test_folders_of_the_linkers_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/a.conf").write_text(f"# comment\n  \n{tmp_path}/far \ninclude x\n")
    (tmp_path / "conf/b.conf").mkdir()
    monkeypatch.setattr(malloc_library, "CONFIGURATION", str(tmp_path / "conf"))
    assert locate_malloc("jemalloc", {"LD_LIBRARY_PATH": ""}, "/") == ""
    path = put(tmp_path / "far", "libjemalloc.so.2")
    assert locate_malloc("jemalloc", {}, "/") == str(path)


@pytest.mark.usefixtures("alone")
def test_only_an_elf_of_this_machines_kind_counts(tmp_path: Path) -> None:
    environ = {"LD_LIBRARY_PATH": str(tmp_path)}
    path = put(tmp_path)
    whole = path.read_bytes()
    foreign = whole[:18] + bytes([whole[18] ^ 1]) + whole[19:]
    short = whole[:4] + bytes([3 - whole[4]]) + whole[5:]
    for data in (b"", b"INPUT ( -ltcmalloc )", whole[:19], foreign, short):
        path.write_bytes(data)
        assert locate_malloc("tcmalloc", environ, "/") == "", data
    path.write_bytes(whole)
    assert locate_malloc("tcmalloc", environ, "/") == str(path)


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_preloaded_is_passed_over(tmp_path: Path) -> None:
    spaced, plain = put(tmp_path / "a b"), put(tmp_path / "plain")
    environ = {"CONDA_PREFIX": "/no/such", "LD_LIBRARY_PATH": f"{spaced.parent}:{plain.parent}"}
    assert locate_malloc("tcmalloc", environ, "/") == str(plain)
    plain.unlink()
    os.mkfifo(plain)
    (plain.parent / "libtcmalloc.so.4").mkdir()
    assert locate_malloc("tcmalloc", environ, "/") == ""
