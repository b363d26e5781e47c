"""`launch tune`: finds a setting that a program is fastest with, by running it again and again.

Each trial is a `launch` of its own, with the settings and the program of this one and the value to try.
"""

import contextlib
import json
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.cli.child import run_child
from launcher.cli.main import Call, group_words, print_json
from launcher.cli.plan import check_target, explain, write_file
from launcher.cli.run import plan_job, specify_job, try_again
from launcher.config.compose import Composed, name_files, read_values
from launcher.config.program import runs_bundled
from launcher.config.run_path import choose_run_path
from launcher.config.settings import refuse
from launcher.config.words import read_key
from launcher.errors import LaunchError, MachineError, UsageError
from launcher.files import LARGEST, read_file
from launcher.launch.ending import describe_exit
from launcher.launch.job import Job, JobSpec
from launcher.launch.local_run import prepare_run
from launcher.launch.signals import KILL_GRACE, TERM_GRACE
from launcher.probe.limits import find_usable_memory, is_memory_low
from launcher.protocol import LAUNCH_LOADER_DEFAULT, LAUNCH_METER, LAUNCH_NUM_WORKERS
from launcher.runs.manifest import Outcome, read_manifest, stamp_time, write_manifest
from launcher.runs.rank_logs import read_tail
from launcher.runs.run_directory import RunDir, write_json
from launcher.runs.secrets import mask_words
from launcher.text import count_things, describe_first_failed_rank, format_size, join_words, print_text
from launcher.tune.search import FIRST_BATCH, BatchSearch, WorkersSearch, find_max_workers
from launcher.tune.trials import FAILED, FITS, TOO_LARGE, VERDICTS, MeasureError, Trial, find_memory_error

logger = logging.getLogger(__name__)

CHOICE_FILE = "conf/dataloader/tuned.yaml"
"""The file that later runs find from the working directory; its folder is made."""
MARK = "# Written by `launch tune "
"""Beginning of a file that may be replaced."""
WARMUP = 2
"""Steps after which garbage collection is as in the later steps of a long run: before any is measured."""
RECORDS = "measured"
"""Folder of the ranks' records, by trial."""
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
OF_A_SEARCH = ("save", "format", "new_run_dir", "yes", "dry_run")
"""Settings beside `tune` that a search alone has."""
Search = WorkersSearch | BatchSearch


def tune_program(call: Call) -> int:
    """Tune what is named for a program, and return the exit code; raises LaunchError."""
    subject = call.names[0] if call.names else ""
    if subject not in ("dataloader", "batch"):
        given = f"`{subject}` cannot be tuned" if subject else "tune what?"
        raise refuse("tune_subject", given=given)
    return try_again(lambda: _tune(call, subject))


def _tune(call: Call, subject: str) -> int:
    _measure_here(call.composition)
    run_path = choose_run_path(call.composition, call.program, suffix="-tune")
    spec = specify_job(call.composition, call.program, run_path, os.environ, "launch tune")
    job, config = plan_job(spec), spec.config
    search: Search
    target, chosen = None, [LAUNCH_METER]
    if subject == "batch":
        tune = config.tune
        option, asked = find_batch_option(spec)
        first, memory = asked or FIRST_BATCH, find_usable_memory(job.plan.machine)
        search = BatchSearch(option, first, tune.max_batch, memory, tune.seconds, tune.timeout)
        if asked is not None and asked > tune.max_batch:
            most = f"tune.max_batch={tune.max_batch}"
            raise UsageError(f"{search.argument(asked)} is above {most}: give a larger one")
        if config.save is not None:
            raise refuse("tune_save", c=config)
    else:
        most_workers, why = find_max_workers(config, job.plan)
        search = WorkersSearch(most_workers, config.tune.steps, why)
        target = CHOICE_FILE if config.save is None else config.save
        check_choice_file(target, replaces=config.yes)
        chosen += [LAUNCH_NUM_WORKERS, LAUNCH_LOADER_DEFAULT]
    if given := [name for name in chosen if name in config.env]:
        raise UsageError(f"env.{given[0]} is set, which `launch tune` chooses: leave it out")
    tuning = Tuning(search, spec, job, call, target)
    return tuning.preview() if config.dry_run else tuning.run()


def _measure_here(composed: Composed) -> None:
    """Have the trials run on this machine; raises UsageError for a job that is to run elsewhere."""
    values = read_values(composed, ("run_dir", "new_run_dir", "nodes", "cluster.kind"))
    nodes, kind, job = str(values["nodes"]), str(values["cluster.kind"]), os.environ.get("SLURM_JOB_ID")
    wrong = [f"{key}={values[key]}" for key in ("run_dir", "new_run_dir") if values[key] is not None]
    wrong += [] if nodes in ("auto", "1", "1:1") else [f"nodes={nodes}"]
    wrong += [f"cluster={kind}"] if kind in ("slurm", "manual") else []
    if job and kind != "local" and "SLURMD_NODENAME" not in os.environ:
        wrong.append(f"this shell is not on the nodes of its SLURM job {job}")
    if wrong:
        raise refuse("tune_here", wrong=wrong[0])
    composed.tree.cluster.kind, composed.tree.nodes = "local", 1


@dataclass(slots=True)
class Tuning:
    """A search with the job that it runs with one value after the other."""

    search: Search
    spec: JobSpec
    job: Job
    """As it is without the value."""
    call: Call
    target: str | None
    """The file that the choice is written to."""

    def preview(self) -> int:
        """Say what would be tried, and return exit code 0."""
        words = self._list_words(self.search.next() or 0, Path("RUN_DIR"))
        command = join_words(["launch", *mask_words(words)])
        written = f"would write {self.target}\n" if self.target else ""
        steps = self.spec.config.tune.steps
        print_text(f"would try {self.search.bounds}, each for {steps} steps at most\n{written}{command}\n")
        return 0

    def run(self) -> int:
        """Try values until the best is known, keep it, and return the exit code.

        Raises LaunchError, and RunIdTakenError before anything has run.
        """
        search, spec, job = self.search, self.spec, self.job
        run, manifest = prepare_run(spec, self.call.argv, [job.host])
        name_files(self.call.composition.own_files)
        program = f"program={spec.choices.get('program', '')}"
        if spec.program is not None:
            program = shlex.join(mask_words(spec.program))
        where = f"{program} on {count_things(len(job.plan.ranks), 'rank')} of {job.host}"
        logger.info(f"{where}: {search.bounds}")
        logger.info(f"run directory {run.path}")

        def end(state: str, status: int) -> None:
            manifest.last.ended, manifest.last.outcome = stamp_time(), Outcome(state, exit_code=status)
            try:
                write_manifest(run, manifest)
            except OSError as error:
                logger.warning(f"the manifest could not be written ({error})")

        status = 0
        try:
            while (value := search.next()) is not None:
                trial = self._try(value, run.path)
                search.trials.append(trial)
                logger.info(describe_trial(trial, search))
            if search.conclude().value is None:
                raise MachineError(search.conclude().lines[0])
        except (KeyboardInterrupt, SystemExit) as stop:
            status = int(stop.code or 0) if isinstance(stop, SystemExit) else 128 + signal.SIGINT
        except LaunchError as error:
            end("failed", error.exit_code)
            for line in error.lines if isinstance(error, MeasureError) else ():
                logger.info(line)
            raise
        end("stopped" if status else "succeeded", status)
        self._show(run, where, status)
        return status

    def _show(self, run: RunDir, where: str, status: int) -> None:
        """Print what was found, and write it down: in the run directory, and to the file for later runs."""
        search, config, found = self.search, self.spec.config, self.search.conclude()
        ordered = sorted(search.trials, key=lambda trial: trial.value)
        saved = None if status or found.value is None else self.target
        if saved is not None:
            lines = [
                f"dataloader`, {stamp_time()}: {where}",
                *(describe_trial(one, search) for one in ordered),
            ]
            self._write_choice(saved, lines, found.value)
        result = {
            **{"schema": 1, "subject": search.subject, "complete": not status, **found.facts},
            "trials": [asdict(trial) for trial in ordered],
            "saved": saved,
        }
        with contextlib.suppress(OSError):
            write_json(run.path / "tuning.json", result)
        if config.format == "json":
            print_json(result)
        else:
            for trial in ordered:
                print_text(f"{describe_trial(trial, search, found.remarks.get(trial.value, ''))}\n")
            sys.stdout.flush()
        if found.value is None:
            logger.info("interrupted before anything was measured")
            return
        *lines, last = found.lines
        if search.option:
            last += f": `{self._render_command(found.value)}`"
        for line in (*lines, last):
            logger.info(f"interrupted, and no file is written: {line}" if status else line)
        if saved is not None:
            words = f" -- {shlex.join(mask_words(self.spec.program))}" if self.spec.program else ""
            path = Path(saved).absolute()
            is_option = path.suffix == ".yaml" and path.parent == Path(CHOICE_FILE).parent.absolute()
            use = f"`launch dataloader={path.stem}{words}` uses it"
            logger.info(f"{saved} written: {'' if is_option else 'in conf/dataloader/, '}{use}")

    def _write_choice(self, name: str, measured: Sequence[str], workers: int | None) -> None:
        """Write an option of the configuration, with what was measured in comments.

        Whole or not at all; raises UsageError or MachineError.
        """
        loader = self.spec.config.dataloader
        settings = {
            "workload": json.dumps(Path(name).stem),
            "num_workers": workers,
            "worker_gib": loader.worker_gib,
            "worker_shm_mib": loader.worker_shm_mib,
            "default": "true",
            "measured": "true",
        }
        # What ends a line must not end a comment if it is among the program's words.
        comments = "\n#   ".join(" ".join(line.splitlines()) for line in measured)
        text = "".join(f"{key}: {value}\n" for key, value in settings.items())
        if name == CHOICE_FILE:
            try:
                Path(name).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise explain("save", name, error) from None
        write_file("save", name, f"{MARK}{comments}\n{text}".encode("utf-8", "replace"))

    def _render_command(self, batch: int) -> str:
        """Return the command that uses a size, with the settings of this one that later runs need too."""
        rest = [self.search.argument(batch)]
        if self.spec.program is not None:
            rest = ["--", *mask_words(set_argument(self.spec.program, self.search.option, batch))]
        return f"launch {join_words([*mask_words(self._list_settings()), *rest])}"

    def _list_settings(self) -> list[str]:
        """Return the command line's settings for the job itself."""
        left_out = (*OF_A_SEARCH, self.search.option.removesuffix("="))
        keys = ((read_key(word), word) for word in self.spec.overrides)
        return [word for key, word in keys if key not in left_out and not key.startswith("tune.")]

    def _list_words(self, value: int, folder: Path) -> list[str]:
        """Return the command line of a trial, whose run directory and ranks' records are in a folder."""
        config, program, name = self.spec.config, self.spec.program, f"{self.search.title}-{value}"
        tune = config.tune
        flags = [group for group in group_words(self.call.words) if group[0][:1] == "-"]
        order = {"folder": str(folder / RECORDS / name), "steps": tune.steps, "seconds": tune.seconds}
        own = [
            *(f"new_run_dir={folder / name}", "cluster.kind=local", "nodes=1"),
            "restarts=0" if config.torchrun.max_restarts is None else "torchrun.max_restarts=0",
            f"gc.warmup={min(config.gc.warmup, WARMUP)}",
            *("logs.console=none", "watch.enabled=false", "preflight.kind=off", "fit.check=off"),
            *("notify.url=null", "notify.ping_url=null"),
            # What files of variables hold is in the trial's environment: a pipe is read once.
            *("env.from_file=null", f"env.{LAUNCH_METER}={json.dumps(order)}"),
        ]
        if self.search.option and program is not None:
            program = set_argument(program, self.search.option, value)
        elif self.search.option:
            own.append(self.search.argument(value))
        else:
            own += [f"env.{LAUNCH_NUM_WORKERS}={value}", f"env.{LAUNCH_LOADER_DEFAULT}=1"]
        if runs_bundled(config):
            # Steps of one micro-step: sequences a second do not depend on how many there are.
            own.append("program.global_batch=auto")
            own += ["program.grad_accumulation=1"] * (config.program.get("grad_accumulation") == "auto")
        given = [word for group in flags if group[0] not in ("-m", "--multirun") for word in group]
        return [*given, "--run", *self._list_settings(), *own, *(["--", *program] if program else ())]

    def _try(self, value: int, folder: Path) -> Trial:
        """Run the program with a value, and return what that has brought.

        Once a value has fitted, what says nothing is put down to the value. Raises LaunchError, and
        SystemExit for a signal.
        """
        try:
            return self._run_trial(value, folder)
        except MeasureError as error:
            if not any(trial.verdict == FITS for trial in self.search.trials):
                raise
            lines = [line.removeprefix("  | ").strip() for line in (str(error), *error.lines)]
            return Trial(value, verdict=FAILED, reason=next(line for line in reversed(lines) if line))

    def _run_trial(self, value: int, folder: Path) -> Trial:
        """Run the program to its end, or until it has been measured, or the machine's memory runs out.

        A program that catches the error of an allocation, and goes on or ends in peace, does not fit either.
        """
        search, config, name = self.search, self.spec.config, f"{self.search.title}-{value}"
        path, records, console = folder / name, folder / RECORDS / name, folder / f"{name}.log"
        of_files = set(config.env).difference(self.call.composition.tree.env)
        environ = {**os.environ, **{variable: config.env[variable] for variable in of_files}}
        command = [sys.executable, "-P", "-m", "launcher", *self._list_words(value, folder)]
        timeout, grace = config.tune.timeout, config.torchrun.shutdown_timeout + TERM_GRACE + 2 * KILL_GRACE
        try:
            records.mkdir(mode=0o700, parents=True)
            with console.open("xb") as output:
                doing = f"trying {search.argument(value)} …"
                status, starved = run_child(command, environ, output, timeout, grace, doing, is_memory_low)
        except OSError as error:
            raise MachineError(f"the trial could not be started ({error})") from None
        said = read_tail(console, LOG_LINES)
        logs = [line for log in sorted(path.glob("logs/*/*")) for line in read_tail(log, LOG_LINES)]
        reason = find_memory_error([*logs, *said])
        if not reason and starved:
            reason = "the machine's memory ran out, so it was ended"
        elif not reason and status == -signal.SIGKILL:
            reason = f"`launch` of the trial {describe_exit(status)}"
        if reason:
            return Trial(value, verdict=TOO_LARGE, reason=reason)
        if status is None:
            raise MeasureError(
                f"not measured within tune.timeout={timeout:g} s: give more time, or a smaller task"
            )
        if status:
            exit_code = 128 - status if status < 0 else status
            failure = read_manifest(path).last.outcome.first_failure
            if not failure:
                errors = [line for line in said if line.startswith("launch: error: ")]
                how = f"`launch` of the trial {describe_exit(status)}: see {console}"
                raise MeasureError([how, *errors][-1].removeprefix("launch: error: "), exit_code)
            rank, last = failure.rank, failure.last_lines
            where = f"rank {rank} on {failure.host} (local rank {failure.local_rank})"
            err, out = (RunDir(path).rank_log(rank, failure.attempt, end) for end in ("err", "out"))
            log = out if last and last[-1] not in read_tail(err, LOG_LINES) else err
            first, *lines = describe_first_failed_rank(where, failure.reason, str(log), last)
            raise MeasureError(first, exit_code, lines)
        return search.measure(records, value, len(self.job.plan.ranks))


def describe_trial(trial: Trial, search: Search, remark: str = "") -> str:
    """Return a trial in a line, with what a conclusion says of it."""
    argument, use = search.argument(trial.value), f", {format_size(trial.use_kib)}" if trial.use_kib else ""
    if not trial.rate:
        return f"{argument}: {VERDICTS[trial.verdict]}{use}: {trial.reason}"
    rate = f"{trial.rate:.3g} {trial.unit}/s ± {trial.error:.1%}, {trial.step_seconds:.3g} s a step"
    wait = f"{trial.wait:.0%} of the time waiting for data"
    return f"{argument}: {rate}, {wait}{use} ({trial.steps} steps){f': {remark}' if remark else ''}"


def check_choice_file(name: str, *, replaces: bool) -> None:
    """Raise UsageError for a file that is neither empty nor of `launch tune`."""
    if name != CHOICE_FILE:
        check_target("save", name)
    path, content = Path(name), b"?"
    with contextlib.suppress(OSError):
        content = read_file(path, LARGEST, follow=True)
    if path.exists() and not replaces and content and not content.startswith(MARK.encode()):
        raise refuse("tune_choice", path=path)


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
            raise refuse("tune_key", name=name, program=program)
        return f"{name}=", _parse_size(str(spec.config.program[key])) if name in spec.given else None
    if name is not None and name.startswith(PREFIX) and not name.endswith("="):
        raise UsageError(f"tune.option={name} is a key of the configured program: name the program's option")
    options = KNOWN if name is None else (name,)
    for option in options:
        if values := [spec.program[at].removeprefix(joined) for at, joined in _find(spec.program, option)]:
            return option, _parse_size(values[-1])
    if name is None:
        raise refuse("tune_option")
    return name, None


def _parse_size(text: str) -> int | None:
    """Return a size of at least 1; None for anything else."""
    return int(text) or None if re.fullmatch(r"[0-9]{1,9}", text) else None


def set_argument(program: Sequence[str], name: str, batch: int) -> tuple[str, ...]:
    """Return a program's arguments with an option set: where it stands, each time, or else at the end."""
    words, places = list(program), list(_find(program, name))
    for at, joined in places:
        words[at] = f"{joined}{batch}"
    if not places:
        words += [f"{name}{batch}"] if name.endswith("=") else [name, str(batch)]
    return tuple(words)


def _find(program: Sequence[str], name: str) -> Iterator[tuple[int, str]]:
    """Give the number of each word that holds an option's value, and what stands before it there."""
    joined = name if name.endswith("=") else f"{name}="
    for at, word in enumerate(program):
        if word.startswith(joined):
            yield at, joined
        elif at and program[at - 1] == name:
            yield at, ""
