"""Training on a GPU: memory and speed as predicted and as measured, watch, loaders, and the allocator."""

import json
import re
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from launcher.plan.variables import KEYS, find_fault
from tests.gpu.proof import PROGRAMS, Proof, together
from tests.plan.test_variables import CORE, LAX, RIGHT, WRONG
from tests.programs.start_program import STEP

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
GIB = 2**30
MEMORY = re.compile(r"memory  ([\d.]+) GiB allocated, ([\d.]+) reserved at most, ([\d.]+) of ([\d.]+) in use")
SHORT = ("program.log_every=2", "program.eval_batches=0", "program.checkpoint_dir=null")
SIZES = {"gpt2": (16, 1024), "llama1b": (4, 2048)}
"""Sequences in a micro-step, and their length, if they are not chosen: for GPUs of 80 GB or more."""


@pytest.mark.parametrize("model", ["gpt2", "llama1b"])
@pytest.mark.parametrize("chosen", [True, False], ids=["auto", "fixed"])
def test_memory_and_speed_are_as_predicted(proof: Proof, model: str, chosen: bool) -> None:
    if proof.cpu and model != "gpt2":
        proof.need_gpu()
    steps, name = (12, "tiny") if proof.cpu else (24, model)
    batch, seq_len = (4, 64) if proof.cpu else SIZES[model]
    asked = [] if chosen and not proof.cpu else [f"fit.micro_batch={batch}", f"fit.seq_len={seq_len}"]
    told = proof.verb("fit", "fit", f"+model={name}", "nproc_per_node=1", *asked, "format=json")
    fit: dict[str, Any] = json.loads(told.out)
    used = fit["settings"]
    words = ["program.grad_accumulation=1", *SHORT, f"program.steps={steps}"]
    if asked:
        words += [f"program.batch_size={batch}", f"program.seq_len={seq_len}"]
        words += ["program.activation_checkpointing=none"]
    ended = proof.start("train", f"+model={name}", *words, limit=130)
    said = ended.read_rank()
    (batches,) = re.findall(r"^batch +.*: (\d+) sequences x (\d+) x", said, re.MULTILINE)
    assert (int(batches[0]), int(batches[1])) == (used["micro_batch"], used["seq_len"]), (
        "fit plans another run"
    )
    lines = [found for found in map(STEP.fullmatch, said.splitlines()) if found]
    assert int(lines[-1][1]) == steps
    assert float(lines[-1][3]) < float(lines[0][3])
    # The first lines have the start in them: kernels are loaded, the allocator grows.
    late = [found for found in lines if int(found[1]) > steps // 2]
    tokens = statistics.median(float(found[5]) for found in late)
    predicted, speed = fit["memory"], fit["speed"]
    row: dict[str, object] = {"model": name, "batch": " x ".join(batches), "auto": not asked}
    row |= {"checkpointing": used["checkpointing"], "verdict": fit["verdict"], "tokens/s": tokens}
    if speed and speed["step_seconds"]:
        fast, slow = (speed["tokens_per_step"] / seconds for seconds in speed["step_seconds"])
        row |= {"tokens/s predicted": f"{slow:.0f} to {fast:.0f}", "TFLOPS": late[-1][6], "MFU": late[-1][7]}
    for kind in ("allocated", "reserved"):
        low, expected, high = (predicted[kind][end] / GIB for end in ("low", "expected", "high"))
        row[f"{kind} predicted, GiB"] = f"{low:.2f} to {high:.2f}, expected {expected:.2f}"
    if proof.cpu:
        row["resident, GiB"] = json.loads((ended.run / "rank-0.memory.json").read_text())["resident"] / GIB
        proof.record("Training", row)
        return
    found = MEMORY.search(said)
    assert found, said[-500:]
    allocated, reserved, in_use, _ = map(float, found.groups())
    row |= {"allocated, GiB": allocated, "reserved, GiB": reserved, "in use, GiB": in_use}
    proof.record("Training", row)
    (report,) = ended.run.glob("watch/node-*.json")
    gpu = json.loads(report.read_text())["ranks"][0]["gpu"]
    proof.record("The watch's last sample", {"model": name, **(gpu or {})})
    assert 0 < float(late[-1][7]) < 100
    assert gpu is not None, "the watch has no sample of the GPU"
    assert allocated <= 1.02 * predicted["allocated"]["high"] / GIB
    assert fit["verdict"] != "fits" or in_use <= fit["capacity"] / GIB


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_compiled_and_checkpointed_it_learns(proof: Proof, parallel: str) -> None:
    if parallel == "fsdp":
        proof.need_gpu()
    options = {"parallel": parallel, "activation_checkpointing": "selective", "compile": not proof.cpu}
    options |= {"batch_size": 4, "seq_len": 64, "steps": 40, "grad_accumulation": 1}
    words = [f"program.{name}={str(value).lower()}" for name, value in options.items()]
    said = proof.start("train", "+model=tiny", *words, *SHORT, limit=130).read_rank()
    assert proof.cpu or "cuda:0" in said
    losses = [float(found[3]) for found in map(STEP.fullmatch, said.splitlines()) if found]
    assert losses[-1] < losses[0] - 0.3


def test_tuned_workers_make_it_faster_and_a_run_takes_them(proof: Proof) -> None:
    size = ("tune.max_workers=2", "tune.steps=10") if proof.cpu else ("tune.max_workers=6", "tune.steps=24")
    words = ("tune", "dataloader", "nproc_per_node=1", *size, "tune.timeout=60", "format=json")
    found = json.loads(proof.verb("tune", *words, "--", PROGRAMS, "load", "9999", limit=100).out)
    trials = {trial["value"]: trial for trial in found["trials"]}
    names = ("value", "rate", "wait", "steps", "reason")
    for _, trial in sorted(trials.items()):
        proof.record("Loading with pinned memory", {name: trial[name] for name in names})
    assert [trial["reason"] for trial in trials.values() if trial["reason"]] == []
    assert found["complete"] is True
    chosen = found["num_workers"]
    assert chosen and trials[chosen]["rate"] > trials[0]["rate"]
    tuned = proof.program("tune", "load", "20", settings=["dataloader=tuned"])
    assert f"workers {chosen}," in "".join(
        line for line in tuned.err.splitlines() if "launch-rank: rank 0" in line
    )


# The CUDA allocator: its settings against the table of them

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Torch reads the first that is set."""
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
KNOWN = {name: kind for name, (kind, since) in KEYS.items() if since <= VERSION}
"""Settings that this torch knows, with the kinds of their values."""
RUNTIME = ("backend",)
"""Settings that cannot be changed once torch is imported."""


def test_torchs_parser_takes_and_refuses_what_the_table_does(proof: Proof) -> None:
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is None:
        pytest.skip(f"torch {torch.__version__} has no function for it")

    def accepts(text: str) -> bool:
        try:
            set_settings(text)
        except (ValueError, RuntimeError, IndexError):
            return False
        finally:
            set_settings("large_segment_size_mb:20")  # other settings depend on it
        return True

    tried, differ = 0, []
    for name, kind in KNOWN.items():
        if name in RUNTIME or not (torch.version.cuda or name in CORE):
            continue
        for value in filter(str.strip, (*RIGHT[kind], *WRONG[kind])):
            tried += 1
            taken, ours = accepts(f"{name}:{value}"), not find_fault(name, value)
            differ += [(name, value, taken)] * (taken != ours and not (taken and value in LAX))
    proof.record("Allocator", {"what": "values that torch's parser was asked", "number": tried})
    assert tried > 30 and differ == []
    assert not torch.version.cuda or not accepts("no_such_key:1")


def test_cudas_first_use_takes_and_refuses_what_the_table_does(proof: Proof) -> None:
    proof.need_gpu()

    def use(attempt: tuple[str, dict[str, str], bool | None]) -> tuple[str, bool | None, bool, str]:
        name, environ, expected = attempt
        ended = proof.run(name, [sys.executable, PROGRAMS, "first_use"], None, 60, environ)
        return name, expected, ended.code == 0, (ended.err.strip() or ended.out.strip()).splitlines()[-1]

    found = together(use, [*list_settings(), *list_variables()])
    for name, expected, taken, said in found:
        if expected is None or not taken:
            proof.record("Settings at CUDA's first use", {"setting": name, "taken": taken, "torch": said})
    assert [one for one in found if one[1] is not None and one[1] != one[2]] == []


def list_settings() -> Iterator[tuple[str, dict[str, str], bool | None]]:
    """For each setting a right value and a wrong one, and names that this torch does not know."""
    variable = ALLOCATOR_VARIABLES[0]
    for name, kind in KNOWN.items():
        # A share of 0 leaves no memory to use.
        first = RIGHT[kind][-1:] if kind == "share" else RIGHT[kind][:1]
        for value in RIGHT[kind] if name in RUNTIME else first:
            yield f"{name}:{value}", {variable: f"{name}:{value}"}, True
        wrong = next(value for value in WRONG[kind] if value.strip() == value != "" and value not in LAX)
        yield f"{name}:{wrong}", {variable: f"{name}:{wrong}"}, False
    for name in ("no_such_key", *(key for key in KEYS if key not in KNOWN)):
        yield f"{name}, unknown to this torch", {variable: f"{name}:1"}, False


def list_variables() -> Iterator[tuple[str, dict[str, str], bool | None]]:
    """Which variables torch reads: a wrong setting in one that is not read does nothing."""
    first, second, third = ALLOCATOR_VARIABLES[:3]
    wrong, right = "no_such_key:1", "expandable_segments:True"
    both = "expandable_segments:True,max_split_size_mb:512,roundup_power2_divisions:[256:1,512:2,>:8]"
    yield "several together", {first: both, third: both}, True
    yield f"{third} is read", {third: wrong}, VERSION < (2, 10)
    yield f"{first} comes before {third}", {first: right, third: wrong}, True
    yield f"{second} is read", {second: wrong}, None
