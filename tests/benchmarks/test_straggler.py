"""The straggler benchmark measures what it says: real ranks, and figures of known steps."""

from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.straggler import POLICIES, RANKS, WARMUP, Policy, Run, choose_stalls, run_policy, sum_up

STEPS = 40
SMALL = (f"--steps={STEPS}", "--objects=2000", "--samples=20")


def make_run(steps: "np.ndarray[tuple[int], np.dtype[np.float64]]", seconds: float = 1) -> Run:
    return Run(steps=steps, stalls=(steps, steps + 1), seconds=seconds, peak_mb=200, final_mb=100)


def test_figures_are_those_of_the_steps_after_the_freezing_one() -> None:
    steps = np.concatenate([np.full(WARMUP - 1, 500.0), [400.0], np.arange(101.0)])
    figures = sum_up([make_run(steps), make_run(steps + 2, 3), make_run(steps + 7, 8)])
    assert (figures.p50, figures.p99, figures.longest, figures.freezing) == (52, 101, 107, 402)
    assert (figures.seconds, figures.peak_mb, figures.final_mb) == (3, 200, 100)


def test_the_simulation_gets_every_rank_of_every_round_after_the_warm_up() -> None:
    runs = [make_run(np.arange(WARMUP + 100.0)) for _ in range(3)]
    measured = choose_stalls(Policy((), period=50), runs)
    assert [series[0] for series in measured.series] == [WARMUP, WARMUP + 1] * 3
    assert {len(series) for series in measured.series} == {100}
    assert measured.period == 50


@pytest.mark.usefixtures("quick_agent")
@pytest.mark.parametrize(
    "policy",
    [
        Policy(("gc=synchronized", "gc.warmup=20", "gc.every=10")),
        Policy(("gc=default",), ("--gc=megatron", "--every=10")),
    ],
    ids=["synchronized", "megatron"],
)
def test_collections_are_seen_in_the_steps_in_which_they_happen(policy: Policy, tmp_path: Path) -> None:
    """Steps are counted from 1; those of the warm-up are the interpreter's own."""
    run = run_policy(policy, tmp_path, SMALL)
    assert len(run.steps) == STEPS
    assert len(run.stalls) == RANKS
    for stalls in run.stalls:
        collecting = [step for step, stall in enumerate(stalls, 1) if stall and step >= 20]
        assert collecting == [20, 30, 40]
        assert (stalls <= run.steps + 1).all()
    assert run.seconds * 1e3 >= run.steps.sum()
    assert run.peak_mb >= run.final_mb > 50


def test_the_default_is_what_others_are_compared_with() -> None:
    first = next(iter(POLICIES.values()))
    assert (first.settings, first.words, first.period) == (("gc=default",), (), 1)
