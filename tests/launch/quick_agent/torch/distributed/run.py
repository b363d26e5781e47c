"""torchrun's agent of one node without torch, whose import takes 1.5 s of every real start.

For tests that are about something else, with ranks that end well or by a signal to `launch`: it does not
write torchrun's report of a failure. It starts the ranks with torchrun's variables and in sessions of
their own, ends the others when one fails, starts them again, and passes on the signal that ends it.
The ranks find the real torch: their PYTHONPATH lacks this folder.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = str(Path(__file__).parents[2])


def main() -> None:
    """Run the command line that `render_torchrun` makes."""
    split = sys.argv.index("--")
    options = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:split])
    count, restarts = int(options["nproc-per-node"]), int(options.get("max-restarts") or 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    for attempt in range(restarts + 1):
        if run_ranks(sys.argv[split + 1 :], count, attempt, restarts):
            return
    sys.exit(1)


def stop(number: int, _frame: object) -> None:
    """End by a signal, as torchrun's agent does."""
    print(f"Received {number} death signal, shutting down workers", file=sys.stderr, flush=True)
    raise SystemExit(1)


def run_ranks(command: Sequence[str], count: int, attempt: int, restarts: int) -> bool:
    """Run the ranks to their end; false if one failed."""
    processes: list[subprocess.Popen[bytes]] = []
    port = find_free_port()
    try:
        for rank in range(count):
            environ = make_environ(rank, count, attempt, restarts, port)
            processes.append(subprocess.Popen(command, env=environ, start_new_session=True))
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                return False
            time.sleep(0.02)
        return not any(process.returncode for process in processes)
    finally:
        end_ranks(processes)


def end_ranks(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what is left with SIGTERM, and after 30 s with SIGKILL."""
    deadline = time.monotonic() + 30
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(0.02)


def find_free_port() -> int:
    """A port for rank 0 to listen on, which no socket has now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def make_environ(rank: int, count: int, attempt: int, restarts: int, port: int) -> dict[str, str]:
    """The environment of a rank on the only node."""
    numbers = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), count),
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": restarts,
    }
    words = {"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "none", "ROLE_NAME": "default"}
    environ = {**os.environ, **words, **{name: str(number) for name, number in numbers.items()}}
    paths = environ.pop("PYTHONPATH", "").split(os.pathsep)
    left = os.pathsep.join(path for path in paths if path != FOLDER)
    return environ | ({"PYTHONPATH": left} if left else {})


if __name__ == "__main__":
    main()
