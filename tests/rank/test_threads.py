"""Threads that torch has in a rank which `launch-rank` has placed on one CPU."""

import sys

import pytest

from tests.rank.start_shim import ALLOWED, run_shim, tell

PROGRAM = """
import json, os, torch
names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
told = {"mine": torch.get_num_threads(), "set": [os.environ.get(name) for name in names]}
print(json.dumps({**told, "mkl": torch.backends.mkl.is_available()}))
"""


def run_rank(**environ: str) -> dict[str, object]:
    """One of as many ranks as there are CPUs."""
    shares = {"LOCAL_WORLD_SIZE": str(len(ALLOWED)), "LAUNCH_GC": "default", "MKL_NUM_THREADS": ""}
    return tell(run_shim(sys.executable, "-c", PROGRAM, preexec=None, **{**shares, **environ}))


@pytest.mark.skipif(len(ALLOWED) < 2, reason="needs a second CPU, so that the plan's number is another")
def test_a_number_of_the_users_is_torchs_although_mkls_goes_before_it() -> None:
    told = run_rank(OMP_NUM_THREADS="2")
    assert (told["mine"], told["set"]) == (2, ["2"] * 4)


@pytest.mark.skipif(len(ALLOWED) < 2, reason="needs a second CPU, so that the plan's number is another")
def test_a_number_for_mkl_alone_stays_beside_the_plans() -> None:
    told = run_rank(MKL_NUM_THREADS="2", OMP_NUM_THREADS="1", TORCHELASTIC_RUN_ID="torchrun's own 1")
    assert told["set"] == ["1", "2", "1", "1"]
    assert told["mine"] == (2 if told["mkl"] else 1)
