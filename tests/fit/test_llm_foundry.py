"""The estimate against 216 trainings of MPT models that ran.

tests/data/llm_foundry.csv has the tables of llm-foundry's scripts/train/benchmarking/README.md (commit
4952183 of April 2024). Most micro-batches are the largest that fitted: an estimate that is right on average
would expect many of them above the capacity.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

from launcher.fit.choice import FitReport, assess
from launcher.fit.counts import count_model_parameters
from launcher.fit.gpus import find_gpu
from launcher.fit.training import Device, ModelDimensions, ParallelLayout, Training, TrainingSettings

TABLES = Path(__file__).parents[1] / "data" / "llm_foundry.csv"
SIZES = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
"""Hidden size, heads and layers, of its scripts/train/yamls/pretrain."""
GPUS = {"h100_80gb": "H100", "a100_80gb": "A100-80GB", "a100_40gb": "A100-40GB"}


def make_report(row: dict[str, str]) -> FitReport:
    """The loss is flash-attention's kernel, and the optimizer (DecoupledAdamW) makes no lists."""
    hidden, heads, layers = SIZES[row["model"]]
    length, gpus = int(row["seq_len"]), int(row["gpus"])
    shape = (50368, layers, hidden, heads, heads, hidden // heads, 4 * hidden, length)
    model = ModelDimensions(
        row["model"], *shape, "layernorm", "gelu", "learned", bias=True, tied_embeddings=True
    )
    assert count_model_parameters(model) == int(row["parameters"]), row
    settings = TrainingSettings(
        framework="fsdp",
        precision="fp8" if row["precision"] == "amp_fp8" else "mixed",
        checkpointing="full" if row["checkpointing"] == "true" else "none",
        micro_batch=int(row["micro_batch"]),
        accumulation=int(row["accumulation"]),
        seq_len=length,
        loss="compiled",
        optimizer_fused=True,
        expandable_segments=False,
    )
    gpu = find_gpu(GPUS[row["gpu"]])
    assert gpu
    layout = ParallelLayout(dp=gpus, zero=2 if row["sharding"] == "SHARD_GRAD_OP" else 3)
    device = Device(gpu.name, gpu.memory_mib)
    return assess(Training(model, layout, settings, device, min(8, gpus), nodes=max(1, gpus // 8)))


def read_reports() -> Iterator[tuple[dict[str, str], FitReport]]:
    with TABLES.open() as file:
        for row in csv.DictReader(file):
            yield row, make_report(row)


def test_trainings_that_ran_are_expected_to_fit() -> None:
    reports = list(read_reports())
    assert len(reports) == 216
    assert [row for row, report in reports if report.verdict == "does_not_fit"] == []
    above = [row for row, report in reports if report.estimate.total.expected > report.request.capacity]
    assert len(above) <= 0.1 * len(reports), above


def test_their_speeds_are_in_the_range() -> None:
    outside = []
    for row, report in read_reports():
        speed = report.speed
        assert speed and speed.step_seconds
        tokens = speed.tokens_per_step / int(row["gpus"])
        low, high = tokens / speed.step_seconds[1], tokens / speed.step_seconds[0]
        if not low <= float(row["tokens_per_s"]) <= high:
            outside.append((row, low, high))
    assert len(outside) <= 0.1 * 216, outside
