"""Runs at the start of a rank's interpreter, in front of the user's own `sitecustomize`.

First it starts what the rank's environment asks for. Then it removes this folder from PYTHONPATH and
sys.path, so that the interpreters which the program starts do not have it. Whatever fails here, the program
runs as it would have.
"""

import os
import sys

FOLDER = os.path.dirname(__file__)


def become_warm(text: str) -> None:
    """Be the process from which ranks are forked; returns in each rank, before the program's first line."""
    root, before = os.path.abspath(f"{FOLDER}/../.."), frozenset(sys.modules)
    sys.path.insert(0, root)
    server = __import__("launcher.launch.warm.server").launch.warm.server
    server.serve_ranks(text, FOLDER, root, before)


def start_policies() -> None:
    """Start what LAUNCH_* ask for in this interpreter."""
    try:
        # By __import__, since type checkers do not have this folder on their path.
        __import__("launch_inprocess").start(os.environ)
    except Exception:
        return


def leave_path() -> None:
    """Remove this folder from PYTHONPATH and sys.path, wherever it is in them."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if FOLDER in entries and not os.environ.get("LAUNCH_FIT"):  # what it starts would train in earnest
        kept = os.pathsep.join([entry for entry in entries if entry != FOLDER])
        os.environ["PYTHONPATH"] = kept
        if not kept:
            del os.environ["PYTHONPATH"]
    sys.path[:] = [entry for entry in sys.path if entry != FOLDER]
    sys.path_importer_cache.pop(FOLDER, None)


if "LAUNCH_WARM" in os.environ:
    become_warm(os.environ.pop("LAUNCH_WARM"))
if FOLDER in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # a forked rank may ask for nothing
    start_policies()
leave_path()
# The user's own `sitecustomize`; the interpreter reports what it raises. If there is none, the ImportError of
# that reaches `site`, as it does without us.
sys.modules.pop("sitecustomize", None)
__import__("sitecustomize")
