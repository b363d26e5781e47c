"""`launch nodes`: what is known of each node over past runs."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

from launcher.cli.verbs import VerbCall
from launcher.errors import UsageError
from launcher.files import read_file
from launcher.runs.manifest import parse_manifest
from launcher.runs.node_history import NodeHistory, collect_history
from launcher.runs.run_lookup import list_runs, name_run
from launcher.slurm.notation import expand_hosts
from launcher.text import print_text

SCHEMA = 1
"""Version of the JSON form."""
MOST_RUNS = 5000
"""Newest runs that are looked through."""
MOST_BYTES = 4 << 20
"""Of a manifest that is looked at: one of a hundred attempts on a thousand nodes has less."""
HUGE = re.compile(r"\[.*\d{6}|\].*\[")
"""In a list of nodes: more of them than are worth naming one by one."""
MOST_NODES = 100
"""Nodes that are shown if none is named."""


def show_nodes(call: VerbCall) -> int:
    """Print what is known of the nodes; returns 0. Raises UsageError for a name that no node has."""
    config = call.config
    nodes = collect_history(read_manifests(Path(config.runs_dir)))
    chosen = choose_nodes_by_name(nodes, call.names, config.runs_dir)
    if config.format == "json":
        listed = [{**asdict(node), "trouble": node.trouble} for node in chosen]
        sys.stdout.write(json.dumps({"schema": SCHEMA, "nodes": listed}, indent=1) + "\n")
        return 0
    if not chosen:
        print_text(f"no run below runs_dir={config.runs_dir} yet\n")
        return 0
    from launcher.report.console import make_console
    from launcher.report.runs import print_nodes

    shown = chosen if call.names else chosen[:MOST_NODES]
    print_nodes(make_console(stderr=False), shown, detailed=bool(call.names))
    if len(shown) < len(chosen):
        print_text(
            f"and {len(chosen) - len(shown)} nodes with less trouble: name them, as in `launch nodes n1*`\n"
        )
    return 0


def read_manifests(runs_dir: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the newest runs' names and manifests; those that cannot be read are left out."""
    for path in islice(list_runs(runs_dir), MOST_RUNS):
        try:
            yield name_run(path), parse_manifest(read_file(path / "manifest.json", MOST_BYTES))
        except OSError:
            continue


def choose_nodes_by_name(
    nodes: Sequence[NodeHistory], names: Sequence[str], runs_dir: str
) -> tuple[NodeHistory, ...]:
    """Return the nodes that names or patterns mean, all if there are none; raises UsageError."""
    if not names:
        return tuple(nodes)
    matching = {name: {node.host for node in nodes if matches(node.host, name)} for name in names}
    missing = next((name for name, hosts in matching.items() if not hosts), None)
    if missing is not None:
        known = ", ".join(sorted(node.host for node in nodes)[:8]) or "none is known"
        raise UsageError(f"no run below runs_dir={runs_dir} was on a node {missing!r}: {known}")
    wanted = set().union(*matching.values())
    return tuple(node for node in nodes if node.host in wanted)


def matches(host: str, name: str) -> bool:
    """Tell whether a name, a pattern (`n1*`) or a list of SLURM's (`n[08-12]`) means a host."""
    try:
        is_list = not {*"*?!"} & {*name} and not HUGE.search(name)
        return host in expand_hosts(name) if is_list else fnmatchcase(host, name)
    except ValueError:
        return fnmatchcase(host, name)


HELP = """\
usage: launch nodes [NODE ...] [KEY=VALUE ...]

Shows what is known of each node over past runs, the ones with the most trouble
first: runs, preflights that found it sick, losses, hangs in which it held the
others up, slow ranks, warnings of preflight. Of each, an attempt counts once.
NODE is a name, a pattern (n1*), or a list as SLURM writes it (n[08-12]); of
nodes that are named, the events are shown too.

  format=table|json    json: {"schema": 1,
                       "nodes": [{host, runs, sick, lost, events, ...}]}
  runs_dir=DIR         where the runs are (runs)

  launch nodes
  launch nodes format=json
"""
