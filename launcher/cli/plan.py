"""`launch plan`: plans this node, or the machine that the configuration names, and prints the plan."""

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.cli.allocator_check import render_configured_program, settle_allocator, unset_settings
from launcher.cli.unused_settings import warn_overruled
from launcher.cli.verbs import VerbCall
from launcher.config.request import load_snapshot, make_request
from launcher.config.settings import MachineConfig, Settings
from launcher.errors import UsageError
from launcher.plan.allocator import read_host
from launcher.plan.model import Machine, Plan
from launcher.plan.planner import plan
from launcher.probe.malloc_library import locate_malloc

if TYPE_CHECKING:
    from launcher.fit.choice import FitReport

logger = logging.getLogger(__name__)


def show_plan(call: VerbCall) -> int:
    """Print the plan to stdout, as a table or as JSON; return 0."""
    config, environ, given = call.config, call.environ, call.given
    warn_overruled(environ, given)
    left_out = settle_allocator(config, call.program or render_configured_program(config), environ, given)
    made = plan_node(unset_settings(config, left_out), environ)
    fit = assess_plan(call, made)
    if config.format == "json":
        from launcher.fit.choice import fit_to_json
        from launcher.plan.model import plan_to_json

        found = {**plan_to_json(made), **({"fit": fit_to_json(fit)} if fit else {})}
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
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


def assess_plan(call: VerbCall, made: Plan) -> "FitReport | None":
    """Judge whether the job fits on nodes of this plan; None if there is no claim. Raises UsageError."""
    config = call.config
    if config.fit.check == "off":
        return None
    from launcher.config.fit_request import (
        count_plan_nodes,
        find_fit_model,
        is_bundled_program,
        make_fit_request,
    )

    model = find_fit_model(config, call.program, call.given)
    request = make_fit_request(
        config,
        made,
        model,
        nodes=count_plan_nodes(config.nodes, call.environ),
        is_bundled=is_bundled_program(config, call.program),
        environ=call.environ,
    )
    if request is None or not request.device.memory_mib:
        return None
    from launcher.cli.measured_fit import learn_for_request
    from launcher.fit.choice import assess

    learned = learn_for_request(config, call.program, request, call.environ)
    return assess(request, learned, grid=config.fit.grid)


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


HELP = """\
usage: launch plan [KEY=VALUE ...] [PROGRAM ARGUMENT ...]

Shows where each rank would run, with which threads, DataLoader workers and
variables, and whether the model fits in the memory of each GPU, what the job
needs of a node, and how fast it would be. It starts nothing. The keys are
those of `launch`, and

  explain=true         why each rank is where it is, and who set each variable
  format=table|json    json is the very value that a run uses
  machine=NAME         plan for a shipped machine (see `launch --help-all`)
  machine.snapshot=F   plan for the machine that `launch topo save=F` described
  machine.root=DIR     read the machine from DIR/sys and DIR/proc
  +model=NAME          the model to judge, or model.config=FILE, a Hugging Face
                       config.json; without one, your program is not judged
  parallel.X, fit.X    how a program of yours splits and trains it: parallel.tp,
                       pp, dp, cp, ep, zero; fit.micro_batch, seq_len,
                       precision, optimizer, checkpointing, offload;
                       fit.gpu=A100-40GB is another GPU; fit.check=off leaves
                       all of this out; fit.grid=true shows micro-batches by
                       checkpointing by sharding

  launch plan
  launch plan nproc_per_node=2 binding=numa explain=true
  launch plan machine=dgx_h100 format=json
  launch plan +model=llama7b nodes=4 machine=dgx_h100
  launch plan +model=llama70b parallel.tp=8 parallel.zero=1 nodes=8 train.py
"""
