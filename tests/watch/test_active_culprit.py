"""A rank that others wait for, and that makes progress of its own, is no hang."""

import pytest

from launcher.watch.hang_judge import find_active
from launcher.watch.progress_limit import RankProgress
from launcher.watch.watch_model import Verdict

LIMIT = 20.0


def make_progress(*idle: float | None) -> list[RankProgress]:
    return [RankProgress(rank, "training", 9, seconds) for rank, seconds in enumerate(idle)]


@pytest.mark.parametrize(
    ("idle", "blamed", "expected"),
    [
        ((0.4, 21.0), (0,), 0.4),  # batch after batch, while the other waits in a barrier
        ((21.0, 0.4), (0,), None),
        ((12.0, 21.0), (0,), None),  # it hung a few seconds after the other
        ((21.0, 3.0, 21.0), (0, 1), 3.0),
        ((None, 21.0), (0,), None),  # it has ended, or is not watched
        ((21.0,), (), None),
    ],
)
def test_a_rank_within_half_the_limit_is_active(
    idle: tuple[float | None, ...], blamed: tuple[int, ...], expected: float | None
) -> None:
    verdict = Verdict("absent", "", blamed)
    assert find_active(verdict, make_progress(*idle), LIMIT) == expected


def test_nobody_is_active_where_there_is_no_hang() -> None:
    assert find_active(Verdict("busy", "", (0,)), make_progress(0.1, 30.0), LIMIT) is None
