"""`launch fit`, and what `launch plan` and a start say about memory."""

import contextlib
import csv
import io
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from launcher.config import training
from launcher.config.program import find_program
from launcher.fit.advice import Advice
from launcher.fit.choice import FitReport, assess
from launcher.fit.training import Learned
from launcher.report.fit import print_fit
from launcher.runs.records import fingerprint_ranks
from tests.benchmarks.fit import FEW, FitCase
from tests.cli.make_runs import read_manifest
from tests.data_files import DATA, read_data
from tests.fit.made_requests import REQUEST, change
from tests.fuzzing import Terminal, assert_harmless
from tests.runs.test_run_lookup import make_measured
from tests.seam import (
    QUICK_AGENT,
    Launch,
    compose_settings,
    list_loaded,
    run_inside,
    run_outside,
    start,
    wait_for,
)

QUESTIONS = read_data("fit_questions")
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
    """DataLoader, autocast, GradScaler, clipping, compile, a value in a condition, a checkpoint each step.

    A thousand tensors on `meta`, of 4 MiB each, take no memory.
    """
    found = fit_json(tmp_path, "fit.gpu=H100", str(PROGRAMS / "plain_loop.py"), "--compile")
    count = found["parameters"]
    assert count == 4 * (2 * 4 * 512 * 512 + 4 * 512 + 512 + 2 * 512) + 512 * 10 + 10 + 8 * 8 + 8
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
    QUESTIONS["programs"],
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


def test_a_program_that_fails_or_never_steps_or_is_interrupted_or_loads_no_hook(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit('no such data')\n")
    code, _, err = fit(tmp_path, "fails.py")
    assert code == 3 and "exit code 1" in err and "no such data" in err
    (tmp_path / "ends.py").write_text("print('done')\n")
    code, _, err = fit(tmp_path, "ends.py")
    assert code == 3 and "ended without a second step" in err
    (tmp_path / "waits.py").write_text("import time\nopen('began', 'w').close()\ntime.sleep(600)\n")
    code, _, err = fit(tmp_path, "--", sys.executable, "-I", "waits.py")  # loads no hook, and does not run
    assert code == 3 and "fake" in err and not (tmp_path / "began").exists()
    code, _, err = fit(tmp_path, "fit.timeout=1", "waits.py")
    assert code == 3 and "fit.timeout=1 s" in err
    (tmp_path / "began").unlink(missing_ok=True)
    with start(tmp_path, "fit", "nproc_per_node=1", "waits.py") as started:
        wait_for((tmp_path / "began").exists, "the program's start")
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 130
        assert not started.survivors()


# Under a limit: what is chosen runs where the fixed defaults are killed


LIMIT_MIB = 1450
MODEL = ("+model=tiny", "model.layers=24", "model.max_seq_len=512")
"""512 tokens of each sequence keep 0.2 GiB in fp32: 2.5 GiB of 12 sequences, 1.7 GiB of 8."""
RUN = (
    "nproc_per_node=1",
    "program.device=cpu",
    "program.steps=1",
    "program.eval_batches=0",
    "start.warm=off",
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
    chosen = read_manifest(tmp_path / "auto")["training"]
    assert chosen["batch_size"] == 8 and chosen["activation_checkpointing"] != "none"


H100 = "machine=dgx_h100"
SMALL = "fit.gpu=A100-40GB"
OTHER = ("--", "true")
TYPED = ("+model=llama7b", H100, "nodes=4")


def read_fit(launch: Launch, *words: str) -> dict[str, Any]:
    done = launch("plan", "format=json", *words)
    assert done.code == 0, done
    found = json.loads(done.out)
    assert set(found) == {"schema", "machine", "ranks", "warnings", "fit"}
    fit: dict[str, Any] = found["fit"]
    return fit


# What is chosen: `launch +model=NAME nodes=N` as it is typed


def test_each_first_command_fits_as_it_is_typed(launch: Launch) -> None:
    with (DATA / "first_commands.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 18
    for row in rows:
        fit = read_fit(launch, f"+model={row['model']}", f"machine={row['machine']}", f"nodes={row['nodes']}")
        assert fit["verdict"] == "fits", row
        settings, layout = fit["settings"], fit["layout"]
        names = ("micro_batch", "checkpointing", "framework", "accumulation")
        columns = ("batch_size", "activation_checkpointing", "parallel", "grad_accumulation")
        assert [str({**settings, **layout}[name]) for name in names] == [row[name] for name in columns], row
        if row["model"] != "tiny":  # the usual batch of each model, on any number of GPUs
            tokens = 1 << 19 if row["model"] == "gpt2" else 1 << 22
            sequences = settings["micro_batch"] * settings["accumulation"] * layout["dp"]
            assert sequences * settings["seq_len"] == tokens, row


def test_the_choice_does_not_depend_on_the_check(launch: Launch) -> None:
    base = ("+model=llama7b", "nproc_per_node=8", "dry_run=true")
    for words, batch, accumulation in (
        (("fit.gpu=H100", "fit.check=off"), 2, 64),
        ((SMALL, "fit.check=off"), 8, 16),
        (("fit.gpu=H100", "fit.check=off", "program.global_batch=64"), 2, 4),
        (("fit.gpu=H100", "fit.micro_batch=1"), 2, 64),
    ):
        chosen = {f"--batch-size={batch}", f"--grad-accumulation={accumulation}", "--parallel=fsdp"}
        for verb in ((), ("fit", "program=train")):
            done = launch(*verb, *base, *words)
            assert done.code == 0 and chosen <= set(done.out.split()), (words, done)
            assert done.err.count("chosen: program.batch_size=") == 1
    trial = launch("tune", "batch", *base, "fit.gpu=H100")  # it chooses the rest for its own batch
    command = shlex.split(trial.out.splitlines()[-1])
    chosen_by_it = launch(*command[1:], "dry_run=true").out.split()
    assert {"--batch-size=8", "--grad-accumulation=1", "--parallel=fsdp"} <= set(chosen_by_it)


@pytest.mark.slow
def test_a_run_has_the_values_and_goes_on_with_them(here: Path) -> None:
    def start(*words: str) -> str:
        done = run_outside([*words, "program.global_batch=6", "start.warm=off"], here)
        assert done.code == 0, done
        return done.out + done.err

    told = start("nproc_per_node=2", "program.steps=1", "new_run_dir=run")
    assert "chosen: program.batch_size=3 " in told
    assert "3 sequences x 128 x 2 ranks x 1 micro-steps" in told
    expected = {
        "batch_size": 3,
        "grad_accumulation": 1,
        "activation_checkpointing": "none",
        "parallel": "ddp",
    }
    manifest = read_manifest(here / "run")
    assert manifest["training"] == expected
    program = yaml.safe_load((here / "run/config.yaml").read_text())["program"]
    assert {key: program[key] for key in expected} == expected
    again = start("nproc_per_node=1", "program.steps=2", "run_dir=run")
    assert "program.batch_size" not in again.partition("other settings")[2].partition("\n")[0]
    assert "3 sequences x 128 x 1 ranks x 2 micro-steps" in again


# What is shown


def test_the_table_is_below_the_placement(launch: Launch) -> None:
    done = launch("plan", *TYPED)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    placement, fit = (
        next(at for at, line in enumerate(lines) if line.startswith(text)) for text in ("rank", "memory of")
    )
    assert placement < fit
    rows = ("weights", "optimizer states", "activations", "total", "capacity", "headroom", "CPU cores", "MFU")
    assert all(text in done.out for text in rows)


def test_what_a_plan_loads(here: Path) -> None:
    loaded = list_loaded(["plan", *TYPED], here)
    assert "launcher.fit.memory" in loaded
    assert not loaded & {"torch", "numpy", "launcher.programs.options"}
    loaded = list_loaded(["watch.enabled=false", "--", "true"], here)
    assert "launcher.runs.records" in loaded
    unasked = {name for name in loaded if name.startswith(("launcher.fit.", "launcher.preflight"))}
    assert unasked == {"launcher.fit.settings"}


def test_a_model_alone_is_answered_about_memory_alone(launch: Launch) -> None:
    done = launch("fit", *TYPED)
    assert done.code == 0 and done.out.startswith("memory of each GPU"), done
    assert "fits" in done.out.splitlines()[0] and "chosen: program.batch_size=2 " in done.out
    assert not [word for word in ("each node", "tokens/s", "NUMA", "rank  ") if word in done.out]
    memory: list[object] = []
    for words in ((), ("program.batch_size=1", "program.activation_checkpointing=full")):
        alone = json.loads(launch("fit", "format=json", *TYPED, *words).out)
        memory.append(read_fit(launch, *TYPED, *words)["memory"])
        assert (alone["memory"], alone["verdict"]) == (memory[-1], "fits")
    assert memory[0] != memory[1]
    done = launch("fit", "+model=llama70b", SMALL, "nproc_per_node=1")
    assert done.code == 3 and "does not fit" in done.out and "nodes=55" in done.out


def test_the_grid_marks_what_is_chosen(here: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = launch("plan", *TYPED, "fit.grid=true")
    lines = done.out.partition("* is what is judged")[2].splitlines()
    assert done.code == 0 and lines and max(map(len, lines[:9])) <= 80, done
    assert "tokens/s" in done.out
    report = read_fit(launch, *TYPED, "fit.grid=true")
    grid = report["grid"]
    (chosen,) = (cell for cell in grid if cell["is_chosen"])
    assert chosen["total"] == report["memory"]["total"]
    assert done.out.count(f"{chosen['total']['high'] / (1 << 30):.1f}*") == 1
    too_much = [cell["total"]["high"] for cell in grid if cell["total"]["high"] > report["capacity"]]
    assert too_much and all(f"({size / (1 << 30):.1f})" in done.out for size in too_much)
    keys = ("micro_batch", "checkpointing", "framework")
    assert [chosen[key] for key in keys] == [{**report["settings"], **report["layout"]}[key] for key in keys]
    assert len({tuple(cell[key] for key in keys) for cell in grid}) == len(grid) == 5 * 3 * 2
    sizes = {tuple(cell[key] for key in keys): cell["total"]["high"] for cell in grid}
    full, none = sizes[8, "full", "fsdp"], sizes[8, "none", "fsdp"]
    assert full < sizes[8, "selective", "fsdp"] < none and full < sizes[8, "full", "ddp"]


def test_a_measured_run_corrects_the_estimate(launch: Launch, here: Path) -> None:
    words = ["+model=llama7b", H100, "program.activation_checkpointing=full", "program.parallel=fsdp"]
    words += ["program.grad_accumulation=1", "program.batch_size=1"]
    before = read_fit(launch, *words)
    expected = before["memory"]["reserved"]["expected"]
    config = compose_settings(*words)
    fingerprint = fingerprint_ranks(find_program(None, config, {}), "gpu", 8)
    make_measured(here / "runs", 1, expected=expected, reserved=int(1.2 * expected), fingerprint=fingerprint)
    after = read_fit(launch, *words, "program.steps=7")
    assert abs(after["memory"]["reserved"]["expected"] / expected - 1.2) < 0.01
    assert "1 run" in after["learned"] and not before["learned"]
    assert not read_fit(launch, *words[:-1], "program.batch_size=2")["learned"]


# What does not fit


@pytest.mark.parametrize("line", QUESTIONS["too_large"])
def test_the_changes_that_are_shown_can_be_typed_and_fit(launch: Launch, line: str) -> None:
    """Of the bundled program they are its options, of another they describe it."""
    words = line.split()
    fit = read_fit(launch, *words)
    changes = [change["settings"] for change in fit["changes"]]
    assert fit["verdict"] == "does_not_fit" and changes
    for settings in changes:
        if "--" not in words:
            assert not [each for each in settings if not each.startswith(("program.", "nodes="))]
        given = {each.partition("=")[0] for each in settings}
        kept = [word for word in words if word.partition("=")[0] not in given]
        fit = read_fit(launch, *settings, *kept)
        assert fit["verdict"] == "fits", (settings, fit)


def test_what_cannot_fit_says_how_many_nodes_can(launch: Launch) -> None:
    done = launch("+model=llama70b", "cluster=local", SMALL, "nproc_per_node=1")
    done.assert_error(3, "llama70b does not fit", "nodes=")
    nodes = int(done.err.partition("nodes=")[2].split()[0])
    words = ("+model=llama70b", SMALL, "nproc_per_node=1", "machine=cpu_2s")
    assert read_fit(launch, *words, f"nodes={nodes}")["verdict"] == "fits"
    assert read_fit(launch, *words, f"nodes={nodes - 1}")["verdict"] != "fits"


def test_another_program_is_not_refused(here: Path) -> None:
    words = ["+model=llama7b", SMALL, "watch.enabled=false", "nproc_per_node=1", "--", "true"]
    done = run_outside(words, here, env={"PYTHONPATH": QUICK_AGENT})
    assert done.code == 0 and "llama7b does not fit" in done.err, done
    assert "model=llama7b says what the job needs of memory" in done.err


def test_a_mistake_of_the_estimate_is_a_warning(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by us")

    monkeypatch.setattr(training, "assess", fail)
    done = launch("+model=gpt2", "dry_run=true")
    assert done.code == 0 and "no estimate of memory: ZeroDivisionError: by us" in done.err
    assert "what is auto is the program's own default" in " ".join(done.err.split())


CHOICES = QUESTIONS["choices"] | dict.fromkeys(QUESTIONS["keys_of_numbers"], QUESTIONS["numbers"])
words = st.sampled_from(sorted(CHOICES)).flatmap(
    lambda key: st.sampled_from(CHOICES[key]).map(lambda value: f"{key}={value}")
)


@given(words=st.lists(words, max_size=5), program=st.sampled_from([(), OTHER]))
def test_no_value_makes_a_traceback_or_negative_memory(words: list[str], program: tuple[str, ...]) -> None:
    done = run_inside(["plan", H100, "+model=gpt2", "format=json", *words, *program])
    assert done.code in (0, 2) and len(done.err) < 1500 and "Traceback" not in done.err, done
    report = json.loads(done.out).get("fit") if done.code == 0 else None
    if report:
        ranges = [*report["memory"]["parts"], *(change["total"] for change in report["changes"])]
        assert all(0 <= one["low"] <= one["expected"] <= one["high"] for one in ranges)
        total = report["memory"]["total"]
        assert 0 < total["low"] <= total["expected"] <= total["high"]
        assert all(line["needed"] >= 0 for line in report["budget"])


# The table of a report at several widths, without colours and block characters


SMALL_NODE = change(REQUEST, {"tokens": 1e12, "node": {"memory_kib": 256 << 20}})
REPORT = assess(SMALL_NODE, Learned(0.97, 0.01, 1, "tiny/1"))


def show(report: FitReport, width: int, *, terminal: bool = False) -> str:
    stream = Terminal() if terminal else io.StringIO()
    console = Console(file=stream, width=width, force_terminal=terminal, highlight=False)
    print_fit(console, report)
    return "\n".join(line.rstrip() for line in stream.getvalue().split("\n"))


def test_a_report_in_a_pipe() -> None:
    lines = show(REPORT, 160).splitlines()
    starts = ["memory of each GPU", "llama7b, 6,738,415,616 parameters", "GiB", "weights", "total"]
    starts += ["capacity", "headroom", "it fits with one of these:", "each node", "CPU memory", "expected"]
    at = [next(n for n, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert at == sorted(at) and f"{REPORT.estimate.total.low / (1 << 30):.1f} GiB at least" in lines[0]
    assert all(f"  {' '.join(change.settings)} (at most " in "\n".join(lines) for change in REPORT.changes)


def test_nothing_is_wider_than_the_terminal() -> None:
    for width in (20, 34, 43, 44, 60, 71, 72, 80, 120, 250):
        shown = show(REPORT, width, terminal=True)
        assert_harmless(shown)
        plain = re.sub(r"\x1b\[[^m]*m", "", shown)
        assert max(cell_len(line) for line in plain.splitlines()) <= width
        joined = " ".join(plain.split())
        assert "does not fit" in joined and REPORT.changes[0].settings[0] in joined
        has_range = ["GiB", "low", "expected", "high"] in [line.split() for line in plain.splitlines()]
        assert has_range is (width >= 44)
        assert ("sharded: nothing" in plain.partition("GiB  ")[2]) is (width >= 72)
        assert "CPU memory " in joined or width < 44


def test_texts_of_others_are_harmless() -> None:
    hostile = "\x1b[2J\x9b31m[bold]\u202e\n"
    names = {"model": replace(REQUEST.model, name=hostile), "device": replace(REQUEST.device, name=hostile)}
    parts = (replace(REPORT.estimate.parts[0], note=hostile),)
    report = replace(
        REPORT,
        request=replace(REQUEST, **names),  # type: ignore[arg-type]  # fields by name
        estimate=replace(REPORT.estimate, parts=parts),
        advice=(Advice("note", hostile, hostile),),
        learned=hostile,
    )
    for width in (30, 80):
        shown = show(report, width, terminal=True)
        assert_harmless(shown)
        assert "[bold]" in shown.replace("\n", "")
