"""`launch tune dataloader`: which number of DataLoader workers a program is fastest with."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.tune import CHOICE_FILES, Strategy, describe_use
from launcher.cli.tune_trial import FinishedTrial, describe_program, specify_trial
from launcher.config.settings import Settings
from launcher.launch.job import Job, JobSpec
from launcher.plan.model import Plan
from launcher.plan.resources import limit_workers
from launcher.protocol import LAUNCH_LOADER_DEFAULT, LAUNCH_METER, LAUNCH_NUM_WORKERS
from launcher.report.fit import describe_workers, print_workers, tabulate_workers
from launcher.text import count_things
from launcher.tune.search import choose_best, choose_next, price_all
from launcher.tune.trials import FAILED, MeasureError, MismatchError, Trial, measure_workers

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.config.compose import Composed

WORKERS_PER_CORE = 2
"""Workers for each core: those that read from a disk or a network wait more than they compute."""
MIN_WORKERS, MAX_WORKERS = 4, 64


class WorkersStrategy(Strategy):
    """Tries the most telling number until it is clear which one is best."""

    subject = group = "dataloader"
    variables = (LAUNCH_NUM_WORKERS, LAUNCH_LOADER_DEFAULT, LAUNCH_METER)

    def __init__(self, composed: "Composed", spec: JobSpec, argv: Sequence[str]) -> None:
        super().__init__(composed, spec, argv)
        self.target = CHOICE_FILES[0] if spec.config.save is None else spec.config.save
        self.max_workers, self.why, self.thrift = 0, "", 0.0

    def set_bounds(self, job: Job) -> str:
        self.max_workers, self.why = find_max_workers(job.config, job.plan)
        self.thrift = price_all(self.max_workers, self.spec.config.tune.steps) / 2
        return f"with 0 to {self.max_workers} workers each ({self.why})"

    def preview(self) -> str:
        return f"0 workers, then up to {self.max_workers} ({self.why}) until it is clear"

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

    def describe(self, trial: Trial) -> str:
        return describe_workers(trial)

    def conclude(self) -> int | None:
        best = choose_best(self.trials)
        return best.value if best else None

    def render_choice(self) -> tuple[Sequence[Sequence[str]], Mapping[str, object]]:
        loader = self.spec.config.dataloader
        return tabulate_workers(self.trials), {
            "workload": json.dumps(Path(str(self.target)).stem),
            "num_workers": self.conclude(),
            "worker_gib": loader.worker_gib,
            "worker_shm_mib": loader.worker_shm_mib,
            "default": "true",
            "measured": "true",
        }

    def to_json(self) -> dict[str, object]:
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
        return {"max_workers": self.max_workers, "num_workers": self.conclude(), "trials": rows}

    def show(self, console: "Console") -> None:
        print_workers(console, self.trials, self.conclude())

    def advise(self, saved: str | None, *, is_early: bool) -> list[str]:
        chosen = self.conclude()
        if chosen is None:
            return ["interrupted before anything was measured"]
        if saved is None:
            return [f"interrupted: {self.argument(chosen)} is the best so far, and no file was written"]
        program = f" -- {describe_program(self.spec)}" if self.spec.program else ""
        use = describe_use(saved, self.group, program)
        return [f"{self.argument(chosen)} chosen; {saved} written: {use}"]


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
