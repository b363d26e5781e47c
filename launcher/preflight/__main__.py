"""`python -P -m launcher.preflight REQUEST`: a node's program, see `preflight_request.py`."""

import os
import sys
import tempfile

from launcher.preflight.preflight_request import NodeAnswer, read_request, render_answer
from launcher.probe.node_facts_reader import read_node_facts
from launcher.protocol import name_host


def main() -> int:
    """Answer what is asked; returns the exit code."""
    request = read_request(sys.argv[1])
    paths = [(each.path, each.purpose) for each in request.paths]
    paths.append((tempfile.gettempdir(), "temporary directory"))
    facts = read_node_facts(paths=paths, host=name_host(os.environ))
    sys.stdout.write(render_answer(NodeAnswer(facts)))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
