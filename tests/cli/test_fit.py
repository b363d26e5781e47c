"""`launch fit` on programs as users write them, and against torch's own MemTracker."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.fit import FEW, FitCase
from tests.seam import run_outside, start, wait_for

PROGRAMS = Path(__file__).parents[1] / "fit_programs"


def fit(folder: Path, *words: str) -> tuple[int, str, str]:
    done = run_outside(["fit", "nproc_per_node=1", *words], folder, timeout=240)
    return done.code, done.out, done.err


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
    assert found["categories"]["temporary"] == pytest.approx(4 * count, rel=0.05)
    assert found["peak"] == pytest.approx(20 * count, rel=0.02)
    assert (found["verdict"], found["device"]["memory_mib"]) == ("fits", 81559)
    assert any("torch.compile was left out" in note for note in found["notes"])
    assert any("loss.item()" in note for note in found["notes"])
    modules = {share["name"]: share["count"] for share in found["modules"]}
    assert modules["*.up"] == 4
    assert list(tmp_path.iterdir()) == []  # no checkpoint of fake tensors


@pytest.mark.slow
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.label)
def test_the_bundled_program_has_the_peak_that_torchs_tracker_sees(case: FitCase, tmp_path: Path) -> None:
    """The recorded peaks are tracked again by tests/fit."""
    words = [f"model.{key}={value}" for key, value in json.loads(case.question)["model"].items()]
    options: dict[str, object] = {
        "batch_size": case.batch,
        "seq_len": case.seq_len,
        "grad_accumulation": case.accumulation,
    }
    options |= {"activation_checkpointing": case.checkpointing, "dtype": "bf16", "num_workers": 0}
    options |= {"parallel": case.parallel if case.parallel == "fsdp" else "ddp"}
    words += [f"program.{key}={value}" for key, value in options.items()]
    words += ["fit.gpu=H100", "program=train", f"nproc_per_node={case.world_size}", "+model=tiny"]
    peaks = json.loads((PROGRAMS.parent / "data" / "tracked_peaks.json").read_text())["peaks"]
    assert fit_json(tmp_path, *words)["peak"] == pytest.approx(peaks[case.label], rel=0.001)


@pytest.mark.slow
def test_blocks_that_are_computed_again_keep_their_inputs_alone(tmp_path: Path) -> None:
    """Checkpointing around attention, whose kernel in the backward pass is the same as in the forward one."""
    program = str(PROGRAMS / "checkpointed_attention.py")
    plain, again = (fit_json(tmp_path, "fit.gpu=H100", program, *word) for word in (["plain"], []))
    count = plain["parameters"]
    assert plain["categories"]["weights"] == again["categories"]["weights"] == 4 * count
    # The input in fp32; in 16 bits what the norm gives, three projections, attention's output, and autocast's
    # copies of the weights; for the loss, the last output in fp32.
    tokens, layers, width = 4 * 1024, 4, 512
    kept = layers * tokens * width * (4 + 2 + 3 * 2 + 2) + 2 * count + 4 * tokens * width
    assert plain["categories"]["activations"] == pytest.approx(kept, rel=0.01)
    assert again["categories"]["activations"] < 0.5 * plain["categories"]["activations"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words", "parameters"),
    [
        (8, ["checkpointed_attention.py", "fsdp"], 4_206_592),
        (8, ["sharded_from_meta.py"], 12_595_200),
        (1, ["resnet.py"], 25_557_032),
        (1, ["resnet.py", "channels_last"], 25_557_032),
        (1, ["lightning_encoder.py"], 3_672_040),
        (1, ["hf_trainer.py"], 13_611_520),
        (1, ["hf_trainer.py", "checkpointing", "compile"], 13_611_520),
        (1, ["hf_trainer.py", "checkpointing", "lora"], 13_726_208),
        (8, ["hf_trainer.py"], 13_611_520),
        (1, ["lora_on_device.py"], 14_224_384),
        (1, ["accelerated_vit.py"], 7_854_184),
        (4, ["accelerated_vit.py", "compile"], 7_854_184),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_programs_of_real_libraries(ranks: int, words: list[str], parameters: int, tmp_path: Path) -> None:
    """What each holds at the peak follows from its parameters, their type and its optimizer."""
    name, *options = words
    found = fit_json(tmp_path, "fit.gpu=H100", f"nproc_per_node={ranks}", str(PROGRAMS / name), *options)
    assert found["parameters"] == parameters
    sharded = ranks if name == "sharded_from_meta.py" or "fsdp" in options else 1
    bytes_each = 2 if name == "lora_on_device.py" else 4
    sizes = found["categories"]
    assert sizes["weights"] == pytest.approx(bytes_each * parameters / sharded, rel=0.03)
    if not {"lora", "lora_on_device.py"} & set(words):
        moments = 4 if name == "resnet.py" else 8
        assert sizes["optimizer"] == pytest.approx(moments * parameters / sharded, rel=0.03)
    assert found["peak"] == sum(sizes.values()) and found["steps"] == 2


def test_a_gpu_has_its_own_capability_and_an_error_its_operation_and_line(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import atexit, torch\natexit.register(print, torch.cuda.get_device_capability())\n"
        "x = torch.ones(3, 4, device='cuda')\ny = x @ x\n"
    )
    code, _, err = fit(tmp_path, "fit.gpu=A100-40GB", "fails.py")
    assert code == 3 and "| (8, 0)" in err
    assert "operation aten::mm failed" in err and "fails.py:4: y = x @ x" in err
    assert "without `launch fit`" in err


def test_shapes_that_depend_on_values_are_told_with_their_line(tmp_path: Path) -> None:
    """A model that picks rows by their values: nobody knows how many, without the values."""
    (tmp_path / "picks.py").write_text(
        "import torch\nclass Picking(torch.nn.Linear):\n    def forward(self, x):\n"
        "        x = super().forward(x)\n        return x[x[:, 0] > 0].sum()\n"
        "Picking(256, 256).cuda()(torch.randn(8, 256).cuda())\n"
    )
    code, out, err = fit(tmp_path, "fit.gpu=H100", "picks.py")
    assert (code, out) == (3, "")
    assert "aten::index" in err and "picks.py:5: return x[x[:, 0] > 0].sum()" in err


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
    with start(tmp_path, "fit", "nproc_per_node=1", "waits.py") as started:
        wait_for((tmp_path / "began").exists, "the program's start")
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 130
        assert not started.survivors()


def test_a_python_that_loads_no_hook_does_not_train(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('trained', 'w').close()\n")
    code, _, err = fit(tmp_path, "--", sys.executable, "-I", "train.py")
    assert code == 3 and "fake" in err and not (tmp_path / "trained").exists()


# Under a limit: what is chosen runs where the fixed defaults are killed


LIMIT_MIB = 1450
MODEL = ("+model=tiny", "model.layers=24", "model.max_seq_len=512")
"""512 tokens of each sequence keep 0.2 GiB in fp32: 2.5 GiB of 12 sequences, 1.7 GiB of 8."""
RUN = (
    "nproc_per_node=1",
    "program.device=cpu",
    "program.steps=1",
    "program.eval_batches=0",
    "start.warm=false",
)


def find_group_folder() -> tuple[Path, str]:
    """The folder of this process's memory cgroup, and its file of the limit; version 1 or 2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory", path.lstrip("/")), "memory.limit_in_bytes"
        if number == "0" and Path("/sys/fs/cgroup/cgroup.controllers").is_file():
            return Path("/sys/fs/cgroup", path.lstrip("/")), "memory.max"
    pytest.skip("there is no memory cgroup")


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup with the limit."""
    folder, limit = find_group_folder()
    own = folder / f"launch-test-{os.getpid()}"
    try:
        own.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        (own / limit).write_text(str(LIMIT_MIB << 20))
        # Nothing may be swapped out in place of being killed.
        for file, text in (("memory.swap.max", "0"), ("memory.swappiness", "0")):
            with contextlib.suppress(OSError):
                (own / file).write_text(text)
        yield own
    except OSError as error:
        pytest.skip(f"the memory of a cgroup cannot be limited: {error}")
    finally:
        own.rmdir()


@pytest.mark.slow
def test_what_is_chosen_is_not_killed(group: Path, tmp_path: Path) -> None:
    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    fixed = ("program.batch_size=12", "program.activation_checkpointing=none")
    killed = run_outside([*MODEL, *RUN, *fixed, "new_run_dir=fixed"], tmp_path, timeout=300, preexec_fn=enter)
    assert killed.code == 137, killed
    assert "does not fit" in killed.err and f"limit of the job's cgroup, {LIMIT_MIB} MiB" in killed.err
    done = run_outside([*MODEL, *RUN, "new_run_dir=auto"], tmp_path, timeout=300, preexec_fn=enter)
    assert done.code == 0, done
    chosen = json.loads((tmp_path / "auto/manifest.json").read_text())["training"]
    assert chosen["batch_size"] == 8 and chosen["activation_checkpointing"] != "none"
