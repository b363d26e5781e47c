"""What `launch watch` shows of made-up jobs, at several widths and sizes."""

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from launcher.report.key_input import parse_keys
from launcher.report.short_values import (
    describe_rate,
    shorten_age,
    shorten_bytes,
    shorten_number,
    shorten_seconds,
)
from launcher.report.watch_screen import View, WatchScreen
from launcher.watch.rank_details import ProcessSnapshot, RankDetails
from launcher.watch.run_reader import NodeView, RunSnapshot
from launcher.watch.watch_model import RankState
from tests.report.watched_runs import (
    CPU_ONLY,
    GPU,
    JOB,
    RUN,
    make_evidence,
    make_hang,
    make_report,
    make_snapshot,
)

NARROW = """\
train/20260801-120000  running  step 120/400  2.5 steps/s  1 min 52 s left
loss 2.412  last step 0s ago
2 nodes  8 ranks  8 training  job 4711  for 1 h 2 min
rank 5 on n1 is a straggler: its own part of a step is 18% longer than the
  others' (steps 100 to 200): its GPU runs at 1410 of 1980 MHz:
  sw_thermal_slowdown

rank  node    phase       step  last    p50  data  others   gpu   mem  held by
   5  n1      training     120    0s  400ms    2%      3%   97%   76%  thermal
   0  n0      training     120    0s  400ms    2%     22%   97%   76%  -
   1  n0      training     120    0s  400ms    2%     22%   97%   76%  -
   2  n0      training     120    0s  400ms    2%     22%   97%   76%  -
   3  n0      training     120    0s  400ms    2%     22%   97%   76%  -
   4  n1      training     120    0s  400ms    2%     22%   97%   76%  -
   6  n1      training     120    0s  400ms    2%     22%   97%   76%  -
   7  n1      training     120    0s  400ms    2%     22%   97%   76%  -


by slowest  s sort  Enter open  p pause  ? help  q quit
"""
ONE_RANK = """\
train/20260801-120000  running  step 120/400  2.5 steps/s  1 min 52 s left
loss 2.412  last step 0s ago
1 node  1 rank  1 training  job 4711  for 1 h 2 min

rank  phase       step  last    p50    p99    own  data  others  delay   rss
   0  training     120    0s  400ms  520ms  312ms    2%     22%     1%    2G




by slowest  s sort  Enter open  p pause  ? help  q quit
"""
LARGE = """\
train/20260801-120000  running  step 120/400  2.5 steps/s  1 min 52 s left  loss 2.412
last step 0s ago
1000 nodes  8000 ranks  8000 training  job 4711  for 1 h 2 min

node    rank  phase       step  last    p50  data  others  delay   rss   gpu    sm   mem  held by
n009      77  training     120    0s  400ms    2%      3%     1%    2G   97%   81%   76%  thermal
n000       0  training     120    0s  400ms    2%     22%     1%    2G   97%   81%   76%  -
n001       8  training     120    0s  400ms    2%     22%     1%    2G   97%   81%   76%  -
n002      16  training     120    0s  400ms    2%     22%     1%    2G   97%   81%   76%  -
rows 1-4 of 1000  by slowest  s sort  Enter open  p pause  ? help  q quit
"""
HANG = """\
train/20260801-120000  hanging  step 120/400  loss 2.412  last step 0s ago
2 nodes  8 ranks  8 training  job 4711  for 1 h 2 min
hang 1: rank 5 on n1 has not joined all_reduce #1042 of the default group, in
  which 7 ranks wait: it sleeps at data.py:88, read_shard

"""
RANK = """\
train/20260801-120000  running  step 120/400  2.5 steps/s  1 min 52 s left

rank 5 on n1  local rank 1  PID 4005  training  last step 0s ago
step 120  p50 400ms  p99 520ms  own 388ms  data 2%  others 3%  cpu 3.8  delay 1%
rss 2G  gpu 97%  sm 81%  temp 88C  held by thermal  net 37G/s
power 612 of 700 W  clock 1410 of 1980 MHz  memory 61.0 of 80.0 GiB
PCIe x16 of x16
placement: CPUs 8-15, memory preferred 1
rank 5 runs on CPUs 8-15, planned 0-7
stack 3s ago (for a hang): it sleeps in hrtimer_nanosleep (system call
  clock_nanosleep)
  data.py:88, read_shard
  train.py:31, main
last lines (stdout)
line 8
line 9
Esc back  up, down other ranks  t stack  p pause  ? help  q quit
"""


def draw(screen: WatchScreen, width: int, height: int) -> str:
    """The screen as text; every line fits it."""
    out = io.StringIO()
    Console(width=width, file=out, force_terminal=False).print(screen.render(width, height))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert len(lines) <= height and all(cell_len(line) <= width for line in lines)
    return "\n".join(lines) + "\n"


def open_screen(snapshot: RunSnapshot, *keys: str) -> WatchScreen:
    screen = WatchScreen(View(RUN, snapshot))
    for key in keys:
        assert screen.press(key)
    return screen


def test_eight_ranks_on_a_narrow_terminal() -> None:
    assert draw(open_screen(make_snapshot()), 80, 19) == NARROW


def test_one_rank_without_a_gpu_has_no_columns_of_gpus_nodes_and_nics() -> None:
    report = replace(make_report(0, 1, 1, gpu=False), nic_rates=())
    snapshot = replace(make_snapshot(1, 1, slow=None), nodes=(NodeView(report, 1.0),))
    assert draw(open_screen(snapshot), 80, 11) == ONE_RANK


def test_steps_that_are_printed_are_no_steps_of_the_optimizer() -> None:
    """A loop without an optimizer prints its steps, and the hook counts none, or others."""
    for counted, told, column in ((0, "step 120/400  ", False), (25, "step 120/400 printed  ", True)):
        snapshot = make_snapshot(1, 2, slow=None)
        (view,) = snapshot.nodes
        ranks = tuple(replace(rank, step=counted) for rank in view.report.ranks)
        shown = draw(
            open_screen(replace(snapshot, nodes=(replace(view, report=replace(view.report, ranks=ranks)),))),
            100,
            12,
        )
        assert told in shown and (" step " in shown.split("rank", 2)[-1]) == column, shown


def test_a_thousand_nodes_have_a_row_each() -> None:
    snapshot = make_snapshot(1000, 8, slow=77)
    assert snapshot.job
    snapshot = replace(snapshot, job=replace(snapshot.job, stragglers=()))
    assert draw(open_screen(snapshot), 100, 10) == LARGE


def test_a_hang_stands_above_the_table_with_its_rank_first() -> None:
    text = draw(open_screen(make_hang(make_snapshot(slow=None))), 80, 20)
    assert text.startswith(HANG)
    assert [line.split()[0] for line in text.splitlines()[6:9]] == ["5", "0", "1"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 160, 250])
@pytest.mark.parametrize("height", [5, 12, 50])
@pytest.mark.parametrize("keys", [[], ["enter"], ["?"], ["down", "I", "p"]], ids="".join)
def test_every_size_is_fitted(width: int, height: int, keys: list[str]) -> None:
    draw(open_screen(make_hang(make_snapshot()), *keys), width, height)


def test_a_wide_terminal_has_every_column() -> None:
    header = draw(open_screen(make_snapshot()), 160, 20).splitlines()[4]
    titles = (
        "rank node phase step last p50 p99 own data others cpu delay rss gpu sm mem power temp clock held by"
    )
    assert " ".join(header.split()) == f"{titles} net"


def test_the_column_that_rows_are_sorted_by_stays_on_a_narrow_terminal() -> None:
    screen = open_screen(make_snapshot(), "J")
    header = draw(screen, 60, 20).splitlines()
    assert any("powerv" in line for line in header)


def test_a_rank_in_detail() -> None:
    process = make_evidence().ranks[0].process
    details = RankDetails(
        5,
        0,
        "CPUs 8-15, memory preferred 1",
        ("rank 5 runs on CPUs 8-15, planned 0-7",),
        ProcessSnapshot(process, 3.0, "for a hang"),
        tuple(f"line {number}" for number in range(10)),
        "out",
    )
    screen = open_screen(make_snapshot(), "enter")
    screen.update(View(RUN, make_snapshot(), details))
    shown = draw(screen, 80, 17)
    assert shown == RANK


def list_order(*ranks: RankState, keys: tuple[str, ...] = ()) -> list[int]:
    """The order in which ranks of one node are shown."""
    view = NodeView(replace(make_report(0, 1), ranks=ranks), 1.0)
    screen = open_screen(RunSnapshot((view,), JOB), *keys)
    return [row.ranks[0].rank for row in screen.rows]


def make_state(rank: int, **values: object) -> RankState:
    return replace(CPU_ONLY, rank=rank, **values)  # type: ignore[arg-type]  # fields of a RankState


def test_the_slowest_is_who_waits_least_and_hardly_different_ranks_stay_in_order() -> None:
    ranks = [make_state(rank, wait_share=share) for rank, share in enumerate((0.30, 0.29, 0.05, 0.31))]
    assert list_order(*ranks) == [2, 0, 1, 3]
    assert list_order(*ranks, keys=("r",)) == [3, 1, 0, 2]


def test_a_rank_that_failed_comes_before_a_slow_one_and_missing_values_come_last() -> None:
    ranks = [make_state(0), make_state(1, p50=0.9), make_state(2, phase="exited", exit_code=3, p50=None)]
    assert list_order(*ranks) == [2, 1, 0]
    assert list_order(*ranks, keys=("P",)) == [1, 0, 2]
    assert list_order(*ranks, keys=("P", "P")) == [0, 1, 2]


def test_a_node_whose_ranks_have_all_ended_is_not_silent() -> None:
    """Nothing is to be heard of it any more."""
    ended = tuple(make_state(rank, phase="exited", exit_code=0) for rank in (0, 1))
    for ranks, word in ((ended, "exited"), ((ended[0], make_state(1)), "silent")):
        view = NodeView(replace(make_report(0, 1), ranks=ranks), 25.0)
        shown = draw(open_screen(RunSnapshot((view,), JOB)), 120, 12)
        assert word in shown and ("silent" in shown) == (word == "silent")


def test_xids_and_low_clocks_are_columns_once_there_are_some() -> None:
    ranks = [
        make_state(0, gpu=GPU),
        make_state(1, gpu=replace(GPU, xids=(79, 48), event_reasons=("new_one",))),
    ]
    view = NodeView(replace(make_report(0, 1), ranks=tuple(ranks)), 1.0)
    lines = draw(open_screen(RunSnapshot((view,), JOB), "X"), 120, 12).splitlines()
    assert "xid^" in lines[3] and lines[4].split()[0] == "1" and "79,48" in lines[4] and "new one" in lines[4]


def test_the_cursor_stays_on_its_row_when_the_order_changes() -> None:
    screen = open_screen(make_snapshot(), "down", "down")
    assert screen.rows[screen.at].ranks[0].rank == 1
    screen.press("R")
    assert (screen.at, screen.rows[screen.at].ranks[0].rank) == (1, 1)
    screen.update(View(RUN, make_snapshot(1, 1, slow=None)))
    assert screen.at == 0


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("q", ["q"]),
        ("\x1b[A\x1bOB\x1b[1;5C", ["up", "down", "right"]),
        ("\x1b", ["escape"]),
        ("\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["page-up", "page-down", "home", "end"]),
        ("\x1b[15~\x01x", ["x"]),
        ("\r\nR?", ["enter", "enter", "R", "?"]),
        ("\x1b\x1b[B", ["escape", "down"]),
    ],
)
def test_keys(text: str, keys: list[str]) -> None:
    assert parse_keys(text) == keys


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (shorten_seconds, 0.0008, "0.8ms"),
        (shorten_seconds, 0.4, "400ms"),
        (shorten_seconds, 0.9996, "1.00s"),
        (shorten_seconds, 12.34, "12.3s"),
        (shorten_seconds, 200.0, "3m20s"),
        (shorten_age, 0.4, "0s"),
        (shorten_age, 7500.0, "2h05m"),
        (shorten_age, 9e5, "10d"),
        (shorten_bytes, 512.0, "512"),
        (shorten_bytes, 1.5 * 2**30, "1.5G"),
        (shorten_bytes, 999.7, "0.976K"),
        (shorten_bytes, 2.0**62, "4096P"),
        (shorten_number, 0.05, "0.05"),
        (shorten_number, 48.0, "48"),
        (describe_rate, 0.4, "2.5 steps/s"),
        (describe_rate, 12.3, "12.3 s/step"),
    ],
)
def test_short_values(show: object, value: float, text: str) -> None:
    assert callable(show) and show(value) == text
