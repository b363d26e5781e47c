"""`launch tune`: finds a setting that a program is fastest with, by running it again and again."""

import contextlib
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.job_warnings import name_files, unset_settings
from launcher.cli.output_files import check_target, explain, write_file
from launcher.cli.run import plan_job, settle_fit, specify_job, try_anew
from launcher.cli.verbs import Call, print_json
from launcher.config.compose import read_values, resolve
from launcher.config.config_file import render_config
from launcher.config.environment_files import fill_env
from launcher.config.run_path import choose_run_path
from launcher.config.settings import Settings
from launcher.errors import LaunchError, MachineError, UsageError
from launcher.files import open_file
from launcher.launch.ending import complete_manifest, explain_failure
from launcher.launch.job import Job, JobSpec, build_agent_environ, render_start
from launcher.launch.local_run import make_agent, prepare_run, write_plan
from launcher.launch.monitor import RankMonitor
from launcher.launch.supervisor import Supervisor
from launcher.launch.torchrun_agent import check_open_files
from launcher.plan.model import Plan, plan_to_json
from launcher.plan.resources import limit_workers
from launcher.probe.limits import count_oom_kills, find_usable_memory, is_memory_low
from launcher.protocol import LAUNCH_LOADER_DEFAULT, LAUNCH_METER, LAUNCH_NUM_WORKERS
from launcher.report.console import make_console
from launcher.report.tune import TrialViewer, describe_trial, print_trials, tabulate_trials
from launcher.runs.manifest import stamp_time, write_manifest
from launcher.runs.rank_logs import read_tail
from launcher.runs.run_directory import RunDir, write_json
from launcher.runs.secrets import mask_words
from launcher.text import count_things, format_size, join_words, print_text
from launcher.tune.batch_search import FIRST_BATCH, BatchBounds, choose_next_batch, conclude_batches
from launcher.tune.search import choose_best, choose_next, price_all
from launcher.tune.trials import (
    FAILED,
    FITS,
    TOO_LARGE,
    MeasureError,
    MismatchError,
    Record,
    Trial,
    check_effect,
    find_memory_error,
    measure_batch,
    measure_workers,
    read_records,
)

if TYPE_CHECKING:
    from launcher.config.compose import Composed

logger = logging.getLogger(__name__)

CHOICE_FILE = "conf/dataloader/tuned.yaml"
"""The file that later runs find from the working directory; its folder is made."""
MARK = "# Written by `launch tune "
"""Beginning of a file that may be replaced; the subject follows."""
WORKERS_PER_CORE = 2
"""Workers for each core: those that read from a disk or a network wait more than they compute."""
MIN_WORKERS, MAX_WORKERS = 4, 64
WARMUP = 2
"""Steps after which garbage collection is as in the later steps of a long run: before any is measured."""
RECORDS = "measured"
"""Folder of the ranks' records in a trial's run directory."""
LOG_LINES = 20_000
"""Last lines of each rank's logs that are searched for an allocation that has failed."""
KNOWN = (
    "--micro-batch-size",
    "--micro_batch_size",
    "--per-device-train-batch-size",
    "--per_device_train_batch_size",
    "--train-batch-size",
    "--train_batch_size",
    "--batch-size",
    "--batch_size",
    "batch_size=",
)
"""Options that are recognized among a program's arguments, if tune.option names none."""
PREFIX = "program."
"""Of keys of the configured program."""
OF_A_SEARCH = ("save", "format", "new_run_dir")
"""Settings beside `tune` that a search alone has."""


class InterruptedTrialError(Exception):
    """`launch` was sent a signal; its number is the argument."""


class FailedTrialError(MeasureError):
    """The program failed; the text is how, in some lines."""

    def __init__(self, lines: Sequence[str], status: int) -> None:
        super().__init__("\n".join(lines))
        self.status = status


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the trials say."""

    value: int | None
    """The value to use; None if there is none."""
    facts: Mapping[str, object]
    """What was found, for programs; what is not known is null."""
    lines: Sequence[str]
    """The same for people, with how it is used; why there is none."""
    remarks: Mapping[int, str]
    """What is said of values in the table."""


class WorkersStrategy:
    """Tries the most telling number of DataLoader workers until it is clear which one is best."""

    subject, title = "dataloader", "workers"

    def __init__(self, spec: JobSpec, job: Job, argv: Sequence[str]) -> None:
        self.trials: list[Trial] = []
        self.max_workers, why = find_max_workers(job.config, job.plan)
        self.thrift = price_all(self.max_workers, job.config.tune.steps) / 2
        self.bounds = f"with 0 to {self.max_workers} workers each ({why})"
        self.preview = f"0 workers, then up to {self.max_workers} ({why}) until it is clear"
        for name in (LAUNCH_NUM_WORKERS, LAUNCH_LOADER_DEFAULT):
            if name in job.config.env:
                raise UsageError(f"env.{name} is set, which `launch tune` chooses: leave it out")

    def next(self) -> int | None:
        """Return the number to try next; None if it is clear which is best."""
        failed = [trial.value for trial in self.trials if trial.verdict != FITS]
        return choose_next(
            self.trials, min([self.max_workers, *(value - 1 for value in failed)]), self.thrift
        )

    def argument(self, value: int) -> str:
        """Return a value as people read it."""
        return count_things(value, "worker")

    def prepare(self, spec: JobSpec, composed: "Composed", value: int) -> tuple[JobSpec, dict[str, str]]:
        """Return the job of a value, with variables of its own."""
        return spec, {LAUNCH_NUM_WORKERS: str(value), LAUNCH_LOADER_DEFAULT: "1"}

    def measure(self, records: Sequence[Record], value: int, ranks: int) -> Trial:
        """Return what a trial has brought; raises MeasureError."""
        return measure_workers(records, value, ranks)

    def conclude(self) -> Conclusion:
        """Return what the trials say."""
        best = choose_best(self.trials)
        facts = {"max_workers": self.max_workers, "num_workers": best.value if best else None}
        if best is None:
            failed = "".join(f": {self.argument(trial.value)}: {trial.reason}" for trial in self.trials[-1:])
            return Conclusion(None, facts, [f"nothing could be measured{failed}"], {})
        return Conclusion(
            best.value, facts, [f"fastest with {self.argument(best.value)}"], {best.value: "chosen"}
        )


class BatchStrategy:
    """Doubles the micro-batch until it does not fit, then looks between."""

    subject, title = "batch", "batch"

    def __init__(self, spec: JobSpec, job: Job, argv: Sequence[str]) -> None:
        """Begin with the size that the command line sets, else with FIRST_BATCH."""
        tune = job.config.tune
        self.spec, self.argv = spec, argv
        self.trials: list[Trial] = []
        self.option, asked = find_batch_option(spec)
        if asked is not None and asked > tune.max_batch:
            raise UsageError(
                f"{self.argument(asked)} is above tune.max_batch={tune.max_batch}: give a larger one"
            )
        start, memory = asked or FIRST_BATCH, find_usable_memory(job.plan.machine)
        self.limits = BatchBounds(start, tune.max_batch, memory, tune.seconds, tune.timeout)
        most = f"{tune.max_batch}" + (f", within {format_size(memory)} of memory" if memory else "")
        self.bounds = f"{self.argument(start)} first, at most {most}"
        self.preview = f"{self.argument(start)}, then twice as much until it does not fit, up to {most}"
        if spec.config.save is not None:
            raise UsageError(
                f"save={spec.config.save}: `launch tune batch` prints the command to use and writes no file,"
                " leave it out"
            )

    def next(self) -> int | None:
        """Return the size to try next; raises MeasureError if the option has no effect."""
        check_effect(self.trials, self.option)
        return choose_next_batch(self.trials, self.limits)

    def argument(self, value: int) -> str:
        """Return a size as it is typed."""
        return f"{self.option}{'' if self.option.endswith('=') else ' '}{value}"

    def prepare(self, spec: JobSpec, composed: "Composed", value: int) -> tuple[JobSpec, dict[str, str]]:
        """Return the job of a size; a configured program's is resolved from the configuration."""
        if spec.program is None:
            composed.tree.program[self.option.removeprefix(PREFIX).removesuffix("=")] = value
            return spec, {}
        return replace(spec, program=set_argument(spec.program, self.option, value)), {}

    def measure(self, records: Sequence[Record], value: int, ranks: int) -> Trial:
        """Return what a trial has brought; raises MeasureError."""
        return measure_batch(records, value, ranks)

    def conclude(self) -> Conclusion:
        """Return what the trials say."""
        choice = conclude_batches(self.trials, self.limits)
        use = self.argument(choice.batch) if choice.batch else None
        facts = {"option": self.option, **asdict(choice), "argument": use}
        if choice.batch is None:
            last = self.trials[-1] if self.trials else Trial(self.limits.start)
            why = (
                f"{self.argument(last.value)} does not fit ({last.reason}), nor does any larger one: use"
                " a smaller model or shorter sequences, activation checkpointing, or more sharding"
            )
            return Conclusion(None, facts, [why], {})
        safe = choice.largest_with_margin or "none is known to have 5% to spare"
        fast = choice.fastest or "not measured"
        sizes = f"with 5% of the memory to spare: {safe}; fastest: {fast}; use {choice.batch}"
        lines = [
            f"largest micro-batch that fits: {choice.largest} ({choice.limit})",
            f"{sizes}: `{self._render_command(choice.batch)}`",
        ]
        names = {"largest": choice.largest, "largest with 5% to spare": choice.largest_with_margin}
        names["fastest"] = choice.fastest
        remarks = {
            trial.value: ", ".join(name for name, size in names.items() if size == trial.value)
            for trial in self.trials
        }
        return Conclusion(choice.batch, facts, lines, remarks)

    def _render_command(self, batch: int) -> str:
        """Return the command that uses a size, with the settings of this one that later runs need too."""
        words = dropwhile(lambda word: word in ("tune", "batch"), self.argv)
        settings = []
        for word in takewhile(lambda word: "=" in word and not word.startswith("-"), words):
            key = word.partition("=")[0].lstrip("+~")
            if key not in (*OF_A_SEARCH, self.option.removesuffix("=")) and not key.startswith("tune."):
                settings.append(word)
        if self.spec.program is None:
            return f"launch {join_words([*mask_words(settings), self.argument(batch)])}"
        program = mask_words(set_argument(self.spec.program, self.option, batch))
        return f"launch {join_words([*mask_words(settings), '--', *program])}"


Strategy = WorkersStrategy | BatchStrategy


def tune_program(call: Call) -> int:
    """Tune what is named for a program, and return the exit code; raises LaunchError."""
    strategies: dict[str, type[Strategy]] = {"dataloader": WorkersStrategy, "batch": BatchStrategy}
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
        if LAUNCH_METER in spec.config.env:
            raise UsageError(f"env.{LAUNCH_METER} is set, which `launch tune` chooses: leave it out")
        job = plan_job(spec)
        return _search(kind(spec, job, call.argv), composed, spec, job, call.argv)

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


def _search(strategy: Strategy, composed: "Composed", spec: JobSpec, job: Job, argv: Sequence[str]) -> int:
    """Try values until the best is known, keep it, and return the exit code.

    Raises LaunchError, and RunIdTakenError before anything has run.
    """
    target = None
    if isinstance(strategy, WorkersStrategy):
        target = CHOICE_FILE if spec.config.save is None else spec.config.save
        check_choice_file(target, replaces=spec.config.yes)
    if spec.config.dry_run:
        first, variables = _specify_trial(strategy, composed, spec, strategy.next() or 0, Path("RUN_DIR"))
        shown = [f"{name}={first.environ[name]}" for name in (*variables, LAUNCH_METER)]
        command = join_words(["env", *shown, *render_start(_plan_trial(first)[1], "RUN_ID")])
        written = f"would write {target}\n" if target else ""
        steps = spec.config.tune.steps
        print_text(f"would try {strategy.preview}, each for {steps} steps at most\n{written}{command}\n")
        return 0
    run, manifest = prepare_run(spec, argv, [job.host])
    name_files(composed.own_files)
    program = f"program={spec.choices.get('program', '')}"
    if spec.program is not None:
        home = f"{os.path.expanduser('~')}/"  # noqa: PTH111
        program = shlex.join(mask_words(spec.program)).replace(home, "~/")
    where = f"{program} on {count_things(len(job.plan.ranks), 'rank')} of {job.host}"
    logger.info(f"{where}, {strategy.bounds}")
    logger.info(f"run directory {run.path}")
    interrupted = 0
    try:
        while (value := strategy.next()) is not None:
            trial = _try_value(strategy, composed, spec, value, run.path, argv)
            strategy.trials.append(trial)
            logger.info(describe_trial(trial, strategy.argument(value)))
        if strategy.conclude().value is None:
            raise MachineError(f"{strategy.conclude().lines[0]} (run directory {run.path})")
    except InterruptedTrialError as error:
        interrupted = error.args[0]
    except KeyboardInterrupt:  # between two runs
        interrupted = signal.SIGINT
    except (MeasureError, LaunchError) as error:
        status = error.status if isinstance(error, FailedTrialError) else getattr(error, "exit_code", 2)
        _end_run(run, manifest, "failed", status)
        if isinstance(error, LaunchError):
            raise
        if not isinstance(error, FailedTrialError):
            raise UsageError(f"{error} (run directory {run.path})") from None
        for line in (*str(error).splitlines(), f"run directory {run.path}"):
            logger.info(line)
        return error.status
    found = strategy.conclude()
    saved = None if interrupted else target
    if saved is not None and found.value is not None:
        write_choice(saved, tabulate_trials(strategy.trials, strategy.title), where, found.value, spec.config)
    result = {
        **{"schema": 1, "subject": strategy.subject, "complete": not interrupted, **found.facts},
        "trials": [asdict(trial) for trial in sorted(strategy.trials, key=lambda trial: trial.value)],
        "saved": saved,
    }
    with contextlib.suppress(OSError):
        write_json(run.path / "tuning.json", result)
    status = 128 + interrupted if interrupted else 0
    _end_run(run, manifest, "stopped" if interrupted else "succeeded", status)
    if spec.config.format == "json":
        print_json(result)
    elif strategy.trials:
        print_trials(make_console(stderr=False), strategy.trials, strategy.title, found.remarks)
        sys.stdout.flush()
    if found.value is None:
        logger.info("interrupted before anything was measured")
        return status
    for line in found.lines:
        logger.info(f"interrupted, and no file is written: {line}" if interrupted else line)
    if saved is not None:
        use = describe_use(saved, f" -- {program}" if spec.program else "")
        logger.info(f"{saved} written: {use}")
    return status


def _try_value(
    strategy: Strategy, composed: "Composed", spec: JobSpec, value: int, folder: Path, argv: Sequence[str]
) -> Trial:
    """Run the program with a value, and return what that has brought.

    Once a value has fitted, a failure is put down to the value. Raises MeasureError if the program cannot be
    tuned, and InterruptedTrialError for a signal.
    """
    path = folder / f"{strategy.title}-{value}"
    trial, _ = _specify_trial(strategy, composed, spec, value, path)
    try:
        return _run_trial(strategy, trial, value, argv)
    except MeasureError as error:
        fitting = [trial.value for trial in strategy.trials if trial.verdict == FITS]
        if not fitting or (isinstance(error, MismatchError) and not any(fitting)):
            raise
        lines = [line.strip().removeprefix("| ").strip() for line in str(error).splitlines()]
        return Trial(value, verdict=FAILED, reason=next((line for line in reversed(lines) if line), ""))


def _specify_trial(
    strategy: Strategy, composed: "Composed", spec: JobSpec, value: int, folder: Path
) -> tuple[JobSpec, Mapping[str, str]]:
    """Return a trial with a run directory and variables of its own, and these variables."""
    spec, variables = strategy.prepare(spec, composed, value)
    config = unset_settings(fill_env(resolve(composed, folder), spec.file_variables), spec.unset_allocator)
    config = replace(
        config,
        gc=replace(config.gc, warmup=min(config.gc.warmup, WARMUP)),
        torchrun=replace(config.torchrun, max_restarts=0),
        restarts=None,
    )
    order = {"folder": str(folder / RECORDS), "steps": config.tune.steps, "seconds": config.tune.seconds}
    trial = replace(
        spec,
        config=config,
        config_text=render_config(composed),
        environ={**spec.environ, **variables, LAUNCH_METER: json.dumps(order)},
        run_path=folder,
        run_key="new_run_dir",
    )
    return trial, variables


def _plan_trial(trial: JobSpec) -> tuple[JobSpec, Job]:
    """Plan a trial; what is free of the bundled program is chosen around what is tried, as a run does."""
    job = plan_job(trial)
    if trial.fit_model is None or not trial.is_bundled:
        return trial, job
    # Steps of one micro-step: sequences a second do not depend on how many there are.
    program = {**trial.config.program, "global_batch": "auto"}
    if program.get("grad_accumulation") == "auto":
        program["grad_accumulation"] = 1
    return settle_fit(replace(trial, config=replace(trial.config, program=program)), job, judges=False)


def _run_trial(strategy: Strategy, trial: JobSpec, value: int, argv: Sequence[str]) -> Trial:
    """Run the program to its end, or until it has been measured, or the machine's memory runs out.

    A program that catches the error of an allocation, and goes on or ends in peace, does not fit either.
    Raises MeasureError, InterruptedTrialError for a signal, and what any job raises.
    """
    trial, job = _plan_trial(trial)
    check_open_files()
    run, manifest = prepare_run(trial, argv, [job.host])
    write_plan(trial, run, job.host, plan_to_json(job.plan))
    (run.path / RECORDS).mkdir(mode=0o700)
    viewer = TrialViewer(f"trying {strategy.argument(value)} …")
    monitor = RankMonitor(job, run, viewer, count_oom_kills, manifest)
    environ = build_agent_environ(job.config, job.cluster, job.environ, run, job.host)
    agent = make_agent(monitor, environ)
    timeout = trial.config.tune.timeout
    supervisor = Supervisor(monitor, agent, deadline=time.monotonic() + timeout, is_starved=is_memory_low)
    try:
        ending = supervisor.run()
    except OSError as error:
        raise MachineError(f"the ranks could not be started ({error}): see {run.path}") from None
    finally:
        viewer.close()
    complete_manifest(monitor, ending)
    if ending.signal is not None and not supervisor.timed_out:
        raise InterruptedTrialError(ending.signal)
    ranks = len(job.plan.ranks)
    logs = [run.rank_log(rank, run.first_attempt, end) for rank in range(ranks) for end in ("err", "out")]
    reason = find_memory_error(line for log in logs for line in read_tail(log, LOG_LINES))
    if not reason and supervisor.starved:
        reason = "the machine's memory ran out, so it was ended"
    elif not reason and monitor.count_new_oom_kills() > 0:
        reason = "the kernel killed a process for memory"
    if reason:
        return Trial(value, verdict=TOO_LARGE, reason=reason)
    if supervisor.timed_out:
        raise MeasureError(
            f"not measured within tune.timeout={timeout:g} s: give more time, or a smaller task"
        )
    if ending.status:
        raise FailedTrialError(explain_failure(monitor, ending, output_shown=False), ending.status)
    return strategy.measure(read_records(run.path / RECORDS), value, ranks)


def _end_run(run: RunDir, manifest: dict[str, object], state: str, status: int) -> None:
    """Complete the manifest; raises MachineError."""
    manifest["ended"] = stamp_time()
    manifest["outcome"] = {"state": state, "exit_code": status}
    try:
        write_manifest(run, manifest)
    except OSError as error:
        raise MachineError(f"{run.manifest_path} cannot be written ({error}): make room") from None


# The file of the choice


def check_choice_file(name: str, *, replaces: bool) -> None:
    """Raise UsageError for a file that cannot be written, or is neither empty nor of `launch tune`."""
    path = Path(name)
    if name != CHOICE_FILE:
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
    name: str, rows: Sequence[Sequence[str]], where: str, workers: int, config: Settings
) -> None:
    """Write an option of the configuration, with what was measured where in comments.

    Whole or not at all; raises UsageError or MachineError.
    """
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    comments = [f"{MARK}dataloader`, {when}: {where}"]
    for row in rows:
        comments.append("#   " + "  ".join(map(str.rjust, row, widths)))
    # What ends a line must not end a comment if it is among the program's words.
    lines = [" ".join(line.splitlines()).rstrip() for line in comments]
    settings = {
        "workload": json.dumps(Path(name).stem),
        "num_workers": workers,
        "worker_gib": config.dataloader.worker_gib,
        "worker_shm_mib": config.dataloader.worker_shm_mib,
        "default": "true",
        "measured": "true",
    }
    lines += [f"{key}: {value}" for key, value in settings.items()]
    if name == CHOICE_FILE:
        try:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain("save", name, error) from None
    write_file("save", name, ("\n".join(lines) + "\n").encode("utf-8", "replace"))


def describe_use(name: str, program: str = "") -> str:
    """Say how later runs use the file; `program` is `-- PROGRAM …` after a space, or nothing."""
    path = Path(name).absolute()
    if path.suffix == ".yaml" and path.parent == Path("conf/dataloader").absolute():
        return f"`launch dataloader={path.stem}{program}` uses it"
    return f"put it into conf/dataloader/ as NAME.yaml, and `launch dataloader=NAME{program}` uses it"


# The number of DataLoader workers, and the option of the micro-batch


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


def find_batch_option(spec: JobSpec) -> tuple[str, int | None]:
    """Return the option that tune.option names, or that is known, and the size that is given; else None.

    An option that ends in `=` is joined to its value, as `train.batch_size=`, and `program.batch_size=` of a
    configured program. Raises UsageError.
    """
    name = spec.config.tune.option
    if spec.program is None:
        name = (name or f"{PREFIX}batch_size").removesuffix("=")
        key = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or key not in spec.config.program:
            program = f"program={spec.choices.get('program', '')}"
            raise UsageError(
                f"tune.option={name}: {program} has no such key, name one that its file has, as in"
                f" tune.option={PREFIX}batch_size"
            )
        return f"{name}=", _parse_size(str(spec.config.program[key])) if name in spec.given else None
    if name is not None and name.startswith(PREFIX) and not name.endswith("="):
        raise UsageError(f"tune.option={name} is a key of the configured program: name the program's option")
    if name is None:
        name = next((option for option in KNOWN if read_argument(spec.program, option) is not None), None)
    if name is None:
        raise UsageError(
            "which option of the program sets its micro-batch? Name it: tune.option=--batch-size, or"
            " tune.option=train.batch_size= for a program of Hydra's"
        )
    return name, _parse_size(read_argument(spec.program, name))


def _parse_size(text: str | None) -> int | None:
    """Return a size of at least 1; None for anything else."""
    number = int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else 0
    return number or None


def read_argument(program: Sequence[str], name: str) -> str | None:
    """Return the last value of an option among a program's arguments; None if it is not there."""
    values = [program[at].removeprefix(before) for at, before in _find_values(program, name)]
    return values[-1] if values else None


def set_argument(program: Sequence[str], name: str, batch: int) -> tuple[str, ...]:
    """Return a program's arguments with an option set: where it stands, each time, or else at the end."""
    words, places = list(program), list(_find_values(program, name))
    for at, before in places:
        words[at] = f"{before}{batch}"
    if not places:
        words += [f"{name}{batch}"] if name.endswith("=") else [name, str(batch)]
    return tuple(words)


def _find_values(program: Sequence[str], name: str) -> Iterator[tuple[int, str]]:
    """Give the number of each word that holds an option's value, and what stands before it there."""
    joined, at = name if name.endswith("=") else f"{name}=", 0
    while at < len(program):
        if program[at].startswith(joined):
            yield at, joined
        elif program[at] == name and at + 1 < len(program):
            at += 1
            yield at, ""
        at += 1
