"""What ranks and nodes leave in a run directory, read back: placement, ends, memory."""

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from launcher.codec import DecodeError, convert, dump, load
from launcher.cpulist import format_cpulist
from launcher.files import LARGEST, open_below, read_file, write_whole
from launcher.plan.model import Memory, RankPlan
from launcher.protocol import name_applied_file, name_memory_file, name_plan_file, parse_plan_file
from launcher.runs.manifest import FirstFailure, Run, parse_manifest
from launcher.runs.run_directory import RunDir, write_private
from launcher.runs.secrets import mask_text
from launcher.text import escape_text


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The first rank of a node that failed, as far as its node can tell, for records and people."""

    rank: int
    local_rank: int
    time: float
    """Seconds since the epoch; the nodes' clocks differ by milliseconds if NTP keeps them."""
    exitcode: int
    """As subprocess gives it: -n for signal n."""
    reason: str
    """In words, `was killed by SIGKILL (signal 9), …`."""
    log: str
    lines: tuple[str, ...]
    """The end of its log."""
    attempt: int = 0

    @property
    def status(self) -> int:
        """The exit code as a shell gives it: 128+n for signal n."""
        return 128 - self.exitcode if self.exitcode < 0 else self.exitcode

    def describe(self, host: str, attempt: int) -> FirstFailure:
        """Return it as a manifest has it."""
        return FirstFailure(self.rank, self.local_rank, host, attempt, self.status, self.reason, self.lines)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node's account of an attempt."""

    host: str
    node_rank: int
    """SLURM_NODEID."""
    state: str
    """`succeeded`, `failed`, or `stopped` by a signal."""
    exit_code: int
    signal: str | None
    """The first stopping signal."""
    agent_said: str
    """The last line of the agent, if it failed and no rank did."""
    failure: RankFailure | None
    restarts: int
    """Starts of the ranks after the first, within the attempt."""
    started: float
    ended: float
    """Seconds since the epoch."""
    ranks: int = 0
    """How many the node has; 0 if none was started."""
    clean: tuple[tuple[int, float], ...] = ()
    """Ranks of its last start that ended with 0, and when, in seconds since the epoch."""
    hang: str = ""
    """The hang, in words, for which its ranks were ended (`watch.on_hang`)."""
    trouble: str = ""
    """Why nothing could be written to the run directory when its ranks had ended."""
    schema: int = 1


def refuse_node(
    host: str, node_rank: int, status: int, said: str, started: float, state: str = "failed"
) -> NodeRecord:
    """Return the record of a node on which no rank was started; `said` is why."""
    return NodeRecord(host, node_rank, state, status, None, said, None, 0, started, time.time())


def write_node(run_path: Path, attempt: int, record: NodeRecord) -> None:
    """Write a node's record, whole or not at all; raises OSError.

    `attempt` is the first of the start that it belongs to.
    """
    with open_below(run_path, "logs", str(attempt)) as at:
        write_whole(at, f"node-{record.host}.json", dump(record, indent=1).encode())


def read_nodes(run_path: Path, attempt: int) -> list[NodeRecord]:
    """Read the records of an attempt, by node rank; those that cannot be read count as missing."""
    found = []
    for path in run_path.glob(f"logs/{attempt}/node-*.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(load(NodeRecord, read_file(path, LARGEST)))
    return sorted(found, key=lambda record: (record.node_rank, record.host))


ENDING = "error.json"
"""Of the file's name, which stands beside the rank's logs."""
LARGEST_ERROR = 1 << 20
"""Bytes of such a file at most: a traceback and a little more."""
LONGEST_MESSAGE = 200


def name_error_file(run: RunDir, rank: int, attempt: int) -> Path:
    """Return the path of a rank's file."""
    return run.rank_log(rank, attempt, ENDING)


def read_error(run: RunDir, rank: int, attempt: int) -> str:
    """Return the exception that ended a rank's program, `ValueError: no data`; empty if it left none.

    The file is the program's: it may hold anything. Its form is that of record_exception in
    torch/distributed/elastic/multiprocessing/errors/error_handler.py.
    """
    try:
        data = json.loads(read_file(name_error_file(run, rank, attempt), LARGEST_ERROR, own=True))
    except (OSError, ValueError, RecursionError):
        return ""
    message = data.get("message") if isinstance(data, dict) else None
    text = message.get("message") if isinstance(message, dict) else message
    return escape_text(mask_text(text.strip()), LONGEST_MESSAGE) if isinstance(text, str) else ""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Applied:
    """One rank's record, `rank-N.applied.json`, as the shim wrote it."""

    rank: int
    local_rank: int
    attempt: int
    pid: int
    agent: int
    """PID of the process that started the rank, on its host."""
    host: str
    cpus: str
    memory: Memory
    problems: tuple[str, ...]
    gpu: str | None = ""
    """UUID of its GPU; None for no GPU, empty if the record does not tell."""
    num_workers: int | None = None
    """None if the record does not tell."""
    env: Mapping[str, str] | None = None
    """Variables that the shim set; None if the record does not tell."""
    time: float = 0
    """Seconds since the epoch."""


@dataclass(slots=True)
class AppliedReader:
    """Reads the records that are new or have changed since the last call."""

    run_path: Path
    own: bool = True
    """What the records say is acted upon: those of other users are left out."""
    seen: dict[Path, int] = field(default_factory=dict)

    def read_new(self) -> list[Applied]:
        """Return the new records; one that is not readable is left for the next call."""
        found = []
        try:
            paths = sorted(self.run_path.glob(name_applied_file("*")))
        except OSError:  # a network filesystem's hiccup
            return []
        for path in paths:
            with contextlib.suppress(OSError, ValueError):
                stamp = path.lstat().st_mtime_ns
                if self.seen.get(path) != stamp:
                    found.append(load(Applied, read_file(path, LARGEST, own=self.own)))
                    self.seen[path] = stamp
        return found


def compare_applied(ranks: Sequence[RankPlan], applied: Sequence[Applied]) -> list[str]:
    """Say, for each rank of this node, where what was applied is not what was planned."""
    found = {record.local_rank: record for record in applied}
    differences: list[str] = []
    for rank in ranks:
        record = found.get(rank.local_rank)
        if record is None:
            differences.append(f"local rank {rank.local_rank} left no record of its placement")
        else:
            differences += compare_rank(rank, record)
    return differences


def compare_rank(rank: RankPlan, record: Applied) -> Iterator[str]:
    """Say where one rank has something else than was planned for it."""
    cpus, name = format_cpulist(rank.cpus), f"rank {record.rank}"
    if record.cpus != cpus:
        yield f"{name} runs on CPUs {record.cpus}, planned {cpus}"
    if rank.memory.policy != "default" and record.memory != rank.memory:
        took, planned = map(describe_memory, (record.memory, rank.memory))
        yield f"{name} has memory policy {took}, planned {planned}"
    gpu = rank.gpu.uuid if rank.gpu else None
    if record.gpu not in ("", gpu):
        yield f"{name} has GPU {record.gpu or 'none'}, planned {gpu or 'none'}"
    if record.num_workers not in (None, rank.num_workers):
        yield f"{name} has {record.num_workers} DataLoader workers, planned {rank.num_workers}"
    env = dict(rank.env)
    for key in sorted({*env, *record.env}) if record.env is not None else ():
        value = (record.env or {}).get(key, "unset")
        if value != env.get(key, "unset"):
            yield f"{name} has {key} {value}, planned {env.get(key, 'unset')}"


def describe_memory(memory: Memory) -> str:
    """Return a memory policy with its nodes: `preferred 0`."""
    return f"{memory.policy} {format_cpulist(memory.nodes)}".strip()


@dataclass(frozen=True, slots=True)
class HostRecords:
    """One host of a run."""

    name: str
    planned: tuple[RankPlan, ...]
    """Empty if the run has no plan of this host."""
    records: tuple[Applied, ...]
    """The newest record of each local rank in the host's last attempt."""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class RunRecords:
    """A run directory, as far as it can be read."""

    path: str
    hosts: tuple[HostRecords, ...]
    state: str = ""
    """How the run went, as the manifest has it; empty if it does not tell."""
    damaged: tuple[str, ...] = ()
    """Files that cannot be read, with the reason."""


def find_last_run(runs_dir: Path) -> Path | None:
    """The run directory below RUNS_DIR/NAME whose plan was written last; None if there is none."""
    found = []
    for plan in runs_dir.glob("*/*/plan-*.json"):
        with contextlib.suppress(OSError):  # taken away meanwhile
            found.append((plan.stat().st_mtime, str(plan.parent)))
    return Path(max(found)[1]) if found else None


def read_run(path: Path) -> RunRecords:
    """Read a run directory; files that are damaged are told in the result, and nothing raises."""
    damaged: list[str] = []

    def read(decode: Callable[[bytes], T], file: Path) -> T | None:
        try:
            return decode(read_file(file, LARGEST))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            damaged.append(f"{file.name} cannot be read ({reason[:200]})")
            return None

    def read_manifest(data: bytes) -> Run:
        load(dict[str, Any], data)  # tells what is wrong
        found = parse_manifest(data)
        if not found.last.outcome.state:
            raise DecodeError("it has no outcome.state")
        return found

    files = sorted(path.glob(name_plan_file("*")))
    plans = {parse_plan_file(file.name): read(read_ranks, file) for file in files}
    files = sorted(path.glob(name_applied_file("*")))
    records = [record for file in files if (record := read(partial(load, Applied), file))]
    file = min(path.glob("manifest*.json"), default=path / "manifest.json")
    run = read(read_manifest, file) or Run()
    # A SLURM job's node that was left out or replaced by a spare one has a plan; others have its ranks.
    last_hosts = run.last.hosts if run.last.slurm else []
    damaged_hosts = {host for host, plan in plans.items() if plan is None}
    planned = {host for host in plans if not last_hosts or host in last_hosts}
    names = sorted((planned | {record.host for record in records}) - damaged_hosts)
    hosts = []
    for name in names:
        # Attempts are counted on each host, again if nodes are started by hand, and ranks may get other
        # numbers without a new attempt: the newest record says which attempt is the last, and of several
        # records of one local rank, the newest counts.
        own = sorted((one for one in records if one.host == name), key=lambda one: (one.time, one.attempt))
        last = own[-1].attempt if own else 0
        newest = {record.local_rank: record for record in own if record.attempt == last}
        found = tuple(newest[rank] for rank in sorted(newest))
        hosts.append(HostRecords(name, plans.get(name) or (), found, last))
    return RunRecords(str(path), tuple(hosts), run.last.outcome.state, tuple(damaged))


def read_ranks(data: bytes) -> tuple[RankPlan, ...]:
    """Read the ranks of a plan's JSON; raises DecodeError."""
    ranks = load(dict[str, Any], data).get("ranks")
    found = convert(tuple[RankPlan, ...], ranks)
    if not found:
        raise DecodeError("ranks is empty")
    return found


PREDICTION = "prediction.json"
MOST_RUNS = 200
"""Newest runs that are looked at."""
MOST_LEARNED = 5
"""Newest runs of a program that count."""
LARGEST_RECORD = 64 << 10
LEAST_RATIO, MOST_RATIO = 0.2, 5.0
"""Beyond these a record is of something else than what was expected."""
IGNORED = (
    r"-{1,2}(epochs?|num[-_]epochs|num[-_]train[-_]epochs|(max[-_]|train[-_])?steps|max[-_]iters|iters|"
    r"total[-_]steps|seed|lr|learning[-_]rate|min[-_]lr([-_]ratio)?|warmup([-_](steps|ratio))?|"
    r"weight[-_]decay|log[-_](every|interval)|logging[-_]steps|save[-_](every|steps|interval)|"
    r"eval[-_](every|steps|interval)|output[-_]dir|out[-_]dir|run[-_]name|name|resume([-_]from)?|"
    r"num[-_]workers|checkpoint[-_](dir|every))"
)
"""Options whose values change nothing of the memory of a step."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a run was expected to take."""

    fingerprint: str
    """Of the program and the settings that matter."""
    expected: int
    """Bytes that torch reserves on a GPU, or that are resident in a rank's process; 0 if nobody said."""
    device: str
    """`gpu` or `cpu`."""
    schema: int = 1


def keep_prediction(run: RunDir, argv: Sequence[str], device: str, ranks: int, expected: int = 0) -> None:
    """Keep in a run directory which program it is, and the bytes that it was expected to take, if known.

    `device` is `gpu` or `cpu`. A file that cannot be written is left out.
    """
    prediction = Prediction(fingerprint_ranks(argv, device, ranks), expected, device)
    with contextlib.suppress(OSError):
        write_private(run.path / PREDICTION, dump(prediction, indent=1))


def fingerprint_ranks(argv: Sequence[str], device: str, ranks: int) -> str:
    """Return what stands for a program on a number of ranks: 16 hexadecimal digits.

    Options that do not matter are left out, and so is the GPU's type: the tensors are the same on another.
    """
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if not (name.startswith("-") and re.fullmatch(IGNORED, name)):
            kept.append(word)
        elif not equals:
            next(words, None)
    text = "\0".join([*kept, "", device, f"ranks={ranks}"])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def read_measured_runs(
    runs_dir: Path, fingerprint: str, device: str, expected: int
) -> tuple[list[str], float, float]:
    """Return the newest runs with this fingerprint that have left records, and what they measured.

    That is the median over what was expected, and half of the range over the median; 0 if there is no run.

    `expected` is what is expected now of the same program: an older estimate does not count.
    """
    import statistics  # this and the next are not for every start

    from launcher.runs.run_status import list_runs, name_run

    names, ratios = list[str](), list[float]()
    for path in islice(list_runs(runs_dir), MOST_RUNS):
        try:
            prediction = load(Prediction, read_file(path / PREDICTION, LARGEST_RECORD, own=True))
        except (OSError, ValueError):
            continue
        if (prediction.fingerprint, prediction.device) != (fingerprint, device):
            continue
        measured = 0
        for file in path.glob(name_memory_file("*")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                record = load(dict[str, Any], read_file(file, LARGEST_RECORD, own=True))
                peaks = [each["reserved"] for each in record["devices"]] if device == "gpu" else []
                measured = max([measured, *(peaks if device == "gpu" else [record["resident"]])])
        if expected > 0 and LEAST_RATIO <= measured / expected <= MOST_RATIO:
            names.append(name_run(path))
            ratios.append(measured / expected)
            if len(names) == MOST_LEARNED:
                break
    if not names:
        return [], 0.0, 0.0
    middle = statistics.median(ratios)
    return names, middle, (max(ratios) - min(ratios)) / 2 / middle
