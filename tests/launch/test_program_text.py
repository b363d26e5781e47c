"""What the text of a program tells: does it use torch, and is there something against a fork?"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.launch.warm.program import MOST_BYTES, MOST_FILES, ProgramText, read_program
from tests.data_files import read_data

CASES = read_data("program_texts")
MANY = {"x.py": "import m0\n"} | {f"m{n}.py": f"import m{n + 1}\n" for n in range(MOST_FILES + 5)}
PROGRAMS = [*CASES["program"], {"name": "many files", "torch": True, "files": MANY}]


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def read(*words: str, to_the_end: bool = False, **environ: str) -> ProgramText:
    found = read_program([sys.executable, *words], {**os.environ, **environ}, to_the_end=to_the_end)
    assert found
    return found


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: str(case["name"]))
def test_a_script_that_uses_torch(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = case["torch"]
    write_files(tmp_path / "src", case["files"])
    monkeypatch.chdir(tmp_path)
    assert read("src/x.py", "--lr", "1").uses_torch is expected
    monkeypatch.chdir(tmp_path / "src")
    assert read("-m", "x").uses_torch is expected
    assert not {"src", "x", "m0"} & sys.modules.keys()


@pytest.mark.parametrize(("text", "reason"), CASES["before"].items())
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
