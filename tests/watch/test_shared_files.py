"""The run directory's thread: a filesystem that hangs stops it alone, and what it has to say is not lost."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.watch import job_view
from launcher.watch.job_view import Exchange, SharedFiles
from launcher.watch.model import JobState, NodeReport, RankEntry
from launcher.watch.ranks import RankBook
from launcher.watch.run_files import read_job_state, read_reports, write_job_state
from tests.seam import wait_for

REPORT = NodeReport("n0", 0, 2, 0, 100.0, 1, 5.0, ())
STATE = JobState(100.0, "n0", 0, "running", 1, 1.0, 1.0, 2)
OTHERS = JobState(200.0, "n1", 0, "hanging", 1, 30.0, 1.0, 2)


def test_a_filesystem_that_hangs_is_noticed_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_view, "STUCK", 0.1)
    files, answer = SharedFiles(tmp_path), threading.Event()

    def read_dead_disk() -> None:
        answer.wait(60)

    files.add_task(read_dead_disk)
    files.submit(Exchange(REPORT, STATE, reads_all=True))
    wait_for(lambda: files.is_stuck(time.monotonic()), "the stuck call")
    assert files.view is None and not files.wait_idle(0.05)
    answer.set()
    assert files.wait_idle(10) and not files.is_stuck(time.monotonic())
    assert files.view and [one.value for one in files.view.reports] == [REPORT]


def test_what_cannot_be_written_is_told_and_tried_again(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path / "later")
    files.submit(Exchange(REPORT, None, reads_all=False))
    assert files.wait_idle(10) and "later" in files.trouble
    (tmp_path / "later").mkdir()
    files.submit(Exchange(REPORT, None, reads_all=False))
    assert files.wait_idle(10) and files.trouble == ""
    assert len(read_reports(tmp_path / "later")) == 1


def test_no_exception_ends_the_thread(tmp_path: Path) -> None:
    """Such as a thread that cannot be started: the node would count as stuck for ever."""

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    files = SharedFiles(tmp_path)
    files.add_task(fail)
    assert files.wait_idle(10) and files.trouble == "RuntimeError: can't start new thread"
    files.submit(Exchange(REPORT, None, reads_all=False))
    assert files.wait_idle(10) and files.view and files.trouble == ""


def test_ranks_are_added_while_another_thread_goes_through_them(tmp_path: Path) -> None:
    book = RankBook(tmp_path, lambda _: None)
    book.add_ranks([RankEntry(0, 0, 0, 100), RankEntry(1, 1, 0, 101)])
    others = iter(book.ranks.items())
    assert next(others)[0] == 0
    book.add_ranks([RankEntry(2, 2, 0, 102)])
    assert [rank for rank, _ in others] == [1] and list(book.ranks) == [0, 1, 2]


def test_what_another_node_has_told_is_read_before_it_is_replaced(tmp_path: Path) -> None:
    write_job_state(tmp_path, OTHERS)
    files = SharedFiles(tmp_path)
    files.submit(Exchange(REPORT, STATE, reads_all=False))
    assert files.wait_idle(10) and files.view and files.view.job and files.view.job.value == OTHERS
    assert read_job_state(tmp_path) == OTHERS
    files.submit(Exchange(REPORT, STATE, reads_all=False))
    assert files.wait_idle(10) and read_job_state(tmp_path) == STATE


def test_two_nodes_of_one_host_name_notice_each_other(tmp_path: Path) -> None:
    both = [SharedFiles(tmp_path), SharedFiles(tmp_path)]
    for number in (1, 2):
        for node_rank, files in enumerate(both):
            report = replace(REPORT, node_rank=node_rank, number=number)
            files.submit(Exchange(report, None, reads_all=False))
            assert files.wait_idle(10)
            if number == 1:
                assert files.twin is None  # what was there before may be of a job before
    assert [files.twin for files in both] == [1, 0]
