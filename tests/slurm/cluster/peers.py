"""A program without torch whose ranks hang together by connections, as those of a real one do.

`python peers.py [again]`: it prints a step every tenth of a second until there is a file `stop` in the
working directory, and then ends with 0. A rank that loses its connection to the others fails as gloo does.
With `again`, SIGUSR2 makes a rank exit with 75 in a job's first attempt.
"""

import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
place = Path(f"hub-{os.environ.get('SLURM_JOB_ID')}-{attempt}")
asked: list[int] = []
if "again" in sys.argv and attempt == "0":
    signal.signal(signal.SIGUSR2, lambda *_: asked.append(75))


def meet() -> list[socket.socket]:
    """Connect every rank with rank 0."""
    if rank:
        while not place.exists():
            time.sleep(0.02)
        return [socket.create_connection(("127.0.0.1", int(place.read_text())))]
    with socket.create_server(("127.0.0.1", 0)) as server:
        draft = place.with_suffix(".new")
        draft.write_text(str(server.getsockname()[1]))
        draft.rename(place)
        return [server.accept()[0] for _ in range(world - 1)]


def leave(code: int) -> None:
    """End without a word."""
    print("rank", rank, "leaves", flush=True)
    os._exit(code)


peers = meet()
for step in range(1, 100_000):
    print(f"step {step}/100000 loss 1.0", flush=True)
    ready, _, _ = select.select(peers, [], [], 0.1)
    if asked:
        leave(75)
    if Path("stop").exists():
        leave(0)
    if ready:
        time.sleep(0.3)  # the file may just come into sight
        leave(0) if Path("stop").exists() else sys.exit("gloo/transport: Connection closed by peer")
