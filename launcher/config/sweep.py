"""Sweeps: the overrides of each job, or the trials that a plugin of Hydra's asks for, as Optuna."""

import contextlib
import logging
import math
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice, product
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from launcher.config.compose import (
    FAILURES,
    Composed,
    add_searchpath,
    compose,
    diagnose_failure,
    list_hydra_words,
    normalize_overrides,
    open_hydra,
    read_values,
    set_hydra_config,
)
from launcher.config.run_path import choose_id, use_sweep_folder
from launcher.config.words import Sources, mentions_hydra, quote_value, read_key, shorten_message
from launcher.errors import LaunchError, MachineError, UsageError
from launcher.files import open_own
from launcher.runs.secrets import mask_words
from launcher.text import StderrHandler

MOST_JOBS = 100_000
"""Of a sweep; SLURM's largest array has 4 million tasks, and 1,000 as it is installed."""


@dataclass(frozen=True, slots=True)
class Multirun:
    """What is known of a sweep before its jobs are."""

    sources: Sources
    words: tuple[str, ...]
    """The command line's overrides in Hydra's terms."""
    tree: DictConfig | None = None
    """The configuration without the values of the sweep; None if nothing in it is Hydra's."""
    own_files: Sequence[str] = ()
    """The user's files that the sweep is composed from."""
    asked: bool = False
    """`hydra.mode=MULTIRUN`."""
    sweeper: str = "basic"
    """The chosen option of the group `hydra/sweeper`."""
    params: Mapping[str, object] = field(default_factory=dict)
    """`hydra.sweeper.params` of the basic sweeper."""
    sweep_dir: str | None = None
    """`hydra.sweep.dir`, if the user has set it; launch has no use for Hydra's default."""


def read_multirun(sources: Sources, overrides: Sequence[str]) -> Multirun:
    """Compose what is the same for all jobs of a sweep; raises UsageError."""
    sources = add_searchpath(sources, overrides)
    with open_hydra(sources) as loader, warnings.catch_warnings(action="ignore"):
        words = normalize_overrides(sources, overrides, sweep=True)
        if not mentions_hydra(words) and not sources.mentions("hydra"):
            return Multirun(sources, tuple(words))
        try:
            tree = loader.load_configuration(sources.primary, words, RunMode.MULTIRUN)
            OmegaConf.set_struct(tree, value=False)
            set_hydra_config(tree, None)
            choices = {str(group): str(option) for group, option in tree.hydra.runtime.choices.items()}
            given = {read_key(word) for word in (*list_hydra_words(sources, choices), *words)}
            sweeper = choices["hydra/sweeper"]
            return Multirun(
                sources,
                tuple(words),
                tree,
                sources.list_own(choices),
                asked=tree.hydra.mode == RunMode.MULTIRUN,
                sweeper=sweeper,
                params=dict(tree.hydra.sweeper.params or {}) if sweeper == "basic" else {},
                sweep_dir=str(tree.hydra.sweep.dir) if "hydra.sweep.dir" in given else None,
            )
        except FAILURES as error:
            raise UsageError(diagnose_failure(loader, sources, words, error)) from None


def expand_sweep(multirun: Multirun) -> list[list[str]]:
    """Return the overrides of each job of a sweep: every combination of the values, the last varying first.

    Values of the command line override those of `hydra.sweeper.params`. Raises UsageError.
    """
    params = [f"{key}={value}" for key, value in multirun.params.items()]
    with open_hydra(multirun.sources) as loader:
        try:
            words = [*normalize_overrides(multirun.sources, params, sweep=True), *multirun.words]
            parsed = OverridesParser.create(loader).parse_overrides(words)
            values = {override.get_key_element(): list_values(override) for override in parsed}
        except FAILURES as error:
            raise UsageError(shorten_message(error)) from None
    if math.prod(map(len, values.values())) > MOST_JOBS:
        raise UsageError(f"the sweep has over {MOST_JOBS} jobs: give fewer values, or several sweeps")
    return [list(job) for job in product(*values.values())]


def list_values(override: Override) -> list[str]:
    """Return an override for each of its values; raises UsageError for values that cannot be listed."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep():
        raise UsageError(
            f"{override.input_line} is for a sweeper that chooses values by results, as hydra/sweeper=optuna:"
            " name one, or list the values"
        )
    some = islice(override.sweep_string_iterator(), MOST_JOBS + 1)
    found = [f"{override.get_key_element()}={value}" for value in some]
    if not found:
        raise UsageError(f"{override.input_line} matches nothing: a sweep needs one value at least")
    return found


logger = logging.getLogger(__name__)


class TrialError(LaunchError):
    """A trial failed; if the sweeper gives up, the sweep ends with the trial's exit code."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class TrialReturn(JobReturn):
    """A trial's result, without the line that Hydra prints whenever a sweeper looks at one that failed."""

    @property
    def return_value(self) -> Any:  # noqa: ANN401 - as Hydra has it
        """The objective; raises TrialError if there is none."""
        if isinstance(self._return_value, TrialError):
            raise self._return_value
        return self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:  # noqa: ANN401 - see above
        """Set the objective, or the error."""
        self._return_value = value


def run_trials(
    multirun: Multirun,
    run: Callable[[Sequence[Composed]], Iterator[int]],
    read_objective: Callable[[Path, str], object],
) -> int:
    """Let the sweeper run its trials, and return 0; raises LaunchError.

    `run` runs configurations, and gives their exit codes as they end. `read_objective` returns the objective
    of a run directory, by the value of `objective`; it raises ValueError. Trial N runs in FOLDER/N; the
    sweeper's own files are beside these.
    """
    folder = make_folder(multirun)
    parsed = OverridesParser.create().parse_overrides(list(multirun.words))
    fixed = {one.get_key_element(): str(one.input_line) for one in parsed if not one.is_sweep_override()}
    defects: list[BaseException] = []

    def run_batch(trials: Sequence[tuple[int, Sequence[str]]]) -> list[JobReturn]:
        """Run a batch, and return each trial's objective, or TrialError if it has none.

        Raises LaunchError for a trial that cannot be composed, before any runs.
        """
        batch: list[tuple[int, Sequence[str], list[str], Composed]] = []
        for number, overrides in trials:
            # What is fixed is as given: sweepers write it in ways of their own.
            chosen = [word for word in overrides if word.partition("=")[0] not in fixed]
            composed = compose(multirun.sources, [*fixed.values(), *chosen], number)
            use_sweep_folder(composed.tree, str(folder / str(number)))
            batch.append((number, overrides, chosen, composed))
        codes = run([composed for *_, composed in batch])
        results: list[JobReturn] = []
        for number, overrides, chosen, composed in batch:
            logger.info(f"trial {number}: {' '.join(mask_words(chosen))}")
            value: object = None
            if code := next(codes):
                value = TrialError(f"trial {number} failed with exit code {code}", code)
            else:
                kind = str(read_values(composed, ("objective",))["objective"])
                try:
                    value = read_objective(folder / str(number), kind)
                except ValueError as error:
                    value = TrialError(f"trial {number}: {error}", UsageError.exit_code)
            failed = isinstance(value, TrialError)
            logger.info(str(value) if failed else f"trial {number}: objective {value}")
            status = JobStatus.FAILED if failed else JobStatus.COMPLETED
            results.append(TrialReturn(overrides, composed.tree, status=status, _return_value=value))
        return results

    def keep_defects(trials: Sequence[tuple[int, Sequence[str]]]) -> list[JobReturn]:
        try:
            return run_batch(trials)
        except BaseException as error:
            defects.append(error)  # not one of the sweeper's
            raise

    logger.info(f"the trials of hydra/sweeper={multirun.sweeper} go to {folder}")
    plugins = logging.getLogger("hydra_plugins")  # whose log has their results
    plugins.handlers = [StderrHandler()]
    plugins.setLevel(logging.INFO)
    node = {"_target_": "hydra_plugins.launch.TrialLauncher"}
    ConfigStore.instance().store(group="hydra/launcher", name="launch", node=node, provider="launch")
    words = [*multirun.words, "hydra/launcher=launch", f"hydra.sweep.dir={quote_value(str(folder))}"]
    with open_hydra(multirun.sources):
        hydra: Any = GlobalHydra.instance().hydra
        try:
            hydra.multirun(multirun.sources.primary, keep_defects, words, with_log_configuration=False)
        except LaunchError:
            raise
        except Exception as error:
            if error in defects:
                raise
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exception(error)
            raise UsageError(f"hydra/sweeper={multirun.sweeper}: {shorten_message(error)}") from None
        finally:
            if not multirun.sweep_dir:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # if no trial has begun
    logger.info(f"the sweep has ended; its trials are in {folder}")
    return 0


def make_folder(multirun: Multirun) -> Path:
    """Return the sweep's folder, made: `hydra.sweep.dir`, else one below `runs_dir`; raises MachineError."""
    given = multirun.sweep_dir
    runs_dir = multirun.tree.runs_dir if multirun.tree is not None else "runs"
    prefix = f"{multirun.sweeper}-"
    try:
        path = Path(given or choose_id(Path(runs_dir), datetime.now().astimezone(), prefix=prefix)).absolute()
        path.mkdir(mode=0o700, parents=True, exist_ok=bool(given))
        os.close(open_own(path))  # Hydra and sweepers write into it by name
    except OSError as error:
        raise MachineError(
            f"cannot make the sweep's folder, {error.filename} ({error.strerror}): set hydra.sweep.dir=DIR"
        ) from None
    return path
