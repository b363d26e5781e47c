"""`launch plan` uses what earlier runs of the same program have measured."""

import json
from pathlib import Path
from typing import Any

from tests.runs.test_run_lookup import make_measured
from tests.seam import Launch

SET = tuple(
    f"program.{word}" for word in ("activation_checkpointing=full", "parallel=fsdp", "grad_accumulation=1")
)
WORDS = ("machine=dgx_h100", "+model=llama7b", "format=json", *SET)


def plan(launch: Launch, *words: str) -> dict[str, Any]:
    result = launch("plan", *WORDS, *words)
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)["fit"]
    return found


def find_fingerprint(batch: int) -> str:
    """Of the bundled program as the plan has it."""
    from launcher.config.compose import compose, resolve
    from launcher.config.program import find_program
    from launcher.config.sources import find_sources
    from launcher.runs.memory_records import fingerprint_ranks

    words = ["machine=dgx_h100", "+model=llama7b", f"program.batch_size={batch}", *SET]
    config = resolve(compose(find_sources(None, None, None), words))
    return fingerprint_ranks(find_program(None, config, {}), "gpu", 8)


def test_a_measured_run_corrects_the_estimate(launch: Launch, here: Path) -> None:
    before = plan(launch, "program.batch_size=1")
    expected = before["memory"]["reserved"]["expected"]
    fingerprint = find_fingerprint(1)
    make_measured(here / "runs", 1, expected=expected, reserved=int(1.2 * expected), fingerprint=fingerprint)
    after = plan(launch, "program.batch_size=1", "program.steps=7")
    assert abs(after["memory"]["reserved"]["expected"] / expected - 1.2) < 0.01
    assert "1 run" in after["learned"] and not before["learned"]
    assert not plan(launch, "program.batch_size=2")["learned"]
