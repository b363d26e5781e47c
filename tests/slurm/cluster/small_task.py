"""One node's part of a job, without torch: what it does in which attempt stands in RUN_DIR/acts.json.

An act is {"steps": last step that is printed, "do": "end", "crash", "wait" or "die", "code": exit code on
SIGUSR2, "ends": whether SIGTERM is answered by a normal end with 0, "saves": whether a checkpoint is written
beside the run directory}.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from launcher.runs.node_records import NodeRecord, RankFailure, write_node

run, attempt, started = Path(os.environ["RUN_DIR"]), int(os.environ["ATTEMPT"]), time.time()
host, number = os.environ["SLURMD_NODENAME"], int(os.environ["SLURM_PROCID"])
acts = json.loads((run / "acts.json").read_text())
act = acts[min(attempt, len(acts) - 1)]


def leave(state: str, code: int, failure: RankFailure | None = None) -> None:
    """Write the record, and end."""
    stop = "SIGTERM" if state == "stopped" else None
    write_node(
        run, attempt, NodeRecord(host, number, state, code, stop, "", failure, 0, started, time.time())
    )
    sys.exit(code)


def leave_by(code: int) -> None:
    """End with a code by one's own will."""
    found = RankFailure(number, 0, time.time(), code, f"exited with code {code}", "its.log", ())
    leave("failed" if code else "succeeded", code, found if code else None)


signal.signal(signal.SIGTERM, lambda *_: leave_by(0) if act.get("ends") else leave("stopped", 143))
signal.signal(signal.SIGUSR2, lambda *_: leave_by(act.get("code", 0)))
log = run / "logs" / str(attempt) / "rank-0.out"
if number == 0:
    if act.get("saves"):
        (run.parent / "elsewhere" / f"step-{attempt}").mkdir(parents=True)
    log.write_text("".join(f"step {step}/10 loss 1.0\n" for step in range(1, act["steps"] + 1)))
if act["do"] == "crash" and number == act.get("rank", 1):
    patience = time.monotonic() + 20
    while not log.exists() and time.monotonic() < patience:  # else SLURM may end rank 0 before it has written
        time.sleep(0.01)
    lines = ("boom",)
    leave("failed", 7, RankFailure(number, 0, time.time(), 7, "exited with code 7", "its.log", lines))
if act["do"] == "die" and number == act.get("rank", 1):
    os.kill(os.getpid(), signal.SIGKILL)
if act["do"] == "end":
    leave("succeeded", 0)
(run / f"waits-{attempt}-{host}").touch()
while True:
    time.sleep(1)
