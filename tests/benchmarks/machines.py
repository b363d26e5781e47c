"""Machines written out as files for the benchmarks."""

from pathlib import Path

from tests.plan.lab_machines import Data, fsroot


def write_tree(data: Data, folder: Path) -> Path:
    """Write a machine's description out below `folder`, and return the tree's root."""
    root = folder / str(data["name"])
    fsroot.materialize(data, root)
    return root


def describe_size(cpus: int) -> Data:
    """A two-package machine of `cpus` CPUs (8 or more), SMT, 8 cores to a cache, as servers are numbered.

    8 GPUs and as many NICs from 128 CPUs on, one to 16 CPUs below; a NUMA node has 64 CPUs at most.
    """
    nodes = max(2, cpus // 64)
    cores = cpus // 2
    each = cores // nodes
    firsts = [at * each for at in range(nodes)]
    devices = max(1, min(8, cpus // 16))
    homes = [at * nodes // devices for at in range(devices)]
    return {
        "name": f"{cpus}-cpus",
        "numa": [
            {
                "id": at,
                "package": at * 2 // nodes,
                "cpus": f"{low}-{low + each - 1},{low + cores}-{low + cores + each - 1}",
                "gib": 64,
            }
            for at, low in enumerate(firsts)
        ],
        "threads": {"offset": cores},
        "l3_cores": 8,
        "distance": [12, 32],
        "gpus": [
            {
                "bdf": f"0000:{16 * at + 7:02x}:00.0",
                "numa": node,
                "model": "GPU",
                "switch": f"{16 * at + 1:02x}",
            }
            for at, node in enumerate(homes)
        ],
        "nics": [
            {
                "name": f"mlx5_{at}",
                "bdf": f"0000:{16 * at + 9:02x}:00.0",
                "numa": node,
                "switch": f"{16 * at + 1:02x}",
            }
            for at, node in enumerate(homes)
        ],
    }
