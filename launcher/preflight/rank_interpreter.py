"""Which interpreter the ranks of a job run in: its torch is the one that counts."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

PYTHON = re.compile(r"(python|pypy)[0-9.]*")


def find_rank_python(argv: Sequence[str], environ: Mapping[str, str], directory: str) -> str:
    """Return the interpreter of a program, by its name or absolute path; empty for the launcher's own.

    `python train.py` names it; `train.py` and `-m module` run under PYTHON_EXEC, as with torchrun. Another
    executable has one that is not known. No file is looked at: it may be on a filesystem that is stuck.
    """
    first = argv[0] if argv else ""
    if first == "-m" or first.endswith(".py"):
        first = environ.get("PYTHON_EXEC", "")
    elif not PYTHON.fullmatch(PurePath(first).name):
        return ""
    return os.path.join(directory, first) if "/" in first else first  # noqa: PTH118 - as it is given
