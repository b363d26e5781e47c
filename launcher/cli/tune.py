"""`launch tune`: finds a setting that a program is fastest with, by running it again and again."""

import contextlib
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import dropwhile, takewhile
from pathlib import Path

from launcher.cli.job_warnings import name_files, unset_settings
from launcher.cli.plan import check_target, explain, write_file
from launcher.cli.run import plan_job, settle_fit, specify_job, try_again
from launcher.cli.verbs import Call, print_json
from launcher.config.compose import Composed, read_values, resolve
from launcher.config.program import fill_env
from launcher.config.run_path import choose_run_path, render_config
from launcher.config.settings import Settings
from launcher.errors import LaunchError, MachineError, UsageError
from launcher.files import open_file
from launcher.launch.agents import make_agent
from launcher.launch.ending import complete_manifest, explain_failure
from launcher.launch.job import Job, JobSpec, build_agent_environ, render_start
from launcher.launch.local_run import prepare_run, write_plan
from launcher.launch.supervisor import Supervisor
from launcher.plan.model import plan_to_json
from launcher.probe.limits import count_oom_kills, find_usable_memory, is_memory_low
from launcher.protocol import LAUNCH_LOADER_DEFAULT, LAUNCH_METER, LAUNCH_NUM_WORKERS
from launcher.report.console import make_console, show_spinner
from launcher.report.tables import make_table
from launcher.runs.manifest import stamp_time, write_manifest
from launcher.runs.progress import Progress
from launcher.runs.rank_logs import read_tail
from launcher.runs.run_directory import write_json
from launcher.runs.secrets import mask_words
from launcher.text import count_things, format_size, join_words, print_text, redirect_log
from launcher.tune.batch import FIRST_BATCH, BatchSearch
from launcher.tune.trials import (
    FAILED,
    FITS,
    TOO_LARGE,
    MeasureError,
    MismatchError,
    Trial,
    find_memory_error,
    read_records,
)
from launcher.tune.workers import WorkersSearch, find_max_workers, price_all

logger = logging.getLogger(__name__)

CHOICE_FILE = "conf/dataloader/tuned.yaml"
"""The file that later runs find from the working directory; its folder is made."""
MARK = "# Written by `launch tune "
"""Beginning of a file that may be replaced; the subject follows."""
WARMUP = 2
"""Steps after which garbage collection is as in the later steps of a long run: before any is measured."""
RECORDS = "measured"
"""Folder of the ranks' records in a trial's run directory."""
LOG_LINES = 20_000
"""Last lines of each rank's logs that are searched for an allocation that has failed."""
KNOWN = (
    *("--micro-batch-size", "--micro_batch_size"),
    *("--per-device-train-batch-size", "--per_device_train_batch_size"),
    *("--train-batch-size", "--train_batch_size", "--batch-size", "--batch_size", "batch_size="),
)
"""Options that are recognized among a program's arguments, if tune.option names none."""
PREFIX = "program."
"""Of keys of the configured program."""
OF_A_SEARCH = ("save", "format", "new_run_dir")
"""Settings beside `tune` that a search alone has."""
VERDICTS = {FITS: "fits", TOO_LARGE: "does not fit", FAILED: "fails, not for memory"}
COLUMNS: Mapping[str, Callable[[Trial], str]] = {
    "±": lambda trial: f"{trial.error:.1%}" if trial.error else "",
    "waiting for data": lambda trial: f"{trial.wait:.0%}" if trial.rate else "",
    "step": lambda trial: f"{trial.step_seconds:.3g} s" if trial.step_seconds else "",
    "memory": lambda trial: format_size(trial.use_kib) if trial.use_kib else "",
    "of": lambda trial: format_size(trial.gpu_total_kib) if trial.gpu_total_kib else "",
}
"""Of the table of trials. Without a GPU the memory has no limit in it, which is then the machine's."""

Search = WorkersSearch | BatchSearch


class TrialViewer:
    """Shows what is being tried, on a terminal alone, and nothing of what the trial prints or logs."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.showing = ExitStack()

    def start(self) -> None:
        """Show it: not before the agent's start, since a thread must not hold locks in a fork."""
        self.showing.enter_context(show_spinner(self.text))
        self.showing.callback(redirect_log(lambda _: None))

    def ignore(self, *_: object, **__: object) -> None:
        """A trial has no terminal, and what it prints is not shown."""

    use_terminal = notify = watch_rank = ignore

    def release_log(self) -> None:
        """Let what is logged be seen."""
        self.showing.close()

    def finish(self, *, patient: bool = True) -> Sequence[Progress]:
        return ()

    def close(self) -> bool:
        """Take the line down."""
        self.showing.close()
        return True


def tune_program(call: Call) -> int:
    """Tune what is named for a program, and return the exit code; raises LaunchError."""
    composed, names = call.composition, call.names
    if len(names) != 1 or names[0] not in ("dataloader", "batch"):
        given = f"`{names[0]}` cannot be tuned" if names else "tune what?"
        raise UsageError(
            f"{given}: say `launch tune dataloader [KEY=VALUE …] [-- PROGRAM ARGUMENT …]`, or `launch tune"
            " batch tune.option=--batch-size …`"
        )

    def tune() -> int:
        _measure_here(composed)
        run_path = choose_run_path(composed, call.program, suffix="-tune")
        spec = specify_job(composed, call.program, run_path, os.environ, "launch tune")
        job = plan_job(spec)
        search: Search
        target, chosen = None, [LAUNCH_METER]
        if names[0] == "batch":
            search = _begin_batches(spec, job)
        else:
            most, why = find_max_workers(job.config, job.plan)
            search = WorkersSearch(most, why, price_all(most, job.config.tune.steps) / 2)
            target = CHOICE_FILE if spec.config.save is None else spec.config.save
            check_choice_file(target, replaces=spec.config.yes)
            chosen += [LAUNCH_NUM_WORKERS, LAUNCH_LOADER_DEFAULT]
        for name in chosen:
            if name in spec.config.env:
                raise UsageError(f"env.{name} is set, which `launch tune` chooses: leave it out")
        tuning = Tuning(search, composed, spec, call.argv, target)
        return tuning.preview() if spec.config.dry_run else tuning.run(job)

    return try_again(tune)


def _measure_here(composed: Composed) -> None:
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


def _begin_batches(spec: JobSpec, job: Job) -> BatchSearch:
    """Return a search that begins with the size that the command line sets, else with FIRST_BATCH."""
    tune = job.config.tune
    option, asked = find_batch_option(spec)
    memory = find_usable_memory(job.plan.machine)
    search = BatchSearch(option, asked or FIRST_BATCH, tune.max_batch, memory, tune.seconds, tune.timeout)
    if asked is not None and asked > tune.max_batch:
        raise UsageError(
            f"{search.argument(asked)} is above tune.max_batch={tune.max_batch}: give a larger one"
        )
    if spec.config.save is not None:
        raise UsageError(
            f"save={spec.config.save}: `launch tune batch` prints the command to use and writes no file,"
            " leave it out"
        )
    return search


@dataclass(slots=True)
class Tuning:
    """A search with the job that it runs with one value after the other."""

    search: Search
    composed: Composed
    spec: JobSpec
    argv: Sequence[str]
    target: str | None
    """The file that the choice is written to."""

    def preview(self) -> int:
        """Say what would be tried, and return exit code 0."""
        first, variables = self._specify(self.search.next() or 0, Path("RUN_DIR"))
        shown = [f"{name}={first.environ[name]}" for name in variables]
        command = join_words(["env", *shown, *render_start(_plan_trial(first)[1], "RUN_ID")])
        written = f"would write {self.target}\n" if self.target else ""
        steps = self.spec.config.tune.steps
        print_text(f"would try {self.search.preview}, each for {steps} steps at most\n{written}{command}\n")
        return 0

    def run(self, job: Job) -> int:
        """Try values until the best is known, keep it, and return the exit code.

        Raises LaunchError, and RunIdTakenError before anything has run.
        """
        search, spec = self.search, self.spec
        run, manifest = prepare_run(spec, self.argv, [job.host])
        name_files(self.composed.own_files)
        program = f"program={spec.choices.get('program', '')}"
        if spec.program is not None:
            home = f"{os.path.expanduser('~')}/"  # noqa: PTH111
            program = shlex.join(mask_words(spec.program)).replace(home, "~/")
        where = f"{program} on {count_things(len(job.plan.ranks), 'rank')} of {job.host}"
        logger.info(f"{where}, {search.bounds}")
        logger.info(f"run directory {run.path}")

        def end(state: str, status: int) -> None:
            manifest.update(ended=stamp_time(), outcome={"state": state, "exit_code": status})
            try:
                write_manifest(run, manifest)
            except OSError as error:
                raise MachineError(f"{run.manifest_path} cannot be written ({error}): make room") from None

        status = 0
        try:
            while (value := search.next()) is not None:
                trial = self._try(value, run.path)
                search.trials.append(trial)
                logger.info(describe_trial(trial, search.argument(value)))
            if search.conclude().value is None:
                raise MachineError(f"{search.conclude().lines[0]} (run directory {run.path})")
        except KeyboardInterrupt as error:
            status = 128 + (error.args[0] if error.args else signal.SIGINT)
        except LaunchError as error:
            end("failed", error.exit_code)
            raise
        except MeasureError as error:
            end("failed", UsageError.exit_code if error.status is None else error.status)
            if error.status is None:
                raise UsageError(f"{error} (run directory {run.path})") from None
            for line in (*str(error).splitlines(), f"run directory {run.path}"):
                logger.info(line)
            return error.status
        found, saved = search.conclude(), None if status else self.target
        if saved is not None and found.value is not None:
            rows = tabulate_trials(search.trials, search.title)
            write_choice(saved, rows, where, found.value, spec.config)
        result = {
            **{"schema": 1, "subject": search.subject, "complete": not status, **found.facts},
            "trials": [asdict(trial) for trial in sorted(search.trials, key=lambda trial: trial.value)],
            "saved": saved,
        }
        with contextlib.suppress(OSError):
            write_json(run.path / "tuning.json", result)
        end("stopped" if status else "succeeded", status)
        if spec.config.format == "json":
            print_json(result)
        elif search.trials:
            print_trials(search.trials, search.title, found.remarks)
        if found.value is None:
            logger.info("interrupted before anything was measured")
            return status
        *lines, last = found.lines
        if isinstance(search, BatchSearch):
            last += f": `{self._render_command(search, found.value)}`"
        for line in (*lines, last):
            logger.info(f"interrupted, and no file is written: {line}" if status else line)
        if saved is not None:
            use = describe_use(saved, f" -- {program}" if spec.program else "")
            logger.info(f"{saved} written: {use}")
        return status

    def _render_command(self, search: BatchSearch, batch: int) -> str:
        """Return the command that uses a size, with the settings of this one that later runs need too."""
        words = dropwhile(lambda word: word in ("tune", "batch"), self.argv)
        settings = []
        for word in takewhile(lambda word: "=" in word and not word.startswith("-"), words):
            key = word.partition("=")[0].lstrip("+~")
            if key not in (*OF_A_SEARCH, search.option.removesuffix("=")) and not key.startswith("tune."):
                settings.append(word)
        rest = [search.argument(batch)]
        if self.spec.program is not None:
            rest = ["--", *mask_words(set_argument(self.spec.program, search.option, batch))]
        return f"launch {join_words([*mask_words(settings), *rest])}"

    def _specify(self, value: int, folder: Path) -> tuple[JobSpec, Mapping[str, str]]:
        """Return a trial with a run directory and variables of its own, and these variables.

        A configured program is resolved from the configuration, in which a micro-batch is set.
        """
        spec, search, variables = self.spec, self.search, dict[str, str]()
        if isinstance(search, WorkersSearch):
            variables = {LAUNCH_NUM_WORKERS: str(value), LAUNCH_LOADER_DEFAULT: "1"}
        elif spec.program is None:
            self.composed.tree.program[search.option.removeprefix(PREFIX).removesuffix("=")] = value
        else:
            spec = replace(spec, program=set_argument(spec.program, search.option, value))
        config = fill_env(resolve(self.composed, folder), spec.file_variables)
        config = replace(
            unset_settings(config, spec.unset_allocator),
            gc=replace(config.gc, warmup=min(config.gc.warmup, WARMUP)),
            torchrun=replace(config.torchrun, max_restarts=0),
            restarts=None,
        )
        order = {"folder": str(folder / RECORDS), "steps": config.tune.steps, "seconds": config.tune.seconds}
        variables[LAUNCH_METER] = json.dumps(order)
        trial = replace(
            spec,
            config=config,
            config_text=render_config(self.composed),
            environ={**spec.environ, **variables},
            run_path=folder,
            run_key="new_run_dir",
        )
        return trial, variables

    def _try(self, value: int, folder: Path) -> Trial:
        """Run the program with a value, and return what that has brought.

        Once a value has fitted, a failure is put down to the value. Raises MeasureError if the program cannot
        be tuned, KeyboardInterrupt with the number of a signal, and what any job raises.
        """
        trial, _ = self._specify(value, folder / f"{self.search.title}-{value}")
        try:
            return self._run_trial(trial, value)
        except MeasureError as error:
            fitting = [trial.value for trial in self.search.trials if trial.verdict == FITS]
            if not fitting or (isinstance(error, MismatchError) and not any(fitting)):
                raise
            lines = [line.strip().removeprefix("| ").strip() for line in str(error).splitlines()]
            return Trial(value, verdict=FAILED, reason=next((line for line in reversed(lines) if line), ""))

    def _run_trial(self, trial: JobSpec, value: int) -> Trial:
        """Run the program to its end, or until it has been measured, or the machine's memory runs out.

        A program that catches the error of an allocation, and goes on or ends in peace, does not fit either.
        """
        trial, job = _plan_trial(trial)
        run, manifest = prepare_run(trial, self.argv, [job.host])
        write_plan(trial, run, job.host, plan_to_json(job.plan))
        (run.path / RECORDS).mkdir(mode=0o700)
        viewer = TrialViewer(f"trying {self.search.argument(value)} …")
        environ = build_agent_environ(job.config, job.cluster, job.environ, run, job.host)
        timeout = trial.config.tune.timeout
        supervisor = Supervisor(
            job,
            run,
            viewer,
            make_agent(job, run, environ),
            count_oom_kills,
            manifest,
            deadline=time.monotonic() + timeout,
            is_starved=is_memory_low,
        )
        try:
            ending = supervisor.run_to_end()
        except OSError as error:
            raise MachineError(f"the ranks could not be started ({error}): see {run.path}") from None
        finally:
            viewer.close()
        complete_manifest(job, run, manifest, ending, ending.state)
        if ending.signal is not None and not supervisor.timed_out:
            raise KeyboardInterrupt(ending.signal)
        ranks = len(job.plan.ranks)
        logs = [run.rank_log(rank, run.first_attempt, end) for rank in range(ranks) for end in ("err", "out")]
        reason = find_memory_error(line for log in logs for line in read_tail(log, LOG_LINES))
        if not reason and supervisor.starved:
            reason = "the machine's memory ran out, so it was ended"
        elif not reason and ending.memory:
            reason = "the kernel killed a process for memory"
        if reason:
            return Trial(value, verdict=TOO_LARGE, reason=reason)
        if supervisor.timed_out:
            raise MeasureError(
                f"not measured within tune.timeout={timeout:g} s: give more time, or a smaller task"
            )
        if ending.status:
            lines = explain_failure(job, run, ending)
            raise MeasureError("\n".join(lines), ending.status)
        return self.search.measure(read_records(run.path / RECORDS), value, ranks)


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


# Trials for people


def _format_rate(trial: Trial) -> str:
    return "-" if not trial.rate else f"{trial.rate:.3g}" if trial.rate < 1000 else f"{trial.rate:.0f}"


def describe_trial(trial: Trial, argument: str) -> str:
    """Return a trial in a line."""
    use = f", {format_size(trial.use_kib)}" if trial.use_kib else ""
    if trial.verdict != FITS or not trial.rate:
        return f"{argument}: {VERDICTS[trial.verdict]}{use}: {trial.reason}"
    rate = f"{_format_rate(trial)} {trial.unit}/s, {trial.wait:.0%} of the time waiting for data"
    return f"{argument}: {rate}{use} ({trial.steps} steps)"


def tabulate_trials(trials: Sequence[Trial], title: str) -> list[tuple[str, ...]]:
    """Return the rows of the table with its head, in the order of the values."""
    ordered = sorted(trials, key=lambda trial: trial.value)
    unit = next((trial.unit for trial in ordered if trial.rate), "steps")
    shown = {head: get for head, get in COLUMNS.items() if any(map(get, ordered))}
    rows: list[tuple[str, ...]] = [(title, f"{unit}/s", *shown)]
    for trial in ordered:
        rows.append((str(trial.value), _format_rate(trial), *(get(trial) or "-" for get in shown.values())))
    return rows


def print_trials(trials: Sequence[Trial], title: str, remarks: Mapping[int, str]) -> None:
    """Print the table of the trials, each with what it is."""
    head, *body = tabulate_trials(trials, title)
    table = make_table((*head, ""), right=head, wrapped=("",))
    for row, trial in zip(body, sorted(trials, key=lambda trial: trial.value), strict=True):
        remark = remarks.get(trial.value, "") if trial.verdict == FITS else VERDICTS[trial.verdict]
        table.add_row(*row, remark)
    make_console(stderr=False).print(table)
    sys.stdout.flush()


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


# The option of the micro-batch


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
