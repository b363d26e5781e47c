"""Runs a job's part on this node: starts the ranks, watches them, passes signals on, and leaves no process.

An agent, this process or torchrun, starts the ranks, reaps them, and starts them again; the supervisor runs
it to its end.
"""

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, ClassVar, Protocol

from launcher.files import Descriptor, open_append, open_below
from launcher.launch.coordinator import Coordinator, GroupStart, JobEnd, Order
from launcher.launch.ending import NodeEnd, describe_oom_kills, judge_end
from launcher.launch.job import (
    LOOPBACK,
    Job,
    choose_restarts,
    find_free_port,
    may_restart,
    render_agent,
    render_shim,
)
from launcher.launch.processes import (
    Death,
    RankProcess,
    RankSet,
    adopt_orphans,
    end_leftovers,
    list_ranks,
    prepare_agent,
    reap_orphans,
)
from launcher.launch.signals import (
    FORWARDED,
    HARD,
    KILL_GRACE,
    SLURM_GRACE,
    STOPPING,
    SignalChannel,
    SignalQueue,
    StopStages,
    catch_signals,
    name_signal,
)
from launcher.launch.terminal import Terminal
from launcher.launch.warm.process import NOT_FORKED, WarmProcess, start_warm
from launcher.launch.warm.program import ExecNeededError
from launcher.launch.watching import Watching
from launcher.probe.limits import count_oom_kills
from launcher.protocol import LAUNCH_PARENT
from launcher.runs.manifest import Run
from launcher.runs.provenance import describe_sources
from launcher.runs.rank_logs import measure_file, read_tail
from launcher.runs.records import AppliedReader, name_error_file
from launcher.runs.run_directory import RunDir

if TYPE_CHECKING:
    from launcher.report.viewer import OutputViewer

logger = logging.getLogger(__name__)

TICK = 0.05
"""Seconds between two looks for new ranks and signals."""
LOST_GRACE = 10.0
"""Seconds in which ranks may notice by themselves that a node was lost."""
AGENT_LINES = 2000
"""Last lines of the agent's log that are searched for its report."""
FAILED = 1
"""Exit code of the agent, as of torchrun's, if ranks have failed or were ended."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default of `--signals-to-handle`, which it leaves in its ranks' environment."""
HEARD = b"death signal"
"""What torchelastic's agent says of a signal that it got (torch/distributed/elastic/agent/server/api.py)."""


class GroupControl(Protocol):
    """Is told what becomes of a node's ranks, and gives orders: start them so, or end."""

    may_restart: bool
    """Another start may follow the first."""

    def report(self, kind: str, restart: int = 0, number: int = 0) -> None:
        """Take `ready` (to start `number` ranks); of start `restart`, `failed` (rank `number`) or `ended`."""

    def take_orders(self) -> Iterable[Order]:
        """Return the orders since the last call."""
        ...


@dataclass(slots=True)
class LocalControl:
    """Decides for the one node of a job."""

    coordinator: Coordinator
    may_restart: bool
    """Another start may follow the first."""
    orders: list[Order] = field(default_factory=list)

    def report(self, kind: str, restart: int = 0, number: int = 0) -> None:
        """Tell the coordinator, and keep its order."""
        order = self.coordinator.note(kind, self.coordinator.hosts[0], restart, number)
        self.orders += [order] if order else []

    def take_orders(self) -> Iterable[Order]:
        """Return the orders since the last call."""
        taken, self.orders = self.orders, []
        return taken


@dataclass(slots=True)
class NodeAgent:
    """Starts the ranks of a node, and what there is to say of them."""

    job: Job
    run: RunDir
    environ: Mapping[str, str]
    """Each rank's, before the agent's own variables (see `launcher.launch.job.build_agent_environ`)."""
    run_id: str
    """`TORCHELASTIC_RUN_ID`, what torchrun calls --rdzv-id."""
    reads_stdin: bool = field(default=False, kw_only=True)
    """Ranks have this process's stdin; else they have an empty one."""
    ranks: RankSet = field(default_factory=RankSet, kw_only=True)
    """All ranks that it has started, as far as they are known."""

    hearing: ClassVar[float] = 0.0
    """Seconds in which it says that it was sent a signal."""

    def list_ranks(self) -> Sequence[RankProcess]:
        """Return ranks that are perhaps not among `ranks` yet."""
        return ()

    def was_signalled(self) -> bool:
        """Tell whether it says that a signal has reached it past this process."""
        return False

    def close(self) -> None:
        """The ranks have ended."""


@dataclass(slots=True)
class DirectAgent(NodeAgent):
    """Does what `control` orders: starts ranks, reaps them, ends all if one has failed."""

    control: GroupControl
    warm: WarmProcess | None = None
    """Ranks are forked from it, unless something is against that; the first reason is told."""
    start: GroupStart | None = None
    """The newest one."""
    group: list[RankProcess] = field(default_factory=list)
    """Its ranks on this node."""
    seen: int = 0
    """Deaths that were looked at."""
    ending: StopStages | None = None
    """The ranks were asked to end, since one has failed, or for an order."""
    order: Order | None = None
    """What comes once the ranks have ended."""
    exitcode: int | None = None
    is_reported: bool = False
    """The control knows that all ranks of the newest start have ended with 0."""
    stopped: bool = False
    """A signal has ended the ranks, and nothing starts any more."""

    @property
    def children(self) -> Collection[int]:
        """PIDs of the ranks, and of the warm process while it runs: nobody else may reap them."""
        warm = (self.warm.process.pid,) if self.warm and self.warm.process.poll() is None else ()
        return (*(rank.pid for rank in self.group), *warm)

    @property
    def descriptors(self) -> Collection[int]:
        """The warm process's channel, if ranks wait for its imports."""
        return (self.warm.channel.fileno(),) if self.warm and not self.warm.await_imports(0) else ()

    def begin(self) -> None:
        """Start the ranks, if the node's part is to begin at once; raises OSError."""
        self.environ = {
            **self.environ,
            "TORCHELASTIC_MAX_RESTARTS": str(choose_restarts(self.job.config, self.job.environ) or 0),
            "TORCHELASTIC_RUN_ID": self.run_id,
            LAUNCH_PARENT: str(os.getpid()),
        }
        self.control.report("ready", number=len(self.job.plan.ranks))
        self.poll()

    def poll(self) -> int | None:
        """Note what ranks ended with, take orders and carry them out; return the exit code in the end.

        Raises OSError if ranks cannot be started.
        """
        if self.exitcode is not None:
            return self.exitcode
        self.note_deaths()
        for order in () if self.stopped else self.control.take_orders():
            self.take_order(order)
        if self.ranks.alive:
            if self.ending and time.monotonic() >= self.ending.deadline:
                if (number := self.ending.next_stage()) is not None:
                    self.ranks.signal_groups(number)
                else:
                    names = ", ".join(str(rank.rank) for rank in self.ranks.alive.values())
                    logger.info(f"not ended by SIGKILL, since they wait in the kernel: rank {names}")
                    self.exitcode = FAILED
        elif isinstance(self.order, GroupStart) and not self.stopped:
            if self.warm is None or self.warm.await_imports(0):
                self.start_group(self.order)
        elif self.order or self.stopped:
            self.exitcode = FAILED if self.stopped or self.order == JobEnd(failed=True) else 0
        if self.exitcode is not None:
            self.end_warm()  # it is no leftover
        return self.exitcode

    def end_warm(self) -> None:
        """End the warm process, if there is one: no rank is forked from now on."""
        if self.warm:
            self.warm.close()
            self.warm = None

    def note_deaths(self) -> None:
        """Tell the control what has become of the ranks, and end the others if one has failed.

        Those that ended with 0 are reaped. The others stay zombies until `close_group`, so that their process
        groups' numbers are not given away. Whoever was reaped by another process has failed.
        """
        restart = self.start.restart if self.start else 0
        for death in self.ranks.deaths[self.seen :]:
            if death.exitcode == 0:
                reap(death.process.pid)
            elif not self.stopped:
                self.end_group()
                self.control.report("failed", restart, death.process.rank)
        self.seen = len(self.ranks.deaths)
        if self.group and not self.is_reported and not self.ranks.alive and not self.list_failed():
            self.is_reported = True
            self.control.report("ended", restart)

    def list_failed(self) -> list[RankProcess]:
        """Return the ranks of the newest start that have ended, and not with 0."""
        return [one.process for one in self.ranks.deaths if one.exitcode != 0 and one.process in self.group]

    def take_order(self, order: Order) -> None:
        """End the ranks for an order. If another node has taken their place, they write nothing any more."""
        self.order, host, patience = order, self.job.host, None
        if isinstance(order, GroupStart):
            patience = order.patience
            if self.group and order.find_group_rank(host) is None:
                logger.info(f"another node has taken the place of {host}: SIGKILL to its ranks")
                self.ranks.signal_groups(signal.SIGKILL)
        if self.group:
            self.end_group(patience)

    def end_group(self, patience: float | None = None) -> None:
        """Ask the ranks to end by SIGTERM, if that was not done yet; `patience` can shorten their time."""
        seconds: float = self.job.config.torchrun.shutdown_timeout
        if patience is not None:
            seconds = min(patience, seconds)
        if self.ending is None:
            self.ending = StopStages.begin(signal.SIGTERM, seconds)
            self.ending.next_stage()
            self.ranks.signal_groups(signal.SIGTERM)
        elif self.ending.current == signal.SIGTERM:
            self.ending.deadline = min(self.ending.deadline, time.monotonic() + seconds)

    def start_group(self, start: GroupStart) -> None:
        """Start this node's ranks of a start, if it has any; raises OSError, and leaves what was started."""
        job, run = self.job, self.run
        self.close_group()
        self.order, self.is_reported, self.start, self.ending = None, False, start, None
        group_rank = start.find_group_rank(job.host)
        if group_rank is None:
            return
        attempt = run.first_attempt + start.restart
        for local_rank in range(start.nodes[group_rank].local_size):
            rank = start.count_ranks_before(group_rank) + local_rank
            own = make_rank_variables(start, group_rank, local_rank, self.environ)
            own["TORCHELASTIC_ERROR_FILE"] = str(name_error_file(run, rank, attempt))
            pid = self.start_rank({**self.environ, **own})
            self.group.append(RankProcess(rank, local_rank, attempt, pid))
            self.ranks.add(self.group[-1:])
        if not self.control.may_restart:
            self.end_warm()  # it takes memory

    def start_rank(self, environ: Mapping[str, str]) -> int:
        """Fork a rank from the warm process, or execute it, and return its PID; raises OSError.

        What it prints before the shim has opened its own logs goes to the agent's log.
        """
        empty = Descriptor(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        with empty, open_log(self.run.agent_log(self.job.host)) as log:
            streams = (0 if self.reads_stdin else empty, log, log)
            if self.warm:
                try:
                    return self.warm.fork_rank(self.job.program, environ, streams)
                except ExecNeededError as error:
                    logger.info(NOT_FORKED.format(error))
                self.end_warm()
            return spawn_rank(self.job.program, environ, streams)

    def close_group(self) -> None:
        """Kill what is left of the groups of ranks that have failed or were ended, and reap these."""
        for rank in self.list_failed():
            with contextlib.suppress(OSError):
                os.killpg(rank.pid, signal.SIGKILL)
            reap(rank.pid)
        self.group = []

    def send_signal(self, number: int) -> None:
        """End the ranks by a signal, and start none after that. The next signals are the supervisor's."""
        self.stopped = True
        self.ranks.signal_groups(number)

    def kill(self) -> None:
        """Kill the ranks, and wait for none."""
        self.ranks.signal_groups(signal.SIGKILL)
        self.end_warm()
        self.exitcode = -signal.SIGKILL

    def close(self) -> None:
        """Reap what has ended, and end the warm process."""
        self.close_group()
        self.end_warm()


@dataclass(slots=True)
class TorchrunAgent(NodeAgent):
    """Runs torchrun, whose children are the ranks."""

    descriptors: ClassVar[Collection[int]] = ()
    hearing: ClassVar[float] = 0.5
    log_begin: int = 0
    """Bytes of the log that are of earlier starts."""
    process: "subprocess.Popen[bytes]" = field(init=False)
    reader: AppliedReader = field(init=False)

    @property
    def children(self) -> Collection[int]:
        """PID of torchrun: nobody else may reap it."""
        return (self.process.pid,)

    def begin(self) -> None:
        """Start torchrun in a session of its own, so that a terminal's Ctrl-C reaches `launch` alone.

        Raises OSError. It ends with this process.
        """
        parent = os.getpid()
        self.reader = AppliedReader(self.run.path)
        with open_log(self.run.agent_log(self.job.host)) as descriptor:
            self.log_begin = os.fstat(descriptor).st_size
            self.process = subprocess.Popen(
                render_agent(self.job, self.run_id),
                env=dict(self.environ),
                stdin=None if self.reads_stdin else subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
                preexec_fn=lambda: prepare_agent(parent, FORWARDED),  # noqa: PLW1509 - there is one thread
            )

    def poll(self) -> int | None:
        """Return torchrun's exit code (-n for signal n); None while it runs."""
        return self.process.poll()

    def list_ranks(self) -> Sequence[RankProcess]:
        """Return ranks that torchrun has started, new ones at least.

        Their records tell, of those too that came and went between two calls. If other nodes share the
        folder of records, the ranks are found among torchrun's children, and the records are read once, when
        torchrun has ended and there are too few.
        """
        agent, known = self.process.pid, len(self.ranks.known)
        is_running = self.process.returncode is None
        if self.job.cluster.max_nodes > 1 and (is_running or known >= len(self.job.plan.ranks)):
            return list_ranks(agent, self.run.first_attempt)
        # There are records of other nodes and of earlier starts: their PIDs say nothing here.
        own = [r for r in self.reader.read_new() if (r.host, r.agent) == (self.job.host, agent)]
        return [RankProcess(r.rank, r.local_rank, r.attempt, r.pid) for r in own]

    def was_signalled(self) -> bool:
        """Tell whether torchrun has said, since this start, that it was sent a signal past this process."""
        with contextlib.suppress(OSError), self.run.agent_log(self.job.host).open("rb") as file:
            file.seek(self.log_begin)
            return HEARD in file.read()
        return False

    def send_signal(self, number: int) -> None:
        """Send torchrun a signal, which it passes on to the ranks."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End torchrun at once."""
        self.process.kill()


Agent = DirectAgent | TorchrunAgent


def make_agent(
    job: Job,
    run: RunDir,
    environ: Mapping[str, str],
    terminal: Terminal | None = None,
    early: WarmProcess | None = None,
) -> Agent:
    """Return what starts a job's ranks on this machine, with variables of `build_agent_environ`.

    `early` is a warm process that was started before this.
    """
    environ = {**environ, **(terminal.variables if terminal else {})}
    # Several ranks would each read some of what is typed on one terminal.
    reads_stdin = job.world_size == 1 or not os.isatty(0)
    if job.agent.kind != "direct":
        return TorchrunAgent(job, run, environ, run.id, reads_stdin=reads_stdin)
    restarts = choose_restarts(job.config, job.environ) or 0
    host, _, given = job.cluster.endpoint.rpartition(":") if job.config.rdzv_endpoint else (LOOPBACK, "", "0")

    def find_endpoint(_host: str, restart: int) -> tuple[str, int]:
        """Peers of an earlier start must not meet this one. A given port of 0 is any free one."""
        port = 0 if restart else int(given)
        return host.strip("[]"), port or find_free_port()

    # What the plan gives to all ranks alike is there for what an import reads.
    pairs = [set(rank.env) for rank in job.plan.ranks]
    known = {**environ, **(dict(sorted(set.intersection(*pairs))) if pairs else {})}
    control = LocalControl(Coordinator((job.host,), 1, restarts, find_endpoint), restarts > 0)
    warm = start_warm(job.program, job.config.start, known, early)
    return DirectAgent(job, run, environ, run.id, control, warm, reads_stdin=reads_stdin)


def spawn_rank(argv: Sequence[str], environ: Mapping[str, str], streams: Sequence[int]) -> int:
    """Execute the shim for a program's argv, in a session of its own, and return its PID; raises OSError.

    It ends with this process. Signals that `launch` passes on would end the shim: they are blocked until it
    has the program's own dispositions. Those that end a job are as torchrun's ranks have them: not ignored,
    even with nohup. Descriptors beyond stderr that this process was started with are not for them.
    """
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are what is wanted
        with contextlib.suppress(OSError):
            os.set_inheritable(int(name), int(name) <= 2)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return os.posix_spawn(
        sys.executable,
        render_shim(argv),
        environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, stream, number) for number, stream in enumerate(streams)],
        setsid=True,
        setsigmask=(*mask, *FORWARDED),
        setsigdef=(*STOPPING, signal.SIGPIPE),
    )


def reap(pid: int) -> None:
    """Reap a rank that has ended."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def make_rank_variables(
    group: GroupStart, group_rank: int, local_rank: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return torchrun's variables for a rank of the node with number `group_rank`: those of its start.

    `environ` is the agent's. From _start_workers of torch/distributed/elastic/agent/server/
    local_elastic_agent.py, launch_agent of launcher/api.py and config_from_args of distributed/run.py
    (torch 2.13, with a static rendezvous).
    """
    local_size = group.nodes[group_rank].local_size
    rank, world_size = str(group.count_ranks_before(group_rank) + local_rank), str(group.world_size)
    return {
        **{"RANK": rank, "LOCAL_RANK": str(local_rank), "ROLE_RANK": rank, "ROLE_NAME": "default"},
        **{"WORLD_SIZE": world_size, "ROLE_WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": str(local_size)},
        **{"GROUP_RANK": str(group_rank), "GROUP_WORLD_SIZE": str(len(group.nodes))},
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(group.restart),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": SIGNALS,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **({"OMP_NUM_THREADS": "1"} if local_size > 1 and "OMP_NUM_THREADS" not in environ else {}),
    }


def open_log(log: Path) -> Descriptor:
    """Open an agent's log in a run directory, to append to it; raises OSError."""
    with open_below(log.parents[1], log.parent.name) as logs:
        return open_append(logs, log.name)


@dataclass(slots=True)
class Supervisor:
    """Runs one agent and its ranks to their end."""

    job: Job
    run: RunDir
    viewer: "OutputViewer"
    agent: Agent
    watching: Watching
    manifest: Run | None = None
    """It is completed with the sources' versions while the job runs; None if another process writes it."""
    terminal: Terminal | None = None
    """If the program has the user's terminal."""
    control: SignalChannel | None = None
    """Commands from the job's first node; None outside of a step of SLURM's."""
    on_stop: Callable[[int, bool], None] = lambda *_: None
    """Called once, with the first stopping signal, and whether the job's first node sent it."""

    stop: StopStages | None = None
    first_signal: int | None = None
    signal_time: float = math.inf
    commanded: bool = False
    """The first node has asked for the end."""
    rank_seen_at: float = 0.0
    """Monotonic time at which a rank was last seen to have started."""
    newest: int | None = None
    """The newest attempt of a rank."""
    killed_at: float = math.inf
    """When ranks were ended for a lost node's or a hang's sake, in seconds since the epoch."""
    hang: str = ""
    """The hang for which ranks were ended, until they have started again."""
    agent_heard: bool = False
    """SLURM has sent the agent the stopping signal by itself."""

    @property
    def ranks(self) -> RankSet:
        """The ranks on this node."""
        return self.agent.ranks

    def run_to_end(self) -> NodeEnd:
        """Run the agent to its end, and judge that; raises OSError if it cannot be started."""
        adopt_orphans()
        agent, job, log = self.agent, self.job, self.run.agent_log(self.job.host)
        manifest, log_begin = self.manifest, measure_file(log)
        # Asks git and the package index, which can take seconds on a network filesystem.

        def add_sources() -> None:
            if manifest:
                manifest.add_sources(describe_sources(Path(manifest.directory)))

        sources = Thread(target=add_sources, daemon=True)
        with catch_signals() as inbox:
            try:
                agent.begin()
                oom_kills = count_oom_kills()
                self.viewer.start()
                sources.start()
                if self.terminal:
                    self.terminal.start()
                # Before the agent ends others for one that has failed: the kernel then has their order.
                self.watch_new_ranks()
                while agent.poll() is None:
                    self.attend(inbox)
                    reap_orphans({*agent.children, *self.watching.pids})
                self.watch_new_ranks()
                self.ranks.poll((), 0)
                self.watching.finish()
                sources.join()
            except BaseException:
                self.viewer.release_log()
                raise
            finally:
                left = end_leftovers(KILL_GRACE, self.watching.pids)
                self.ranks.close()
                agent.close()
        status = agent.poll()
        code = -signal.SIGKILL if status is None else status
        deaths = tuple(self.ranks.deaths)
        if code == 0:  # torchrun may have looked at a rank before this process
            deaths = tuple(replace(death, exitcode=death.exitcode or 0) for death in deaths)
        end = NodeEnd(
            code,
            deaths,
            self.first_signal,
            self.signal_time,
            tuple(left),
            self.hang,
            tuple(read_tail(log, AGENT_LINES, log_begin)),
            describe_oom_kills(job, count_oom_kills() - oom_kills),
        )
        # In a job of several nodes, a node has done its part if its ranks have, whatever the others need.
        return judge_end(end, len(job.plan.ranks) if self.control else 0)

    def attend(self, inbox: SignalQueue) -> None:
        """Wait a moment for what happens, and act on it."""
        ranks, now = self.ranks, time.monotonic()
        # None comes while they end, and looking for it takes time in which the agent reaps others.
        if (ranks.fresh or len(ranks.alive) < len(self.job.plan.ranks)) and self.stop is None:
            self.watch_new_ranks()
        known = len(ranks.deaths)
        channels = self.control.descriptors if self.control else ()
        ranks.poll((inbox.wakeup, *channels, *self.agent.descriptors), TICK)
        fresh = ranks.deaths[known:]
        self.handle_key_signals(fresh)
        self.report_failures(fresh)
        if self.control and self.stop is None and fresh and self.agent.was_signalled():
            self.handle_stop_signal(signal.SIGTERM, by_slurm=True)  # the agent alone got it
        self.handle_signals(inbox)
        # torchrun's agents restart for nodes that come, not for those that go: ranks that do not fail by
        # themselves wait for the lost ones in a collective until that times out.
        control = None if self.stop else self.control
        if control and self.rank_seen_at <= control.lost_at < now - LOST_GRACE:
            control.lost_at, self.killed_at = math.inf, time.time()
            logger.info("a node was lost: SIGKILL to the ranks, which start again without it")
            ranks.signal_groups(signal.SIGKILL)
        self.attend_watcher()

    def handle_key_signals(self, deaths: Sequence[Death]) -> None:
        """Take the end of a program by the user's Ctrl-C for a stop, after which nothing restarts."""
        pressed = self.terminal.pressed if self.terminal else {}
        for death in deaths:
            number = max(death.status - 128, 0)  # or one that the program reports as a shell does
            if number in pressed and self.stop is None:
                grace = self.job.config.torchrun.shutdown_timeout
                self.begin_stop(number, grace, pressed[number]).next_stage()
                self.agent.send_signal(number)

    def report_failures(self, deaths: Sequence[Death]) -> None:
        """Say at once that a rank has failed, since its peers may take long to end; not what follows it."""
        job = self.job
        if job.world_size == 1 and not may_restart(job.config, job.cluster, job.environ):
            return  # the end is at hand, and says it
        for death in deaths:
            attempt, code = death.process.attempt, death.exitcode
            failed = (d for d in self.ranks.deaths if d.process.attempt == attempt and d.exitcode)
            ended = 0 <= death.time - self.killed_at < KILL_GRACE and code == -signal.SIGKILL
            if code and not ended and self.stop is None and next(failed) is death:
                status = f"code {code}" if code > 0 else name_signal(-code)
                asks = code in job.config.cluster.requeue.exit_codes
                what = "asks for another start" if asks else "failed"
                others = "" if job.world_size == 1 else "; the other ranks are ended"
                logger.info(f"rank {death.process.rank} {what} ({status}){others}")

    def watch_new_ranks(self) -> None:
        """Watch ranks that have started, and tell of a restart of the worker group."""
        ranks = self.ranks
        ranks.add(self.agent.list_ranks())
        fresh, ranks.fresh = ranks.fresh, []
        if not fresh:
            return
        self.rank_seen_at = time.monotonic()
        newest = max(process.attempt for process in fresh)
        if self.newest is not None and newest > self.newest:
            logger.info(f"the ranks were started again: attempt {newest}")
            self.hang = ""
        self.newest = max(newest, self.newest or 0)
        for process in fresh:
            self.viewer.watch_rank(process.rank, process.attempt)
        self.watching.add_ranks(fresh)

    def attend_watcher(self) -> None:
        """Log what the watcher has to say, and end ranks if it says so (`watch.on_hang`)."""
        for order in self.watching.attend(self.ranks.deaths):
            if self.stop or order.is_late(self.ranks.alive.values()):
                continue
            self.killed_at = time.time()
            if order.action == "restart":
                # Killed ranks are started again with their group: all if the named ones have ended.
                number = signal.SIGKILL
                if self.ranks.signal_groups(number, order.ranks) or self.ranks.signal_groups(number):
                    logger.info("SIGKILL to ranks that hang, so that all start again")
                    self.hang = order.sentence
                continue
            self.hang, self.first_signal, self.signal_time = order.sentence, signal.SIGTERM, self.killed_at
            self.begin_stop(signal.SIGTERM, self.limit_grace())
            self.advance_stop()

    def handle_signals(self, inbox: SignalQueue) -> None:
        """Pass on what has arrived; each stopping signal goes a stage on, and so does the time.

        The first node asks for a stop by signals too; others are for the ranks that catch them.
        """
        for number in inbox.take():
            if number in FORWARDED:
                # By `scancel --signal=USR2 JOB` or the like: SLURM sends it to a step's tasks alone.
                self.pass_on(number, catchers=self.control is not None)
            else:
                self.handle_stop_signal(number, by_slurm=self.control is not None)
        if self.stop and time.monotonic() >= self.stop.deadline:
            self.advance_stop()
        for number in self.control.read_signals() if self.control else ():
            if number in (*STOPPING, *HARD):
                self.commanded = True
                self.handle_stop_signal(number)
            else:
                self.pass_on(number, catchers=True)

    def pass_on(self, number: int, *, catchers: bool) -> None:
        """Pass a signal on to the ranks, or to those that have a handler for it."""
        self.watch_new_ranks()  # it can be for a rank that has started since the last look
        if spared := self.ranks.signal_ranks(number, catchers=catchers):
            ranks = "1 rank has" if spared == 1 else f"{spared} ranks have"
            logger.info(f"{name_signal(number)} not sent: {ranks} no handler for it")

    def limit_grace(self) -> float:
        """Return the seconds that ranks have after a first signal, within SLURM's patience if it has one."""
        grace = self.job.config.torchrun.shutdown_timeout
        return min(grace, SLURM_GRACE) if self.control else grace

    def begin_stop(self, number: int, grace: float, when: float | None = None) -> StopStages:
        """Begin to stop; how ranks end after the first stopping signal is no failure."""
        if self.first_signal is None:
            self.first_signal, self.signal_time = number, time.time() if when is None else when
            self.hang = ""  # the user's stop comes first
            self.on_stop(number, self.commanded)
        self.stop = StopStages.begin(number, grace)
        return self.stop

    def handle_stop_signal(self, number: int, *, by_slurm: bool = False) -> None:
        """Begin to stop, or enter the next stage. What SLURM and the first node both send is one stage.

        The agent may have got SLURM's signal as well, and then is not to get it from here: if SLURM tracks
        processes by cgroup, it has, and a second one would break off its shutdown, and so the ranks' time.
        """
        grace = self.limit_grace() if by_slurm else self.job.config.torchrun.shutdown_timeout
        if self.stop is None:
            self.begin_stop(number, grace)
            deadline = time.monotonic() + (self.agent.hearing if by_slurm else 0)
            while not self.agent_heard and time.monotonic() < deadline and self.agent.poll() is None:
                self.ranks.poll((), TICK)  # what a rank ended with is known until the agent looks
                self.agent_heard = self.agent.was_signalled()
        elif self.control and self.stop.has_reached(number):
            return
        self.advance_stop()
        while self.control and self.stop and number in HARD and not self.stop.has_reached(number):
            self.advance_stop()

    def advance_stop(self) -> None:
        """Enter the next stage. The agent forwards the first signal, later ones go to the ranks directly."""
        if (stop := self.stop) is None:
            return
        first = not stop.deadline
        number = stop.next_stage()
        if number is None or number == signal.SIGKILL:
            logger.info("SIGKILL to the ranks")
            if number is None or not self.ranks.alive:
                self.agent.kill()
            self.ranks.signal_groups(signal.SIGKILL)
            return
        left = stop.deadline - time.monotonic()
        logger.info(f"{name_signal(number)} to the ranks, which have {left:.0f} s to end")
        if not first:
            self.ranks.signal_groups(number)
        elif not self.agent_heard:
            self.agent.send_signal(number)
