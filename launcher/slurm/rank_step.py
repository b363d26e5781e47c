"""The step of `agent=srun`, whose tasks are the ranks: the head has nobody on the nodes to ask."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

from launcher.errors import SchedulerError
from launcher.launch.signals import STOPPING, name_signal
from launcher.slurm.commands import run_slurm
from launcher.slurm.hostlist import expand_hosts
from launcher.slurm.rank_output import RankView
from launcher.slurm.srun_command import Step, render_step
from launcher.slurm.srun_messages import (
    TaskEnd,
    is_cancelled,
    is_noise,
    is_verbose,
    parse_completed,
    parse_end,
    parse_lost,
)
from launcher.slurm.step_environ import clean_for_step

LAST = 40
"""Lines of srun's, and of tasks that have no logs yet, that are kept for the account."""


@dataclass(slots=True)
class Told:
    """What srun has told of a step's tasks."""

    ends: list[tuple[float, TaskEnd]] = field(default_factory=list)
    """With the time of the line, in seconds since the epoch; not of those that ended with 0."""
    clean: dict[int, float] = field(default_factory=dict)
    """When tasks ended with 0, by their ranks."""
    lost: set[str] = field(default_factory=set)
    """Hosts."""
    said: deque[str] = field(default_factory=lambda: deque(maxlen=LAST))
    """All of its lines that are of use."""
    cancelled: bool = False
    cancelled_first: bool = False
    """Before any task had ended."""
    stop: tuple[int, float] | None = None
    """The first stopping signal that the ranks were sent, and when, in seconds since the epoch."""

    def note_line(self, line: str) -> bool:
        """Take a line of srun's stderr; false where there is nothing in it for people."""
        if is_noise(line) or is_verbose(line):
            self.clean |= dict.fromkeys(parse_completed(line), time.time())
            return False
        self.said.append(line)
        if end := parse_end(line):
            self.ends.append((time.time(), end))
            return False
        if hosts := parse_lost(line):
            with contextlib.suppress(ValueError):
                self.lost.update(expand_hosts(hosts))
        cancelled = is_cancelled(line)
        self.cancelled = self.cancelled or cancelled
        self.cancelled_first = self.cancelled_first or (cancelled and not self.ends)
        # That srun itself has the others ended is no news after the first end.
        return not (cancelled and self.ends)


@dataclass(slots=True)
class RankStep:
    """A running step whose tasks are the ranks."""

    process: "subprocess.Popen[bytes]"
    view: RankView
    describing: Step
    """What srun was started with."""
    run_id: str
    """TORCHELASTIC_RUN_ID, which no other step of the job has."""
    environ: Mapping[str, str]
    """The head's."""
    exit_codes: Collection[int] = ()
    """Those by which a rank asks for another start."""
    started: float = field(default_factory=time.time)
    told: Told = field(default_factory=Told)
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Begin to read what srun tells, and to show what the ranks print."""
        self.reader = threading.Thread(target=self.read_errors, daemon=True)
        self.reader.start()
        self.view.start()

    def read_errors(self) -> None:
        """Take srun's stderr to its end: the thread's body."""
        for raw in self.process.stderr or ():
            line, is_first = raw.decode(errors="replace").rstrip("\n"), not self.told.ends
            if self.told.note_line(line):
                self.view.show_text(line)
            if is_first and self.told.ends and not (self.told.stop or self.told.cancelled):
                self.view.say(self.describe_first(self.told.ends[0][1]))

    def describe_first(self, end: TaskEnd) -> str:
        """Say at once that ranks have failed, since the others may take long to end."""
        how = f"code {end.exitcode}" if end.exitcode > 0 else name_signal(-end.exitcode)
        hosts = ", ".join(dict.fromkeys(self.view.name_host(rank) for rank in end.tasks))
        ranks = "rank" if len(end.tasks) == 1 else "ranks"
        numbers = ", ".join(map(str, end.tasks[:8])) + (" …" if len(end.tasks) > 8 else "")
        what = "failed"
        if end.exitcode in self.exit_codes:
            what = "asks for another start" if len(end.tasks) == 1 else "ask for another start"
        return f"{ranks} {numbers} on {hosts} {what} ({how}); srun ends the others"

    @property
    def lost(self) -> Set[str]:
        """Nodes that SLURM has given up."""
        return self.told.lost

    def send(self, number: int) -> None:
        """Send a signal to the ranks: those that stop to all, others where they are caught.

        It takes a step of its own, and so a thread; the last stage is srun's.
        """
        if number in STOPPING and self.told.stop is None:
            self.told.stop = (number, time.time())
        if number == signal.SIGKILL:
            self.process.send_signal(signal.SIGTERM)
        else:
            threading.Thread(target=self.tell_ranks, args=(number,), daemon=True).start()

    def tell_ranks(self, number: int) -> None:
        """Have each node's ranks sent a signal; where that fails, srun sends a user signal to all."""
        try:
            said = run_slurm(self.render_telling(number), clean_for_step(self.environ))
            spared = sum(map(int, said.split()))
        except (SchedulerError, ValueError) as error:
            if self.process.poll() is None:
                self.view.say(f"warning: {name_signal(number)} not sent to the ranks alone ({error})")
                if number not in STOPPING:
                    self.process.send_signal(number)
            return
        if spared:
            ranks = "1 rank has" if spared == 1 else f"{spared} ranks have"
            self.view.say(f"{name_signal(number)} not sent: {ranks} no handler for it")

    def render_telling(self, number: int) -> tuple[str, ...]:
        """Return the words of the step that sends a signal: a task on each node, outside of any container."""
        job = self.environ.get("SLURM_JOB_ID", "")
        command = (
            sys.executable,
            "-P",
            "-m",
            "launcher.slurm.rank_signal",
            str(int(number)),
            job,
            self.run_id,
        )
        own = Step(
            self.describing.nodes,
            self.describing.nodelist,
            elastic=True,
            directory=self.describing.directory,
            command=command,
            options={"input": "none", "gres": "none"},
        )
        return render_step(own)

    def close(self) -> None:
        """Read and show the rest, after srun's end."""
        self.reader.join()
        self.view.close()
