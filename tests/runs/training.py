"""A training without torch that ends as its first argument says; it saves a checkpoint at step 5."""

import os
import signal
import sys
import time
from pathlib import Path

import launcher


def main(how: str) -> None:
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    run_dir = Path(os.environ["LAUNCH_RUN_DIR"])
    saved = run_dir / "checkpoints/last"
    is_again = attempt > 0 or os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    first = int(saved.read_text()) + 1 if is_again and saved.exists() else 1
    print(f"begins at step {first} of 10", flush=True)
    for step in range(first, 11):
        print(f"step {step}/10 loss {4 - step / 4}", flush=True)
        launcher.step()
        time.sleep(0.05)
        if step == 5:
            if rank == 0:
                saved.parent.mkdir(exist_ok=True)
                draft = saved.with_name("draft")
                draft.write_text("5")
                draft.replace(saved)
            _await(saved)
            if attempt == 0 and first == 1:
                _interrupt(how, rank, run_dir)
    _await_reports(run_dir)
    if how == "fail" and rank == 1:
        raise RuntimeError("no more data")
    if how == "wait":
        time.sleep(600)


def _interrupt(how: str, rank: int, run_dir: Path) -> None:
    if how == "hang":
        time.sleep(600)
    elif how == "fail once" and rank == 1:
        sys.exit(3)
    elif how == "kill" and rank == 1:
        _await_reports(run_dir)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "lose":
        time.sleep(600 if "SLURM_JOB_ID" in os.environ else 0)


def _await_reports(run_dir: Path) -> None:
    """Wait for all that is written while ranks run, so that a short run leaves what a long one does."""
    for pattern in ("watch/job.json", "watch/node-*.json", "watch/metrics-*.jsonl"):
        while not list(run_dir.glob(pattern)):
            time.sleep(0.05)


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
