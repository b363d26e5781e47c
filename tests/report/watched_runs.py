"""Values and run directories of `launch watch`, made up."""

import os
import time
from dataclasses import replace
from pathlib import Path

from launcher.runs.progress import Progress
from launcher.runs.run_process import identify_process
from launcher.runs.run_status import RunStatus
from launcher.watch.node_reports import write_evidence, write_job_state, write_report
from launcher.watch.run_reader import NodeView, RunSnapshot
from launcher.watch.watch_model import (
    Frame,
    GpuSample,
    Hang,
    JobState,
    NodeEvidence,
    NodeReport,
    ProcessState,
    RankEvidence,
    RankState,
    Stack,
    Straggler,
    Verdict,
)
from tests.cli.make_runs import make_run, write_log

RUN = RunStatus(
    "train/20260801-120000", "/runs/train/20260801-120000", "running", job_id="4711", nodes=2, seconds=3723.0
)
SENTENCE = (
    "rank 5 on n1 has not joined all_reduce #1042 of the default group, in which 7 ranks wait: it sleeps at"
    " data.py:88, read_shard"
)
GPU = GpuSample(
    0,
    utilization=0.97,
    sm_activity=0.81,
    memory_used=61 << 30,
    memory_total=80 << 30,
    power=612.0,
    power_limit=700.0,
    temperature=64.0,
    sm_clock=1980,
    max_sm_clock=1980,
    pcie_width=16,
    max_pcie_width=16,
)
CPU_ONLY = RankState(
    0,
    0,
    100,
    0,
    "training",
    120,
    0.2,
    p50=0.4,
    p99=0.52,
    data_share=0.02,
    cpu=3.8,
    run_delay=0.01,
    rss=2 << 30,
)


def make_rank(rank: int, local_rank: int, *, gpu: bool = True, slow: bool = False) -> RankState:
    """A rank; the slow one waits least for the others, and its GPU is hot."""
    state = replace(CPU_ONLY, rank=rank, local_rank=local_rank, pid=4000 + rank, wait_share=0.22)
    if gpu:
        state = replace(state, gpu=replace(GPU, index=local_rank))
    if slow:
        hot = replace(
            GPU, index=local_rank, temperature=88.0, sm_clock=1410, event_reasons=("sw_thermal_slowdown",)
        )
        state = replace(state, wait_share=0.03, gpu=hot if gpu else None)
    return state


def make_report(
    node: int, nodes: int, ranks: int = 4, *, slow: int | None = None, gpu: bool = True
) -> NodeReport:
    """A node's report."""
    first = node * ranks
    states = tuple(make_rank(first + one, one, gpu=gpu, slow=first + one == slow) for one in range(ranks))
    host = f"n{node}" if nodes < 100 else f"n{node:03}"
    return NodeReport(
        host,
        node,
        nodes,
        0,
        1e9,
        7,
        5.0,
        states,
        limit=20.0,
        nic_rates=(("mlx5_0", 2.5e10), ("mlx5_1", 1.5e10)),
    )


STRAGGLER = Straggler(
    5, "n1", 0.18, "gpu_clock", "its GPU runs at 1410 of 1980 MHz: sw_thermal_slowdown", 100, 200, 1e9
)
VERDICT = Verdict(
    "absent",
    SENTENCE,
    (5,),
    ("n1",),
    "default group",
    "all_reduce",
    1042,
    7,
    Frame("data.py", 88, "read_shard"),
)
JOB = JobState(1e9, "n0", 0, "running", 120, 0.2, 0.4, 2)


def make_snapshot(nodes: int = 2, ranks: int = 4, *, slow: int | None = 5, gpu: bool = True) -> RunSnapshot:
    """A job's state with one straggler, if there is one."""
    views = tuple(NodeView(make_report(node, nodes, ranks, slow=slow, gpu=gpu), 1.0) for node in range(nodes))
    stragglers = (STRAGGLER,) if slow is not None else ()
    return RunSnapshot(
        views, replace(JOB, nodes=nodes, stragglers=stragglers), Progress(120, 400, (("loss", "2.412"),)), 0.4
    )


def make_hang(snapshot: RunSnapshot) -> RunSnapshot:
    """The same job in a hang."""
    hang = Hang(1, 1e9, 1e9 - 24, 120, VERDICT)
    assert snapshot.job
    return replace(snapshot, job=replace(snapshot.job, state="hanging", hangs=(hang,), stragglers=()))


def make_evidence() -> NodeEvidence:
    """What node n1 gathered of rank 5."""
    stack = Stack(
        "MainThread", (Frame("data.py", 88, "read_shard"), Frame("train.py", 31, "main")), is_current=True
    )
    process = ProcessState(
        4005, "S", "hrtimer_nanosleep", "clock_nanosleep", stacks=(stack,), stack_source="faulthandler"
    )
    rank = RankEvidence(5, 1, "n1", 4005, "training", 120, 24.0, 24.0, process)
    return NodeEvidence("n1", 1, 1, 1e9, 1.5, (rank,))


def make_watched_run(runs_dir: Path, nodes: int = 2, ranks: int = 4, state: str = "running") -> Path:
    """A run directory with reports, which lives as long as this process."""
    path = make_run(runs_dir, "train", state=state, process=identify_process(os.getpid()))
    snapshot = make_snapshot(nodes, ranks)
    for view in snapshot.nodes:
        write_report(path, replace(view.report, time=time.time()))
    assert snapshot.job
    write_job_state(path, snapshot.job)
    write_evidence(path, make_evidence())
    write_log(path, 0, "step 119/400 loss 2.5\nstep 120/400 loss 2.412\n")
    write_log(path, 5, "reading shard 17\n")
    return path
