"""`launch report`: writes what there is to know of a run into one HTML page."""

import contextlib
import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from launcher.cli.output_files import check_target, explain, write_file
from launcher.cli.runs import choose_one
from launcher.cli.verbs import Call
from launcher.codec import load
from launcher.errors import MachineError, UsageError
from launcher.files import LARGEST, open_own, read_file, write_whole
from launcher.plan.model import Plan, RankPlan, parse_machine, warn
from launcher.protocol import name_plan_file, parse_plan_file
from launcher.runs.run_directory import closing_descriptor
from launcher.text import print_text

logger = logging.getLogger(__name__)

NAME = "report.html"
INSTALL = "pip install 'launch-ranks[report]'"


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """A plan's JSON, less its machine."""

    ranks: tuple[RankPlan, ...]
    warnings: tuple[str, ...] = ()


def write_run_report(call: Call) -> int:
    """Write the page of the named run, or of the newest, and print its path; return 0.

    Raises UsageError or MachineError.
    """
    config = call.config
    path = choose_one(config, call.names, "report")
    if find_spec("jinja2") is None:  # which torch brings along
        raise MachineError(f"launch report needs jinja2: {INSTALL}")
    if find_spec("matplotlib") is None:
        logger.warning(f"without matplotlib the page has no charts: {INSTALL}")
    if config.save is not None:
        check_target("save", config.save)
    from launcher.report.page import render_report
    from launcher.report.timeline import read_account

    account = read_account(path)
    page, target = render_report(account, _read_plans(path)), path / NAME
    if config.save is not None:
        write_file("save", config.save, page)
    else:  # into the run directory, for its owner alone
        try:
            with closing_descriptor(open_own(path)) as at:
                write_whole(at, NAME, page)
        except PermissionError as error:
            reason = error.strerror or error
            raise UsageError(f"{target} cannot be written ({reason}): name another file, save=FILE") from None
        except OSError as error:
            raise explain("save", str(target), error) from None
    if account.status.is_live:
        logger.info(f"{account.status.run} is {account.status.state}: the report tells of it so far")
    print_text(f"{config.save or target}\n")
    return 0


def _read_plans(path: Path) -> dict[str, Plan]:
    """Return the plans of a run by host; the report tells of those that cannot be read as damaged."""
    plans = {}
    for file in sorted(path.glob(name_plan_file("*"))):
        with contextlib.suppress(OSError, ValueError, UsageError):
            text = read_file(file, LARGEST).decode()
            machine, found = parse_machine(text), load(WrittenPlan, text)
            warnings = []
            for line in found.warnings:
                what, _, fix = line.rpartition(": ")
                is_probed = line in machine.warnings
                warnings.append(
                    warn("machine", text=line) if is_probed else warn("written", text=what or fix, fix=fix)
                )
            plans[parse_plan_file(file.name)] = Plan(machine, found.ranks, tuple(warnings))
    return plans
