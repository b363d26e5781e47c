"""The values that watching passes on: what a rank does, what a node reports, and what follows from it.

Each has one JSON form, its fields by name (`dataclasses.asdict`, `launcher.codec`). Times are seconds since
the epoch on the clock of the node that wrote them; durations are in seconds, shares are fractions of time.
"""

from dataclasses import dataclass, fields
from typing import Any

PHASES = ("starting", "joining", "training", "loading", "compiling", "saving", "evaluating", "ended")
"""What a rank does. `starting`: before its first step. `joining`: in `init_process_group`. `loading`: it
waits for a DataLoader. `ended`: its interpreter has begun to exit."""
UNWATCHED = ("ended", "exited", "unwatched")
"""Phases of ranks from which no progress is due."""


def list_fields(value: Any) -> dict[str, Any]:  # noqa: ANN401 - one of these dataclasses
    """Return a value's fields by name, to make a larger one of it."""
    return {item.name: getattr(value, item.name) for item in fields(value)}


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a rank's hook has written last."""

    rank: int
    local_rank: int
    pid: int
    phase: str
    """One of PHASES."""
    phase_since: float
    step: int
    """Steps so far."""
    step_time: float
    """When the last step ended; 0 if none has."""
    activity_time: float
    """When it last did anything that counts: a step, a batch, a change of phase."""
    batches: int
    """Batches that its DataLoaders have returned."""
    data_wait: float
    """Seconds that it has waited for them, without the wait that it may be in."""
    durations: tuple[float, ...] = ()
    """Seconds of the last steps, oldest first; the hook keeps 256."""
    step_ends: tuple[float, ...] = ()
    """When these steps ended."""
    can_dump: bool = False
    """Its signal for stacks is in place."""
    notes: tuple[str, ...] = ()
    """What of the hook could not be set up, in words."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """What NVML says of a rank's GPU; None for what it does not say."""

    index: int
    utilization: float | None = None
    """Share of the time with a kernel running."""
    sm_activity: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    """Bytes."""
    power: float | None = None
    """W."""
    power_limit: float | None = None
    temperature: float | None = None
    """Degrees Celsius."""
    sm_clock: int | None = None
    max_sm_clock: int | None = None
    """MHz."""
    event_reasons: tuple[str, ...] = ()
    """Why clocks are low, by NVML's names (`sw_thermal_slowdown`, `hw_power_brake`, …), without idle."""
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    pcie_replays: int | None = None
    xids: tuple[int, ...] = ()
    """Of XID errors since the watcher's start."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A process that runs on a rank's cores and is not the rank's own."""

    name: str
    pid: int
    share: float
    """Cores that it used of those that the rank may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """What the kernel says of a rank and its children since the last; None for what is not known (yet)."""

    cpu: float | None = None
    """Cores used."""
    run_delay: float | None = None
    """Seconds per second that threads, in all, were ready to run and waited for a core (schedstat)."""
    thread_delay: float | None = None
    """The same of the one thread that waited most."""
    rss: int | None = None
    """Bytes: the rank's resident memory, and its children's without what files and shared memory have."""
    major_faults: float | None = None
    """Per second."""
    throttled: float | None = None
    """Seconds per second, summed over CPUs, that a CPU quota held back its cgroup or one above it."""
    neighbours: tuple[Neighbour, ...] = ()
    """Processes of others that ran on its cores, the busiest first."""


@dataclass(frozen=True, slots=True)
class Rank(RankSample):
    """A rank that is watched, as its node reports it: its last heartbeat, its sample, its GPU."""

    rank: int
    local_rank: int
    pid: int
    attempt: int
    phase: str
    """One of PHASES; `unwatched` for a rank without a heartbeat; `exited` for one that is gone."""
    step: int
    step_age: float | None
    """Seconds since its last step; None if it has made none."""
    p50: float | None = None
    p99: float | None = None
    """Of the seconds of its last steps."""
    data_share: float | None = None
    """Share of the time that it waits for data."""
    wait_share: float | None = None
    """Share of the time that it waits for other ranks; None if that is not known."""
    exit_code: int | None = None
    gpu: GpuSample | None = None
    notes: tuple[str, ...] = ()
    """What of its hook, or of its evidence, could not be had, and why."""
    idle: float | None = None
    """Seconds without progress, as its node saw it; None if it is not watched. Before the first step,
    activity is progress in a report, but not in evidence."""
    quiet: float = 0.0
    """Seconds without activity of its process tree; what cannot be seen counts as activity."""


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """When a rank came to its last collectives (torch's flight recorder), and when its last steps ended."""

    rank: int
    measure: str
    """`enqueued`: when the rank enqueued them. `duration`: how long they took (NCCL with timing)."""
    groups: tuple[str, ...] = ()
    """Process groups that the marks refer to; an empty name stands for the ends of steps."""
    marks: str = ""
    """One for each collective and each end of a step, packed by flight_recorder.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """What the kernel says of a node since the last sample; None for what is not known (yet)."""

    memory_pressure: float | None = None
    cpu_pressure: float | None = None
    io_pressure: float | None = None
    """Share of the last 10 s that some task waited for it (PSI)."""


@dataclass(frozen=True, slots=True)
class NodeReport(NodeSample):
    """What a node's watcher writes every few seconds to `RUN_DIR/watch/node-HOST.json`, whole."""

    host: str
    node_rank: int
    nodes: int
    """Nodes of the job."""
    attempt: int
    time: float
    number: int
    """Counts the reports of this watcher."""
    interval: float
    """Seconds to the next one."""
    ranks: tuple[Rank, ...]
    stalled_since: float | None = None
    """Since when no rank here has made progress, once that is longer than the limit."""
    limit: float | None = None
    """Seconds without progress that count as a hang now."""
    notes: tuple[str, ...] = ()
    """Part of the form, in which there has been none so far."""
    collectives: tuple[CollectiveTimes, ...] = ()
    """Of its ranks, as of the last time that their recorders were read."""
    schema: int = 1

    @property
    def stalled(self) -> float:
        """Seconds without progress, once that is a hang; else 0."""
        return 0.0 if self.stalled_since is None else self.time - self.stalled_since


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Stack:
    """One thread of a process."""

    thread: str
    """Its name or identifier as the source gives it."""
    frames: tuple[Frame, ...]
    """Innermost first."""
    is_current: bool = False
    """It is the main thread."""
    awaits_lock: bool = False
    """Its line takes a lock, and nothing else: `with self.lock:`, `lock.acquire()`."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What the kernel and its stacks say of a process: a rank, or a DataLoader worker of one."""

    pid: int
    state: str
    """As in proc(5): R, S, D, T, t, Z; X if it is gone."""
    wait_channel: str = ""
    system_call: str = ""
    """Its name if it is known, of the main thread."""
    tracer: int = 0
    """PID of a debugger; 0 for none."""
    stacks: tuple[Stack, ...] = ()
    command: str = ""
    """For a child: its name."""

    @property
    def main_stack(self) -> Stack | None:
        """The stack of its main thread."""
        return next((stack for stack in self.stacks if stack.is_current and stack.frames), None)


@dataclass(frozen=True, slots=True)
class Call:
    """A collective of one group, as one rank's flight recorder has it."""

    sequence: int
    operation: str
    """In torch's words: `all_reduce`."""
    sizes: str
    """Input sizes and types: `[100] Float`."""
    is_complete: bool


@dataclass(frozen=True, slots=True)
class GroupState:
    """What torch's flight recorder of one rank says of one process group."""

    name: str
    """`default group`, or the name or description that the program gave."""
    ranks: tuple[int, ...]
    """Global ranks of its members; empty if not known."""
    last_enqueued: int
    last_completed: int
    """Sequence numbers; -1 for none."""
    key: str = ""
    """torch's name of the group, the same on all of its ranks; `name` need not be unique."""
    calls: tuple[Call, ...] = ()
    """The last collectives in their order, at most 64."""
    exchanges: tuple[tuple[str, int], ...] = ()
    """Point-to-point operations that are not complete: `recv`, and the rank they are with. NCCL alone."""

    @property
    def pending(self) -> Call | None:
        """The first collective that is not complete; None if all are."""
        completed = max(self.last_completed, 0)
        if self.last_enqueued <= completed:
            return None
        unknown = Call(completed + 1, "", "", is_complete=False)
        return next((call for call in self.calls if not call.is_complete), unknown)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence(Rank):
    """All that is known of one rank when steps have stopped."""

    host: str
    process: ProcessState
    children: tuple[ProcessState, ...] = ()
    """DataLoader workers and other children."""
    groups: tuple[GroupState, ...] = ()
    answered: bool = False
    """torch's server in the rank answered."""


@dataclass(frozen=True, slots=True)
class NodeEvidence:
    """What a node gathers for one hang, in `RUN_DIR/watch/evidence-HOST.json`."""

    host: str
    node_rank: int
    number: int
    """Of the hang."""
    time: float
    seconds: float
    """That gathering took."""
    ranks: tuple[RankEvidence, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who holds the others up, as far as can be said."""

    kind: str
    """`absent` (a rank has not joined a collective), `network` (all have joined), `mismatch`, `silent` (a
    node or rank is not heard of), `exited` (a rank has ended while others wait), `stopped` (SIGSTOP),
    `standstill` (nobody waits for others, and no rank makes progress), or `debugged`: no hang."""
    sentence: str
    ranks: tuple[int, ...] = ()
    """Those that hold the others up, the first one named first."""
    hosts: tuple[str, ...] = ()
    group: str = ""
    operation: str = ""
    sequence: int | None = None
    waiting: int = 0
    """Ranks that wait for them."""
    frame: Frame | None = None
    """Where the first of them stands, in the program's own code if it is there."""
    is_final: bool = False
    """It cannot go on by itself."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from the evidence of a pause."""

    word: str
    """`none`, `notice` or `hang`."""
    verdict: Verdict
    seconds: float = 0.0
    """Until it would be a hang, if nothing changes."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks that will not go on, or have done nothing for a long time: kept, told, and acted on."""

    number: int
    time: float
    """Of the verdict."""
    stalled_since: float
    step: int
    verdict: Verdict
    action: str = "report"
    """What followed: `report`, `restart` or `stop`."""
    recovered: float | None = None
    """When steps went on."""
    pids: tuple[tuple[int, int], ...] = ()
    """Rank and PID of those that hold the others up: the number of a start may differ by node, and
    stay the same in a new one."""

    @property
    def folder(self) -> str:
        """The folder in the run directory that it has."""
        return f"hang-{self.number}"


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that others wait for in each step."""

    rank: int
    host: str
    excess: float
    """How much longer its own part of a step takes than the others', as a share of the step."""
    cause: str
    """One of `data`, `run_delay`, `cpu_quota`, `memory_pressure`, `page_faults`, `gpu_clock`, `pcie`,
    `program` (its own code, for none of these reasons)."""
    detail: str
    """In words, with the figures: `python (PID 4711) runs on its core 3 for 48% of the time`."""
    first_step: int
    last_step: int
    time: float


@dataclass(frozen=True, slots=True)
class JobState:
    """What the judging node knows of the whole job, in `RUN_DIR/watch/job.json`."""

    time: float
    host: str
    """The node that judges: the first one that is heard of."""
    attempt: int
    state: str
    """`starting`, `running`, `hanging`, or `ended`."""
    step: int
    step_age: float | None
    p50: float | None
    """Seconds of a step."""
    nodes: int
    silent: tuple[str, ...] = ()
    """Nodes that are not heard of."""
    hangs: tuple[Hang, ...] = ()
    restarts: int = 0
    """Restarts of the ranks that were asked for because of a hang."""
    stragglers: tuple[Straggler, ...] = ()
    notes: tuple[str, ...] = ()
    asks: int = 0
    """Number of the hang that all nodes are to gather evidence for; 0 for none."""
    wait_shares: tuple[tuple[int, float], ...] = ()
    """Share of the time that ranks wait for others, by rank."""
    schema: int = 1


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """`watch.*`, as config/settings.py has it."""

    hang_seconds: Any = "auto"
    on_hang: str = "report"
    interval: float = 5.0
    metrics_interval: float = 30.0
    prometheus_port: int | None = None
    prometheus_address: str = "127.0.0.1"
    textfile: str | None = None


@dataclass(frozen=True, slots=True)
class NotifySettings:
    """`notify.*`, as config/settings.py has it."""

    url: str | None = None
    format: str = "auto"
    events: tuple[str, ...] = ()
    ping_url: str | None = None
    ping_interval: float = 60.0


@dataclass(frozen=True, slots=True)
class WatcherSettings:
    """The first line that the supervisor writes to the watcher."""

    run_dir: str
    run: str
    """`NAME/ID`."""
    folder: str
    """Where the node's ranks keep their heartbeats."""
    host: str
    node_rank: int
    nodes: int
    """Nodes of the job, at most."""
    attempt: int
    """Number of this start's first attempt."""
    ranks: int
    """Ranks on this node."""
    watch: WatchSettings
    notify: NotifySettings


@dataclass(frozen=True, slots=True)
class RankEntry:
    """A rank on this node, as the supervisor knows it; a later line has those that started, or have ended."""

    rank: int
    local_rank: int
    attempt: int
    pid: int
    has_ended: bool = False
    exit_code: int | None = None
    """As subprocess gives it; None for one that runs, or whose end nobody saw."""
