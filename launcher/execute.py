"""Carries a job out on this node: run directory, agent, console, and the account of how it ended."""

import shlex
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config import dump_yaml, resolve
from launcher.errors import MachineError
from launcher.job import Job, build_environ, open_target, render_agent
from launcher.launch.processes import RankProcess
from launcher.launch.supervise import Outcome, supervise
from launcher.plan.codec import plan_to_json
from launcher.runs.applied import Applied, AppliedReader
from launcher.runs.logs import Follower
from launcher.runs.manifest import describe_sources, describe_start, write_manifest
from launcher.runs.rundir import RunDir, write_json, write_private
from launcher.runs.secrets import mask_tree

if TYPE_CHECKING:
    from launcher.report.console import JobConsole


@dataclass(slots=True)
class Attendant:
    """Looks after a running job: finds its ranks and shows their output."""

    job: Job
    run: RunDir
    own_files: Sequence[str]
    """Configuration files that are not the shipped ones."""
    follower: Follower
    reader: AppliedReader
    applied: dict[int, Applied] = field(default_factory=dict)
    """The newest record of each rank of this node."""
    console: "JobConsole | None" = None

    def find_ranks(self) -> list[RankProcess]:
        """Return the ranks of this node that have started since the last call."""
        fresh = [record for record in self.reader.read_new() if record.host == self.job.host]
        for record in fresh:
            self.applied[record.rank] = record
            self.follower.watch_rank(record.rank, record.attempt)
        return [RankProcess(r.rank, r.local_rank, r.attempt, r.pid) for r in fresh]

    def look(self, *, final: bool = False) -> None:
        """Show what the ranks have printed since the last call; at first, where they are placed."""
        console = self.get_console()
        for line in self.follower.read_lines(final=final):
            console.show_line(line)

    def announce(self, text: str) -> None:
        """Show one of our own lines."""
        self.get_console().say(text)

    def get_console(self) -> "JobConsole":
        """Return the console; its import waits until the agent is on its way, and is hidden by torch's."""
        if self.console is None:
            from launcher.report.console import JobConsole, make_console
            from launcher.report.placement import print_placement

            explain = self.job.config.explain
            self.console = JobConsole(self.job.config.logs.console, self.job.host, make_console())
            for line in describe_job(self.job, self.run, self.own_files):
                self.console.say(line)
            self.console.guard(lambda console: print_placement(console, self.job.plan, explain=explain))
        return self.console


def execute_job(job: Job, argv: Sequence[str], own_files: Sequence[str]) -> int:
    """Run the job to its end and return the exit code; raises UsageError or MachineError before it starts."""
    from launcher.conclude import conclude_job

    run, manifest = prepare_run(job, argv)
    command = render_agent(job, resolve(job.composed, run.path), run.id)
    attendant = Attendant(job, run, own_files, Follower(run), AppliedReader(run.path))
    sources = threading.Thread(target=lambda: manifest.update(describe_sources(Path.cwd())), daemon=True)
    started = time.monotonic()
    outcome: Outcome = supervise(
        command,
        build_environ(job, run),
        run.agent_log(job.host),
        grace=job.config.torchrun.shutdown_timeout,
        started=sources.start,
        find_ranks=attendant.find_ranks,
        look=attendant.look,
        announce=attendant.announce,
    )
    attendant.look(final=True)
    sources.join()
    return conclude_job(attendant, outcome, manifest, time.monotonic() - started)


def prepare_run(job: Job, argv: Sequence[str]) -> tuple[RunDir, dict[str, object]]:
    """Make the run directory with plan, configuration and manifest; raises MachineError, leaving nothing."""
    config = job.config
    run = None
    try:
        run = open_target(job)
        write_json(run.plan_path(job.host), plan_to_json(job.plan))
        resolve(job.composed, run.path)
        write_private(run.path / "config.yaml", dump_yaml(job.composed, mask_tree))
        manifest = describe_start(run, ["launch", *argv], job.composed.choices)
        manifest["hosts"] = [job.host]
        write_manifest(run, manifest)
    except OSError as error:
        if run and not config.run_dir:
            shutil.rmtree(run.path, ignore_errors=True)
        key, target = ("run_dir", config.run_dir) if config.run_dir else ("runs_dir", config.runs_dir)
        where = f"{error.filename or target} ({error.strerror})"
        raise MachineError(
            f"cannot write the run directory, {where}: set {key}=DIR to another place"
        ) from None
    return run, manifest


def describe_job(job: Job, run: RunDir, own_files: Sequence[str]) -> list[str]:
    """Say what was chosen and why."""
    count = len(job.plan.ranks)
    ranks = f"{count} rank{'s' if count > 1 else ''} on {job.host}"
    lines = [f"{ranks} (cluster={job.cluster.kind}: {job.cluster.why}), run directory {run.path}"]
    if own_files:
        lines.append(f"configuration from {', '.join(own_files)}")
    if job.words is not None and job.composed.choices.get("model") not in (None, "tiny"):
        lines.append(
            f"model={job.composed.choices['model']} is not used: the program after -- has its own arguments"
        )
    return lines


def preview_job(job: Job) -> int:
    """Show the plan and the command, and start nothing: `dry_run=true`."""
    from launcher.report.console import make_console
    from launcher.report.placement import print_placement

    print_placement(make_console(), job.plan, explain=job.config.explain)
    command = render_agent(job, resolve(job.composed, Path("RUN_DIR")), "RUN_ID")
    sys.stdout.write(shlex.join(command) + "\n")
    return 0
