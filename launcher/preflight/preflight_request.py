"""What the nodes of a job are to check, and the lines in which they answer.

`python -P -m launcher.preflight REQUEST` is a node's program: REQUEST is `PreflightRequest` as JSON, on its
command line, since a node whose filesystems are stuck can read no file. It prints an answer on stdout as soon
as it has the facts, and the last one when its work is done. Whoever started it collects the answers, and
writes them below the run directory (see `answer_files.py`): the node's own program writes nothing.
"""

import json
from dataclasses import asdict, dataclass

from launcher.codec import DecodeError, convert, load, parse_json
from launcher.doctor.node_facts import NodeFacts

ANSWER = "launch-preflight: "
"""How an answer's line begins; other lines are somebody else's."""
LONGEST_ANSWER = 1 << 20
"""Characters of an answer: a node of 16 GPUs with 16 XIDs each has less than 64 KiB."""
SECONDS = {"light": 10.0, "deep": 60.0}
"""Seconds that a node's checks may take, from the start of its program, by their kind."""


@dataclass(frozen=True, slots=True)
class NeededPath:
    """A path that the job needs on every node."""

    path: str
    purpose: str
    """See `PathFacts.purpose`."""


@dataclass(frozen=True, slots=True)
class PreflightRequest:
    """What every node of a job is asked, the same for all."""

    kind: str
    """`light` or `deep`."""
    hosts: tuple[str, ...]
    """The nodes, by their ranks; names as `protocol.name_host` has them."""
    seconds: float
    """A node's program ends within them, and says in `unchecked` what it had no time for."""
    asked: float
    """Of the asking process's clock: seconds since the epoch."""
    paths: tuple[NeededPath, ...] = ()
    min_free_gib: float = 1.0
    tolerance: float = 0.93
    endpoint: str = ""
    """HOST:PORT of the first node; nodes meet in pairs on each other's ports from that one on, 48 of them.
    Empty if they are not to."""
    python: str = ""
    """The ranks' interpreter, which has torch; empty for the one that asks."""

    def to_json(self) -> str:
        """Return the program's argument."""
        return json.dumps(asdict(self), separators=(",", ":"))


def read_request(text: str) -> PreflightRequest:
    """Read the program's argument; raises DecodeError."""
    return load(PreflightRequest, text)


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """What a node has found so far."""

    facts: NodeFacts
    is_final: bool = True
    """False: its work is still to come."""


def render_answer(answer: NodeAnswer) -> str:
    """Return an answer's line, with its end."""
    return f"{ANSWER}{json.dumps(asdict(answer), separators=(',', ':'))}\n"


def parse_answer(line: str) -> NodeAnswer | None:
    """Read a line; None if it is no answer."""
    if not line.startswith(ANSWER) or len(line) > LONGEST_ANSWER:
        return None
    try:
        return convert(NodeAnswer, parse_json(line.removeprefix(ANSWER)))
    except DecodeError:
        return None
