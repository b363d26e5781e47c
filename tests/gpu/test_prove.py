"""`tests/gpu/prove` without a GPU: one test from another directory, and what is written."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.seam import clean_environ

PROVE = str(Path(__file__).with_name("prove"))


@pytest.mark.slow
def test_prove_runs_and_writes_its_summary(tmp_path: Path) -> None:
    words = [sys.executable, PROVE, "--cpu", "--output=found", "-k", "topo or torchs_parser or first_use"]
    done = subprocess.run(
        words, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cases = ElementTree.parse(tmp_path / "found/junit.xml").findall(".//testcase")
    assert len(cases) == 3
    summary = (tmp_path / "found/summary.md").read_text()
    assert "| test_machine.py::test_topo_plan_and_doctor | passed | " in summary
    assert "| skipped | " in summary and "needs a GPU" in summary
    assert "| GPUs | none |" in summary
    assert (tmp_path / "found/machine.json").is_file()
