"""Checks of a configuration's values that need no look at a machine; all of them raise UsageError."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from launcher.config.cluster import Cluster
from launcher.config.schema import LaunchConfig
from launcher.errors import UsageError
from launcher.plan.rules import DEVICES
from launcher.runs.objective import KINDS
from launcher.slurm.requeue_policy import check_requeue
from launcher.slurm.srun_command import refuse_options

CONSOLES = ("rank0", "all", "none")
AGENTS = ("torchrun", "srun")
RUNTIMES = ("pyxis", "apptainer")
FORMATS = ("table", "json")
MOST_WORKERS = 1024
"""DataLoader workers of a rank: more than a node has cores; a slip of the finger must not be planned."""


def check_config(config: LaunchConfig) -> None:
    """Check what a job is asked for, wherever it runs; raises UsageError."""
    check_strings(asdict(config))
    check_variables(config.env)
    check_choice("logs.console", config.logs.console, CONSOLES)
    check_choice("devices", config.devices, DEVICES)
    check_choice("agent", config.agent, AGENTS)
    check_choice("cluster.container.runtime", config.cluster.container.runtime, RUNTIMES)
    check_choice("objective", config.objective, KINDS)
    check_name(config.name)
    check_workers(config.dataloader.num_workers)
    check_paths("progress.paths", config.progress.paths)
    check_least("logs.tail", config.logs.tail, 1)
    check_least("torchrun.shutdown_timeout", config.torchrun.shutdown_timeout, 0)
    check_least("torchrun.max_restarts", config.torchrun.max_restarts or 0, 0)
    check_requeue(config.cluster.requeue)
    check_own_machine(config)
    check_run_dir(config.run_dir)


def check_agent(config: LaunchConfig, cluster: Cluster) -> None:
    """Raise UsageError for agent=srun where there is no srun for the ranks, or where it needs torchrun's."""
    if config.agent != "srun":
        return
    if cluster.kind not in ("slurm", "allocation"):
        raise UsageError(
            f"agent=srun, but the ranks run here ({cluster.why}): set cluster=slurm, or leave agent out"
        )
    if config.rdzv_endpoint:
        raise UsageError(
            f"rdzv_endpoint={config.rdzv_endpoint} with agent=srun, where there is no rendezvous: set"
            " torchrun.master_addr and torchrun.master_port"
        )
    refuse_options(asdict(config.torchrun), cluster.min_nodes, cluster.max_nodes)


def check_container(config: LaunchConfig, cluster: Cluster) -> None:
    """Raise UsageError for a container where no srun starts the ranks in it."""
    image = config.cluster.container.image
    if image and cluster.kind not in ("slurm", "allocation"):
        raise UsageError(
            f"cluster.container.image={image}, but the ranks run here ({cluster.why}): set cluster=slurm, or"
            " start launch in the container"
        )


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise UsageError for a value that is not one of the choices."""
    if value not in choices:
        raise UsageError(f"{key}={value}: choose from {', '.join(choices)}")


def check_paths(key: str, paths: Sequence[str]) -> None:
    """Raise UsageError for an empty entry in a list of paths or patterns."""
    if not all(paths):
        raise UsageError(f"{key}={','.join(paths)}: an entry is empty, leave it out")


def check_least(key: str, value: int, least: int) -> None:
    """Raise UsageError for a number that is too small."""
    if value < least:
        raise UsageError(f"{key}={value}: give a number of at least {least}")


def check_workers(number: int) -> None:
    """Raise UsageError for a number of DataLoader workers that no rank can have."""
    if not 0 <= number <= MOST_WORKERS:
        raise UsageError(
            f"dataloader.num_workers={number}: give a number of at least 0 and at most {MOST_WORKERS}"
        )


def check_strings(value: object) -> None:
    """Raise UsageError for a text that can be no path, argument or variable: NUL, or not in the encoding."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for item in value:
            check_strings(item)
    elif isinstance(value, str):
        try:
            possible = b"\0" not in os.fsencode(value)
        except UnicodeEncodeError:
            possible = False
        if not possible:
            raise UsageError(f"{value!r} has a character that no path, argument or variable can have")


def check_variables(env: Mapping[str, str]) -> None:
    """Raise UsageError for a name that no variable of the environment can have."""
    for name in env:
        if not name or "=" in name:
            raise UsageError(f"env has a variable named {name!r}: give a name without =")


def check_own_machine(config: LaunchConfig) -> None:
    """Raise UsageError for a run with a snapshot: its plan has to be that of the machine it runs on."""
    if config.machine.snapshot and not config.dry_run:
        raise UsageError(
            f"machine.snapshot={config.machine.snapshot} is another machine, and a run reads the one that it "
            "is on: leave out machine=…, or see the other's plan with `launch plan` or dry_run=true"
        )


def check_run_dir(path: str | None) -> None:
    """Raise UsageError for an empty path: a run that was meant to go on must not start anew."""
    if path == "":
        raise UsageError("run_dir= is empty, perhaps from an unset shell variable: name a run's directory")


def check_name(name: str | None) -> None:
    """Raise UsageError for a run's name that cannot be the name of a folder."""
    if name is None:
        return
    if name in ("", ".", "..") or "/" in name or len(os.fsencode(name)) > 200 or not name.isprintable():
        raise UsageError(
            f"name={name!r}: give a name without / of 1 to 200 bytes; runs_dir=DIR says where it goes"
        )
