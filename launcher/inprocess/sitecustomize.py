"""Runs at the start of a rank's interpreter, in front of the user's own `sitecustomize`.

This folder leaves PYTHONPATH and sys.path at once, so that the interpreters which the program starts know
nothing of it. Whatever goes wrong with what is started here, the program runs as it would have.
"""

import os
import sys

FOLDER = os.path.dirname(__file__)


def leave_path() -> None:
    """Take this folder out of PYTHONPATH, where it is first, and out of sys.path."""
    head, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if head == FOLDER:
        os.environ["PYTHONPATH"] = rest
    if not os.environ.get("PYTHONPATH"):
        os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [entry for entry in sys.path if entry != FOLDER]


def start_policies() -> None:
    """Start what the rank was told to have."""
    try:
        # Found while this folder is on sys.path: type checkers do not have it there.
        from launch_inprocess.start import start  # type: ignore[import-not-found]

        start(os.environ)
    except Exception:
        return


def run_own() -> None:
    """Run the user's own `sitecustomize`, where there is one; what it raises is the interpreter's to tell."""
    ours = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


start_policies()
leave_path()
run_own()
