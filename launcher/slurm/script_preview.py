"""`dry_run=true` for SLURM: a script that sbatch takes, and the plan; nothing is written or submitted."""

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from launcher.config.schema import MachineConfig
from launcher.config.suggestions import suggest
from launcher.config.yaml_files import read_yaml
from launcher.errors import UsageError
from launcher.launch.job import Draft, name_run, plan_configured
from launcher.runs.secrets import MASK, mask_words
from launcher.slurm.batch_script import Script, check_syntax, render_standalone
from launcher.slurm.job_request import JobRequest, make_request
from launcher.slurm.job_resources import Asked
from launcher.slurm.notation import read_gpus
from launcher.slurm.standalone_script import RUN_ID, hides, render_document
from launcher.text import print_text

logger = logging.getLogger(__name__)


def preview_submission(drafts: Sequence[Draft], argv: Sequence[str], asked: Asked, script: Script) -> int:
    """Show the plan on stderr and the script on stdout; returns the exit code."""
    folders = list(map(foresee_run, drafts))
    requests = [make_request(draft, argv, folder) for draft, folder in zip(drafts, folders, strict=True)]
    text = render_standalone(script, render_document(requests, folders))
    check_syntax(text, script.setup)
    show_plan(drafts[0], asked)
    for line in tell_secrets(requests):
        logger.info(line)
    sys.stderr.flush()
    print_text(text)
    return 0


def foresee_run(draft: Draft) -> Path:
    """Return the run directory, with RUN_ID for what the job's number decides."""
    if draft.config.run_dir:
        return Path(draft.config.run_dir).absolute()
    return Path(draft.config.runs_dir).absolute() / name_run(draft) / RUN_ID


def tell_secrets(requests: Sequence[JobRequest]) -> Iterator[str]:
    """Say which secrets are not in the script, and how the job gets them."""
    names = {name for request in requests for name, value in request.config.env.items() if hides(name, value)}
    if names:
        yield f"the script leaves out {', '.join(sorted(names))}: export them before sbatch"
    if any(request.words and mask_words(request.words) != [*request.words] for request in requests):
        yield f"warning: the script has {MASK} for a secret among the program's arguments: write it there"


def show_plan(draft: Draft, asked: Asked) -> None:
    """Show the plan for the nodes, where it is known what they are."""
    from launcher.report.console import make_console
    from launcher.report.placement_table import print_placement

    config = draft.config
    snapshot = config.machine.snapshot
    if config.cluster.machine is not None:
        snapshot = find_snapshot(draft, config.cluster.machine)
    if snapshot is None:
        logger.info(
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
