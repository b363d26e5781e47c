"""Sweeps: the overrides of each job, or the trials that a plugin of Hydra's asks for, as Optuna."""

import contextlib
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import product
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus

from launcher.config.compose import Composed, compose, normalize_overrides, open_hydra, read_values
from launcher.config.run_path import choose_id, use_sweep_folder
from launcher.config.settings import refuse
from launcher.config.words import quote_value
from launcher.errors import LaunchError, MachineError, UsageError
from launcher.files import open_own
from launcher.runs.secrets import mask_words
from launcher.text import StderrHandler

logger = logging.getLogger(__name__)


def expand_sweep(sweep: Composed) -> list[list[str]]:
    """Return the overrides of each job of a sweep: every combination of the values, the last varying first.

    Values of the command line override those of `hydra.sweeper.params`. Raises UsageError.
    """
    params = [f"{key}={value}" for key, value in sweep.params.items()]
    values: dict[str, list[str]] = {}
    with open_hydra(sweep.sources) as hydra:
        words = [*normalize_overrides(hydra, sweep.sources, params, sweep=True), *sweep.words]
        for override in OverridesParser.create(hydra.config_loader).parse_overrides(words):
            key, line = override.get_key_element(), str(override.input_line)
            if not override.is_sweep_override():
                values[key] = [line]
            elif not override.is_discrete_sweep():
                raise refuse("no_sweeper", line=line)
            else:
                values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
            if not values[key]:
                raise UsageError(f"{line} matches nothing: a sweep needs one value at least")
    return [list(job) for job in product(*values.values())]


class TrialError(LaunchError):
    """A trial failed; if the sweeper gives up, the sweep ends with the trial's exit code."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def run_trials(
    sweep: Composed,
    run: Callable[[Sequence[Composed]], Iterator[int]],
    read_objective: Callable[[Path, str], object],
) -> int:
    """Let the sweeper run its trials, and return 0; raises LaunchError.

    `run` runs configurations, and gives their exit codes as they end. `read_objective` returns the objective
    of a run directory, by the value of `objective`; it raises ValueError. Trial N runs in FOLDER/N; the
    sweeper's own files are beside these.
    """
    folder = make_folder(sweep)
    parsed = OverridesParser.create().parse_overrides(list(sweep.words))
    fixed = {one.get_key_element(): str(one.input_line) for one in parsed if not one.is_sweep_override()}

    def run_batch(trials: Sequence[tuple[int, Sequence[str]]]) -> list[JobReturn]:
        """Run a batch, and return each trial's objective, or TrialError if it has none.

        Raises LaunchError for a trial that cannot be composed, before any runs.
        """
        batch: list[tuple[int, Sequence[str], list[str], Composed]] = []
        for number, overrides in trials:
            # What is fixed is as given: sweepers write it in ways of their own.
            chosen = [word for word in overrides if word.partition("=")[0] not in fixed]
            composed = compose(sweep.sources, [*fixed.values(), *chosen], number)
            use_sweep_folder(composed.tree, str(folder / str(number)))
            batch.append((number, overrides, chosen, composed))
        codes = run([composed for *_, composed in batch])
        results: list[JobReturn] = []
        for number, overrides, chosen, composed in batch:
            logger.info(f"trial {number}: {' '.join(mask_words(chosen))}")
            status, value = JobStatus.COMPLETED, None
            try:
                if code := next(codes):
                    raise TrialError(f"trial {number} failed with exit code {code}", code)
                value = read_objective(
                    folder / str(number), str(read_values(composed, ["objective"])["objective"])
                )
                logger.info(f"trial {number}: objective {value}")
            except (TrialError, ValueError) as error:
                told = error if isinstance(error, TrialError) else TrialError(f"trial {number}: {error}", 2)
                status, value = JobStatus.FAILED, told
                logger.info(str(told))
            results.append(JobReturn(overrides, composed.tree, status=status, _return_value=value))
        return results

    logger.info(f"the trials of hydra/sweeper={sweep.sweeper} go to {folder}")
    plugins = logging.getLogger("hydra_plugins")  # whose log has their results
    plugins.handlers = [StderrHandler()]
    plugins.setLevel(logging.INFO)
    node = {"_target_": "hydra_plugins.launch.TrialLauncher"}
    ConfigStore.instance().store(group="hydra/launcher", name="launch", node=node, provider="launch")
    words = [*sweep.words, "hydra/launcher=launch", f"hydra.sweep.dir={quote_value(str(folder))}"]
    with open_hydra(sweep.sources) as hydra:
        try:
            hydra.multirun(sweep.sources.primary, run_batch, words, with_log_configuration=False)
        except LaunchError:
            raise
        except Exception as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if str(frame.f_globals.get("__name__")).startswith("launcher."):  # a defect of ours
                raise
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exception(error)
            why = " ".join(str(error.__cause__ or error).split())
            raise UsageError(f"hydra/sweeper={sweep.sweeper}: {why}") from None
        finally:
            if not sweep.sweep_dir:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # if no trial has begun
    logger.info(f"the sweep has ended; its trials are in {folder}")
    return 0


def make_folder(sweep: Composed) -> Path:
    """Return the sweep's folder, made: `hydra.sweep.dir`, else one below `runs_dir`; raises MachineError."""
    given, prefix = sweep.sweep_dir, f"{sweep.sweeper}-"
    runs_dir = Path(str(sweep.tree.runs_dir))
    try:
        path = Path(given or choose_id(runs_dir, datetime.now().astimezone(), prefix=prefix)).absolute()
        path.mkdir(mode=0o700, parents=True, exist_ok=bool(given))
        os.close(open_own(path))  # Hydra and sweepers write into it by name
    except OSError as error:
        raise refuse("sweep_folder", MachineError, error=error) from None
    return path
