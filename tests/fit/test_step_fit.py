"""What a tracked peak means for a device, and which runs are of the same program."""

import pytest

from launcher.fit.choice import fit_step, make_step_peak
from launcher.fit.training import Device, Learned
from launcher.runs.memory_records import fingerprint_program, strip_numbers

GIB = 1 << 30
H100 = Device("H100", 81559)
PEAK = make_step_peak(
    60 * GIB,
    {"activations": 20 * GIB, "weights": 40 * GIB},
    {"blocks.0.mlp": {"weights": GIB}, "blocks.11.mlp": {"weights": GIB}, "head2": {"weights": GIB}, "": {}},
)


def test_modules_that_differ_by_a_number_are_added_up() -> None:
    assert [(share.name, share.count, share.bytes) for share in PEAK.modules] == [
        ("blocks.*.mlp", 2, 2 * GIB),
        ("head2", 1, GIB),
        ("", 1, 0),
    ]
    assert [name for name, _ in PEAK.categories] == ["weights", "activations"]


@pytest.mark.parametrize(
    ("gib", "verdict"), [(40, "fits"), (60, "fits"), (76, "tight"), (78, "tight"), (90, "does_not_fit")]
)
def test_a_verdict(gib: int, verdict: str) -> None:
    peak = make_step_peak(gib * GIB, {}, {})
    assert fit_step(peak, H100, 8, expandable=True).verdict == verdict


def test_without_expandable_segments_more_is_lost() -> None:
    good, bad = (fit_step(PEAK, H100, 1, expandable=expandable) for expandable in (True, False))
    assert bad.estimate.reserved.high > good.estimate.reserved.high > PEAK.total


def test_what_was_measured_counts_and_is_not_learned_twice() -> None:
    first = fit_step(PEAK, H100, 1, expandable=True)
    learned = Learned(1.1, 0.0, 1, "train/1")
    found = fit_step(PEAK, H100, 1, expandable=True, learned=learned)
    assert found.estimate.reserved.expected == pytest.approx(1.1 * first.predicted, rel=1e-6)
    assert found.predicted == first.predicted
    for end in ("low", "expected", "high"):
        rows = sum(getattr(part.bytes, end) for part in found.estimate.parts)
        assert rows == getattr(found.estimate.total, end)
    assert "train/1 took 110%" in found.learned


def test_on_cpus_the_process_counts() -> None:
    found = fit_step(PEAK, Device("CPU", 100 << 10, kind="cpu"), 1, expandable=True)
    assert found.verdict == "fits" and found.estimate.total.low > PEAK.total
    assert found.predicted == found.estimate.total.expected


def test_numbers_that_do_not_matter_are_left_out() -> None:
    words = ["train.py", "--lr", "3e-4", "--batch-size", "8", "--steps=100", "--seed", "1"]
    assert strip_numbers(words) == ["train.py", "--batch-size", "8"]
    other = ["train.py", "--lr=1", "--batch-size", "8"]
    assert fingerprint_program(words, ["ranks=8"]) == fingerprint_program(other, ["ranks=8"])
    assert fingerprint_program(words, ["ranks=8"]) != fingerprint_program(words, ["ranks=4"])
    assert fingerprint_program(["a", "b c"], []) != fingerprint_program(["a b", "c"], [])
