"""`launch tune`: finds a setting that a program is fastest with, by running it again and again."""

import contextlib
import json
import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.job_warnings import name_files, report_config_programs
from launcher.cli.output_files import check_target, explain, write_file
from launcher.cli.run import plan_job, specify_job, try_anew
from launcher.cli.tune_trial import (
    FailedTrialError,
    FinishedTrial,
    InterruptedTrialError,
    describe_program,
    plan_trial,
    run_trial,
    specify_trial,
)
from launcher.cli.verbs import Call, print_json
from launcher.config.compose import read_values
from launcher.config.run_path import choose_run_path
from launcher.config.settings import Settings
from launcher.errors import LaunchError, MachineError, UsageError
from launcher.files import open_file
from launcher.launch.job import Job, JobSpec, render_start
from launcher.launch.local_run import prepare_run
from launcher.plan.model import Plan
from launcher.plan.resources import limit_workers
from launcher.protocol import LAUNCH_LOADER_DEFAULT, LAUNCH_METER, LAUNCH_NUM_WORKERS
from launcher.report.console import make_console
from launcher.report.fit import announce_trial, describe_workers, print_workers, tabulate_workers
from launcher.runs.manifest import stamp_time, write_manifest
from launcher.runs.run_directory import RunDir, write_json
from launcher.text import count_things, join_words, print_text
from launcher.tune.search import choose_best, choose_next, price_all
from launcher.tune.trials import FAILED, MeasureError, MismatchError, Trial, measure_workers

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.config.compose import Composed

logger = logging.getLogger(__name__)

CHOICE_FILES = ("conf/dataloader/tuned.yaml", "conf/program/tuned.yaml")
"""Files that later runs find from the working directory; their folders are made."""
MARK = "# Written by `launch tune "
"""Beginning of a file that may be replaced; the subject follows."""
WORKERS_PER_CORE = 2
"""Workers for each core: those that read from a disk or a network wait more than they compute."""
MIN_WORKERS, MAX_WORKERS = 4, 64


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the trials say."""

    value: int | None
    """The value to use; None if there is none."""
    facts: Mapping[str, object]
    """What was found, with the trials, for programs; what is not known is null."""
    lines: Sequence[str]
    """The same for people, with how it is used; why there is none."""
    settings: Mapping[str, object]
    """What the file of the choice holds, as YAML."""


class Strategy(ABC):
    """What is tuned, and how: which value is next, how a program gets it, what the trials say."""

    subject: str
    """What is tuned, as the command line names it."""
    group: str
    """The group of the configuration of which the choice is an option."""
    variables: tuple[str, ...]
    """Variables of the environment that a trial sets."""
    describe: Callable[[Trial], str]
    """Says a trial in a line, or a few."""
    tabulate: Callable[[Sequence[Trial]], Sequence[Sequence[str]]]
    """Returns the table of the trials, the head first."""

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
    def set_bounds(self, job: Job) -> tuple[str, str]:
        """Decide what the search keeps to; returns it in words, and which values would be tried.

        Raises UsageError.
        """

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

    @abstractmethod
    def judge(self, finished: FinishedTrial, value: int) -> Trial:
        """Return what a trial has brought; raises MeasureError, or InterruptedTrialError for a signal."""

    @abstractmethod
    def excuse(self, error: MeasureError, value: int) -> Trial | None:
        """Return the trial of a failure that is put down to its value; None if the program can't be tuned."""

    @abstractmethod
    def conclude(self) -> Conclusion:
        """Return what the trials say."""

    @abstractmethod
    def show(self, console: "Console") -> None:
        """Print the trials for people."""


def tune_program(call: Call) -> int:
    """Tune what is named for a program, and return the exit code; raises LaunchError."""
    from launcher.cli.tune_batch import BatchStrategy  # which builds on this module

    strategies = {kind.subject: kind for kind in (WorkersStrategy, BatchStrategy)}
    composed, names = call.composition, call.names
    if len(names) != 1 or names[0] not in strategies:
        given = f"`{names[0]}` cannot be tuned" if names else "tune what?"
        raise UsageError(
            f"{given}: say `launch tune dataloader [KEY=VALUE …] [-- PROGRAM ARGUMENT …]`, or `launch tune"
            " batch tune.option=--batch-size …`"
        )
    kind = strategies[names[0]]

    def search() -> int:
        _measure_here(composed)
        run_path = choose_run_path(composed, call.program, suffix="-tune")
        spec = specify_job(composed, call.program, run_path, os.environ, "launch tune")
        for name in kind.variables:
            if name in spec.config.env:
                raise UsageError(f"env.{name} is set, which `launch tune` chooses: leave it out")
        return _search(kind(composed, spec, call.argv))

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
    bounds, preview = strategy.set_bounds(job)
    if spec.config.dry_run:
        trial = strategy.specify(strategy.next() or 0, Path("RUN_DIR"))
        variables = [f"{name}={trial.environ[name]}" for name in strategy.variables]
        command = join_words(["env", *variables, *render_start(plan_trial(trial)[1], "RUN_ID")])
        written = f"would write {strategy.target}\n" if strategy.target else ""
        print_text(
            f"would try {preview}, each for {spec.config.tune.steps} steps at most\n{written}{command}\n"
        )
        return 0
    run, manifest = prepare_run(spec, strategy.argv, [job.host])
    name_files(composed.own_files)
    report_config_programs([spec], composed.own_files)
    program = describe_program(spec)
    where = f"{program} on {count_things(len(job.plan.ranks), 'rank')} of {job.host}"
    logger.info(f"{where}, {bounds}")
    logger.info(f"run directory {run.path}")
    interrupted = 0
    try:
        _try_values(strategy, run)
        if strategy.conclude().value is None:
            raise MachineError(f"{strategy.conclude().lines[0]} (run directory {run.path})")
    except InterruptedTrialError as error:
        interrupted = error.args[0]
    except KeyboardInterrupt:  # between two runs
        interrupted = signal.SIGINT
    except (MeasureError, LaunchError) as error:
        return _give_up(error, run, manifest)
    found = strategy.conclude()
    saved = None if interrupted else strategy.target
    if saved is not None:
        write_choice(saved, strategy.subject, strategy.tabulate(strategy.trials), where, found.settings)
    state = {"schema": 1, "subject": strategy.subject, "complete": not interrupted}
    result = {**state, **found.facts, "saved": saved}
    with contextlib.suppress(OSError):
        write_json(run.path / "tuning.json", result)
    status = 128 + interrupted if interrupted else 0
    _end_run(run, manifest, "stopped" if interrupted else "succeeded", status)
    if spec.config.format == "json":
        print_json(result)
    elif strategy.trials:
        strategy.show(make_console(stderr=False))
        sys.stdout.flush()
    if interrupted and found.value is None:
        logger.info("interrupted before anything was measured")
        return status
    for line in found.lines:
        logger.info(f"interrupted, and no file is written: {line}" if interrupted else line)
    if saved is not None:
        use = describe_use(saved, strategy.group, f" -- {program}" if spec.program else "")
        logger.info(f"{saved} written: {use}")
    return status


def _try_values(strategy: Strategy, run: RunDir) -> None:
    """Try one value after the other; raises MeasureError if the program cannot be tuned so."""
    while (value := strategy.next()) is not None:
        progress = announce_trial(make_console(), f"trying {strategy.argument(value)} …")
        try:
            finished = run_trial(strategy.specify(value, run.path), strategy.argv, progress)
            trial = strategy.judge(finished, value)
        except MeasureError as error:
            excused = strategy.excuse(error, value)
            if excused is None:
                raise
            trial = excused
        strategy.trials.append(trial)
        for line in strategy.describe(trial).splitlines():
            logger.info(line)


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


# The number of DataLoader workers


class WorkersStrategy(Strategy):
    """Tries the most telling number until it is clear which one is best."""

    subject = group = "dataloader"
    variables = (LAUNCH_NUM_WORKERS, LAUNCH_LOADER_DEFAULT, LAUNCH_METER)
    describe, tabulate = staticmethod(describe_workers), staticmethod(tabulate_workers)

    def __init__(self, composed: "Composed", spec: JobSpec, argv: Sequence[str]) -> None:
        super().__init__(composed, spec, argv)
        self.target = CHOICE_FILES[0] if spec.config.save is None else spec.config.save
        self.max_workers, self.thrift = 0, 0.0

    def set_bounds(self, job: Job) -> tuple[str, str]:
        most, why = find_max_workers(job.config, job.plan)
        self.max_workers, self.thrift = most, price_all(most, self.spec.config.tune.steps) / 2
        preview = f"0 workers, then up to {most} ({why}) until it is clear"
        return f"with 0 to {most} workers each ({why})", preview

    def next(self) -> int | None:
        return choose_next(self.trials, self.max_workers, self.thrift)

    def argument(self, value: int) -> str:
        return count_things(value, "worker")

    def specify(self, value: int, run_path: Path) -> JobSpec:
        variables = {LAUNCH_NUM_WORKERS: str(value), LAUNCH_LOADER_DEFAULT: "1"}
        return specify_trial(self.composed, self.spec, run_path / f"workers-{value}", variables)

    def judge(self, finished: FinishedTrial, value: int) -> Trial:
        finished.check()
        return measure_workers(finished.read_records(), value, finished.ranks)

    def excuse(self, error: MeasureError, value: int) -> Trial | None:
        """Once a trial with fewer workers has succeeded, a failure is put down to the number."""
        known = [trial.value for trial in self.trials if trial.rate]
        if not known or (isinstance(error, MismatchError) and not any(known)):
            return None
        self.max_workers = min(self.max_workers, value - 1)
        return Trial(value, verdict=FAILED, reason=str(error))

    def conclude(self) -> Conclusion:
        best, loader = choose_best(self.trials), self.spec.config.dataloader
        value = best.value if best else None
        rows = [
            {
                "workers": trial.value,
                "steps_per_second": round(trial.rate, 4) if trial.rate else None,
                "wait_share": round(trial.wait, 4) if trial.rate else None,
                "memory_kib": trial.memory_kib or None,
                "steps": trial.steps,
                "unit": trial.unit,
                "failure": trial.reason or None,
            }
            for trial in sorted(self.trials, key=lambda trial: trial.value)
        ]
        return Conclusion(
            value,
            facts={"max_workers": self.max_workers, "num_workers": value, "trials": rows},
            lines=[f"fastest with {self.argument(value or 0)}"],
            settings={
                "workload": json.dumps(Path(str(self.target)).stem),
                "num_workers": value,
                "worker_gib": loader.worker_gib,
                "worker_shm_mib": loader.worker_shm_mib,
                "default": "true",
                "measured": "true",
            },
        )

    def show(self, console: "Console") -> None:
        print_workers(console, self.trials, self.conclude().value)


def find_max_workers(config: Settings, plan: Plan) -> tuple[int, str]:
    """Return the most workers of a rank that a search is to try, with why."""
    asked = config.tune.max_workers
    if isinstance(asked, int):
        return asked, f"tune.max_workers={asked}"
    ranks, machine = len(plan.ranks), plan.machine
    # The cores of the rank that has fewest, shared ones and a quota on CPU time counted in part.
    core_of = {cpu.id: cpu.core for cpu in machine.cpus}
    sets = [{core_of[cpu] for cpu in rank.worker_cpus if cpu in core_of} for rank in plan.ranks]
    quota = [] if machine.limits.cpus is None else [machine.limits.cpus / ranks]
    cores = min(len(set().union(*sets)) / ranks, *map(len, sets), *quota)
    highest = min(MAX_WORKERS, max(MIN_WORKERS, int(WORKERS_PER_CORE * cores)))
    bounds = limit_workers(config.dataloader, machine, ranks, highest)
    tight = min(bounds, key=lambda bound: bound.max_workers, default=None)
    if tight is not None and tight.max_workers < highest:
        return max(1, tight.max_workers), tight.what
    return highest, f"{WORKERS_PER_CORE} for each of a rank's cores, and at least {MIN_WORKERS}"
