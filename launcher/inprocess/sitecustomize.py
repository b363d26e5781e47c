"""Runs at the start of a rank's interpreter, in front of the user's own `sitecustomize`.

This folder leaves PYTHONPATH and sys.path at once, so that the interpreters which the program starts know
nothing of it. Whatever goes wrong with what is started here, the program runs as it would have.
"""

import os
import sys

FOLDER = os.path.dirname(__file__)


def start_policies() -> None:
    """Start what the rank was told to have."""
    try:
        # Found while this folder is on sys.path: type checkers do not have it there.
        from launch_inprocess.startup import start  # type: ignore[import-not-found]

        start(os.environ)
    except Exception:
        return


def leave_path() -> None:
    """Take this folder out of PYTHONPATH and out of sys.path, wherever it is in them."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if FOLDER in entries:
        kept = os.pathsep.join([entry for entry in entries if entry != FOLDER])
        os.environ["PYTHONPATH"] = kept
        if not kept:
            del os.environ["PYTHONPATH"]
    sys.path[:] = [entry for entry in sys.path if entry != FOLDER]
    sys.path_importer_cache.pop(FOLDER, None)


def run_own() -> None:
    """Run the user's own `sitecustomize`; what it raises is the interpreter's to tell.

    Where there is none, the ImportError of that is, for `site`, what it always is.
    """
    sys.modules.pop("sitecustomize", None)
    __import__("sitecustomize")


start_policies()
leave_path()
run_own()
