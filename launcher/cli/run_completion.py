"""Completion for the verbs that take runs: their names, their jobs, and the keys that count."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from launcher.config.hydra_flags import parse_flags
from launcher.config.schema import LaunchConfig
from launcher.config.search_path import find_shipped
from launcher.errors import UsageError
from launcher.runs.find import list_runs, name_run
from launcher.runs.manifest import read_job, read_manifest, take_dict
from launcher.runs.run_status import LIVE, STATES

KEYS = {
    "status": ("format=", "runs_dir="),
    "logs": ("-f", "rank=", "logs.tail=", "runs_dir="),
    "cancel": ("yes=true", "runs_dir="),
}
"""What each verb reads, beside the names."""
MOST = 100
"""Newest runs that are offered: a shell waits for the answer."""


def complete_names(verb: str, before: Sequence[str], last: str) -> list[str]:
    """Return what may stand where the line ends: keys, then runs, the newest first, then jobs.

    Runs that have ended are not offered to `cancel`.
    """
    given = {word.partition("=")[0] for word in before if "=" in word}
    try:
        runs_dir = find_runs_dir(before)
    except UsageError:  # a line that makes no sense yet, or a configuration that makes none
        return []
    keys = [key for key in KEYS[verb] if key.partition("=")[0] not in (*given, *before)]
    names, jobs = [], []
    for path in islice(list_runs(runs_dir), MOST):
        manifest = read_manifest(path)
        state = STATES.get(str(take_dict(manifest, "outcome").get("state")))
        if verb != "cancel" or state in LIVE:
            names.append(name_run(path))
            jobs.append(read_job(manifest))
    answers = [*keys, *names, *(job for job in jobs if job)]
    return [word for word in answers if word.startswith(last) and word not in before]


def find_runs_dir(before: Sequence[str]) -> Path:
    """Return where runs are, by the line or the user's own configuration; raises UsageError."""
    given = [word.partition("=")[2] for word in before if word.startswith("runs_dir=")]
    if given and given[-1]:
        return Path(given[-1])
    sources = parse_flags([word for word in before if word != "-f"]).sources
    primary = sources.find_file(sources.primary)
    if primary is None or find_shipped() in primary.parents:
        return Path(LaunchConfig.runs_dir)
    from launcher.config.composition import compose, resolve  # Hydra takes longer than all of the rest

    return Path(resolve(compose(sources, ())).runs_dir)
