"""Hydra's launcher for the trials of a sweep; Hydra takes plugins from this namespace package alone."""

from collections.abc import Sequence

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class TrialLauncher(Launcher):
    """Hands each batch of trials to the task function at once; see `launcher.config.sweep`."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the task function, which is `run_batch` of `launcher.config.sweep`."""
        self.run_batch = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch, whose trials are numbered from `initial_job_idx`, and return their results."""
        results: Sequence[JobReturn] = self.run_batch(list(enumerate(job_overrides, initial_job_idx)))
        return results
