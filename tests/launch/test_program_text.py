"""What the text of a program tells: does it use torch, and is there something against a fork?"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.launch.warm.program import MOST_BYTES, MOST_FILES, ProgramText, read_program

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
    "another line of an import": (True, {"x.py": "import os, \\\n  torch\n"}),
    "an import in brackets": (True, {"x.py": "from p import (\n  a,\n  b)\n", "p/b.py": "import torch"}),
    "in a text": (False, {"x.py": '"""\nimport torch\n"""\n# import torch\n'}),
    "another encoding": (False, {"x.py": "# -*- coding: utf-8 -*-\nimport os  # ü\n"}),
    "empty": (False, {"x.py": ""}),
    "many files": (
        True,
        {"x.py": "import m0\n"} | {f"m{n}.py": f"import m{n + 1}\n" for n in range(MOST_FILES + 5)},
    ),
}


BEFORE: dict[str, str] = {
    "import os\nos.environ['OMP_NUM_THREADS'] = '2'": "x.py:2 sets variables",
    "import os\nos.environ.setdefault( 'TORCH_LOGS', '1')": "x.py:2 sets variables",
    "from os import environ\nenviron['MKL_CBWR'] += ':x'": "x.py:2 sets variables",
    "import os\nos.environ.pop('KMP_BLOCKTIME', 0)": "x.py:2 sets variables",
    "import os\nos.putenv('OMP_SCHEDULE', 'static')": "x.py:2 sets variables",
    "import os\nos.environ[name] = '1'": "sets variables",
    "import os\nos.environ[f'TORCH_{x}'] = '1'": "sets variables",
    "import os\nos.environ.update(A='1')": "sets variables",
    "import os\nos.environ |= {}": "sets variables",
    "import os\ndel os.environ['A']": "sets variables",
    "import sys\nsys.path.insert(0, 'x')": "x.py:2 changes what imports find",
    "import sys\nsys.path[:0] = ['x']": "changes what imports find",
    "import sys\nsys.path = ['x']": "changes what imports find",
    "import sys\nmine = sys.path": "changes what imports find",
    "from sys import argv, path": "changes what imports find",
    "import sys as s": "changes what imports find",
    "import sys\nsys.modules['torch'] = None": "changes what imports find",
    "import sys\nsys.meta_path.insert(0, F())": "changes what imports find",
    "import builtins\nbuiltins.__import__ = f": "changes what imports find",
    "import site\nsite.addsitedir('x')": "changes what imports find",
    "import threading\nthreading.settrace(f)": "watches what runs",
    "import sys\nsys.addaudithook(f)": "watches what runs",
    "if 1:\n    import cProfile": "watches what runs",
    "from tracemalloc import start": "watches what runs",
    "exec('x')": "runs other code",
    "import runpy\nrunpy.run_path('y')": "runs other code",
    "s = '\"\"\"'\nexec('x')\ns = '\"\"\"'": "x.py:2 runs other code",
    '"""\nimport torch\n"""\nexec("x")': "x.py:4 runs other code",
    "def f():\n    import torch\nexec('x')": "x.py:3 runs other code",
    # None of these has an effect on the import of torch.
    "import os\nos.environ['HF_HOME'] = 'x'\nos.environ.setdefault('MINE', '1')": "",
    "import os\nx = os.environ['OMP_NUM_THREADS'], os.environ.get('TORCH_LOGS'), os.environ == {}": "",
    "import os\nenv = dict(os.environ)\nenv['OMP_NUM_THREADS'] = '1'": "",
    "import sys\nif 'x' not in sys.path:\n    sys.path.append('x')\nsys.path += ['y']": "",
    "import sys\nme = sys.modules[__name__]\nyes = 'torch' in sys.modules": "",
    "import re\nre.compile('x')\nmodel.eval()\npath = modules = 1": "",
    "'exec is a word'  # exec('x')": "",
}
"""What stands before `import torch`, and what is said of it."""


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def read(*words: str, to_the_end: bool = False, **environ: str) -> ProgramText:
    found = read_program([sys.executable, *words], {**os.environ, **environ}, to_the_end=to_the_end)
    assert found
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_that_uses_torch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, files = PROGRAMS[name]
    write_files(tmp_path / "src", files)
    monkeypatch.chdir(tmp_path)
    assert read("src/x.py", "--lr", "1").uses_torch is expected
    monkeypatch.chdir(tmp_path / "src")
    assert read("-m", "x").uses_torch is expected
    assert not {"src", "x", "m0"} & sys.modules.keys()


@pytest.mark.parametrize(("text", "reason"), BEFORE.items())
def test_what_comes_before_torch(text: str, reason: str, tmp_path: Path) -> None:
    path = str(tmp_path / "x.py")
    for lines, is_before in ((f"{text}\nimport torch\n", True), (f"import torch\n{text}\n", False)):
        write_files(tmp_path, {"x.py": lines})
        found = read(path).obstacle
        assert reason in found if is_before and reason else not found
        assert bool(read(path, to_the_end=True).obstacle) is bool(reason)
    write_files(tmp_path, {"x.py": "import own\nimport torch\n", "own.py": f"{text}\n"})
    assert reason.replace("x.py", "own.py") in read(path).obstacle
    write_files(tmp_path, {"own.py": f"import torch\n{text}\n"})
    assert not read(path).obstacle


def test_folders_modules_and_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(
        tmp_path, {"app/__main__.py": "import z\n", "app/__init__.py": "", "lib/z.py": "import torch\n"}
    )
    path = f"{tmp_path / 'lib'}{os.pathsep}"
    assert read("app", PYTHONPATH=path).uses_torch and read("-m", "app", PYTHONPATH=path).uses_torch
    (tmp_path / "lib/z.py").write_text("import os\n")
    assert not read("app", PYTHONPATH=path).uses_torch and not read("-m", "app", PYTHONPATH=path).uses_torch
    assert read("-m", "installed_elsewhere").uses_torch and read("missing.py").uses_torch
    assert read("-c", "import torch").uses_torch and not read("-c", "import os").uses_torch
    assert read("-c", "exec('x')").obstacle == "-c:1 runs other code"


def test_what_is_no_python_program_or_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("#!/bin/sh\npython train.py\n")
    assert read_program(["sh", str(tmp_path / "train.sh")], dict(os.environ)) is None
    os.mkfifo(tmp_path / "x.py")
    assert read(str(tmp_path / "x.py")).uses_torch


def test_what_is_too_large_to_look_through_is_not_taken_for_harmless(tmp_path: Path) -> None:
    """Neither does the start wait for it."""
    line = "x = 1\n"
    large = line * (MOST_BYTES // len(line))
    for size in (len(large) // 2, len(large)):
        own = {"x.py": "import own, two\nimport torch\n", "own.py": large[:size], "two.py": large[:size]}
        write_files(tmp_path, own)
        found = read(str(tmp_path / "x.py"))
        assert found.uses_torch and found.obstacle == "its files are too many, or too large, to look through"
    write_files(tmp_path, {"own.py": "import torch\n" + line * 9, "two.py": ""})
    assert read(str(tmp_path / "x.py")).obstacle == ""
