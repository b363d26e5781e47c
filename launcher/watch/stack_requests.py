"""Somebody who looks at a run asks for a rank's stack: a file in the run directory, which its node answers.

    watch/stack-request.json   StackRequest, by `launch watch`; the newest one counts
    watch/stack-HOST.json      model.NodeEvidence of that rank, by the watcher of its node

So it works from any machine that has the run directory. A request of another user is not answered.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.codec import load
from launcher.files import LARGEST, open_below, read_file, write_whole
from launcher.runs.run_directory import closing_descriptor
from launcher.watch.node_reports import FOLDER, encode_value, watch_path, write_watch_file
from launcher.watch.watch_model import NodeEvidence

REQUEST = "stack-request.json"
ANSWER = "stack-"
PATIENCE = 30.0
"""Seconds after which a request is no longer answered: who asked has gone on."""


@dataclass(frozen=True, slots=True)
class StackRequest:
    """What is asked for."""

    rank: int
    number: int
    """Greater than that of any request before, which it replaces."""


def write_stack_request(run_path: Path, rank: int) -> int:
    """Ask for a rank's stack; return the request's number. Raises OSError, also for another user's run."""
    request = StackRequest(rank, time.time_ns())
    with closing_descriptor(open_below(run_path, FOLDER)) as at:
        write_whole(at, REQUEST, (json.dumps(asdict(request)) + "\n").encode())
    return request.number


def read_stack_request(run_path: Path, now: float) -> StackRequest | None:
    """Return the request of this user's, if there is one that is not old; `now` is the filesystem's time."""
    path = watch_path(run_path) / REQUEST
    try:
        if abs(now - path.lstat().st_mtime) > PATIENCE:
            return None
        return load(StackRequest, read_file(path, LARGEST, own=True))
    except (OSError, ValueError):
        return None


def write_stack_answer(run_path: Path, evidence: NodeEvidence) -> None:
    """Write what a node has gathered for a request; raises OSError."""
    write_watch_file(run_path, f"{ANSWER}{evidence.host}.json", encode_value(evidence))
