"""The estimate of the bundled program against torch's memory tracker.

The grid's peaks are recorded (`python -m tests.benchmarks fit` tracks them again); a few are tracked here.
"""

import json
from pathlib import Path

import pytest

from launcher.fit.memory import CUBLAS, estimate_memory
from tests.benchmarks.fit_cases import FEW, GRID, FitCase, make_request
from tests.benchmarks.fit_grid import MOST_ABOVE, find_missing, track_cases

RECORDED = Path(__file__).parents[1] / "data" / "tracked_peaks.json"


def check_estimate(case: FitCase, truth: int) -> None:
    allocated = estimate_memory(make_request(case)).allocated
    # The tracker sees no workspaces of libraries, and the smallest models have no more than those.
    assert allocated.expected - CUBLAS.expected == pytest.approx(truth, rel=0.05), case.label
    assert truth <= (1 + MOST_ABOVE) * allocated.high, case.label
    assert allocated.low <= 1.001 * truth, case.label


def test_estimates_of_the_grid_are_what_torch_tracked() -> None:
    peaks = json.loads(RECORDED.read_text())["peaks"]
    assert set(peaks) == {case.label for case in (*FEW, *GRID)}
    for case in (*FEW, *GRID):
        check_estimate(case, peaks[case.label])


@pytest.mark.slow
def test_the_recorded_peaks_are_what_torch_tracks(tmp_path: Path) -> None:
    if missing := find_missing():
        pytest.skip(f"there is no {missing}")
    peaks = json.loads(RECORDED.read_text())["peaks"]
    for case, truth in zip(FEW, track_cases(FEW, tmp_path), strict=True):
        assert truth == pytest.approx(peaks[case.label], rel=0.01), case.label
        check_estimate(case, truth)
