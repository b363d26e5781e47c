"""A run directory with all that a report can show, made up: a hang, a straggler, GPUs, checkpoints."""

import json
import math
import os
import random
from dataclasses import asdict
from pathlib import Path

from launcher.watch.watch_model import (
    Frame,
    GpuSample,
    GroupState,
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

BEGIN = 1785585600.0
"""When `make_run` has a run begin: 2026-08-01T12:00:00+00:00."""
GIB = 1 << 30


def make_full_run(
    runs_dir: Path, nodes: int = 2, ranks: int = 4, seconds: float = 5400.0, interval: float = 30.0
) -> Path:
    """A run of `nodes` times `ranks` that was requeued, hung, had a straggler, and failed at last."""
    earlier = {
        "command": ["launch", "train.py"],
        "started": "2026-08-01T12:00:00.000+00:00",
        "ended": "2026-08-01T12:30:00.000+00:00",
        "outcome": {"state": "requeued", "cause": "preempted", "reason": "SLURM preempted the job"},
    }
    failure = {"rank": 5, "host": "n1", "local_rank": 1, "reason": "exited with 1"}
    failure["last_lines"] = ["Traceback (most recent call last):", "RuntimeError: no more <b>data</b>"]
    path = make_run(
        runs_dir,
        state="failed",
        command=["launch", "nodes=2", "gc=synchronized", "gc.log=true", "env.HF_TOKEN=***", "train.py"],
        directory="/home/ann/train",
        hosts=[f"n{number}" for number in range(nodes)],
        started="2026-08-01T12:31:00.000+00:00",
        ended="2026-08-01T13:30:00.000+00:00",
        earlier=[earlier],
        outcome={"exit_code": 1, "first_failure": failure, "events": []},
        git={"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": True},
        packages={"launch": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
        slurm={"job_id": "4711"},
    )
    hang = make_hang(ranks)
    for number in range(nodes):
        reports = [
            make_report(number, nodes, ranks, BEGIN + at * interval, number=at, interval=interval)
            for at in range(1, int(seconds / interval))
        ]
        write_watch(path, f"metrics-n{number}.jsonl", "\n".join(dump(report) for report in reports) + "\n")
        write_watch(path, f"node-n{number}.json", dump(reports[-1]))
        evidence = make_evidence(number, ranks)
        folder = path / f"hang-{hang.number}"
        folder.mkdir(exist_ok=True)
        (folder / f"evidence-n{number}.json").write_text(dump(evidence))
    straggler = Straggler(
        min(2, ranks - 1), "n0", 0.14, "run_delay",
        "python (PID 4711) runs on its core 3 for 48% of the time",
        1200, 1420, BEGIN + 1500,
    )  # fmt: skip
    job = JobState(
        BEGIN + seconds, "n0", 1, "ended", 5200, 4.0, 0.8, nodes, (), (hang,), 0, (straggler,), ("a note",)
    )
    write_watch(path, "job.json", dump(job))
    for number, minutes in enumerate((10, 20, 40, 50, 80)):
        file = path / "checkpoints" / f"step-{number}"
        file.mkdir(parents=True)
        os.utime(file, (BEGIN + 60 * minutes,) * 2)
    write_log(path, 0, "step 5200/20000 loss 2.41 tokens/s 12345\n", attempt=1)
    lines = (
        f"launch: rank 0: step {step}: 812 objects collected in 4.2 ms\n" for step in range(50, 5000, 100)
    )
    write_log(path, 0, "".join(lines), ending="err")
    return path


def dump(value: object) -> str:
    """A value's JSON on one line."""
    return json.dumps(asdict(value))  # type: ignore[call-overload]  # a dataclass


def write_watch(path: Path, name: str, text: str) -> None:
    """Write a file of watching."""
    (path / "watch").mkdir(exist_ok=True)
    (path / "watch" / name).write_text(text)


def make_report(
    node: int, nodes: int, ranks: int, time: float, *, number: int, interval: float
) -> NodeReport:
    """A node's report at a time of the made-up run."""
    states = tuple(make_state(node * ranks + local, local, time) for local in range(ranks))
    attempt = int(time >= BEGIN + 1860)
    return NodeReport(f"n{node}", node, nodes, attempt, time, number, interval, states)


def make_state(rank: int, local: int, time: float) -> RankState:
    """A rank's state at a time."""
    past = time - BEGIN
    rng = random.Random(f"{rank} {time}")
    slow = rank == 2
    phase = "starting" if past < 90 or 1800 < past < 1890 else "saving" if past % 1200 < 60 else "training"
    if 2700 < past < 2900:
        phase = "training"
    if phase == "starting":
        return RankState(rank, local, 100 + rank, int(past >= 1860), phase, 0, None, rss=2 * GIB, cpu=0.9)
    wave = 0.06 * math.sin(past / 300)
    used = 0.02 if 2700 < past < 2900 else 0.93 - 0.05 * (rank % 3) + wave - rng.random() / 20
    gpu = GpuSample(
        local, used, None, int((58 + 6 * rng.random() + rank % 4) * GIB), 80 * GIB, 260 + 380 * used, 700,
        48 + 30 * used, int(1980 - 200 * slow), 1980, xids=(79,) if rank == 3 and past > 5000 else (),
    )  # fmt: skip
    return RankState(
        rank, local, 100 + rank, int(past >= 1860), phase, int(past), 0.4,
        p50=0.78 + wave / 3 + rng.random() / 80, p99=0.98 + rng.random() / 5,
        data_share=0.04 + 0.02 * rng.random(), wait_share=(0.05 if slow else 0.18) + 0.02 * rng.random(),
        cpu=1.8 + rng.random() / 2, run_delay=0.3 if slow else 0.01, rss=int((12 + past / 900) * GIB),
        major_faults=0.0, gpu=gpu,
    )  # fmt: skip


def make_hang(ranks: int) -> Hang:
    """A hang of one rank."""
    sentence = (
        "rank 1 on n0 has not joined all_reduce #1042 of the default group, in which 7 ranks wait: "
        "it sleeps at data.py:88, read_shard"
    )
    frame = Frame("/home/ann/train/data.py", 88, "read_shard")
    verdict = Verdict("absent", sentence, (1,), ("n0",), "default group", "all_reduce", 1042, 7, frame)
    return Hang(1, BEGIN + 2724, BEGIN + 2700, 1800, verdict, "report", BEGIN + 2900)


def make_evidence(node: int, ranks: int) -> NodeEvidence:
    """What a node gathered for the hang: rank 1 reads, the others wait for it."""
    found = []
    for local in range(ranks):
        rank = node * ranks + local
        inner = Frame("/home/ann/train/data.py", 88, "read_shard") if rank == 1 else Frame(
            "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py", 2810, "all_reduce"
        )  # fmt: skip
        main = Stack("MainThread", (inner, Frame("/home/ann/train/train.py", 120, "main")), is_current=True)
        other = Stack("Thread-1 (pin_memory)", (Frame("/usr/lib/python3/threading.py", 320, "wait"),))
        process = ProcessState(
            100 + rank, "S", "hrtimer_nanosleep" if rank == 1 else "poll", "", 0.01, stacks=(main, other)
        )
        group = GroupState("default group", (), 1041 + (rank != 1), 1041, "all_reduce", "[4096]", rank != 1)
        found.append(
            RankEvidence(
                rank, local, f"n{node}", 100 + rank, "training", 1800, 24.0, 24.0, process, (), (group,)
            )
        )
    return NodeEvidence(f"n{node}", node, 1, BEGIN + 2723, 1.2, tuple(found))
