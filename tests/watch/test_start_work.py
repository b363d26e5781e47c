"""Activity is progress before a rank's first step; afterwards it is not, and what is not seen is activity."""

import time
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
    ("step", "sample", "idle", "expected", "quiet"),
    [
        (0, RankSample(cpu=0.9), 30.0, 4.0, 4.0),  # imports
        (0, RankSample(cpu=0.06, run_delay=0.9), 30.0, 4.0, 4.0),  # the same on a machine that is busy
        (0, RankSample(is_active=False), 30.0, 30.0, 30.0),  # sleeps
        (0, RankSample(), 30.0, 4.0, 4.0),  # not known
        (3, RankSample(cpu=0.9), 30.0, 30.0, 4.0),  # an endless loop in a step
        (3, RankSample(is_active=False), 30.0, 30.0, 30.0),
        (0, RankSample(cpu=0.9), MOST_START + 100, MOST_START + 100, 4.0),  # an endless loop before all steps
    ],
)
def test_activity_counts_as_progress_before_the_first_step_alone(
    step: int, sample: RankSample, idle: float, expected: float, quiet: float
) -> None:
    began = time.time()
    beat = Heartbeat(0, 0, PID, "starting", began, step, 0.0, began - idle + 4, 0, 0.0)
    book = RankBook(Path("/nowhere"), lambda _: beat)
    book.add_ranks([RankEntry(0, 0, 0, PID)])
    book.look(START)
    book.note_activity({PID: sample}, {})
    known = book.ranks[0]
    book.now, known.read_at = START + 4, began + 4
    assert book.measure_idle(known) == pytest.approx(expected, abs=0.5)
    assert book.measure_quiet(known) == pytest.approx(quiet, abs=0.5)


def test_a_rank_that_is_not_watched_has_no_idle_time() -> None:
    book = RankBook(Path("/nowhere"), lambda _: None)
    book.add_ranks([RankEntry(0, 0, 0, PID)])
    book.look(START)
    book.note_activity({PID: RankSample(cpu=1.0)}, {})
    assert book.measure_idle(book.ranks[0]) is None


def test_work_in_part_of_an_interval_is_taken_to_have_been_its_beginning() -> None:
    beat = Heartbeat(0, 0, PID, "starting", 0.0, 0, 0.0, time.time() - 100, 0, 0.0)
    book = RankBook(Path("/nowhere"), lambda _: beat)
    book.add_ranks([RankEntry(0, 0, 0, PID)])
    book.look(START)
    book.note_activity({PID: RankSample(cpu=1.0)}, {})
    book.look(START + 5)
    book.note_activity({PID: RankSample(cpu=0.4, run_delay=0.2)}, {})
    assert book.measure_idle(book.ranks[0]) == pytest.approx(2.0)
