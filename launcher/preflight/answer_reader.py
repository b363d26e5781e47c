"""Collects the nodes' answers from the program that carries them: srun, or a node's own on this machine."""

import os
import selectors
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field, replace

from launcher.doctor.node_facts import NodeFacts
from launcher.preflight.preflight_request import ANSWER, LONGEST_ANSWER, PreflightRequest, parse_answer

START_MARGIN = 20.0
"""Seconds beside its checks' that a node's program has to start: srun, and Python from a slow filesystem."""
END_GRACE = 2.0
"""Seconds that the program has to end by itself once all answers are there, and again after SIGTERM."""
KEPT_LINES = 40
"""Lines of stderr that are kept."""
CHUNK = 1 << 16


@dataclass(slots=True)
class AnswerReader:
    """Reads a running program's stdout and stderr, which are pipes."""

    process: "subprocess.Popen[bytes]"
    request: PreflightRequest
    wakeup: int | None = None
    """Descriptor that is readable if a signal has come."""
    facts: dict[str, NodeFacts] = field(default_factory=dict)
    """By host, the newest answer."""
    final: set[str] = field(default_factory=set)
    """Hosts whose checks are done."""
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    """Last lines on stderr."""
    ended: bool = False
    """The program has closed its output."""
    rests: dict[int, bytes] = field(default_factory=dict)
    """Beginnings of lines, by their descriptors."""

    def collect(self, deadline: float) -> bool:
        """Read until all nodes have answered, the program ends, or the deadline (monotonic seconds) is over.

        Returns true, at once, if a signal came: call it again to go on.
        """
        with selectors.DefaultSelector() as selector:
            open_pipes = {pipe.fileno() for pipe in (self.process.stdout, self.process.stderr) if pipe}
            for descriptor in open_pipes | ({self.wakeup} if self.wakeup is not None else set()):
                selector.register(descriptor, selectors.EVENT_READ)
            while open_pipes and not self.is_complete:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                for key, _ in selector.select(left):
                    if key.fd == self.wakeup:
                        return True
                    if not self.read_some(key.fd):
                        selector.unregister(key.fd)
                        open_pipes.discard(key.fd)
        self.ended = not open_pipes
        return False

    @property
    def is_complete(self) -> bool:
        """Whether all nodes have answered."""
        return self.final >= {*self.request.hosts}

    def read_some(self, descriptor: int) -> bool:
        """Take what a pipe has; false at its end."""
        data = os.read(descriptor, CHUNK)
        *lines, rest = (self.rests.get(descriptor, b"") + data).split(b"\n")
        self.rests[descriptor] = rest[: LONGEST_ANSWER + len(ANSWER)]
        if not data and rest:
            lines.append(rest)
        for raw in lines:
            line = raw.decode(errors="replace")
            if self.process.stdout and descriptor == self.process.stdout.fileno():
                self.take_answer(line)
            elif line.strip():
                self.errors.append(line.strip())
        return bool(data)

    def take_answer(self, line: str) -> None:
        """Take an answer of one of the nodes; its first one says when its facts were here."""
        answer = parse_answer(line)
        if answer is None or answer.facts.host not in self.request.hosts:
            return
        host = answer.facts.host
        before = self.facts.get(host)
        answered = before.answered if before else time.time()
        rank = self.request.hosts.index(host)
        self.facts[host] = replace(answer.facts, node_rank=rank, asked=self.request.asked, answered=answered)
        if answer.is_final:
            self.final.add(host)

    def end(self) -> None:
        """End the program: it has little time left to end by itself if it is done, and none if it is not.

        One that the kernel keeps in a driver or a filesystem is left behind.
        """
        for act, seconds in (
            (None, END_GRACE if self.is_complete or self.ended else 0.0),
            (self.process.terminate, END_GRACE),
            (self.process.kill, END_GRACE),
        ):
            if act:
                act()
            try:
                self.process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                continue
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()
