"""What earlier runs have measured, and that nothing planted counts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import launcher
from launcher.runs.memory_records import PREDICTION, read_measured_runs, summarize_ratios
from tests.seam import clean_environ

INPROCESS = Path(launcher.__file__).parent / "inprocess"


def make_measured(
    runs_dir: Path, number: int, *, expected: int, reserved: int, fingerprint: str = "f"
) -> Path:
    folder = runs_dir / "train" / f"20260801-12000{number}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    prediction = {"schema": 1, "fingerprint": fingerprint, "expected": expected, "device": "gpu"}
    (folder / PREDICTION).write_text(json.dumps(prediction))
    devices = [{"index": 0, "name": "x", "reserved": reserved, "allocated": reserved - 1}]
    record = {"schema": 1, "rank": 0, "resident": 5, "steps": 3, "devices": devices}
    (folder / "rank-0.memory.json").write_text(json.dumps(record))
    return folder


def test_runs_of_the_same_program_count(tmp_path: Path) -> None:
    make_measured(tmp_path, 1, expected=100, reserved=110)
    make_measured(tmp_path, 2, expected=0, reserved=60)
    make_measured(tmp_path, 3, expected=100, reserved=90, fingerprint="other")
    make_measured(tmp_path, 4, expected=100, reserved=10_000)  # of something else
    found = read_measured_runs(tmp_path, "f", "gpu", 100)
    assert [(run.run, run.measured) for run in found] == [
        ("train/20260801-120002", 60),
        ("train/20260801-120001", 110),
    ]
    ratio, spread = summarize_ratios(found)
    assert abs(ratio - 0.85) < 1e-9 and abs(spread - 0.25 / 0.85) < 1e-9
    assert read_measured_runs(tmp_path, "f", "cpu", 50) == []


def test_records_that_make_no_sense_or_are_links_are_left_out(tmp_path: Path) -> None:
    folder = make_measured(tmp_path, 1, expected=100, reserved=110)
    record = folder / "rank-0.memory.json"
    for text in ("", "[]", '{"rank": 0}', '{"rank": 0, "resident": "many"}', "[" * 100_000):
        record.write_text(text)
        assert read_measured_runs(tmp_path, "f", "gpu", 50) == []
    real = folder / "real"
    real.write_text(json.dumps({"rank": 0, "resident": 1, "devices": []}))
    record.unlink()
    record.symlink_to(real)
    assert read_measured_runs(tmp_path, "f", "gpu", 50) == []
    record.unlink()
    os.mkfifo(record)
    assert read_measured_runs(tmp_path, "f", "gpu", 50) == []


def test_a_rank_leaves_its_peak(tmp_path: Path) -> None:
    """The hook writes it at the end of the process that has the variable, and of no child of it."""
    script = """
import os, subprocess, sys
import torch.version
held = bytearray(200 << 20)
held[::4096] = b"x" * len(held[::4096])
del held
assert "LAUNCH_MEMORY" not in os.environ
subprocess.run([sys.executable, "-c", "import torch.version"], check=True)
assert not os.path.exists("rank-3.memory.json")
"""
    environ = {**clean_environ(), "PYTHONPATH": str(INPROCESS), "LAUNCH_MEMORY": str(tmp_path), "RANK": "3"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environ, check=True, timeout=120)
    record = json.loads((tmp_path / "rank-3.memory.json").read_text())
    assert record["rank"] == 3 and record["devices"] == []
    assert 200 << 20 < record["resident"] < 2 << 30
    assert (tmp_path / "rank-3.memory.json").stat().st_mode & 0o777 == 0o600
