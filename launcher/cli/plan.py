"""Which verb does what."""

import os
import sys
from collections.abc import Collection, Mapping, Sequence

from launcher.cli.allocator_check import find_words, settle_allocator
from launcher.cli.output_files import refuse_files
from launcher.cli.unused_settings import warn_elsewhere, warn_overruled
from launcher.config.environment_files import fill_env
from launcher.config.schema import LaunchConfig
from launcher.launch.job import plan_configured

OF_MACHINE = ("plan", "topo", "doctor")
"""Verbs that depend on the environment that ranks would have."""


def show(
    verb: str,
    config: LaunchConfig,
    names: Sequence[str] = (),
    *,
    given: Collection[str] = (),
    program: Sequence[str] = (),
) -> int:
    """Do what a verb asks, of these runs and jobs where it takes any; return the exit code.

    `given` are the command line's keys, and `program` its words after `--`.
    """
    if verb in OF_MACHINE:
        fill_env(config)
    if verb in ("plan", "doctor") or (verb == "topo" and config.image):
        warn_elsewhere(config, os.environ)
    environ = {**os.environ, **config.env}
    if verb != "topo":
        refuse_files(f"launch {verb}", config)
    if verb == "plan":
        warn_overruled(environ, given)
        settle_allocator(config, program or find_words(config), environ, given)
        return show_plan(config, environ)
    if verb == "topo":
        from launcher.cli.topo import show_topo

        return show_topo(config, environ)
    if verb == "doctor":
        from launcher.cli.doctor import show_checkup

        return show_checkup(config, environ)
    if verb == "status":
        from launcher.cli.status import show_status

        return show_status(config, names)
    if verb == "logs":
        from launcher.cli.logs import show_logs

        return show_logs(config, names)
    from launcher.cli.cancel import cancel_runs

    return cancel_runs(config, names)


def show_plan(config: LaunchConfig, environ: Mapping[str, str]) -> int:
    """Print the plan to stdout, as a table or as JSON."""
    plan = plan_configured(config, environ)
    if config.format == "json":
        import json

        from launcher.plan.json_form import plan_to_json

        sys.stdout.write(json.dumps(plan_to_json(plan), indent=1) + "\n")
        return 0
    from launcher.report.console import make_console
    from launcher.report.placement_table import print_placement

    print_placement(make_console(stderr=False), plan, explain=config.explain, full=True)
    return 0


HELP = """\
usage: launch plan [KEY=VALUE ...] [PROGRAM ARGUMENT ...]

Shows where each rank would run, with which threads, DataLoader workers and
variables. It starts nothing. The keys are those of `launch`, and

  explain=true         why each rank is where it is, and who set each variable
  format=table|json    json is the very value that a run uses
  machine=NAME         plan for a shipped machine (see `launch --help-all`)
  machine.snapshot=F   plan for the machine that `launch topo save=F` described
  machine.root=DIR     read the machine from DIR/sys and DIR/proc

  launch plan
  launch plan nproc_per_node=2 binding=numa explain=true
  launch plan machine=dgx_h100 format=json
"""
