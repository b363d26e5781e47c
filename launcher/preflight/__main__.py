"""`python -P -m launcher.preflight REQUEST`: a node's program, see `preflight_request.py`."""

import os
import sys
import time

from launcher.doctor.node_facts import NodeFacts
from launcher.preflight.preflight_request import NodeAnswer, read_request, render_answer
from launcher.protocol import name_host


def main() -> int:
    """Answer what is asked; returns the exit code."""
    started = time.time()
    request = read_request(sys.argv[1])
    host = name_host(os.environ)
    rank = request.hosts.index(host) if host in request.hosts else 0
    facts = NodeFacts(
        host,
        rank,
        started,
        asked=request.asked,
        cpus=len(os.sched_getaffinity(0)),
        kernel=os.uname().release,
        seconds=time.time() - started,
    )
    sys.stdout.write(render_answer(NodeAnswer(facts)))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
