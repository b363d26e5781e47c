"""What each node of a SLURM job leaves of an attempt: `logs/ATTEMPT/node-HOST.json`, whatever happened."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.codec import load
from launcher.files import LARGEST, open_below, read_file, write_whole
from launcher.runs.run_directory import RunDir, closing_descriptor
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

    def to_json(self, host: str) -> dict[str, object]:
        """Return it as a manifest has it."""
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "host": host,
            "attempt": self.attempt,
            "exit_code": self.status,
            "reason": self.reason,
            "last_lines": list(self.lines),
        }


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
    """The last line of torchrun's agent, if it failed and no rank did."""
    failure: RankFailure | None
    restarts: int
    """Of torchrun's worker group, within the attempt."""
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


def refuse_node(host: str, node_rank: int, status: int, said: str, started: float) -> NodeRecord:
    """Return the record of a node on which no rank was started; `said` is why."""
    return NodeRecord(host, node_rank, "failed", status, None, said, None, 0, started, time.time())


def node_path(run_path: Path, attempt: int, host: str) -> Path:
    """The record of one node; `attempt` is the first of the start that it belongs to."""
    return run_path / "logs" / str(attempt) / f"node-{host}.json"


def write_node(run_path: Path, attempt: int, record: NodeRecord) -> None:
    """Write a node's record, whole or not at all; raises OSError."""
    text = json.dumps({"schema": 1, **asdict(record)}, indent=1) + "\n"
    with closing_descriptor(open_below(run_path, "logs", str(attempt))) as at:
        write_whole(at, node_path(run_path, attempt, record.host).name, text.encode())


def read_nodes(run_path: Path, attempt: int) -> list[NodeRecord]:
    """Read the records of an attempt, by node rank; those that cannot be read count as missing."""
    found = []
    for path in run_path.glob(f"logs/{attempt}/node-*.json"):
        try:
            found.append(load(NodeRecord, read_file(path, LARGEST)))
        except (OSError, ValueError):
            continue
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
