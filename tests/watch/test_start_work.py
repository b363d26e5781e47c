"""Before its first step, a rank that uses CPU makes progress; one that only waits does not."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.watch.process_samples import RankSample
from launcher.watch.rank_book import MOST_START, RankBook
from launcher.watch.watch_model import Heartbeat
from launcher.watch.watcher_settings import RankEntry

PID = 4711
START = 1000.0
"""Monotonic."""


@pytest.mark.parametrize(
    ("step", "cpu", "run_delay", "idle", "expected"),
    [
        (0, 0.9, 0.0, 30.0, 4.0),  # imports
        (0, 0.06, 0.9, 30.0, 4.0),  # the same on a machine that is busy
        (0, 0.01, 0.0, 30.0, 30.0),  # sleeps
        (0, None, None, 30.0, 30.0),  # not known
        (3, 0.9, 0.0, 30.0, 30.0),  # an endless loop in a step
        (0, 0.9, 0.0, MOST_START + 100, MOST_START + 100),  # an endless loop before all steps
    ],
)
def test_cpu_counts_before_the_first_step_alone(
    step: int, cpu: float | None, run_delay: float | None, idle: float, expected: float
) -> None:
    began = time.time()
    beat = Heartbeat(0, 0, PID, "starting", began, step, 0.0, began - idle + 4, 0, 0.0)
    book = RankBook(Path("/nowhere"), lambda _: beat)
    book.add_ranks([RankEntry(0, 0, 0, PID)])
    book.look(START)
    book.note_work({PID: RankSample(cpu=cpu, run_delay=run_delay)})
    known = book.ranks[0]
    book.now, known.read_at = START + 4, began + 4
    assert book.measure_idle(known) == pytest.approx(expected, abs=0.5)


def test_a_rank_that_is_not_watched_has_no_idle_time() -> None:
    book = RankBook(Path("/nowhere"), lambda _: None)
    book.add_ranks([RankEntry(0, 0, 0, PID)])
    book.look(START)
    book.note_work({PID: replace(RankSample(), cpu=1.0)})
    assert book.measure_idle(book.ranks[0]) is None


def test_work_in_part_of_an_interval_is_taken_to_have_been_its_beginning() -> None:
    beat = Heartbeat(0, 0, PID, "starting", 0.0, 0, 0.0, time.time() - 100, 0, 0.0)
    book = RankBook(Path("/nowhere"), lambda _: beat)
    book.add_ranks([RankEntry(0, 0, 0, PID)])
    book.look(START)
    book.note_work({PID: RankSample(cpu=1.0)})
    book.look(START + 5)
    book.note_work({PID: RankSample(cpu=0.4, run_delay=0.2)})
    assert book.measure_idle(book.ranks[0]) == pytest.approx(2.0)
