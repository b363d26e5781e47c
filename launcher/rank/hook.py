"""Lets a rank's interpreter start with `launcher.inprocess`: garbage collection, DataLoaders."""

import os

from launcher.rank.plain_json import format_json
from launcher.rank.share import Share

FOLDER = os.path.abspath(f"{__file__}/../../inprocess")
NEEDS = {"LAUNCH_GC": "default", "LAUNCH_LOADER_DEFAULT": "0", "LAUNCH_METER": ""}
"""Variables that ask for something inside the interpreter, with the values that do not."""
TOLD = ("local_rank", "gpu", "cpus", "worker_cpus", "memory", "num_workers", "omp_num_threads", "nic")
"""What of its plan a rank's program can ask for (`launcher.rank_plan`)."""


def add_hook(environ: dict[str, str], share: Share) -> None:
    """Put the hook first on PYTHONPATH where something asks for it; it takes itself out again.

    `LAUNCH_RANK_PLAN` is what the program can know of its plan, JSON.
    """
    environ["LAUNCH_RANK_PLAN"] = format_json({name: share.entry.get(name) for name in TOLD})
    wanted = any(environ.get(name, off).partition(",")[0] != off for name, off in NEEDS.items())
    if wanted or share.entry.get("worker_cpus") not in (None, share.entry["cpus"]):
        # An empty entry of PYTHONPATH is the working directory.
        environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *filter(None, [environ.get("PYTHONPATH")])])
