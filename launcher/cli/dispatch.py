"""Composes a configuration, and does with it what the verb asks."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from launcher.cli.arguments import Command
from launcher.cli.config_programs import name_files
from launcher.cli.early_start import EarlyStart
from launcher.cli.unused_settings import warn_elsewhere, warn_unread
from launcher.cli.verbs import VerbCall, load_verb, takes_names, takes_program
from launcher.config.environment_files import fill_env, read_env_files
from launcher.config.hydra_flags import Flags
from launcher.config.overrides import quote_value
from launcher.config.rules import Context, check
from launcher.config.settings import Settings, settle_words
from launcher.config.sources import Sources, find_shipped
from launcher.config.start import pet_overrides

if TYPE_CHECKING:
    from launcher.config.compose import Composed

logger = logging.getLogger(__name__)

SHIPPED = Sources((find_shipped(),))
"""Without a file of the user's."""


def run_verb(flags: Flags, command: Command, argv: Sequence[str], early: EarlyStart) -> int:
    """Compose one configuration, and do what the command line asks with it."""
    overrides = add_pet(flags.overrides, os.environ)
    if takes_names(command.verb) and not overrides and flags.sources == SHIPPED:
        config = Settings()  # these verbs read no group, and Hydra takes longer than all of the rest
        settle_words(config)
        return show_runs(config, command)
    from launcher.config.compose import compose

    composed = compose(flags.sources, overrides)
    return run_composed(composed, command, argv, early)


def add_pet(overrides: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Put the overrides that `PET_*` variables stand for before the user's own, which win."""
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    pet = {key: value for key, value in pet_overrides(environ).items() if key not in given}
    return [*(f"{key}={quote_value(value)}" for key, value in pet.items()), *overrides]


def run_composed(
    composed: "Composed", command: Command, argv: Sequence[str], early: EarlyStart | None = None
) -> int:
    """Do what the command line asks with a configuration; return the exit code, raise LaunchError."""
    for warning in composed.warnings:
        logger.warning(warning)
    if takes_program(command.verb):
        warn_unread(composed.sources, command.program or ())
    if command.verb == "run":
        from launcher.cli.run import run_job

        return run_job(composed, command.program, argv, early or EarlyStart())
    if command.verb == "tune":
        from launcher.cli.tune import tune_program

        return tune_program(composed, command.names, command.program, argv)
    name_files(composed.own_files)
    if takes_names(command.verb):
        from launcher.config.compose import resolve

        return show_runs(resolve(composed), command)
    return show_machine(composed, command)


def show_machine(composed: "Composed", command: Command) -> int:
    """Run a verb that depends on the machine, and on the environment that ranks would have."""
    from launcher.config.compose import resolve

    config = resolve(composed)
    config = fill_env(config, read_env_files(config))
    if command.verb != "topo" or config.image:
        warn_elsewhere(config, os.environ)
    check(Context(config, f"launch {command.verb}", composed.given))
    environ = {**os.environ, **config.env}
    call = VerbCall(config, environ, program=command.program or (), given=composed.given)
    return load_verb(command.verb)(call)


def show_runs(config: Settings, command: Command) -> int:
    """Run a verb for runs that there are."""
    check(Context(config, f"launch {command.verb}"))
    return load_verb(command.verb)(VerbCall(config, os.environ, command.names))
