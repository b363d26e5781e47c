"""The estimate of the bundled program against torch's memory tracker, for a few small settings.

The whole grid is `python -m tests.benchmarks fit`.
"""

from pathlib import Path

import pytest

from launcher.fit.device_overhead import CUBLAS
from launcher.fit.memory_estimate import estimate_memory
from tests.benchmarks.fit_cases import FEW, make_request
from tests.benchmarks.fit_grid import MOST_ABOVE, find_missing, track_cases


def test_estimates_are_what_torch_tracks(tmp_path: Path) -> None:
    if missing := find_missing():
        pytest.skip(f"there is no {missing}")
    for case, truth in zip(FEW, track_cases(FEW, tmp_path), strict=True):
        allocated = estimate_memory(make_request(case)).allocated
        # The tracker sees no workspaces of libraries, and models as small as these no more than those.
        assert allocated.expected - CUBLAS.expected == pytest.approx(truth, rel=0.05), case.label
        assert truth <= (1 + MOST_ABOVE) * allocated.high, case.label
