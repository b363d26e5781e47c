"""`launch plan` and `launch topo`: this machine, or one that the configuration names, and the ranks on it."""

import contextlib
import errno
import json
import logging
import os
import re
import shlex
import sys
from pathlib import Path

from launcher.cli.main import Call, print_json
from launcher.config.program import render_program
from launcher.config.rules import settle_allocator, warn_overruled
from launcher.config.start import plan_node, read_machine
from launcher.config.words import quote_value, read_section
from launcher.errors import MachineError, UsageError
from launcher.files import LARGEST, ON_THE_WAY, Descriptor, read_file, write_whole
from launcher.plan.model import KIND, machine_to_json, plan_to_json

logger = logging.getLogger(__name__)

SIMPLE = re.compile(r"[\w./ -]+")
"""Names that an override takes as they are."""
IMAGES = (".svg", ".png", ".pdf")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors that are the machine's fault, not the command line's."""


def show_plan(call: Call) -> int:
    """Print the plan to stdout, as a table or as JSON; return 0."""
    config, environ, given, words = call.config, call.environ, call.given, call.program or ()
    warn_overruled(environ, given)
    if not words:
        with contextlib.suppress(UsageError):  # a run says so
            words = render_program(config)
    made = plan_node(settle_allocator(config, words, environ, given), environ)
    fit = None
    if config.fit.check != "off":
        from launcher.cli.fit import estimate_fit  # what estimates is loaded for an estimate alone

        fit = estimate_fit(call, config, made)
    if config.format == "json":
        found = plan_to_json(made)
        if fit:
            from launcher.fit.choice import fit_to_json

            found = {**found, "fit": fit_to_json(fit)}
        print_json(found)
        return 0
    from launcher.report.placement import print_placement
    from launcher.report.tables import make_console

    if fit and not call.program and not {"model", "program"} & {*map(read_section, given)}:
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


def show_topo(call: Call) -> int:
    """Print the machine to stdout, or write the files that were asked for; return 0.

    Raises UsageError or MachineError. Messages go to stderr, so that stdout holds the JSON alone.
    """
    config, image, save = call.config, call.config.image, call.config.save
    if image is not None and Path(image).suffix.lower() not in IMAGES:
        raise UsageError(f"image={image} has no ending that says its format: use {', '.join(IMAGES)}")
    if save is not None:
        check_target("save", save)
        if Path(save).is_file() and not _is_snapshot(Path(save)):
            raise UsageError(f"save={save} is there already and is no machine snapshot: name another file")
    if image is None:
        machine = read_machine(config.machine)
    else:
        check_target("image", image)
        from launcher.report.charts import draw_machine

        plan = plan_node(config, call.environ)
        machine, picture = plan.machine, Path(image).suffix[1:].lower()
        write_file("image", image, draw_machine(plan, f"binding={config.binding.policy}", picture))
        for warning in plan.warnings:
            logger.warning(f"{warning}")
        logger.info(f"the machine is drawn in {image}, with the ranks on it")
    snapshot = json.dumps(machine_to_json(machine), indent=1) + "\n"
    if save is not None:
        write_file("save", save, snapshot.encode())
        value = save if SIMPLE.fullmatch(save) else quote_value(save)
        use = shlex.join(["launch", "plan", f"machine.snapshot={value}"])
        logger.info(f"the machine is saved in {save}; plan for it anywhere: {use}")
    if config.format == "json":
        sys.stdout.write(snapshot)
    elif save is None and image is None:
        from launcher.report.machine import print_topology
        from launcher.report.tables import make_console

        print_topology(make_console(stderr=False), machine, explain=config.explain)
    return 0


def _is_snapshot(path: Path) -> bool:
    """Tell whether a file is a snapshot of any version, or empty."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        text = read_file(path, LARGEST, follow=True)
        data = json.loads(text) if text else {"kind": KIND}
        return isinstance(data, dict) and data.get("kind") == KIND
    return False


# Files that a user names: written whole or not at all, and none of the user's own lost


def check_target(key: str, name: str) -> None:
    """Raise UsageError for a name that no file can be written to, before any work is done for it."""
    path = Path(name)
    if not name:
        raise UsageError(f"{key}= is empty: name a file")
    try:
        if path.is_dir() or name.endswith("/"):
            raise UsageError(f"{key}={name} is a directory: name a file in it")
        if not path.parent.is_dir():
            raise UsageError(f"{key}={name}: there is no directory {path.parent}: make it first")
    except OSError as error:
        raise explain(key, name, error) from None


def write_file(key: str, name: str, data: bytes) -> None:
    """Write a file whole or not at all, with the mode of the one that it replaces.

    Raises UsageError or MachineError. What is no regular file, such as /dev/stdout, is written to.
    """
    path = Path(name)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            target = path.resolve()  # a link goes on pointing at the file
            with Descriptor(os.open(target.parent, ON_THE_WAY)) as folder:
                write_whole(folder, target.name, data, private=False, sync=True)
    except OSError as error:
        raise explain(key, name, error) from None


def explain(key: str, name: str, error: OSError) -> UsageError | MachineError:
    """Say why a file was not written, and what to do."""
    kind = MachineError if error.errno in FULL else UsageError
    why = error.strerror or error
    return kind(f"{key}={name} cannot be written ({why}): name a file where you may write and there is room")
