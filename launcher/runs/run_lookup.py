"""Finds runs below `runs_dir`: the newest, or those that a name, a path or the number of a job means."""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path

from launcher.files import LARGEST, is_planted, open_directory, read_file
from launcher.runs.manifest import JOB, read_job, read_manifest
from launcher.runs.run_directory import closing_descriptor

STAMP = re.compile(r"(\d{8}-\d{6})(?:-(\d+))?")
"""A run's ID as `launch` chooses it."""
MOST_NEAR = 200
"""Runs whose names are compared with one that is not found."""


class RunLookupError(LookupError):
    """No run, or several, are meant by a name: what there is instead."""


def list_runs(runs_dir: Path) -> Iterator[Path]:
    """Give the run directories, the newest first; whether one has a manifest is looked up as it is given."""
    folders = [run for name in list_within(runs_dir) for run in list_within(name)]
    return (path for path in sorted(folders, key=read_age, reverse=True) if is_run(path))


def list_within(folder: Path) -> list[Path]:
    """Return the folders in a folder, another user's symbolic links left out; none if it cannot be read."""
    try:
        with closing_descriptor(open_directory(folder)) as at, os.scandir(at) as entries:
            found = [entry for entry in entries if entry.is_dir()]
            links = [e.name for e in found if e.is_symlink() and is_planted(e.stat(follow_symlinks=False))]
            return [folder / entry.name for entry in found if entry.name not in links]
    except (OSError, ValueError):
        return []


def read_age(path: Path) -> tuple[str, int, str]:
    """Return what orders runs by their start: the ID tells it, else the folder's time of change."""
    span = STAMP.fullmatch(path.name)
    if span:
        return span[1], int(span[2] or 1), path.parent.name
    try:
        changed = path.stat().st_mtime
    except OSError:
        changed = 0.0
    return datetime.fromtimestamp(changed).astimezone().strftime("%Y%m%d-%H%M%S"), 0, path.name


def is_run(path: Path) -> bool:
    """Tell whether a folder is a run's."""
    try:
        return (path / "manifest.json").is_file()
    except (OSError, ValueError):  # too long to be a path, or with a NUL in it
        return False


def name_run(path: Path) -> str:
    """Return a run's name as the verbs take it, `NAME/ID`."""
    return f"{path.parent.name}/{path.name}"


def find_runs(runs_dir: Path, text: str) -> tuple[Path, ...]:
    """Return the runs that a text means: several only for the number of a job array, its newest members.

    It is a path, `NAME/ID`, an ID, the NAME of runs (the newest), or a job's number (`12`, `12_3`). Raises
    RunLookupError.
    """
    for path in (runs_dir / text, Path(text)):
        if "/" in text.rstrip("/") and is_run(path):
            return (path.absolute(),)
    jobs = find_jobs(runs_dir, text) if JOB.fullmatch(text) else ()
    named = find_named(runs_dir, text)
    if jobs and named:
        raise RunLookupError(
            f"{text} is the job of {name_run(jobs[0])}, and means {name_run(named)} too: write NAME/ID"
        )
    if jobs or named:
        return (named,) if named else jobs
    if is_run(Path(text)):
        return (Path(text).absolute(),)
    raise RunLookupError(explain_missing_run(runs_dir, text))


def find_named(runs_dir: Path, text: str) -> Path | None:
    """Return the run with this ID, or the newest of this name; raises RunLookupError for an ID of several."""
    if not text or "/" in text or text in (".", ".."):
        return None
    same = sorted(name / text for name in list_within(runs_dir) if is_run(name / text))
    if len(same) > 1:
        shown = ", ".join(name_run(path) for path in same[:8])
        raise RunLookupError(f"{text} is the ID of {len(same)} runs: write one of {shown}")
    own = sorted(list_within(runs_dir / text), key=read_age, reverse=True)
    return same[0] if same else next((path.absolute() for path in own if is_run(path)), None)


def find_jobs(runs_dir: Path, number: str) -> tuple[Path, ...]:
    """Return the newest run of a job, or of each member of a job array, in the order of their numbers."""
    mark = f'"{number}'.encode()
    found: dict[str, Path] = {}
    for path in list_runs(runs_dir):
        try:
            if mark not in read_file(path / "manifest.json", LARGEST):
                continue  # parsing thousands of manifests would take seconds
        except OSError:
            continue
        job_id = read_job(read_manifest(path))
        if job_id == number:
            return (path.absolute(),)
        if job_id and job_id.partition("_")[0] == number:
            found.setdefault(job_id, path.absolute())
    members = sorted(found, key=lambda job_id: int(job_id.partition("_")[2]))
    return tuple(found[job_id] for job_id in members)


def explain_missing_run(runs_dir: Path, text: str) -> str:
    """Say that there is no such run, with the names that are near."""
    newest = list(islice(list_runs(runs_dir), MOST_NEAR))
    if not newest:
        return f"there is no run {text!r}: none is below runs_dir={runs_dir}; name another with runs_dir=DIR"
    known = [form for path in newest for form in (path.parent.name, path.name, name_run(path))]
    near = difflib.get_close_matches(text, dict.fromkeys(known), n=3, cutoff=0.6)
    what = "job" if JOB.fullmatch(text) else "run"
    hint = f"did you mean {' or '.join(near)}?" if near else f"the newest is {name_run(newest[0])}"
    return f"there is no {what} {text!r} below runs_dir={runs_dir}: {hint}"


def choose_runs(runs_dir: Path, texts: Sequence[str]) -> list[Path]:
    """Return the runs that some texts mean, each once; raises RunLookupError."""
    return list(dict.fromkeys(path for text in texts for path in find_runs(runs_dir, text)))
