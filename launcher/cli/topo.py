"""`launch topo`: shows the machine, saves a snapshot of it, and draws it with the ranks."""

import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from launcher.cli.output_files import check_snapshot, check_target, write_file
from launcher.cli.plan import plan_node, read_machine
from launcher.cli.verbs import VerbCall
from launcher.config.overrides import quote_value
from launcher.config.settings import Settings
from launcher.errors import UsageError
from launcher.plan.model import Machine, machine_to_json

logger = logging.getLogger(__name__)

IMAGES = (".svg", ".png", ".pdf")
SIMPLE = re.compile(r"[\w./ -]+")
"""Names that an override takes as they are."""


def show_topo(call: VerbCall) -> int:
    """Print the machine to stdout, or write the files that were asked for; return 0.

    Raises UsageError or MachineError. Messages go to stderr, so that stdout holds the JSON alone.
    """
    config, environ = call.config, call.environ
    ending = check_image_suffix(config.image)
    if config.save is not None:
        check_target("save", config.save)
        check_snapshot(config.save)
    if config.image is not None:
        check_target("image", config.image)
        check_apart(config.image, config.save)
        machine = draw(config, environ, config.image, ending)
    else:
        machine = read_machine(config.machine)
    if config.save is not None:
        save(machine, config.save)
    if config.format == "json":
        sys.stdout.write(format_snapshot(machine))
    elif config.save is None and config.image is None:
        from launcher.report.console import make_console
        from launcher.report.machine import print_topology

        print_topology(make_console(stderr=False), machine, explain=config.explain)
    return 0


def format_snapshot(machine: Machine) -> str:
    """A snapshot's text."""
    return json.dumps(machine_to_json(machine), indent=1) + "\n"


def save(machine: Machine, name: str) -> None:
    """Write a snapshot and say how it is used; raises UsageError or MachineError."""
    write_file("save", name, format_snapshot(machine).encode())
    use = ""
    if name.isprintable() and Path(name).is_file():
        value = name if SIMPLE.fullmatch(name) else quote_value(name)
        use = f"; plan for it anywhere: {shlex.join(['launch', 'plan', f'machine.snapshot={value}'])}"
    logger.info(f"the machine is saved in {name}{use}")


def check_apart(image: str, save: str | None) -> None:
    """Raise UsageError if the picture and the snapshot would be one file."""
    if save is not None and os.path.realpath(image) == os.path.realpath(save):
        raise UsageError(f"image={image} and save={save} are one file: name two")


def check_image_suffix(image: str | None) -> str:
    """Return the ending of a picture's name, empty for None; raises UsageError for one that is unknown."""
    if image is None:
        return ""
    ending = next((ending for ending in IMAGES if image.lower().endswith(ending)), None)
    if ending is None:
        raise UsageError(f"image={image} has no ending that says its format: use {', '.join(IMAGES)}")
    return ending


def draw(config: Settings, environ: Mapping[str, str], name: str, ending: str) -> Machine:
    """Plan the ranks, draw them on their machine, and return it; raises UsageError or MachineError."""
    from launcher.report.machine import render_machine

    plan = plan_node(config, environ)
    picture = render_machine(plan, f"binding={config.binding.policy}", ending[1:])
    write_file("image", name, picture)
    for warning in plan.warnings:
        logger.warning(f"{warning}")
    logger.info(f"the machine is drawn in {name}, with the ranks on it")
    return plan.machine


HELP = """\
usage: launch topo [KEY=VALUE ...]

Shows the machine as a tree of packages, NUMA nodes, caches, cores, GPUs and
NICs, and what this job may use of it.

  explain=true         every cache and core on a line of its own
  format=table|json    json is the snapshot that save=FILE writes
  save=FILE            write a snapshot, to plan for this machine anywhere:
                       `launch plan machine.snapshot=FILE`
  image=FILE.svg       draw the machine with the ranks on it, which
                       nproc_per_node and binding place as for `launch`
  machine=NAME, machine.snapshot=F, machine.root=DIR    another machine

  launch topo
  launch topo machine=dgx_a100 explain=true
"""
