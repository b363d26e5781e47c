"""`dry_run=true` for SLURM: the submission script and the plan, and nothing written or submitted."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from launcher.errors import UsageError
from launcher.job import Draft, name_run, plan_configured
from launcher.launch.slurm.notations import read_gpus
from launcher.launch.slurm.script import check_syntax, render_script
from launcher.schema import MachineConfig
from launcher.submit.asked import Asked
from launcher.suggest import suggest
from launcher.terminal import print_text
from launcher.wording import say
from launcher.yamlfiles import read_yaml

RUN_ID = "RUN_ID"
"""Stands for a run's identifier, which is made from the time of the submission."""


def preview_submission(drafts: Sequence[Draft], asked: Asked, python: Sequence[str]) -> int:
    """Show the plan on stderr and the script on stdout; returns the exit code."""
    setup = drafts[0].config.cluster.setup
    text = render_script(asked.options, foresee_runs(drafts), setup, python)
    check_syntax(text, setup)
    show_plan(drafts[0], asked)
    sys.stderr.flush()
    print_text(text)
    return 0


def foresee_runs(drafts: Sequence[Draft]) -> list[str]:
    """Return the run directories, with RUN_ID for what the submission decides."""
    found: list[str] = []
    for draft in drafts:
        own = draft.config.run_dir
        base = (
            Path(own).absolute() if own else Path(draft.config.runs_dir).absolute() / name_run(draft) / RUN_ID
        )
        same = sum(path == str(base) or path.startswith(f"{base}-") for path in found)
        found.append(f"{base}-{same + 1}" if same else str(base))
    return found


def show_plan(draft: Draft, asked: Asked) -> None:
    """Show the plan for the nodes, where it is known what they are."""
    from launcher.report.console import make_console
    from launcher.report.placement import print_placement

    config = draft.config
    snapshot = config.machine.snapshot
    if config.cluster.machine is not None:
        snapshot = find_snapshot(draft, config.cluster.machine)
    if snapshot is None:
        say(
            "each node makes its own plan: cluster.machine=NAME shows it for a shipped machine or for a"
            " snapshot that `launch topo save=FILE` wrote on such a node"
        )
        return
    ranks = config.nproc_per_node
    gpus = next((option.value for option in asked.options if option.name == "gpus-per-node"), None)
    if gpus and ranks in ("auto", "gpu"):
        ranks = read_gpus("cluster.gpus_per_node", gpus).count
    machine = MachineConfig("/", snapshot)
    plan = plan_configured(replace(config, machine=machine, nproc_per_node=ranks), draft.environ)
    print_placement(make_console(), plan, explain=config.explain)


def find_snapshot(draft: Draft, name: str) -> str:
    """Return the snapshot of a machine named as in `machine=NAME`, or a file; raises UsageError."""
    sources = draft.composed.sources
    path = sources.find_file(f"machine/{name}")
    try:
        tree = read_yaml(path) if path else {"snapshot": name}
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read ({error}): mend it, or name another machine") from None
    given = tree.get("snapshot") if isinstance(tree, dict) else None
    found = sources.find_beside("machine", str(given)) if given else None
    if found is None or not Path(found).is_file():
        near = suggest(name, sources.list_options("machine"))
        raise UsageError(f"cluster.machine={name} is no machine in conf/machine and no snapshot{near}")
    return found
