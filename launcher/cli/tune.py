"""`launch tune`: finds a setting that a program is fastest with, by running it again and again."""

import contextlib
import json
import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.config_programs import name_files, report_config_programs
from launcher.cli.output_files import check_target, explain, write_file
from launcher.cli.run import plan_job, specify_job, try_anew
from launcher.cli.tune_trial import (
    FailedTrialError,
    FinishedTrial,
    InterruptedTrialError,
    describe_program,
    plan_trial,
    run_trial,
)
from launcher.config.compose import read_values
from launcher.config.run_path import choose_run_path
from launcher.errors import LaunchError, MachineError, UsageError
from launcher.files import open_file
from launcher.launch.job import Job, JobSpec, render_start
from launcher.launch.local_run import prepare_run
from launcher.report.console import make_console
from launcher.report.fit import announce_trial
from launcher.runs.manifest import stamp_time, write_manifest
from launcher.runs.run_directory import RunDir, write_json
from launcher.text import count_things, join_words, print_text
from launcher.tune.trials import MeasureError, Trial

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.config.compose import Composed

logger = logging.getLogger(__name__)

CHOICE_FILES = ("conf/dataloader/tuned.yaml", "conf/program/tuned.yaml")
"""Files that later runs find from the working directory; their folders are made."""
MARK = "# Written by `launch tune "
"""Beginning of a file that may be replaced; the subject follows."""


class Strategy(ABC):
    """What is tuned, and how: which value is next, how a program gets it, what the trials say."""

    subject: str
    """What is tuned, as the command line names it."""
    group: str
    """The group of the configuration of which the choice is an option."""
    variables: tuple[str, ...]
    """Variables of the environment that a trial sets."""

    def __init__(self, composed: "Composed", spec: JobSpec, argv: Sequence[str]) -> None:
        self.composed = composed
        self.spec = spec
        """What the trials have in common."""
        self.argv = argv
        """The whole command line."""
        self.trials: list[Trial] = []
        self.target: str | None = spec.config.save
        """The file in which the choice is kept."""

    @abstractmethod
    def set_bounds(self, job: Job) -> str:
        """Decide what the search keeps to, and say it; raises UsageError."""

    @abstractmethod
    def preview(self) -> str:
        """Say which values would be tried."""

    @abstractmethod
    def next(self) -> int | None:
        """Return the value to try next; None if what a few runs can tell is known.

        Raises MeasureError if the trials show that the program does not take the value.
        """

    @abstractmethod
    def argument(self, value: int) -> str:
        """Return a value as people read it."""

    @abstractmethod
    def specify(self, value: int, run_path: Path) -> JobSpec:
        """Return the trial of a value, which is kept in the run directory of the search."""

    def is_starved(self) -> bool:
        """Tell whether a trial has to end since the machine's memory runs out."""
        return False

    @abstractmethod
    def judge(self, finished: FinishedTrial, value: int) -> Trial:
        """Return what a trial has brought; raises MeasureError, or InterruptedTrialError for a signal."""

    @abstractmethod
    def excuse(self, error: MeasureError, value: int) -> Trial | None:
        """Return the trial of a failure that is put down to its value; None if the program can't be tuned."""

    @abstractmethod
    def describe(self, trial: Trial) -> str:
        """Return a trial in a line, or a few."""

    @abstractmethod
    def conclude(self) -> int | None:
        """Return the value to use; None if there is none."""

    @abstractmethod
    def render_choice(self) -> tuple[Sequence[Sequence[str]], Mapping[str, object]]:
        """Return the table of the trials, the head first, and the settings of the choice's file as YAML."""

    @abstractmethod
    def to_json(self) -> dict[str, object]:
        """Return what was found, with the trials, for programs; what is not known is null."""

    @abstractmethod
    def show(self, console: "Console") -> None:
        """Print the trials for people."""

    @abstractmethod
    def advise(self, saved: str | None, *, is_early: bool) -> list[str]:
        """Say what was chosen and how it is used, or why nothing is; `saved` is the file that was written."""


def tune_program(
    composed: "Composed", names: Sequence[str], program: tuple[str, ...] | None, argv: Sequence[str]
) -> int:
    """Tune what is named for a program, and return the exit code; raises LaunchError."""
    from launcher.cli.tune_batch import BatchStrategy
    from launcher.cli.tune_dataloader import WorkersStrategy

    strategies = {kind.subject: kind for kind in (WorkersStrategy, BatchStrategy)}
    if len(names) != 1 or names[0] not in strategies:
        given = f"`{names[0]}` cannot be tuned" if names else "tune what?"
        raise UsageError(
            f"{given}: say `launch tune dataloader [KEY=VALUE …] [-- PROGRAM ARGUMENT …]`, or `launch tune"
            " batch tune.option=--batch-size …`"
        )
    kind = strategies[names[0]]

    def search() -> int:
        _measure_here(composed)
        run_path = choose_run_path(composed, program, suffix="-tune")
        spec = specify_job(composed, program, run_path, os.environ, "launch tune")
        for name in kind.variables:
            if name in spec.config.env:
                raise UsageError(f"env.{name} is set, which `launch tune` chooses: leave it out")
        return _search(kind(composed, spec, argv))

    return try_anew(search)


def _measure_here(composed: "Composed") -> None:
    """Have the trials run on this machine; raises UsageError for a job that is to run elsewhere."""
    values = read_values(composed, ("nodes", "cluster.kind", "run_dir", "new_run_dir"))
    nodes, kind = str(values["nodes"]), str(values["cluster.kind"])
    for key in ("run_dir", "new_run_dir"):
        if values[key] is not None:
            raise UsageError(
                f"{key}={values[key]}: `launch tune` makes a run directory of its own, leave it out"
            )
    if nodes not in ("auto", "1", "1:1"):
        raise UsageError(f"nodes={nodes}: `launch tune` measures on one node, leave nodes out")
    if kind in ("slurm", "manual"):
        raise UsageError(
            f"cluster={kind}: `launch tune` runs the program here, again and again: run it on a node like"
            " those of the job, inside an allocation (`salloc`, then `srun -N1 -n1 launch tune …`)"
        )
    job = os.environ.get("SLURM_JOB_ID")
    if kind != "local" and job and "SLURMD_NODENAME" not in os.environ:
        raise UsageError(
            f"this shell belongs to SLURM job {job}, but is not on its nodes: `srun -N1 -n1 launch tune …`,"
            " or set cluster=local to measure here"
        )
    composed.tree.cluster.kind, composed.tree.nodes = "local", 1


def _search(strategy: Strategy) -> int:
    """Try values until the best is known, keep it, and return the exit code.

    Raises LaunchError, and RunIdTakenError before anything has run.
    """
    spec, composed = strategy.spec, strategy.composed
    if strategy.target is not None:
        check_choice_file(strategy.target, replaces=spec.config.yes)
    job = plan_job(spec)
    bounds = strategy.set_bounds(job)
    if spec.config.dry_run:
        return _preview(strategy)
    run, manifest = prepare_run(spec, strategy.argv, [job.host])
    name_files(composed.own_files)
    report_config_programs([spec], composed.own_files)
    where = f"{describe_program(spec)} on {count_things(len(job.plan.ranks), 'rank')} of {job.host}"
    logger.info(f"{where}, {bounds}")
    logger.info(f"run directory {run.path}")
    interrupted, value = 0, None
    try:
        _try_values(strategy, run)
        value = strategy.conclude()
        if value is None:
            raise MachineError(f"{strategy.advise(None, is_early=False)[0]} (run directory {run.path})")
    except InterruptedTrialError as error:
        interrupted = error.args[0]
    except KeyboardInterrupt:  # between two runs
        interrupted = signal.SIGINT
    except (MeasureError, LaunchError) as error:
        return _give_up(error, run, manifest)
    saved = strategy.target if not interrupted and value is not None else None
    if saved is not None:
        rows, settings = strategy.render_choice()
        write_choice(saved, strategy.subject, rows, where, settings)
    result = {
        "schema": 1,
        "subject": strategy.subject,
        "complete": not interrupted,
        **strategy.to_json(),
        "saved": saved,
    }
    with contextlib.suppress(OSError):
        write_json(run.path / "tuning.json", result)
    status = 128 + interrupted if interrupted else 0
    _end_run(run, manifest, "stopped" if interrupted else "succeeded", status)
    if spec.config.format == "json":
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    elif strategy.trials:
        strategy.show(make_console(stderr=False))
        sys.stdout.flush()
    for line in strategy.advise(saved, is_early=bool(interrupted)):
        logger.info(line)
    return status


def _try_values(strategy: Strategy, run: RunDir) -> None:
    """Try one value after the other; raises MeasureError if the program cannot be tuned so."""
    while (value := strategy.next()) is not None:
        progress = announce_trial(make_console(), f"trying {strategy.argument(value)} …")
        try:
            finished = run_trial(
                strategy.specify(value, run.path), strategy.argv, progress, strategy.is_starved
            )
            trial = strategy.judge(finished, value)
        except MeasureError as error:
            excused = strategy.excuse(error, value)
            if excused is None:
                raise
            trial = excused
        strategy.trials.append(trial)
        for line in strategy.describe(trial).splitlines():
            logger.info(line)


def _preview(strategy: Strategy) -> int:
    """Show what would be tried, and start nothing."""
    trial = strategy.specify(strategy.next() or 0, Path("RUN_DIR"))
    variables = [f"{name}={trial.environ[name]}" for name in strategy.variables]
    command = join_words(["env", *variables, *render_start(plan_trial(trial)[1], "RUN_ID")])
    written = f"would write {strategy.target}\n" if strategy.target else ""
    steps = strategy.spec.config.tune.steps
    print_text(f"would try {strategy.preview()}, each for {steps} steps at most\n{written}{command}\n")
    return 0


def _give_up(error: MeasureError | LaunchError, run: RunDir, manifest: dict[str, object]) -> int:
    """Say why nothing could be measured; returns the program's exit code, or raises LaunchError."""
    status = error.status if isinstance(error, FailedTrialError) else getattr(error, "exit_code", 2)
    _end_run(run, manifest, "failed", status)
    if isinstance(error, LaunchError):
        raise error
    if not isinstance(error, FailedTrialError):
        raise UsageError(f"{error} (run directory {run.path})")
    for line in str(error).splitlines():
        logger.info(line)
    logger.info(f"run directory {run.path}")
    return error.status


def _end_run(run: RunDir, manifest: dict[str, object], state: str, status: int) -> None:
    """Complete the manifest; raises MachineError."""
    manifest["ended"] = stamp_time()
    manifest["outcome"] = {"state": state, "exit_code": status}
    try:
        write_manifest(run, manifest)
    except OSError as error:
        raise MachineError(f"{run.manifest_path} cannot be written ({error}): make room") from None


def check_choice_file(name: str, *, replaces: bool) -> None:
    """Raise UsageError for a file that cannot be written, or is neither empty nor of `launch tune`."""
    path = Path(name)
    if name not in CHOICE_FILES:
        check_target("save", name)
    is_ours = replaces or not path.exists()
    if not is_ours:
        with contextlib.suppress(OSError), os.fdopen(open_file(path, follow=True), "rb") as file:
            is_ours = file.read(len(MARK)) in (b"", MARK.encode())
    if not is_ours:
        raise UsageError(
            f"{path} is there already, and `launch tune` has not written it: name another with save=FILE, or"
            " set yes=true to replace it"
        )
    near = next(folder for folder in path.absolute().parents if folder.exists())
    if not near.is_dir() or not os.access(near, os.W_OK | os.X_OK):
        raise UsageError(
            f"{path} cannot be written ({near} is no folder to write to): name another, save=FILE"
        )


def write_choice(
    name: str, subject: str, rows: Sequence[Sequence[str]], where: str, settings: Mapping[str, object]
) -> None:
    """Write an option of the configuration, with what was measured where in comments.

    Whole or not at all; raises UsageError or MachineError.
    """
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    comments = [f"{MARK}{subject}`, {when}: {where}"]
    for row in rows:
        comments.append("#   " + "  ".join(map(str.rjust, row, widths)))
    # What ends a line must not end a comment if it is among the program's words.
    lines = [" ".join(line.splitlines()).rstrip() for line in comments]
    lines += [f"{key}: {value}" for key, value in settings.items()]
    path = Path(name)
    try:
        if name in CHOICE_FILES:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain("save", name, error) from None
    write_file("save", name, ("\n".join(lines) + "\n").encode("utf-8", "replace"))


def describe_use(name: str, group: str, program: str = "") -> str:
    """Say how later runs use the file; `program` is `-- PROGRAM …` after a space, or nothing."""
    path = Path(name).absolute()
    option = f"{group}={path.stem}"
    if path.suffix != ".yaml" or path.parent.name != group:
        return f"put it into conf/{group}/ as NAME.yaml, and `launch {group}=NAME{program}` uses it"
    if path.parent.parent == Path("conf").absolute():
        return f"`launch {option}{program}` uses it"
    return f"`launch --config-dir {os.path.relpath(path.parent.parent)} {option}{program}` uses it"


HELP = """\
usage: launch tune dataloader|batch [KEY=VALUE ...] [PROGRAM ARGUMENT ...]

Runs the program on this machine with several values of a setting, for some
dozens of steps each, and ends it when its speed is clear. The program is not
changed. It starts from its beginning each time, and writes what it writes.

dataloader  The number of DataLoader workers. A DataLoader(...) without
            num_workers gets the number to be tried, and so do
            LAUNCH_NUM_WORKERS and `{num_workers}` among the arguments. The
            choice, the fewest workers that are as fast as any, is kept as an
            option of the group dataloader.
batch       The largest micro-batch that fits in memory, and the fastest one, by
            the program's own option. The argument to use is printed.

  format=table|json    json: {"schema": 1, "trials": [...], ...} and the choice:
                       num_workers, or batch, largest, fastest, argument
  dry_run=true         show what would be tried
  save=FILE            where to keep the choice (dataloader: by default
                       conf/dataloader/tuned.yaml, which
                       `launch dataloader=tuned` takes; batch: for the bundled
                       program, such as conf/program/tuned.yaml)
  yes=true             replace a file there that launch has not written
  tune.option=OPTION   batch: the program's option, as --batch-size or
                       train.batch_size= (for Hydra's); the bundled program's
                       is known
  tune.max_batch=N     largest micro-batch to try (4096)
  tune.max_workers=N   workers of a rank at most (auto: two for each of its
                       cores, if memory allows)
  tune.steps=N         measured steps at most for each value (48)
  tune.seconds=N       seconds of measuring for each value (60)
  tune.timeout=N       seconds that a run of the program may take (900)

  launch tune dataloader train.py --epochs 1
  launch tune dataloader nproc_per_node=2 tune.max_workers=8 train.py
  launch tune batch tune.option=--batch-size train.py --epochs 1
  launch tune batch +model=gpt2 save=conf/program/tuned.yaml
"""
