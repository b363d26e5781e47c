"""Whatever stands in the files: findings, never a traceback."""

import random
from pathlib import Path

import pytest

from tests.doctor.healthy_tree import HEALTHY, pick, run_doctor
from tests.probe.machine_trees import spoilt
from tests.seam import run_inside

KINDS = ("bytes", "nothing", "long", "huge", "negative", "lines", "markup", "nul")
FILES = sorted({path for path in HEALTHY if "/cpu" not in path or "/cpu5/" in path})
"""One CPU's files stand for those of all."""


def spoil(kind: str, path: str) -> bytes:
    """Garbage of a kind, the same in each run of the tests."""
    rng = random.Random(f"{kind} {path}")
    return {
        "bytes": rng.randbytes(300),
        "nothing": b"",
        "long": b"9" * 5000,
        "huge": b"9" * 400,
        "negative": b"-1\n",
        "lines": b"\n".join(rng.randbytes(8).hex().encode() + b": [" for _ in range(40)),
        "markup": "[bold]\x1b[31m {items} %s é".encode(),
        "nul": b"0\0" * 20,
    }[kind]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", KINDS)
def test_garbage_in_every_file_at_once(healthy: Path, kind: str) -> None:
    with spoilt(healthy, {path: spoil(kind, path) for path in FILES}):
        done, findings = run_doctor(healthy)
        shown = run_inside(["doctor", f"machine.root={healthy}"])
    assert findings
    assert shown.code == done.code
    assert "\x1b" not in shown.out
    assert not pick(findings, "error")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("number", "kind"), list(enumerate(KINDS)))
def test_garbage_in_some_files_beside_healthy_ones(healthy: Path, number: int, kind: str) -> None:
    with spoilt(healthy, {path: spoil(kind, path) for path in FILES[number :: len(KINDS)]}):
        _, findings = run_doctor(healthy)
    assert findings and not pick(findings, "error")


@pytest.mark.usefixtures("here")
def test_what_is_not_understood_is_named(healthy: Path) -> None:
    edits: dict[str, str | bytes | None] = {
        "proc/sys/kernel/numa_balancing": "yes",
        "sys/kernel/mm/transparent_hugepage/enabled": "sometimes",
        "proc/self/limits": "Max open files   many  more",
        "sys/devices/system/cpu/cpu5/cpufreq/scaling_governor": "very fast",
    }
    with spoilt(healthy, edits):
        done, findings = run_doctor(healthy)
    said = " ".join(finding["what"] for finding in pick(findings, "note"))
    assert "proc/sys/kernel/numa_balancing is 'yes', which is no number" in said
    assert "transparent_hugepage/enabled is 'sometimes', which is not understood" in said
    assert "has 'Max open files   many  more' for Max open files" in said
    assert "cpu5/cpufreq/scaling_governor is 'very fast', which is not understood" in said
    assert done.code == 0
