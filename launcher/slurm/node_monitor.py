"""Looks after one node's ranks in a SLURM job: finds them, shows their lines, and keeps the node's record."""

import contextlib
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.decode import decode
from launcher.files import LARGEST, read_file
from launcher.launch.failure import Failure, list_clean
from launcher.launch.job import Job
from launcher.launch.monitor import PATIENCE, Viewer
from launcher.launch.outcome import Ending, quote_agent, tail_rank
from launcher.launch.processes import RankProcess, list_ranks
from launcher.launch.signals import name_signal
from launcher.launch.stop_requests import Control, report_signal
from launcher.probe.cgroups import count_oom_kills
from launcher.probe.sysfs import Tree
from launcher.protocol import name_applied_file
from launcher.runs.applied_records import Applied, AppliedReader, compare_applied
from launcher.runs.node_records import NodeFailure, NodeRecord, write_node
from launcher.runs.run_directory import RunDir
from launcher.slurm.slurm_environ import TaskIdentity


@dataclass(slots=True)
class Companion:
    """The observer of one node's supervisor."""

    job: Job
    run: RunDir
    place: TaskIdentity
    viewer: Viewer
    control: Control
    started: float
    """Seconds since the epoch."""
    ranks: dict[int, RankProcess] = field(default_factory=dict)
    """By PID, over all restarts."""
    patient: bool = True
    """Nobody has asked for the end: a slow reader of the output is waited for."""
    clean: tuple[tuple[int, float], ...] = ()
    """See `NodeRecord.clean`."""
    oom_kills: int = 0
    """Processes that the kernel had killed for memory here when the agent started."""
    view: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Make the thread; it starts with the job."""
        self.view = threading.Thread(target=self.viewer.run_view, daemon=True)

    def begin(self) -> None:
        """Start to show: the console's import waits until the agent is on its way."""
        self.oom_kills = count_oom_kills(Tree())
        self.view.start()

    def find_ranks(self, agent: int) -> list[RankProcess]:
        """Return the ranks that the agent (a PID) has started since the last call.

        Ranks that came and went between two calls are known by their records alone. These are looked for
        once, when the agent has ended: the folder is shared by all nodes.
        """
        found = list_ranks(agent, self.run.first_attempt)
        if len(self.ranks) < len(self.job.plan.ranks) and not Path(f"/proc/{agent}").exists():
            records = AppliedReader(self.run.path).read_new()
            own = [r for r in records if (r.host, r.agent) == (self.place.host, agent)]
            found = [RankProcess(r.rank, r.local_rank, r.attempt, r.pid) for r in own]
        fresh = [process for process in found if self.ranks.get(process.pid) != process]
        for process in fresh:
            self.ranks[process.pid] = process
            self.viewer.watch_rank(process.rank, process.attempt)
        return fresh

    def announce(self, text: str) -> None:
        """Show one of our own lines, with this node's name."""
        self.viewer.messages.put(f"{self.place.host}: {text}")

    def note_stop(self, number: int, *, by_head: bool) -> None:
        """Leave a record at once: SLURM may kill this process before its ranks have ended."""
        if not by_head:
            report_signal(2, self.place.host, number)
        with contextlib.suppress(OSError):
            self.write_record("stopped", 128 + number, number, "it was killed while its ranks ended", None)

    def may_reap(self) -> bool:
        """Nothing but the agent is waited for here."""
        return True

    def end(self) -> None:
        """Nothing to wait for."""

    def write_end(self, ending: Ending) -> str | None:
        """Record how this node's part ended, and say what was not as planned; returns the kept state."""
        failure, number = ending.failure, ending.outcome.signal
        self.patient = number is None
        if number and failure and failure.exitcode == -signal.SIGTERM:
            failure = None  # SLURM sent the same signal to the rank
        state = "stopped" if number and not failure and ending.status else ending.state
        self.clean = tuple((d.process.rank, d.time) for d in list_clean(ending.outcome.deaths))
        said = "" if failure or state != "failed" else f"torchrun's agent {quote_agent(ending)}"
        for line in self.check_success(ending) if state == "succeeded" else ():
            self.announce(f"warning: {line}")
        try:
            self.write_record(state, ending.status, number, said, self.describe_failure(ending, failure))
        except OSError as error:
            self.announce(f"warning: its record could not be written ({error})")
            return None
        return state

    def write_record(
        self, state: str, status: int, number: int | None, said: str, failure: NodeFailure | None
    ) -> None:
        """Write this node's record; raises OSError.

        Not so once this task is cut off from the job: with the daemon behind it gone, the node is lost to the
        job, which a record would hide.
        """
        if self.control.is_cut:
            return
        newest = max((process.attempt for process in self.ranks.values()), default=self.place.attempt)
        record = NodeRecord(
            self.place.host,
            self.place.node_rank,
            state,
            status,
            name_signal(number) if number else None,
            said,
            failure,
            newest - self.place.attempt,
            self.started,
            time.time(),
            len(self.job.plan.ranks),
            self.clean,
        )
        write_node(self.run.path, self.place.attempt, record)

    def describe_failure(self, ending: Ending, failure: Failure | None) -> NodeFailure | None:
        """Return the first failure with its time and last lines."""
        if failure is None:
            return None
        times = [death.time for death in ending.outcome.deaths if death.process.pid == failure.pid]
        source, lines = tail_rank(self.run, failure, self.job.config.logs.tail)
        return NodeFailure(
            failure.rank,
            failure.local_rank,
            min(times, default=time.time()),
            failure.exitcode,
            failure.describe(),
            source,
            tuple(lines),
        )

    def check_success(self, ending: Ending) -> list[str]:
        """Say what was not as planned on a node that succeeded."""
        lines = compare_applied(self.job.plan.ranks, self.read_applied())
        lines += [f"{name} outlived the program, and was ended" for name in ending.outcome.leftovers]
        return [*lines, ending.memory] if ending.memory else lines

    def read_applied(self) -> Sequence[Applied]:
        """Read what this node's ranks have recorded of themselves: their files alone."""
        found = []
        for rank in {process.rank for process in self.ranks.values()}:
            path = self.run.path / name_applied_file(rank)
            with contextlib.suppress(OSError, ValueError):
                found.append(decode(Applied, read_file(path, LARGEST, own=True)))
        return [record for record in found if record.host == self.place.host]

    def close(self) -> bool:
        """Have everything shown; False where the reader of our output takes none."""
        self.viewer.await_shown(patient=self.patient)
        self.viewer.closing.set()
        self.view.join(PATIENCE if self.viewer.shown.is_set() else 0)
        return not self.view.is_alive()
