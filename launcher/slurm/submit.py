"""Submits jobs to SLURM: run directories, one sbatch, and what to do next."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launcher
from launcher.errors import LaunchError, MachineError, SchedulerError, UsageError
from launcher.launch.job import Draft
from launcher.launch.local_run import refuse_run
from launcher.protocol import LAUNCH_SECRETS
from launcher.runs.provenance import describe_sources
from launcher.runs.run_directory import write_private
from launcher.slurm.batch_script import Script, check_syntax, render_script
from launcher.slurm.job_resources import Asked, ask_for
from launcher.slurm.refusal import explain_refusal
from launcher.slurm.sbatch_environ import clean_for_sbatch
from launcher.slurm.script_comments import describe_jobs
from launcher.slurm.staging import Staged, stage_run
from launcher.text import print_text, quote_word

logger = logging.getLogger(__name__)

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - to warn of
ISOLATED = ("-I", "-P")
"""Ways to keep Python from importing what lies in the working directory, the first that finds us winning.

-I leaves PYTHONPATH out too, whose empty entries are the working directory, and which modules set.
"""


def submit_jobs(drafts: Sequence[Draft], argv: Sequence[str]) -> int:
    """Submit a job, or several as one job array, and say how to go on; returns the exit code.

    With dry_run=true, show the script and the plan. Raises LaunchError, leaving no new run directory.
    """
    dry = any(draft.config.dry_run for draft in drafts)
    # What takes a process each is asked for at the same time.
    with ThreadPoolExecutor() as pool:
        sources = None if dry else pool.submit(describe_sources, Path.cwd())
        python = pool.submit(find_python)
        asked = ask_for(drafts, os.environ, dry=dry)
        if sources is None:
            from launcher.slurm.script_preview import preview_submission

            say_warnings(asked.warnings)
            return preview_submission(
                drafts, argv, asked, describe_script(drafts, argv, asked, python.result())
            )
        staged = stage_all(drafts, argv, sources.result())
        try:
            job_id = send_script(staged, asked, describe_script(drafts, argv, asked, python.result()))
        except LaunchError:
            undo_all(staged)
            raise
    say_warnings([*asked.warnings, *check_place(staged[0].run.path)])
    jobs = note_jobs(staged, job_id)
    tell_submitted(jobs, job_id, asked)
    if not any(draft.config.follow for draft in drafts):
        return 0
    from launcher.slurm.follow import follow_jobs

    sys.stdout.flush()
    return follow_jobs([(each.run.path, number) for number, each in jobs.items()])


def stage_all(drafts: Sequence[Draft], argv: Sequence[str], sources: Mapping[str, object]) -> list[Staged]:
    """Make all run directories, or none."""
    paths = [draft.config.run_dir for draft in drafts if draft.config.run_dir]
    if len(paths) > len(set(paths)):
        raise UsageError(
            f"run_dir={paths[0]} is one directory for {len(paths)} jobs of a sweep: leave it out, and each"
            " gets its own"
        )
    staged: list[Staged] = []
    try:
        for draft in drafts:
            staged.append(stage_run(draft, argv, sources))
    except BaseException:
        undo_all(staged)
        raise
    return staged


def undo_all(staged: Sequence[Staged]) -> None:
    """Undo what was made, the last first: the first has made the directories that the others are in."""
    for each in reversed(staged):
        each.undo()


def describe_script(
    drafts: Sequence[Draft], argv: Sequence[str], asked: Asked, python: Sequence[str]
) -> Script:
    """Return what the script is made of."""
    setup = drafts[0].config.cluster.setup
    return Script(asked.options, describe_jobs(drafts, argv), tuple(setup), tuple(python))


def send_script(staged: Sequence[Staged], asked: Asked, script: Script) -> str:
    """Write the script into each run directory, submit it, and return the job's id."""
    from launcher.slurm.submission import submit_script

    config = staged[0].draft.config
    text = render_script(script, [str(each.run.path) for each in staged])
    check_syntax(text, script.setup)
    try:
        for each in staged:
            write_private(each.script, text)
    except OSError as error:
        raise refuse_run(config, error) from None
    environ = clean_for_sbatch(os.environ, [option.name for option in asked.options])
    try:
        return submit_script(staged[0].script, {**environ, **carry_secrets(staged)})
    except SchedulerError as error:
        raise explain_refusal(str(error), asked.options, asked.partitions, asked.kinds, environ) from None


def carry_secrets(staged: Sequence[Staged]) -> dict[str, str]:
    """Return the variable that tells the jobs what their files do not; mostly one value for all."""
    secrets = {str(each.run.path): each.secrets for each in staged if each.secrets}
    values = list(secrets.values())
    if len(values) == len(staged) > 1 and all(value == values[0] for value in values):
        secrets = {"": values[0]}
    return {LAUNCH_SECRETS: json.dumps(secrets)} if secrets else {}


def find_python() -> tuple[str, ...]:
    """Return this interpreter, and the option by which it finds this very package; raises MachineError."""
    for option in ISOLATED:
        words = [
            sys.executable,
            option,
            "-c",
            "import os, launcher; print(os.fsencode(launcher.__file__).hex())",
        ]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.stdout.split() == [os.fsencode(launcher.__file__).hex().encode()]:
            return (sys.executable, option)
    raise MachineError(
        f"the nodes would not find launch by {sys.executable} outside of {Path.cwd()}: install it there,"
        " `python -m pip install -e FOLDER`"
    )


def check_place(path: Path) -> list[str]:
    """Return a warning for a run directory on a disk that the nodes, as a rule, do not share."""
    return [
        f"the run directory {path} is below {folder}, which every node has its own of as a rule: runs_dir=DIR"
        " chooses a shared one"
        for folder in NODE_LOCAL
        if path.is_relative_to(folder)
    ]


def note_jobs(staged: Sequence[Staged], job_id: str) -> dict[str, Staged]:
    """Write the job's number into each manifest, and return the run directories by their numbers."""
    numbers = [job_id] if len(staged) == 1 else [f"{job_id}_{number}" for number in range(len(staged))]
    jobs = dict(zip(numbers, staged, strict=True))
    for number, each in jobs.items():
        try:
            each.note_job(number)
        except (OSError, KeyError) as error:
            logger.warning(f"{each.run.manifest_path} does not tell the job's number {number} ({error})")
    return jobs


def tell_submitted(jobs: Mapping[str, Staged], job_id: str, asked: Asked) -> None:
    """Print the job, the run directories, and the commands to go on with."""
    values = {option.name: option for option in asked.options}
    shown = [
        values[name].render() for name in ("nodes", "gpus-per-node", "cpus-per-task", "mem") if name in values
    ]
    what = "job" if len(jobs) == 1 else f"array of {len(jobs)} jobs,"
    print_line(f"submitted {what} {job_id} ({' '.join(shown)})")
    for number, each in jobs.items():
        print_line(f"{'run directory' if len(jobs) == 1 else number} {each.run.path}")
    first = next(iter(jobs.values()))
    default = (Path.cwd() / "runs") == first.run.path.parents[1]
    run = f"{first.run.path.parent.name}/{first.run.id}" if default else str(first.run.path)
    whole = job_id if default else run
    print_line(f"follow with  launch status {quote_word(whole)}")
    print_line(f"             launch logs -f {quote_word(run)}")
    print_line(f"             launch cancel {quote_word(whole)}")


def print_line(text: str) -> None:
    """Print a line of the answer."""
    print_text(f"{text}\n")


def say_warnings(warnings: Iterable[str]) -> None:
    """Print warnings; where a job is refused, its error alone is said."""
    for warning in warnings:
        logger.warning(f"{warning}")
