"""Which pauses are hangs, which are worth a notice, and which are nothing to tell of: by a table."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.watch.verdict import Pause, decide
from launcher.watch.watch_model import Frame, ProcessState, RankEvidence, Stack
from tests.watch.made_evidence import (
    COMPUTING,
    IN_COLLECTIVE,
    LIBRARY,
    READ_SHARD,
    SLEEPING,
    TRAIN,
    make_group,
    make_nodes,
    make_process,
    make_rank,
    make_reports,
)

TABLE = tomllib.loads(Path(__file__).with_name("decisions.toml").read_text())
PAUSES = [TABLE["defaults"] | row for row in TABLE["pause"]]
WAITING, BEHIND = make_group(1042, 1041), make_group(1041, 1041)
LOCKED = tuple(Stack(str(number), (TRAIN,), is_current=not number, awaits_lock=True) for number in (0, 1))
OTHER = Stack("2", (Frame(f"{LIBRARY}/threading.py", 331, "wait"), TRAIN))
DOING: dict[str, RankEvidence] = {
    "sleeps": make_rank(1, SLEEPING, BEHIND),
    "computes": make_rank(1, COMPUTING, BEHIND),
    "unknown": make_rank(1, SLEEPING, BEHIND, is_measured=False),
    "debugs": make_rank(1, replace(SLEEPING, tracer=77), BEHIND),
    "stopped": make_rank(1, ProcessState(100, "T"), answered=False),
    "ended": make_rank(1, ProcessState(100, "X"), answered=False, exit_code=0),
    "mismatch": make_rank(1, IN_COLLECTIVE, make_group(1042, 1041, operation="barrier", sizes="")),
    "deadlock": make_rank(1, replace(make_process(TRAIN), stacks=LOCKED), BEHIND),
    "lock": make_rank(1, replace(make_process(READ_SHARD), stacks=(*LOCKED, OTHER)), BEHIND),
}


@pytest.mark.parametrize("row", PAUSES, ids=lambda row: row["name"])
def test_what_follows_from_a_pause(row: dict[str, Any]) -> None:
    waiting = make_rank(0, IN_COLLECTIVE, WAITING, host="n0", step=row["step"], idle=row["idle"])
    ranks = [waiting] if row["others"] else []
    if row["doing"] != "silent":
        culprit = DOING[row["doing"]]
        ranks.append(replace(culprit, phase=row["phase"], step=row["step"], idle=row["own_idle"]))
    reports = make_reports({"n0": (0,), "n1": (1,)} if row["others"] else {"n1": (1,)})
    reports = [
        replace(one, ranks=tuple(replace(rank, step=row["step"]) for rank in one.ranks)) for one in reports
    ]
    quiet = {rank.rank: row["quiet"] for rank in ranks}
    pause = Pause(20.0, row["idle"], quiet, row["longest"], row["setting"])
    decision = decide(make_nodes(ranks), reports, pause)
    assert decision.word == row["word"], decision
    assert decision.verdict.sentence.endswith(row.get("sentence", ""))
    assert (decision.seconds > 0) is (decision.word != "hang" and row["doing"] != "debugs")
