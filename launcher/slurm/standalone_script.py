"""`launch … dry_run=true > job.sh; sbatch job.sh`: a script that holds the job's request.

The run directory is made once the job starts, as `RUNS_DIR/NAME/job-NUMBER`; later attempts find it again.
"""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from launcher.codec import DecodeError, convert
from launcher.config.settings import Settings
from launcher.errors import MachineError, UsageError
from launcher.files import open_append, open_below
from launcher.protocol import LAUNCH_SECRETS
from launcher.runs.manifest import describe_start, read_manifest, take_dict, write_manifest
from launcher.runs.run_directory import (
    RunDir,
    closing_descriptor,
    find_write_error,
    open_run_dir,
    write_private,
)
from launcher.runs.run_status import explain_outcome
from launcher.runs.secrets import MASK, is_secret, mask_text, mask_tree, mask_words
from launcher.slurm.commands import count_restarts, name_job
from launcher.slurm.first_node import run_batch_script
from launcher.slurm.job_request import JobRequest, make_job_request, write_job_request
from launcher.text import escape_text, print_text

if TYPE_CHECKING:
    from launcher.launch.job import JobSpec
    from launcher.slurm.batch_script import Script
    from launcher.slurm.job_options import JobOptions

logger = logging.getLogger(__name__)

RUN_ID = "RUN_ID"
"""Stands for the name of the run directory, which is known once the job has a number."""


def render_document(requests: Sequence[JobRequest], folders: Sequence[Path]) -> str:
    """Return the requests as JSON, a list with one for each member of an array.

    `folders` are their run directories, as they stand in the configuration: the last name is RUN_ID if the
    directory is still to be made. Secrets are left out; so are settings that are as the schema has them.
    """
    usual = asdict(Settings())
    documents: list[dict[str, object]] = []
    for request, folder in zip(requests, folders, strict=True):
        data = json.loads(json.dumps(asdict(replace(request, config=Settings()))))
        config = find_changed(asdict(request.config), usual)
        config.pop("dry_run", None)
        env = {
            name: value
            for name, value in config.pop("env", {}).items()
            if not is_hidden_variable(name, value)
        }
        whole = {**data, "config": {**config, **({"env": env} if env else {})}}
        masked = {key: mask_tree(value, hide=is_secret(key)) for key, value in whole.items()}
        about = {"schema": 1, "run_dir": str(folder), "has_secrets": masked != whole}
        documents.append({**about, **masked})
    return json.dumps(documents if len(documents) > 1 else documents[0], indent=1)


def is_hidden_variable(name: str, value: str) -> bool:
    """Tell whether a variable is a secret, or has one in it."""
    return is_secret(name) or mask_text(value) != value


def find_changed(value: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """Return what of nested mappings differs from the usual."""
    changed = {}
    for key, item in value.items():
        own = usual.get(key)
        if isinstance(item, dict) and isinstance(own, dict) and own:
            if inner := find_changed(item, own):
                changed[key] = inner
        elif key not in usual or item != own:
            changed[key] = item
    return changed


def run_standalone(text: str, environ: Mapping[str, str]) -> int:
    """Run one attempt of the job that a script's document describes; raises LaunchError."""
    data = choose_member(text, environ)
    run = open_standalone_run(Path(data["run_dir"]), environ)
    request = read_document(data, run.path)
    secrets = write_job_request(request, run.path)
    if not run.manifest_path.exists():
        write_private(
            run.path / "config.yaml", yaml.safe_dump(mask_tree(asdict(request.config)), sort_keys=False)
        )
        start = describe_start(run, request.command, request.choices)
        slurm = {"slurm": {"job_id": name_job(environ)}, "outcome": {"state": "submitted"}}
        write_manifest(run, {**start, "directory": request.directory, "hosts": [], **slurm})
    if secrets:
        os.environ[LAUNCH_SECRETS] = json.dumps({str(run.path): secrets})
    own = redirect_to_log(run, environ)
    try:
        return run_batch_script(run.path)
    finally:
        with contextlib.suppress(OSError):
            os.write(own, f"launch: {escape_text(describe_attempt_end(run))}\n".encode(errors="replace"))
        os.close(own)


def choose_member(text: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the document of this job, in an array that of this member; raises UsageError."""
    try:
        data = json.loads(text)
        is_array = isinstance(data, list)
        found: dict[str, Any] = data[int(environ["SLURM_ARRAY_TASK_ID"])] if is_array else data
        if found["schema"] != 1:
            raise KeyError("schema")
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"the job's description in its script cannot be read ({error!r}): make the script anew, `launch …"
            " dry_run=true > job.sh`, and submit it with sbatch"
        ) from None
    return found


def open_standalone_run(planned: Path, environ: Mapping[str, str]) -> RunDir:
    """Make the run directory of this job, or open that of its earlier attempts; raises MachineError."""
    try:
        return open_run_dir(choose_job_path(planned, environ), None)
    except OSError as error:
        raise MachineError(
            f"{os.uname().nodename} cannot write the run directory, {error.filename} ({error.strerror}):"
            " make the script with runs_dir=DIR on a filesystem that all nodes share"
        ) from None


def choose_job_path(planned: Path, environ: Mapping[str, str]) -> Path:
    """Return the run directory: `job-12`, or `job-12-2` if an earlier cluster had a job of that number."""
    if planned.name != RUN_ID:
        return planned
    path, last, number = planned.with_name(f"job-{name_job(environ)}"), None, 1
    first = path
    while path.exists():
        last, number = path, number + 1
        path = first.with_name(f"{first.name}-{number}")
    return last if last and count_restarts(environ) else path


def read_document(data: dict[str, Any], path: Path) -> JobRequest:
    """Return the request, with the run directory in place of the foreseen one; raises UsageError."""
    text = json.dumps(data)
    found = json.loads(text.replace(json.dumps(data["run_dir"])[1:-1], json.dumps(str(path))[1:-1]))
    if data["has_secrets"] and MASK in json.dumps([found["config"], found["words"]]):
        raise UsageError(
            f"the script has {MASK} in place of a secret: write the secret there, or have the program read a"
            " variable, and export that before sbatch"
        )
    try:
        config = merge(asdict(Settings()), found["config"])
        return convert(JobRequest, {**found, "config": config, "command": mask_words(found["command"])})
    except (DecodeError, KeyError, TypeError) as error:
        raise UsageError(
            f"the job's description in its script lacks a part ({error!r}): make it anew"
        ) from None


def merge(usual: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that `find_changed` was given: its changes in the usual ones."""
    return usual | {
        key: merge(usual[key], item) if isinstance(item, dict) and usual.get(key) else item
        for key, item in changed.items()
    }


def describe_attempt_end(run: RunDir) -> str:
    """Say how this attempt ended, or why that is not known, in a line."""
    outcome = take_dict(read_manifest(run.path) or {}, "outcome")
    state, reason = str(outcome.get("state")), explain_outcome(outcome)
    if state == "running":
        return find_write_error(run) or "it ended without a word"
    return f"{state}: {reason}" if reason else state


def redirect_to_log(run: RunDir, environ: Mapping[str, str]) -> int:
    """Say where the run directory is, and have all that follows in the log there; raises OSError.

    Returns a descriptor of SLURM's own output file.
    """
    name = f"slurm-{environ.get('SLURM_JOB_ID', '')}.out"
    logger.info(f"run directory {run.path}: the output goes on in {run.path / 'logs' / name}")
    own = os.dup(2)
    with closing_descriptor(open_below(run.path, "logs")) as folder:
        descriptor = open_append(folder, name)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    return own


def preview_submission(
    specs: Sequence["JobSpec"], argv: Sequence[str], chosen: "JobOptions", script: "Script"
) -> int:
    """Show the plan on stderr and the script on stdout; returns the exit code."""
    from launcher.slurm.batch_script import check_syntax, render_standalone

    folders = [spec.run_path for spec in specs]
    requests = [make_job_request(spec, argv) for spec in specs]
    text = render_standalone(script, render_document(requests, folders))
    check_syntax(text, script.setup)
    print_node_plan(specs[0], chosen)
    for line in list_secret_notes(requests):
        logger.info(line)
    sys.stderr.flush()
    print_text(text)
    return 0


def list_secret_notes(requests: Sequence[JobRequest]) -> Iterator[str]:
    """Say which secrets are not in the script, and how the job gets them."""
    names = {
        name
        for request in requests
        for name, value in request.config.env.items()
        if is_hidden_variable(name, value)
    }
    if names:
        yield f"the script leaves out {', '.join(sorted(names))}: export them before sbatch"
    if any(request.words and mask_words(request.words) != [*request.words] for request in requests):
        yield f"warning: the script has {MASK} for a secret among the program's arguments: write it there"


def print_node_plan(spec: "JobSpec", chosen: "JobOptions") -> None:
    """Show the plan for the nodes, if it is known what they are."""
    from launcher.report.console import make_console
    from launcher.report.placement import print_placement
    from launcher.slurm.submission_fit import plan_snapshot

    made = plan_snapshot(spec, chosen)
    if made is None:
        logger.info(
            "each node makes its own plan: cluster.machine=NAME shows it for a shipped machine or for a"
            " snapshot that `launch topo save=FILE` wrote on such a node"
        )
        return
    print_placement(make_console(), made, explain=spec.config.explain)
