"""`python -m tests.benchmarks [NAME …] [rounds=N]`: those that are named, or all.

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
from tests.benchmarks.fidelity import bench_fidelity
from tests.benchmarks.fit_grid import bench_fit
from tests.benchmarks.garbage_memory import bench_garbage_memory
from tests.benchmarks.hang_matrix import bench_hangs
from tests.benchmarks.output import bench_output
from tests.benchmarks.probing import bench_command, bench_probe
from tests.benchmarks.recovery import bench_recovery
from tests.benchmarks.recovery_slurm import bench_hang_recovery, bench_node_death, bench_rank_death
from tests.benchmarks.shim import bench_shim
from tests.benchmarks.slow_ranks import bench_stragglers
from tests.benchmarks.slurm import bench_slurm, bench_slurm_start
from tests.benchmarks.start import bench_start
from tests.benchmarks.start_memory import bench_start_memory
from tests.benchmarks.straggler import bench_gc
from tests.benchmarks.watch_cost import bench_watch
from tests.benchmarks.watch_scale import bench_watch_scale
from tests.probe.machine_trees import short_lived

TIMED: Mapping[str, tuple[Callable[[Path, int], None], int]] = {
    "start-1": (partial(bench_start, ranks=1), 5),
    "start-2": (partial(bench_start, ranks=2), 5),
    "start-8": (partial(bench_start, ranks=8), 3),
    "start-bare": (partial(bench_start, ranks=2, imports=False), 5),
    "start-memory": (bench_start_memory, 1),
    "recovery": (bench_recovery, 3),
    "recovery-slurm": (bench_rank_death, 2),
    "recovery-node": (bench_node_death, 1),
    "recovery-hang": (bench_hang_recovery, 1),
    "command": (bench_command, 10),
    "shim": (bench_shim, 40),
    "probe": (bench_probe, 20),
    "output": (bench_output, 5),
    "slurm": (bench_slurm, 6),
    "slurm-start": (bench_slurm_start, 3),
    "gc": (bench_gc, 3),
    "gc-memory": (bench_garbage_memory, 5),
    "watch-scale": (bench_watch_scale, 5),
}
"""What is timed, with the rounds of each."""
WATCHING: Mapping[str, Callable[[Path, Mapping[str, str]], None]] = {
    "hangs": bench_hangs,
    "watch-cost": bench_watch,
    "false-alarms": bench_false_alarms,
    "stragglers": bench_stragglers,
    "fit": bench_fit,
    "fidelity": bench_fidelity,
}
"""Real hangs, real hours, a grid of models: not among those that run if none is named."""


def main() -> None:
    """Run the benchmarks that are named, or all."""
    words = [word for word in sys.argv[1:] if "=" not in word]
    options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    rounds = [int(options["rounds"])] if "rounds" in options else []
    names = (*TIMED, *WATCHING)
    if set(words) - set(names):
        sys.exit(f"benchmarks are {', '.join(names)}, not {', '.join(sorted(set(words) - set(names)))}")
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}, Python {platform.python_version()}, torch {version('torch')}", flush=True)
    for name in words or TIMED:
        if name in WATCHING:
            with short_lived() as folder:
                WATCHING[name](folder, options)
            continue
        bench, usual = TIMED[name]
        with short_lived() as folder:
            bench(folder, *(rounds or [usual]))


if __name__ == "__main__":
    main()
