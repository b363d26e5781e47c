"""From the words of the user, or of the configuration, to what a rank execs."""

import os
import stat
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.program import describe_interpreter, render_program, resolve_program
from launcher.errors import UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with programs of every kind."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "a b'c.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text("")
    (tmp_path / "plain").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("run", "bin/tool"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    (tmp_path / "bin/data").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


ENVIRON = {"PATH": "/nowhere:bin"}
PYTHON = sys.executable
CHMOD = "`chmod +x train.py` lets it"


@pytest.mark.parametrize(
    ("words", "resolved"),
    [
        (["train.py"], (PYTHON, "train.py")),
        (["./train.py", "--lr", "3e-4"], (PYTHON, "./train.py", "--lr", "3e-4")),
        (["a b'c.py", "x"], (PYTHON, "a b'c.py", "x")),
        (["package", "x"], (PYTHON, "package", "x")),
        (["-m", "package", "x"], (PYTHON, "-m", "package", "x")),
        (["-m", "json.tool"], (PYTHON, "-m", "json.tool")),
        (["./run", "x"], ("./run", "x")),
        (["tool", "-m", "x"], ("bin/tool", "-m", "x")),
    ],
)
def test_forms_of_programs(words: list[str], resolved: tuple[str, ...]) -> None:
    assert resolve_program(words, ENVIRON) == resolved


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("#!/usr/bin/env -S uv run --script", "uv run --script"),
        ("#! /bin/sh -e", "/bin/sh -e"),
        ("#!/usr/bin/env A=1 pixi", "pixi"),
        ("#!/usr/bin/env -S A=1 python3 -O", ""),
        ("#!/opt/conda/bin/python", ""),
        ("#!", ""),
        ("import torch", ""),
    ],
)
def test_a_python_file_whose_first_line_names_something_else_runs_by_that(
    folder: Path, line: str, own: str
) -> None:
    script = folder / "train.py"
    script.write_text(f"{line}\n")
    assert resolve_program(["train.py", "x"], ENVIRON) == (PYTHON, "train.py", "x")
    says = describe_interpreter(["train.py", "x"])
    assert says == (own and f"warning: train.py runs under Python, not by its #! line ({own}): {CHMOD}")
    script.chmod(stat.S_IRWXU)
    resolved = ("./train.py", "x") if own else (PYTHON, "train.py", "x")
    assert resolve_program(["train.py", "x"], ENVIRON) == resolved
    assert describe_interpreter(["train.py"]) == (own and f"train.py runs by its own #! line, {own}")
    assert describe_interpreter(["tool"]) == ""


def test_the_python_that_torchrun_would_use() -> None:
    environ = {**ENVIRON, "PYTHON_EXEC": "/opt/python"}
    assert resolve_program(["train.py"], environ) == ("/opt/python", "train.py")
    assert resolve_program(["tool"], environ) == ("bin/tool",)


def test_an_absolute_executable_and_path_lookup_as_a_shell_has_it(folder: Path) -> None:
    assert resolve_program([str(folder / "run")], ENVIRON) == (str(folder / "run"),)
    assert resolve_program([PYTHON, "train.py"], ENVIRON) == (PYTHON, "train.py")
    with pytest.raises(UsageError, match=r"no such program: run \(there is a file \./run here\)"):
        resolve_program(["run"], ENVIRON)
    with pytest.raises(UsageError, match="no such program: data"):
        resolve_program(["data"], ENVIRON)


def test_a_module_on_the_python_path(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/mine.py").write_text("raise RuntimeError('this is not run')")
    assert resolve_program(["-m", "mine"], {**ENVIRON, "PYTHONPATH": "elsewhere"})[1:] == ("-m", "mine")
    with pytest.raises(UsageError, match="no module 'mine'"):
        resolve_program(["-m", "mine"], ENVIRON)
    assert "mine" not in sys.modules


def test_modules_in_an_archive_and_of_an_editable_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `python -m` finds beside folders: a zip, and a finder that knows a module by its whole name."""
    with ZipFile(folder / "code.zip", "w") as archive:
        archive.writestr("zipped/__init__.py", "")
        archive.writestr("zipped/train.py", "")
    environ = {**ENVIRON, "PYTHONPATH": "code.zip"}
    assert resolve_program(["-m", "zipped.train"], environ)[1:] == ("-m", "zipped.train")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, None, origin="train.py") if name == "shared.train" else None

    (folder / "shared").mkdir()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert resolve_program(["-m", "shared.train"], ENVIRON)[1:] == ("-m", "shared.train")
    with pytest.raises(UsageError, match=r"no module 'shared\.trian'"):
        resolve_program(["-m", "shared.trian"], ENVIRON)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no program"),
        ([""], "no program"),
        (["--lr"], "'--lr' is no program"),
        (["-m"], "-m needs a module"),
        (["-m", ""], "no module"),
        (["-m", ".x"], "no module"),
        (["-m", "no such module"], "no module 'no such module'"),
        (["nothere.py"], r"no such program: nothere\.py \(from "),
        (["plain"], "plain is a folder"),
        (["plain/"], "plain/ is a folder"),
        (["./bin/data"], r"\./bin/data is not executable: `chmod \+x \./bin/data`"),
        (["./nothere"], r"no such program: \./nothere"),
        (["x" * 5000], "no such program"),
        (["x" * 5000 + ".py"], "no such program"),
        (["bin/tool/x.py"], "no such program"),
    ],
)
def test_what_is_no_program(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_program(words, ENVIRON)


@given(st.lists(st.text(), max_size=5))
def test_arguments_stay_as_they_are(arguments: list[str]) -> None:
    assert resolve_program([PYTHON, *arguments], ENVIRON) == (PYTHON, *arguments)
    assert resolve_program(["-m", "json.tool", *arguments], os.environ) == (
        *(PYTHON, "-m", "json.tool"),
        *arguments,
    )


def test_a_configured_program_has_an_option_for_each_key() -> None:
    program = {
        "command": ["train.py", "go"],
        "sections": ["model", "data"],
        "batch_size": 8,
        "lr": 1e-4,
        "on": True,
        "off": False,
        "none": None,
        "many": [1, "b"],
        "text": "a b",
        "empty": "",
        "my_net": {"hidden_size": 2, "bias": False, "norm": {"eps": 1}, "none": {}},
    }
    sections: dict[str, dict[str, object]] = {
        "model": {"layers": 2, "kv_heads": None, "bias": False},
        "data": {"path": "/x y"},
        "other": {"a": 1},
    }
    assert render_program(program, sections) == (
        "train.py",
        "go",
        "--model.layers=2",
        "--no-model.bias",
        "--data.path=/x y",
        "--batch-size=8",
        "--lr=0.0001",
        "--on",
        "--no-off",
        "--many=1,b",
        "--text=a b",
        "--empty=",
        "--my-net.hidden_size=2",
        "--no-my-net.bias",
        "--my-net.norm.eps=1",
    )


@pytest.mark.parametrize(
    "program", [{}, {"command": []}, {"command": None}, {"command": "train.py"}, {"command": {"a": 1}}]
)
def test_a_configured_program_without_a_command(program: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="the program has no command"):
        render_program(program, {})


def test_a_section_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"program\.sections names 'optim': choose from model, data"):
        render_program({"command": ["x"], "sections": ["optim"]}, {"model": {}, "data": {}})
