"""Hydra's flags: what `--cfg`, `--info` and the rest print."""

from pathlib import Path

import pytest

from tests.seam import Launch


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("searchpath", ["file://", "structured://"]),
        ("defaults", ["launch_schema", "model/tiny", "binding/exclusive"]),
        ("defaults-tree", ["launch:", "model: tiny"]),
        ("config", ["Config", "nproc_per_node: auto"]),
        ("plugins", ["BashCompletion"]),
        ("all", ["Defaults Tree", "nproc_per_node: auto"]),
    ],
)
def test_info(here: Path, what: str, parts: list[str]) -> None:
    from tests.seam import run_outside

    result = run_outside(["--info", what], here)
    assert (result.code, result.err) == (0, "")
    for part in parts:
        assert part in result.out
    assert not list(here.iterdir())


def test_hydras_own_help(launch: Launch) -> None:
    result = launch("--hydra-help")
    assert (result.code, result.err) == (0, "")
    assert "Hydra" in result.out and "--multirun" in result.out
