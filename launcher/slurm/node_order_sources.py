"""Finds the order of a job's nodes: asks SLURM for its topology, or reads the file that the user names."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.errors import SchedulerError
from launcher.files import read_file
from launcher.slurm.client import run_slurm
from launcher.slurm.node_order import (
    NodeOrder,
    keep_order,
    order_by_names,
    order_by_topology,
    parse_host_file,
    parse_topology,
)

TIMEOUT = 10.0
"""Seconds that SLURM has to tell of its switches: a job starts without, if slurmctld is busy."""
LARGEST_FILE = 16 << 20
"""Bytes of a file of nodes."""
FLAT = "node"
"""SLURM_TOPOLOGY_ADDR_PATTERN if there are no switches: then SLURM need not be asked (srun(1))."""


def find_node_order(
    setting: str, hosts: Sequence[str], environ: Mapping[str, str], directory: str
) -> NodeOrder:
    """Return the order that `cluster.node_order` asks for. What cannot be had is told of, and ends no job.

    `directory` is where a relative path starts.
    """
    if len(hosts) < 2 or setting == "slurm":
        return keep_order(hosts, "one node" if len(hosts) < 2 else "cluster.node_order=slurm")
    if setting not in ("auto", "topology"):
        return order_by_file(hosts, setting, directory)
    asked = setting == "topology"
    if environ.get("SLURM_TOPOLOGY_ADDR_PATTERN") == FLAT:
        return order_by_topology(hosts, (), asked=asked)
    try:
        text = run_slurm(("scontrol", "show", "topology"), environ, timeout=TIMEOUT)
    except SchedulerError as error:
        return keep_order(hosts, f"the switches are not known ({error})", warns=asked)
    return order_by_topology(hosts, parse_topology(text), asked=asked)


def order_by_file(hosts: Sequence[str], setting: str, directory: str) -> NodeOrder:
    """Order nodes by a file of the user's."""
    path = os.path.join(directory, Path(setting).expanduser())  # noqa: PTH118 - the directory can be relative
    try:
        names = parse_host_file(read_file(path, LARGEST_FILE, follow=True).decode("utf-8", "replace"))
    except OSError as error:
        return keep_order(hosts, f"cluster.node_order={setting}: {error.strerror}", warns=True)
    except ValueError as error:
        return keep_order(hosts, f"cluster.node_order={setting}: {error}", warns=True)
    return order_by_names(hosts, names, setting)
