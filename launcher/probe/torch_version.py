"""The version of torch that ranks would import, and its CUDA, without importing it: that takes seconds."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

LOCATE = "import importlib.util as u; s = u.find_spec('torch'); print((s.origin or '') if s else '', end='')"
PATIENCE = 5.0
"""Seconds for another interpreter to start."""
MOST = 1 << 16
"""Bytes of `torch/version.py` that are read; it has less than one KB."""
VERSION = re.compile(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"\s]{1,80})['\"]", re.MULTILINE)
CUDA = re.compile(r"^cuda\s*(?::[^=]*)?=\s*['\"]([0-9.]{1,20})['\"]", re.MULTILINE)


def read_torch(python: str | None = None) -> tuple[str, str]:
    """Return the version of torch and that of the CUDA that it was built for, both empty if there is none.

    `python` is the ranks' interpreter, by default this one. Raises OSError or SubprocessError if it does
    not run.
    """
    origin = locate_torch() if python in (None, sys.executable) else ask_interpreter(python or "")
    if not origin:
        return "", ""
    with open(
        os.path.join(os.path.dirname(origin), "version.py"), encoding="utf-8", errors="replace"
    ) as file:
        return parse_torch_version(file.read(MOST))


def locate_torch() -> str:
    """Return the file of this interpreter's torch; empty if there is none."""
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError, AttributeError):
        return ""
    return (spec.origin or "") if spec else ""


def ask_interpreter(python: str) -> str:
    """Return the file of another interpreter's torch; it starts at the root, where no folder is `torch`."""
    done = subprocess.run(
        [python, "-c", LOCATE],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=PATIENCE,
        check=True,
    )
    return done.stdout[:MOST].decode("utf-8", "replace").rpartition("\n")[2]


def parse_torch_version(text: str) -> tuple[str, str]:
    """Read `torch/version.py`: the version, and the CUDA version of a build for CUDA."""
    version, cuda = VERSION.search(text), CUDA.search(text)
    return version[1] if version else "", cuda[1] if cuda else ""
