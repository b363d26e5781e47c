"""`launch report`: writes what there is to know of a run into one HTML page."""

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from launcher.cli.output_files import check_target, explain, write_file
from launcher.cli.runs import choose_one
from launcher.cli.verbs import Call
from launcher.codec import load
from launcher.errors import MachineError, UsageError
from launcher.files import LARGEST, read_file
from launcher.plan.model import Plan, RankPlan
from launcher.text import print_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """A plan's JSON, less its machine."""

    ranks: tuple[RankPlan, ...]
    warnings: tuple[str, ...] = ()


NAME = "report.html"
INSTALL = "pip install 'launch-ranks[report]'"


def write_run_report(call: Call) -> int:
    """Write the page of the named run, or of the newest, and print its path; return 0.

    Raises UsageError or MachineError.
    """
    config = call.config
    path = choose_one(config, call.names, "report")
    if find_spec("jinja2") is None:  # which torch brings along
        raise MachineError(f"launch report needs jinja2: {INSTALL}")
    if find_spec("matplotlib") is None:
        logger.warning(f"without matplotlib the page has no charts, their figures as tables alone: {INSTALL}")
    if config.save is not None:
        check_target("save", config.save)
    from launcher.report.page import render_report
    from launcher.report.timeline import read_account

    account = read_account(path)
    page = render_report(account, read_host_plans(path))
    if config.save is not None:
        write_file("save", config.save, page)
    else:
        write_into_run(path, page)
    if account.status.is_live:
        logger.info(f"{account.status.run} is {account.status.state}: the report tells of it so far")
    print_text(f"{config.save or path / NAME}\n")
    return 0


def write_into_run(path: Path, page: bytes) -> None:
    """Write the page into the run directory, for its owner alone; raises UsageError or MachineError."""
    from launcher.files import open_own, write_whole
    from launcher.runs.run_directory import closing_descriptor

    try:
        with closing_descriptor(open_own(path)) as at:
            write_whole(at, NAME, page)
    except PermissionError as error:
        reason = error.strerror or error
        raise UsageError(
            f"{path / NAME} cannot be written ({reason}): name another file, save=FILE"
        ) from None
    except OSError as error:
        raise explain("save", str(path / NAME), error) from None


def read_host_plans(path: Path) -> dict[str, Plan]:
    """Return the plans that can be read, by host."""
    from launcher.protocol import name_plan_file, parse_plan_file

    found = {}
    for file in sorted(path.glob(name_plan_file("*"))):
        try:
            found[parse_plan_file(file.name)] = read_host_plan(read_file(file, LARGEST).decode())
        except (OSError, ValueError, UsageError):
            continue  # the report tells of it as damaged
    return found


def read_host_plan(text: str) -> Plan:
    """Read a node's plan; raises UsageError or ValueError."""
    from launcher.plan.model import parse_machine, warn

    machine, found = parse_machine(text), load(WrittenPlan, text)
    warnings = []
    for line in found.warnings:
        what, _, fix = line.rpartition(": ")
        is_probed = line in machine.warnings
        warnings.append(
            warn("machine", text=line) if is_probed else warn("written", text=what or fix, fix=fix)
        )
    return Plan(machine, found.ranks, tuple(warnings))
