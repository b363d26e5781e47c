"""`python -m tests.benchmarks [NAME …] [rounds=N]`: those that are named, or all that are timed.

Those of WATCHING take long, and run only if they are named; each has settings `KEY=VALUE` of its own.
"""

import os
import platform
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tests.benchmarks.false_alarms import bench_false_alarms
from tests.benchmarks.fit import bench_fit
from tests.benchmarks.hangs import bench_hangs
from tests.benchmarks.recovery import bench_recovery
from tests.benchmarks.start import bench_shim, bench_slurm, bench_start, bench_start_memory
from tests.benchmarks.stragglers import bench_stragglers
from tests.probe.machine_trees import short_lived

RECOVERIES = ("recovery", "recovery-slurm", "recovery-node", "recovery-hang")
TIMED: Mapping[str, tuple[Callable[[Path, int], None], int]] = {
    "start-1": (partial(bench_start, ranks=1), 5),
    "start-2": (partial(bench_start, ranks=2), 5),
    "start-8": (partial(bench_start, ranks=8), 3),
    "start-bare": (partial(bench_start, ranks=2, imports=False), 5),
    "start-memory": (bench_start_memory, 1),
    "slurm": (bench_slurm, 3),
    "shim": (bench_shim, 40),
    **{kind: (partial(bench_recovery, kind=kind), 2) for kind in RECOVERIES},
}
"""What is timed, with the rounds of each."""
WATCHING: Mapping[str, Callable[[Path, Mapping[str, str]], None]] = {
    "hangs": bench_hangs,
    "false-alarms": bench_false_alarms,
    "stragglers": bench_stragglers,
    "fit": bench_fit,
}
"""Real hangs, real hours, a grid of models: not among those that run if none is named."""


def main() -> None:
    """Run the benchmarks that are named, or all that are timed."""
    words = [word for word in sys.argv[1:] if "=" not in word]
    options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    names = (*TIMED, *WATCHING)
    if set(words) - set(names):
        sys.exit(f"benchmarks are {', '.join(names)}, not {', '.join(sorted(set(words) - set(names)))}")
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, Python {platform.python_version()}, torch {version('torch')}", flush=True)
    for name in words or TIMED:
        with short_lived() as folder:
            if name in WATCHING:
                WATCHING[name](folder, options)
            else:
                bench, usual = TIMED[name]
                bench(folder, int(options.get("rounds", usual)))


if __name__ == "__main__":
    main()
