"""Training on a GPU: memory and speed as predicted and as measured, watch, loaders, and the allocator."""

import json
import re
import statistics
import sys
from typing import Any

import pytest
import torch

from launcher.plan.variables import KEYS
from tests.gpu.proof import PROGRAMS, Proof, together
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
BOTH = "expandable_segments:True,max_split_size_mb:512,roundup_power2_divisions:[256:1,512:2,>:8]"


def test_cudas_first_use_knows_the_settings_that_the_table_has(proof: Proof) -> None:
    """A known key with a wrong value is refused for its value, an unknown one for its name."""
    proof.need_gpu()
    first, second, third = ALLOCATOR_VARIABLES
    wrong, right = "no_such_key:1", "expandable_segments:True"
    tries: list[tuple[dict[str, str], bool | None]] = [
        ({first: f"{name}:1"}, None if since <= VERSION else False) for name, since in KEYS.items()
    ]
    tries += [
        ({first: wrong}, False),
        ({first: BOTH, third: BOTH}, True),
        ({third: wrong}, VERSION < (2, 10)),
    ]
    tries += [({first: right, third: wrong}, True), ({second: wrong}, None)]

    def use(attempt: tuple[dict[str, str], bool | None]) -> tuple[dict[str, str], bool | None, bool, str]:
        environ, expected = attempt
        name = " ".join(f"{key}={value}" for key, value in environ.items()).replace("/", "-")
        ended = proof.run(name, [sys.executable, PROGRAMS, "first_use"], None, 60, environ)
        return environ, expected, ended.code == 0, (ended.err.strip() or ended.out.strip()).splitlines()[-1]

    found = together(use, tries)
    for environ, expected, taken, said in found:
        if expected is None or not taken:
            proof.record("Settings at CUDA's first use", {"setting": environ, "taken": taken, "torch": said})
        assert taken == expected or expected is None, (environ, said)
        assert "nrecognized" not in said or expected is not None, (environ, said)
