"""Threads that torch has in a rank which `launch-rank` has placed on one CPU."""

import sys

import pytest

from tests.rank.start_shim import ALLOWED, run_shim, tell

PROGRAM = """
import json, os
{}
import torch
names = sorted(name for name in os.environ if name.endswith("_NUM_THREADS"))
print(json.dumps({"mine": torch.get_num_threads(), "mkl": torch.backends.mkl.is_available(), "names": names}))
"""


@pytest.mark.skipif(len(ALLOWED) < 2, reason="needs a second CPU, so that the plan's number is another")
@pytest.mark.parametrize(
    ("environ", "line", "threads", "with_mkl"),
    [
        ({}, "", 1, 1),
        pytest.param({"OMP_NUM_THREADS": "2"}, "", 2, 2, marks=pytest.mark.slow),
        ({}, "os.environ['OMP_NUM_THREADS'] = '2'", 2, 2),
        pytest.param({"MKL_NUM_THREADS": "2"}, "", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_torch_has_the_number_that_was_set_last_before_its_import(
    environ: dict[str, str], line: str, threads: int, with_mkl: int
) -> None:
    shares = {"LOCAL_WORLD_SIZE": str(len(ALLOWED)), "LAUNCH_GC": "default"}
    program = PROGRAM.replace("{}", line)
    told = tell(run_shim(sys.executable, "-c", program, preexec=None, **{**shares, **environ}))
    assert told["mine"] == (with_mkl if told["mkl"] else threads)
    assert told["names"] == sorted({"OMP_NUM_THREADS", *environ})
