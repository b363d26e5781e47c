"""`launch topo`: shows the machine, saves a snapshot of it, and draws it with the ranks."""

import json
import logging
import os
import re
import shlex
import sys
from pathlib import Path

from launcher.cli.output_files import check_target, write_file
from launcher.cli.plan import plan_node, read_machine
from launcher.cli.verbs import Call
from launcher.config.overrides import quote_value
from launcher.errors import UsageError
from launcher.files import LARGEST
from launcher.plan.model import KIND, machine_to_json

logger = logging.getLogger(__name__)

IMAGES = (".svg", ".png", ".pdf")
SIMPLE = re.compile(r"[\w./ -]+")
"""Names that an override takes as they are."""


def show_topo(call: Call) -> int:
    """Print the machine to stdout, or write the files that were asked for; return 0.

    Raises UsageError or MachineError. Messages go to stderr, so that stdout holds the JSON alone.
    """
    config, image, save = call.config, call.config.image, call.config.save
    ending = next((ending for ending in IMAGES if image and image.lower().endswith(ending)), "")
    if image is not None and not ending:
        raise UsageError(f"image={image} has no ending that says its format: use {', '.join(IMAGES)}")
    if save is not None:
        check_target("save", save)
        if Path(save).is_file() and not _is_snapshot(Path(save)):
            raise UsageError(f"save={save} is there already and is no machine snapshot: name another file")
    if image is None:
        machine = read_machine(config.machine)
    else:
        check_target("image", image)
        if save is not None and os.path.realpath(image) == os.path.realpath(save):
            raise UsageError(f"image={image} and save={save} are one file: name two")
        from launcher.report.machine import render_machine

        plan = plan_node(config, call.environ)
        machine = plan.machine
        write_file("image", image, render_machine(plan, f"binding={config.binding.policy}", ending[1:]))
        for warning in plan.warnings:
            logger.warning(f"{warning}")
        logger.info(f"the machine is drawn in {image}, with the ranks on it")
    snapshot = json.dumps(machine_to_json(machine), indent=1) + "\n"
    if save is not None:
        write_file("save", save, snapshot.encode())
        use = ""
        if save.isprintable() and Path(save).is_file():
            value = save if SIMPLE.fullmatch(save) else quote_value(save)
            use = f"; plan for it anywhere: {shlex.join(['launch', 'plan', f'machine.snapshot={value}'])}"
        logger.info(f"the machine is saved in {save}{use}")
    if config.format == "json":
        sys.stdout.write(snapshot)
    elif save is None and image is None:
        from launcher.report.console import make_console
        from launcher.report.machine import print_topology

        print_topology(make_console(stderr=False), machine, explain=config.explain)
    return 0


def _is_snapshot(path: Path) -> bool:
    """Tell whether a file is a snapshot of any version, or empty."""
    try:
        size = path.stat().st_size
        data = json.loads(path.read_bytes()) if 0 < size <= LARGEST else {}
    except (OSError, ValueError, RecursionError):
        return False
    return size == 0 or (isinstance(data, dict) and data.get("kind") == KIND)
