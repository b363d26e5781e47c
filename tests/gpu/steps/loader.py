"""`launch tune dataloader` on a program with pinned memory and a GPU's work."""

import json

from tests.gpu.context import NEEDED, PROGRAMS, Context

PROGRAM = str(PROGRAMS / "pinned_loading.py")
TUNING = 100
"""Seconds for the search."""


def run(context: Context) -> None:
    """Tune, and run with what was found."""
    size = ("tune.max_workers=2", "tune.steps=10") if context.cpu else ("tune.max_workers=6", "tune.steps=24")
    words = ("dataloader", "nproc_per_node=1", *size, "tune.timeout=60", "format=json", "--", PROGRAM, "9999")
    ended = context.verb("tune", "tune", *words, limit=TUNING).demand()
    if context.cpu:
        context.record.leave_out("pinned memory", NEEDED)
    result = json.loads(ended.out)
    trials = {trial["workers"]: trial for trial in result["trials"]}
    for workers, trial in sorted(trials.items()):
        context.record.row(
            "Loading with pinned memory",
            workers=workers,
            steps_per_s=trial["steps_per_second"],
            waiting=trial["wait_share"],
            steps=trial["steps"],
            chosen=workers == result["num_workers"],
        )
    failures = [trial["failure"] for trial in result["trials"] if trial["failure"]]
    context.record.check("every number of workers could be measured", not failures, "; ".join(failures))
    context.record.check("the search came to its end", result["complete"] is True)
    chosen = result["num_workers"]
    faster = chosen and trials[chosen]["steps_per_second"] > trials[0]["steps_per_second"]
    context.record.check("workers make it faster", bool(faster), f"{chosen} of {sorted(trials)}")
    tuned = context.launch("tune", "nproc_per_node=1", "dataloader=tuned", "--", PROGRAM, "20").demand()
    said = [line for line in tuned.err.splitlines() if "launch-rank: rank 0" in line]
    context.record.check("a run takes what was found", f"workers {chosen}," in "".join(said), "".join(said))
