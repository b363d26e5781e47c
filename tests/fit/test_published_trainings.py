"""The estimate against published trainings: ends, measured peaks, speeds, and how wide the ranges are.

`python -m tests.fit.test_published_trainings` prints each. Those that leave too much unsaid are `weak`, and
do not count.
"""

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher.config.settings import FitConfig, LoraConfig, ParallelConfig, Settings
from launcher.config.training import find_fit_device, make_request_on, read_dimensions
from launcher.fit.choice import FitReport, assess
from launcher.fit.training import NodeResources, Range

DATA = Path(__file__).parents[1] / "data"
TRAININGS, ADAPTERS = "published_trainings.json", "published_adapters.json"
"""Whole models; and LoRA with and without quantized weights, and torchtune's table of what saves memory."""
GIB = 1 << 30


@dataclass(frozen=True)
class Published:
    """A training and what comes of its settings."""

    id: str
    truth: dict[str, float | str]
    is_judged: bool
    """Whether its memory counts."""
    weak: bool
    selective: bool
    report: FitReport

    @property
    def is_right(self) -> bool:
        """Whether the verdict goes with the training's end."""
        return self.report.verdict != ("does_not_fit" if self.truth["fits"] == "fits" else "fits")

    @property
    def range(self) -> Range:
        """What the measured peak is compared with."""
        estimate = self.report.estimate
        kinds = {"allocated": estimate.allocated, "total": estimate.total}
        return kinds.get(str(self.truth.get("peak_kind")), estimate.reserved)

    @property
    def peak(self) -> float | None:
        """GiB, measured."""
        return float(self.truth["peak_gib"]) if "peak_gib" in self.truth else None

    @property
    def speeds(self) -> tuple[float, float] | None:
        """Tokens a second of a GPU, low and high."""
        speed = self.report.speed
        if speed is None or speed.step_seconds is None:
            return None
        each = speed.tokens_per_step / self.report.request.layout.world_size
        return each / speed.step_seconds[1], each / speed.step_seconds[0]

    @property
    def has_right_speed(self) -> bool:
        """Whether the measured speed is in the range."""
        low, high = self.speeds or (0.0, 0.0)
        return low <= float(self.truth["tokens_per_s"]) <= high


def read_published(folder: Path, name: str) -> list[Published]:
    every = [json.loads((DATA / each).read_text()) for each in (TRAININGS, ADAPTERS)]
    models = every[0]["models"] | every[1]["models"]
    found = []
    for row in every[(TRAININGS, ADAPTERS).index(name)]["trainings"]:
        path = folder / f"{row['model']}.json"
        path.write_text(json.dumps(models[row["model"]]))
        model = read_dimensions({"config": str(path)})
        assert model is not None
        sections: dict[str, dict[str, Any]] = {"fit": {}, "parallel": {}, "": {}}
        for key, value in row["settings"].items():
            section, _, setting = key.rpartition(".")
            sections[section][setting] = LoraConfig(**value) if key == "fit.lora" else value
        fit = FitConfig(**sections["fit"])
        config = replace(Settings(), fit=fit, parallel=ParallelConfig(**sections["parallel"]))
        shape = (sections[""]["nproc_per_node"], sections[""]["nodes"])
        device = find_fit_device(fit, [], 0)
        request = make_request_on(
            config,
            model,
            device,
            NodeResources(),
            shape=shape,
            is_bundled=False,
            expandable=sections[""].get("expandable_segments", True),
        )
        weak = row.get("weak", False)
        is_judged = row.get("memory_scored", True) and not weak
        is_selective = fit.checkpointing == "selective"
        found.append(Published(row["id"], row["truth"], is_judged, weak, is_selective, assess(request)))
    return found


def test_published_trainings_are_told_right(tmp_path: Path) -> None:
    trainings = read_published(tmp_path, TRAININGS)
    assert len(trainings) == 51
    assert [one.id for one in trainings if one.is_judged and not one.is_right] == []
    measured = [one for one in trainings if one.peak and not one.weak]
    outside = [one.id for one in measured if not one.range.low <= (one.peak or 0) * GIB <= one.range.high]
    assert len(outside) <= 0.1 * len(measured), outside
    fast = [one for one in trainings if one.speeds and "tokens_per_s" in one.truth and not one.weak]
    wrong = [one.id for one in fast if not one.has_right_speed]
    assert len(wrong) <= 0.1 * len(fast), wrong
    for selective, most in ((False, 1.5), (True, 1.75)):
        widths = [
            one.report.estimate.total.high / one.report.estimate.total.low
            for one in trainings
            if one.selective is selective and not one.weak
        ]
        assert statistics.median(widths) <= most


def test_published_adapters_are_told_right(tmp_path: Path) -> None:
    """LoRA and QLoRA of litgpt, torchtune, peft and Answer.AI, most on one or two GPUs.

    What is kept with quantized weights was fitted to litgpt's rows; the others are independent of it.
    """
    trainings = read_published(tmp_path, ADAPTERS)
    assert len(trainings) == 83
    assert [one.id for one in trainings if one.is_judged and not one.is_right] == []
    measured = [one for one in trainings if one.peak and not one.weak]
    outside = [one.id for one in measured if not one.range.low <= (one.peak or 0) * GIB <= one.range.high]
    assert len(outside) <= 0.1 * len(measured), outside
    fast = [one for one in trainings if one.speeds and "tokens_per_s" in one.truth and not one.weak]
    assert [one.id for one in fast if not one.has_right_speed] == []


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for one in (one for name in (TRAININGS, ADAPTERS) for one in read_published(Path(folder), name)):
            peak = " ".join(
                f"{value / GIB:.1f}" for value in (one.range.low, one.range.expected, one.range.high)
            )
            print(one.id, one.report.verdict, one.is_right, peak, one.speeds, one.truth)
