"""Running programs in an interpreter with the hook, and in one without it."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import launcher
from tests.seam import clean_environ

ROOT = Path(launcher.__file__).parents[1]
FOLDER = ROOT / "launcher" / "inprocess"
QUICK = "synchronized,warmup=3,every=5"
PYTHON = (sys.executable, "-W", "error")

STEPS = """
import gc, json, os, sys, weakref
from launcher import collect
seen = []
"""
"""Begin of a program without torch, which marks its steps itself."""
WITHOUT_COMPILER = """
import sys, types, torch
torch._dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
torch._dynamo.disable = lambda function, *_, **__: function
torch._dynamo.graph_break = lambda: None
torch._dynamo.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
"""
"""Begin of a program whose optimizer imports no compiler, which takes longer than the rest of torch."""


def run_program(
    words: Sequence[str], cwd: Path, policy: str | None = QUICK, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command line as the shim would exec it; `policy` None is without the hook."""
    environ = {**clean_environ(), **variables}
    path = [str(FOLDER)] if policy is not None else []
    path += [variables["PYTHONPATH"]] if "PYTHONPATH" in variables else []
    environ.pop("PYTHONPATH", None)
    environ |= {"PYTHONPATH": os.pathsep.join(path)} if path else {}
    environ |= {"LAUNCH_GC": policy} if policy is not None else {}
    return subprocess.run(
        [*words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=240, check=False
    )


def run_code(
    code: str,
    cwd: Path,
    policy: str | None = QUICK,
    python: Sequence[str] = PYTHON,
    **variables: str,
) -> object:
    """Run a program that prints one line of JSON, and, by PYTHON, no warning; return what is in it."""
    (cwd / "program.py").write_text(code)
    done = run_program([*python, "program.py"], cwd, policy, **{"PYTHONPATH": str(ROOT), **variables})
    assert done.returncode == 0, done.stderr
    assert not done.stderr or python != PYTHON, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
