"""`launch fit` on programs as users write them, and against torch's own MemTracker."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import clean_environ

PROGRAMS = Path(__file__).parents[1] / "fit_programs"


def start_fit(folder: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "launcher", "fit", "nproc_per_node=1", *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=clean_environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fit(folder: Path, *words: str) -> tuple[int, str, str]:
    process = start_fit(folder, *words)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def fit_json(folder: Path, *words: str) -> dict[str, Any]:
    code, out, err = fit(folder, "format=json", *words)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_loop_for_a_gpu_runs_without_one(tmp_path: Path) -> None:
    """DataLoader, autocast, GradScaler, clipping, compile, a value in a condition, a checkpoint each step."""
    found = fit_json(tmp_path, "fit.gpu=H100", str(PROGRAMS / "plain_loop.py"), "--compile")
    count = found["parameters"]
    assert count == 4 * (2 * 4 * 512 * 512 + 4 * 512 + 512 + 2 * 512) + 512 * 10 + 10
    # AdamW without fused=True computes on lists: one more copy of all parameters.
    assert found["categories"]["optimizer"] == pytest.approx(8 * count, rel=0.01)
    assert found["categories"]["gradients"] == pytest.approx(4 * count, rel=0.01)
    assert found["peak"] == pytest.approx(20 * count, rel=0.02)
    assert (found["verdict"], found["device"]["memory_mib"]) == ("fits", 81559)
    assert any("torch.compile was left out" in note for note in found["notes"])
    assert any("loss.item()" in note for note in found["notes"])
    modules = {share["name"]: share["count"] for share in found["modules"]}
    assert modules["*.up"] == 4
    assert list(tmp_path.iterdir()) == []  # no checkpoint of fake tensors


def test_the_bundled_program_has_the_peak_that_torchs_tracker_sees(tmp_path: Path) -> None:
    words = ["program.device=cpu", "program.dtype=fp32", "program.batch_size=8", "program.num_workers=0"]
    found = fit_json(tmp_path, *words)
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "track_bundled.py"), "8", "128"],
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert found["peak"] == pytest.approx(int(done.stdout), rel=0.02)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shapes_that_depend_on_values_are_told_with_their_line(device: str, tmp_path: Path) -> None:
    code, out, err = fit(tmp_path, "fit.gpu=H100", str(PROGRAMS / "data_dependent.py"), device)
    assert (code, out) == (3, "")
    assert "aten::index" in err and "data_dependent.py:16: return x[x[:, 0] > 0].sum()" in err


def test_a_program_that_fails_or_never_steps_or_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit('no such data')\n")
    code, _, err = fit(tmp_path, "fails.py")
    assert code == 3 and "exit code 1" in err and "no such data" in err
    (tmp_path / "ends.py").write_text("print('done')\n")
    code, _, err = fit(tmp_path, "ends.py")
    assert code == 3 and "ended without a second step" in err
    (tmp_path / "waits.py").write_text("import time\nopen('began', 'w').close()\ntime.sleep(600)\n")
    code, _, err = fit(tmp_path, "fit.timeout=1", "waits.py")
    assert code == 3 and "fit.timeout=1 s" in err
    (tmp_path / "began").unlink(missing_ok=True)
    process = start_fit(tmp_path, "waits.py")
    while not (tmp_path / "began").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_a_python_that_loads_no_hook_does_not_train(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('trained', 'w').close()\n")
    code, _, err = fit(tmp_path, "--", sys.executable, "-I", "train.py")
    assert code == 3 and "fake" in err and not (tmp_path / "trained").exists()
