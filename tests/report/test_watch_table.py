"""The table of `launch watch`: its rows, their order, its columns, and how it fits terminals of all sizes."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.make_runs import write_log
from tests.cli.watched_run import (
    GPU,
    HANGING,
    RANK,
    SENTENCE,
    make_report,
    make_watched_run,
    write_watch,
)
from tests.seam import Launch


def make_job(here: Path, *ranks: dict[str, Any], age: float = 0.0, **more: Any) -> None:
    """A job of one node with these ranks, without GPUs unless they say so."""
    path = make_watched_run(here / "runs", nodes=0)
    found = [{**RANK, "rank": n, "local_rank": n, "pid": 100 + n, **rank} for n, rank in enumerate(ranks)]
    write_watch(path, make_report(0, 1, ranks=found, **more))
    os.utime(path / "watch/node-n0.json", (time.time() - age,) * 2)
    write_watch(path, {"time": 1e9, "host": "n0", "attempt": 0, "state": "running", "nodes": 1}, "job.json")


def read_table(launch: Launch) -> tuple[list[str], list[list[str]]]:
    """The titles of the table that is printed, and its rows."""
    result = launch("watch")
    assert result.code == 0, result
    rows = [line.split() for line in result.out.splitlines()]
    (head,) = (number for number, row in enumerate(rows) if row[:1] == ["rank"] and "phase" in row)
    return rows[head], [row for row in rows[head + 1 :] if row]


@pytest.mark.parametrize(
    ("ranks", "order"),
    [
        ([{"wait_share": share} for share in (0.30, 0.29, 0.05, 0.31)], [2, 0, 1, 3]),
        ([{}, {"p50": 0.9}, {"phase": "exited", "exit_code": 3, "p50": None}], [2, 1, 0]),
    ],
    ids=["who waits least is the slowest, and hardly different ranks stay in order", "failed, slow"],
)
def test_the_order_of_rows(launch: Launch, here: Path, ranks: list[dict[str, Any]], order: list[int]) -> None:
    make_job(here, *ranks)
    assert [int(row[0]) for row in read_table(launch)[1]] == order


def test_one_rank_without_a_gpu_has_no_columns_of_gpus_nodes_and_nics(launch: Launch, here: Path) -> None:
    make_job(here, {"wait_share": 0.22}, nic_rates=[])
    titles, (row,) = read_table(launch)
    assert titles == [
        "rank",
        "phase",
        "step",
        "last",
        "p50",
        "p99",
        "own",
        "data",
        "others",
        "cpu",
        "delay",
        "rss",
    ]
    assert " ".join(row) == "0 training 120 0s 400ms 520ms 312ms 2% 22% 3.8 1% 2G"


@pytest.mark.parametrize(("step", "has_column"), [(0, False), (25, True)])
def test_steps_that_are_printed_are_no_steps_of_the_optimizer(
    launch: Launch, here: Path, step: int, has_column: bool
) -> None:
    make_job(here, {"step": step}, {"step": step})
    (path,) = here.glob("runs/*/*")
    write_log(path, 0, "step 120/400 loss 2.5\n")
    assert ("step" in read_table(launch)[0]) is has_column
    assert ("printed" in launch("watch").out.splitlines()[0]) is has_column


def test_a_node_whose_ranks_have_all_ended_is_not_silent(launch: Launch, here: Path) -> None:
    """Nothing is to be heard of it any more."""
    ended = {"phase": "exited", "exit_code": 0}
    make_job(here, ended, {}, age=100)
    assert "silent" in launch("watch").out
    (path,) = here.glob("runs/*/*")
    ranks = [{**RANK, "rank": n, "local_rank": n, "pid": 100 + n, **ended} for n in (0, 1)]
    write_watch(path, make_report(0, 1, ranks=ranks))
    os.utime(path / "watch/node-n0.json", (time.time() - 100,) * 2)
    shown = launch("watch").out
    assert "exited" in shown and "silent" not in shown


def test_xids_and_low_clocks_are_columns_once_there_are_some(launch: Launch, here: Path) -> None:
    bad = {**GPU, "index": 1, "xids": [79, 48], "event_reasons": ["new_one"]}
    make_job(here, {"gpu": {**GPU, "index": 0}}, {"gpu": bad})
    titles, rows = read_table(launch)
    assert "xid" in titles
    (row,) = (row for row in rows if row[0] == "1")
    assert "79,48" in row and "new one" in " ".join(row)


def test_a_thousand_nodes_have_a_row_each_and_a_hang_stands_above(launch: Launch, here: Path) -> None:
    path = make_watched_run(here / "runs", nodes=1000, ranks=2)
    write_watch(path, HANGING, "job.json")
    shown = launch("watch").out
    assert " ".join(shown.split()).count("training") >= 1000 and "2000 ranks" in shown
    table = shown.index("phase")
    assert " ".join(shown[:table].split()).find(SENTENCE) > 0
