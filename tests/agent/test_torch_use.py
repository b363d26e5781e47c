"""Which programs are judged to use torch: from their text alone."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.agent.torch_use import MOST_FILES, find_import_change, is_without_torch, may_use_torch

PROGRAMS: dict[str, tuple[bool, Mapping[str, str]]] = {
    "torch": (True, {"x.py": "import os\nimport torch\n"}),
    "in a function": (True, {"x.py": "def f():\n    from torch.nn import Linear\n"}),
    "in a string": (False, {"x.py": "s = 'import torch'\nimport json, os.path\n"}),
    "the standard library": (False, {"x.py": "import os, sys\nfrom collections import abc\n"}),
    "known packages": (
        False,
        {"x.py": "import numpy as np, yaml\nfrom PIL import Image\nimport mpi4py.MPI\n"},
    ),
    "another package": (True, {"x.py": "import os\nimport lightning as L\n"}),
    "nobody knows it": (True, {"x.py": "import not_installed_here\n"}),
    "own module": (False, {"x.py": "import a\n", "a.py": "import os\n"}),
    "own module with torch": (True, {"x.py": "import a\n", "a.py": "import b\n", "b.py": "import torch\n"}),
    "a package's init": (
        True,
        {"x.py": "from p.q import f\n", "p/__init__.py": "import torch\n", "p/q.py": ""},
    ),
    "a package's module": (
        True,
        {"x.py": "from p import q\n", "p/__init__.py": "", "p/q.py": "import torch"},
    ),
    "a relative import": (
        True,
        {
            "x.py": "import p\n",
            "p/__init__.py": "from . import q\n",
            "p/q.py": "from .r import z",
            "p/r.py": "import torch",
        },
    ),
    "without torch": (
        False,
        {
            "x.py": "import p\n",
            "p/__init__.py": "from .q import f\n",
            "p/q.py": "from ..p import r",
            "p/r.py": "import os",
        },
    ),
    "circles": (False, {"x.py": "import a\n", "a.py": "import b\n", "b.py": "import a, x\n"}),
    "anything": (True, {"x.py": "import importlib, sys\nimportlib.import_module(sys.argv[1])\n"}),
    "exec": (True, {"x.py": "exec(open('y').read())\n"}),
    "model.eval": (False, {"x.py": "import re\nre.compile('x').eval()\n"}),
    "no Python": (True, {"x.py": "def\n"}),
    "another encoding": (False, {"x.py": "# -*- coding: utf-8 -*-\nimport os  # ü\n"}),
    "empty": (False, {"x.py": ""}),
    "many files": (
        True,
        {"x.py": "import m0\n"} | {f"m{n}.py": f"import m{n + 1}\n" for n in range(MOST_FILES + 5)},
    ),
}


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.agent.torch_use.MOST_SECONDS", 60.0)
    expected, files = PROGRAMS[name]
    write_files(tmp_path / "src", files)
    assert may_use_torch(["src/x.py", "--lr", "1"], str(tmp_path), {}) is expected
    assert may_use_torch([str(tmp_path / "src/x.py")], "/", {}) is expected
    assert may_use_torch(["-m", "x"], str(tmp_path / "src"), {}) is expected
    assert not {"src", "x", "m0"} & sys.modules.keys()


def test_folders_modules_and_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.agent.torch_use.MOST_SECONDS", 60.0)
    write_files(
        tmp_path, {"app/__main__.py": "import z\n", "app/__init__.py": "", "lib/z.py": "import torch\n"}
    )
    environ = {"PYTHONPATH": f"{tmp_path / 'lib'}{os.pathsep}"}
    assert may_use_torch(["app"], str(tmp_path), environ)
    assert may_use_torch(["-m", "app"], str(tmp_path), environ)
    (tmp_path / "lib/z.py").write_text("import os\n")
    assert not may_use_torch(["app"], str(tmp_path), environ)
    assert not may_use_torch(["-m", "app"], str(tmp_path), environ)
    assert may_use_torch(["-m", "installed_elsewhere"], str(tmp_path), {})
    assert may_use_torch(["missing.py"], str(tmp_path), {})


def test_what_takes_too_long_or_is_no_file_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "x.py")
    assert may_use_torch(["x.py"], str(tmp_path), {})
    write_files(tmp_path, {"y.py": "import os\n"})
    assert not may_use_torch(["y.py"], str(tmp_path), {})
    monkeypatch.setattr("launcher.agent.torch_use.MOST_SECONDS", -1.0)
    assert may_use_torch(["y.py"], str(tmp_path), {})


def test_a_python_program_without_torch_is_told_from_one_that_may_run_it(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import json\n")
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "train.sh").write_text("#!/bin/sh\npython train.py\n")
    environ = dict(os.environ)
    found = {
        name: is_without_torch([sys.executable, str(tmp_path / name)], environ)
        for name in ("plain.py", "train.py")
    }
    assert found == {"plain.py": True, "train.py": False}
    assert not is_without_torch(["sh", str(tmp_path / "train.sh")], environ)


@pytest.mark.parametrize("size", [1 << 19, 1 << 21])
def test_what_is_too_large_to_look_through_is_not_taken_for_harmless(size: int, tmp_path: Path) -> None:
    """Neither does the start wait for it."""
    line = "x = 1\n"
    write_files(tmp_path, {"x.py": "import own\nimport torch\n", "own.py": line * (size // len(line))})
    argv = [sys.executable, str(tmp_path / "x.py")]
    assert "can be looked through" in find_import_change(argv, dict(os.environ))
    write_files(tmp_path, {"own.py": "import torch\n" + line * 9})
    assert find_import_change(argv, dict(os.environ)) == ""
