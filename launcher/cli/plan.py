"""`launch plan`: plans this node, or the machine that the configuration names, and prints the plan."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from launcher.cli.job_warnings import settle_allocator, unset_settings, warn_overruled
from launcher.cli.verbs import Call, print_json
from launcher.config.program import render_program
from launcher.config.request import load_snapshot, make_request
from launcher.config.settings import MachineConfig, Settings
from launcher.errors import UsageError
from launcher.plan.allocator import read_host
from launcher.plan.model import Machine, Plan
from launcher.plan.planner import plan
from launcher.probe.malloc_library import locate_malloc

logger = logging.getLogger(__name__)


def show_plan(call: Call) -> int:
    """Print the plan to stdout, as a table or as JSON; return 0."""
    config, environ, given = call.config, call.environ, call.given
    warn_overruled(environ, given)
    words = call.program
    if words is None:
        try:
            words = render_program(config.program, {"model": config.model, "data": config.data})
        except UsageError:  # a run says so
            words = ()
    left_out = settle_allocator(config, words, environ, given)
    made = plan_node(unset_settings(config, left_out), environ)
    fit = None
    if config.fit.check != "off":
        from launcher.cli.fit import estimate_fit  # what estimates is loaded for an estimate alone

        fit = estimate_fit(call, config, made)
    if config.format == "json":
        from launcher.plan.model import plan_to_json

        found = plan_to_json(made)
        if fit:
            from launcher.fit.choice import fit_to_json

            found = {**found, "fit": fit_to_json(fit)}
        print_json(found)
        return 0
    from launcher.report.console import make_console
    from launcher.report.placement import print_placement

    if fit and not call.program and not any(key.partition(".")[0] in ("model", "program") for key in given):
        logger.info(
            "no program is given: memory is judged for the bundled one with its small model; name yours by"
            " +model=NAME or model.config=FILE"
        )
    console = make_console(stderr=False)
    print_placement(console, made, explain=config.explain, full=True)
    if fit:
        from launcher.report.fit import print_fit

        console.print()
        print_fit(console, fit)
    return 0


def plan_node(config: Settings, environ: Mapping[str, str]) -> Plan:
    """Plan this node, or the machine that the configuration names; raises UsageError or MachineError."""
    machine = read_machine(config.machine)
    request = make_request(config, environ, machine)
    if config.machine.snapshot is None:
        library = locate_malloc(read_host(config.allocator), environ, config.machine.root)
        request = replace(request, host_library=library)
    return plan(machine, request)


def read_machine(machine: MachineConfig) -> Machine:
    """Return the machine below `machine.root`, or a snapshot's; raises UsageError or MachineError."""
    if machine.snapshot is None:
        from launcher.probe.machine import probe

        return probe(machine.root)
    if machine.root != "/":
        raise UsageError(
            f"machine.snapshot={machine.snapshot} and machine.root={machine.root} are two machines: leave one"
            " of them out"
        )
    return load_snapshot(machine.snapshot)
