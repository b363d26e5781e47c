"""`python -P -m launcher.preflight REQUEST`: a node's program, see `preflight_request.py`."""

import os
import sys

from launcher.codec import DecodeError
from launcher.preflight.node_program import run_node_checks
from launcher.preflight.preflight_request import read_request


def main() -> int:
    """Answer what is asked; returns the exit code."""
    try:
        request = read_request(sys.argv[1])
    except (IndexError, DecodeError) as error:
        sys.stderr.write(f"launch: no request of preflight: {error}\n")
        return 2
    try:
        run_node_checks(request, os.environ, sys.stdout)
    except BrokenPipeError:
        return 1  # nobody waits for the answer any more
    return 0


if __name__ == "__main__":
    sys.exit(main())
