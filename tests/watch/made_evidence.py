"""Made-up evidence of ranks, for tables of cases."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.watch.watch_model import (
    Call,
    Frame,
    GroupState,
    NodeEvidence,
    NodeReport,
    ProcessState,
    RankEvidence,
    RankState,
    Stack,
)

LIBRARY = "/usr/lib/python3.11"
TORCH = f"{LIBRARY}/site-packages/torch"
TRAIN = Frame("/home/me/train.py", 40, "train")
READ_SHARD = Frame("/home/me/data.py", 88, "read_shard")
BARRIER = Frame(f"{TORCH}/distributed/distributed_c10d.py", 4500, "barrier")
RECV = replace(BARRIER, function="recv")
INIT = replace(BARRIER, function="init_process_group")
WRAPPER = Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper")
BACKWARD = Frame(f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward")
NEXT_DATA = Frame(f"{TORCH}/utils/data/dataloader.py", 1300, "_try_get_data")
WORKER_LOOP = Frame(f"{TORCH}/utils/data/_utils/worker.py", 349, "_worker_loop")
QUEUE_GET = Frame(f"{LIBRARY}/multiprocessing/queues.py", 113, "get")
GET_ITEM = Frame("/home/me/data.py", 9, "__getitem__")
FETCH = Frame(f"{TORCH}/utils/data/_utils/fetch.py", 54, "fetch")


def make_process(
    *frames: Frame, pid: int = 100, state: str = "S", call: str = "futex", channel: str = "", cpu: float = 0.0
) -> ProcessState:
    """A process with a main thread at these lines, innermost first."""
    stacks = (Stack("0x1", frames, is_current=True),) if frames else ()
    return ProcessState(pid, state, channel, call, cpu, stacks=stacks, stack_source="faulthandler")


SLEEPING = make_process(READ_SHARD, TRAIN, call="clock_nanosleep")
IN_COLLECTIVE = make_process(BACKWARD, TRAIN)
COMPUTING = make_process(TRAIN, state="R", call="", cpu=1.0)


def make_group(
    enqueued: int,
    completed: int,
    *,
    name: str = "default group",
    key: str = "0",
    operation: str = "all_reduce",
    sizes: str = "[100] Float",
    ranks: tuple[int, ...] = (),
) -> GroupState:
    """A group in whose last three collectives a rank is that far."""
    calls = tuple(
        Call(number, operation, sizes, is_complete=number <= completed)
        for number in range(max(enqueued - 2, 1), enqueued + 1)
    )
    return GroupState(
        name, ranks, enqueued, completed, operation, sizes, enqueued > completed, key=key, calls=calls
    )


def make_rank(
    rank: int,
    process: ProcessState = IN_COLLECTIVE,
    *groups: GroupState,
    host: str = "n1",
    phase: str = "training",
    children: tuple[ProcessState, ...] = (),
    **more: object,
) -> RankEvidence:
    """A rank's evidence; with groups, its server has answered."""
    found = RankEvidence(
        rank, rank, host, 1000 + rank, phase, 10, 30.0, 30.0, process, children, groups, answered=True
    )
    return replace(found, **more)  # type: ignore[arg-type]  # fields by name


def make_nodes(ranks: Sequence[RankEvidence]) -> list[NodeEvidence]:
    """The evidence of each host."""
    hosts = dict.fromkeys(rank.host for rank in ranks)
    return [
        NodeEvidence(host, number, 1, 0.0, 1.0, tuple(rank for rank in ranks if rank.host == host))
        for number, host in enumerate(hosts)
    ]


def make_reports(ranks: Mapping[str, Sequence[int]], nodes: int | None = None) -> list[NodeReport]:
    """The last reports of hosts with these ranks."""
    return [
        NodeReport(
            host,
            number,
            nodes or len(ranks),
            0,
            0.0,
            1,
            5.0,
            tuple(RankState(rank, rank, 1, 0, "training", 10, 30.0) for rank in found),
        )
        for number, (host, found) in enumerate(ranks.items())
    ]
