"""Changes that are proposed, what a tracked peak means for a device, and which runs are of one program."""

from dataclasses import replace

import pytest

from launcher.fit.choice import find_changes, fit_step, make_step_peak
from launcher.fit.counts import count_model_parameters
from launcher.fit.training import Device, Learned, ParallelLayout, Range, Training, TrainingSettings
from launcher.runs.records import fingerprint_ranks
from tests.fit.made_requests import H100, REQUEST, make_request

GIB = 1 << 30


def estimate(request: Training) -> Range:
    """States and activations of a simple model of memory, in which every change counts."""
    layout, settings = request.layout, request.settings
    parameters = count_model_parameters(request.model) // layout.tp
    shards = [1 if stage > layout.zero else layout.dp * layout.cp for stage in (3, 2, 1)]
    moments = {"adamw8bit": 2}.get(settings.optimizer, 8) if settings.offload == "none" else 0
    states = sum(size * parameters // shard for size, shard in zip((4, 4, moments), shards, strict=True))
    tokens = settings.micro_batch * settings.seq_len * request.model.hidden_size * request.model.layers
    kept = {"none": 34, "selective": 24, "full": 2}[settings.checkpointing]
    total = states + tokens * kept // layout.tp
    return Range(total, total, total)


def limit(request: Training, gib: float) -> Training:
    return replace(request, device=replace(request.device, memory_mib=int(gib * 1024)))


def propose(request: Training, gib: float) -> list[tuple[str, ...]]:
    changes = find_changes(limit(request, gib), estimate)
    assert all(change.total.high <= gib * GIB for change in changes)
    assert all(change.why for change in changes)
    return [change.settings for change in changes]


def test_single_changes_come_first_and_the_cheapest_of_each() -> None:
    sharded = make_request(ParallelLayout(dp=8, zero=3))
    assert propose(sharded, 100) == [
        ("fit.micro_batch=4", "fit.accumulation=2"),
        ("parallel.tp=2", "fit.accumulation=2"),
        ("fit.checkpointing=full",),
    ]


def test_combinations_if_no_single_change_is_enough() -> None:
    found = propose(REQUEST, 40)
    assert len(found) == 3
    assert all(len(settings) > 1 for settings in found)
    assert found[0] == ("parallel.zero=3", "fit.micro_batch=1", "fit.accumulation=8")


def test_no_change_has_more_than_is_needed() -> None:
    found = [{setting.partition("=")[0] for setting in settings} for settings in propose(REQUEST, 100)]
    assert not any(one < other for one in found for other in found)


def test_nothing_is_proposed_if_nothing_helps() -> None:
    assert propose(REQUEST, 0.01) == []


def test_the_bundled_programs_changes_are_its_own_options() -> None:
    bundled = replace(make_request(ParallelLayout(dp=8)), is_bundled=True)
    for settings in propose(bundled, 40) + propose(bundled, 70):
        keys = [setting.partition("=")[0] for setting in settings]
        assert {key.partition(".")[0] for key in keys} <= {"program", "nodes"}
    assert ("program.parallel=fsdp", "program.activation_checkpointing=full") in propose(bundled, 50)


def test_a_set_global_batch_is_kept() -> None:
    request = make_request(ParallelLayout(dp=8, zero=3), TrainingSettings(micro_batch=6, seq_len=4096))
    changes = find_changes(limit(replace(request, global_batch=48), 90), estimate)
    for change in changes:
        pairs = dict(setting.split("=") for setting in change.settings)
        replicas = 8 * int(pairs.get("nodes", 1)) // int(pairs.get("parallel.tp", 1))
        batch = int(pairs.get("fit.micro_batch", 6)) * int(pairs.get("fit.accumulation", 1)) * replicas
        assert batch == 48


@pytest.mark.parametrize(
    ("now", "most", "chosen"),
    [(8, 4, 4), (8, 3, 2), (8, 1, 1), (6, 5, 3), (6, 2, 2), (7, 6, 1), (10**9, 5, 1), (1, 1, None)],
)
def test_smaller_micro_batches_divide_the_batch(now: int, most: int, chosen: int | None) -> None:
    request = make_request(ParallelLayout(dp=8), TrainingSettings(micro_batch=now))

    def measure(one: Training) -> Range:
        return Range.of(0 if one.settings.micro_batch <= most and one.settings.micro_batch < now else 2**60)

    found = [setting for change in find_changes(request, measure) for setting in change.settings]
    assert [one for one in found if "micro_batch" in one] == ([f"fit.micro_batch={chosen}"] if chosen else [])


def test_heads_are_not_split_unevenly() -> None:
    odd = replace(REQUEST, model=replace(REQUEST.model, heads=25, kv_heads=25))
    assert not [one for one in propose(odd, 40) if any("parallel.tp" in setting for setting in one)]


def test_replicas_that_are_set_are_set_anew() -> None:
    request = replace(make_request(ParallelLayout(dp=8, zero=3)), fixed=("parallel.dp",))
    found = [settings for settings in propose(request, 100) if "parallel.tp=2" in settings]
    assert found and all("parallel.dp=4" in settings for settings in found)


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
    assert list(PEAK.categories) == ["weights", "activations"]


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
    other = ["train.py", "--lr=1", "--batch-size", "8"]
    assert fingerprint_ranks(words, "gpu", 8) == fingerprint_ranks(other, "gpu", 8)
    assert fingerprint_ranks(words, "gpu", 8) != fingerprint_ranks(words, "gpu", 4)
    assert fingerprint_ranks(["a", "b c"], "gpu", 8) != fingerprint_ranks(["a b", "c"], "gpu", 8)
