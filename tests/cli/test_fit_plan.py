"""`launch plan` and `fit.check`: what is shown of memory, what is refused at a start, and what never is."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import fit_check
from tests.seam import Launch, clean_environ, list_loaded, run_inside, run_outside
from tests.specify import specify

H100 = "machine=dgx_h100"
A100 = "machine=dgx_a100"
SMALL = "fit.gpu=A100-40GB"


def read_fit(launch: Launch, *words: str) -> dict[str, object] | None:
    done = launch("plan", "format=json", *words)
    assert done.code == 0, done
    found = json.loads(done.out)
    assert set(found) - {"fit"} == {"schema", "machine", "ranks", "warnings"}
    fit: dict[str, object] | None = found.get("fit")
    return fit


def test_the_table_is_below_the_placement(launch: Launch) -> None:
    done = launch("plan", "+model=llama7b", "nodes=4", H100)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    placement, fit = (
        next(at for at, line in enumerate(lines) if line.startswith(text)) for text in ("rank", "memory of")
    )
    assert placement < fit
    for text in (
        "weights",
        "optimizer states",
        "activations",
        "total",
        "capacity",
        "headroom",
        "CPU cores",
        "MFU",
    ):
        assert text in done.out


def test_a_plan_loads_no_torch(tmp_path: Path) -> None:
    words = ["plan", "+model=llama7b", "nodes=4", H100]
    loaded = list_loaded(words, tmp_path)
    assert "launcher.fit.memory" in loaded
    assert not loaded & {"torch", "numpy", "launcher.programs.options"}


def test_a_program_without_a_model_loads_no_estimate(tmp_path: Path) -> None:
    words = ["watch.enabled=false", "--", "true"]
    loaded = list_loaded(words, tmp_path)
    assert "launcher.runs.memory_records" in loaded
    assert not [name for name in loaded if name.startswith(("launcher.fit.", "launcher.preflight"))]


def list_changes(launch: Launch, *words: str) -> list[list[str]]:
    fit = read_fit(launch, *words)
    assert fit is not None and fit["verdict"] == "does_not_fit", fit
    return [change["settings"] for change in fit["changes"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "words",
    [
        ("+model=llama7b", A100, "program.batch_size=16", "program.activation_checkpointing=none"),
        ("+model=llama13b", A100, "nodes=2", "program.batch_size=8", "program.activation_checkpointing=none"),
        ("+model=llama7b", H100, "program.parallel=ddp"),
        ("+model=llama70b", H100),
        (
            "+model=gpt2",
            "machine=cpu_2s",
            "fit.gpu=T4",
            "nproc_per_node=4",
            "program.batch_size=64",
            "program.activation_checkpointing=none",
        ),
    ],
    ids=" ".join,
)
def test_the_bundled_programs_changes_can_be_typed_and_fit(launch: Launch, words: tuple[str, ...]) -> None:
    changes = list_changes(launch, *words)
    assert changes
    for settings in changes:
        assert not [each for each in settings if not each.startswith(("program.", "nodes="))]
        given = {each.partition("=")[0] for each in settings}
        kept = [word for word in words if word.partition("=")[0] not in given]
        fit = read_fit(launch, *kept, *settings)
        assert fit is not None and fit["verdict"] == "fits", (settings, fit)


@pytest.mark.parametrize(
    "words",
    [
        ("+model=llama7b", A100, "fit.micro_batch=8"),
        ("+model=llama13b", H100, "parallel.zero=1", "fit.global_batch=64", "fit.micro_batch=4"),
        ("+model=llama70b", H100, "nodes=2", "parallel.framework=fsdp", "parallel.dp=16"),
    ],
    ids=" ".join,
)
def test_another_programs_changes_describe_it_and_fit(launch: Launch, words: tuple[str, ...]) -> None:
    changes = list_changes(launch, *words, "--", "true")
    assert changes
    for settings in changes:
        given = {each.partition("=")[0] for each in settings}
        kept = [word for word in words if word.partition("=")[0] not in given]
        fit = read_fit(launch, *kept, *settings, "--", "true")
        assert fit is not None and fit["verdict"] == "fits", (settings, fit)


def test_a_dry_run_and_another_program_are_not_refused(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    done = launch("+model=llama7b", SMALL, "dry_run=true")
    assert done.code == 0 and "does not fit" in done.err
    done = launch("+model=llama7b", SMALL, "dry_run=true", "--", "true")
    assert done.code == 0
    assert "model=llama7b says what the job needs of memory" in done.err
    assert "does not fit" in done.err


def test_a_small_model_starts_without_a_word(launch: Launch) -> None:
    done = launch("+model=tiny", "dry_run=true", "nproc_per_node=1")
    assert done.code == 0 and not [line for line in done.err.splitlines() if "fit" in line]


def test_a_program_of_the_users_runs_whatever_the_estimate_says(here: Path) -> None:
    words = ["+model=llama7b", SMALL, "watch.enabled=false", "nproc_per_node=1", "--", "true"]
    done = run_outside(words, here, env={**clean_environ(), "PYTHONPATH": QUICK_AGENT})
    assert done.code == 0, done
    assert "llama7b does not fit" in done.err


QUICK_AGENT = str(Path(__file__).parents[1] / "launch" / "quick_agent")


def test_a_mistake_of_the_estimate_is_a_warning(
    here: Path, monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by us")

    monkeypatch.setattr(fit_check, "assess", fail)
    done = launch("+model=gpt2", "dry_run=true")
    assert done.code == 0 and "no estimate of memory (ZeroDivisionError: by us)" in done.err
    assert "what is auto is the program's own: 8 sequences" in " ".join(done.err.split())


def test_a_model_that_makes_no_sense_is_left_to_the_program(launch: Launch) -> None:
    assert launch("model.heads=7", "dry_run=true").code == 0
    launch("program.batch_size=0", "dry_run=true").assert_error(2, "program.batch_size=0", "at least 1")
    done = launch("model.config=absent.json", "dry_run=true", "--", "true")
    assert done.code == 0 and "no estimate of memory: model.config=absent.json cannot be read" in done.err
    launch("model.config=absent.json", "dry_run=true").assert_error(2, "launch plan", "train.py")


def test_the_content_of_a_config_json_goes_with_a_job(here: Path) -> None:
    fields = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
    (here / "config.json").write_text(
        json.dumps({"model_type": "llama", "intermediate_size": 128, "max_position_embeddings": 64, **fields})
    )
    (here / "train.py").touch()
    spec = specify(["model.config=config.json", "cluster=slurm", "dry_run=true"], ("train.py",))
    assert spec.fit_model is not None and spec.fit_model.layers == 2 and not spec.is_bundled
    from launcher.slurm.job_request import make_job_request, read_job_request, write_job_request

    request = make_job_request(spec, [])
    write_job_request(request, here)
    (here / "config.json").unlink()
    assert read_job_request(here, os.environ).fit_model == spec.fit_model


NUMBERS = [
    "0",
    "1",
    "2",
    "7",
    "64",
    "1000000",
    "-1",
    "1.5",
    "nan",
    "inf",
    "1e400",
    "true",
    "null",
    "auto",
    "x",
    "[1]",
]
CHOICES = {
    "fit.precision": ["auto", "fp32", "bf16", "mixed", "fp8", "x"],
    "fit.optimizer": ["adamw", "adamw8bit", "adafactor", "lion", "sgd", "muon"],
    "fit.checkpointing": ["auto", "none", "selective", "full"],
    "fit.offload": ["none", "optimizer", "parameters"],
    "fit.flash_attention": ["true", "false"],
    "parallel.zero": ["auto", "0", "1", "2", "3", "fsdp", "4"],
    "parallel.framework": ["auto", "ddp", "fsdp", "zero", "megatron", "x"],
    "parallel.sequence_parallel": ["true", "false"],
    "model.heads": ["3", "0", "12"],
    "model.layers": ["1000000000", "1"],
    "model.vocab_size": ["1", "50257"],
    "+model.experts": ["{count:8,per_token:2,intermediate_size:64}", "8"],
    "nodes": ["1", "2", "7", "64", "1000000"],
} | dict.fromkeys(
    (
        *(f"parallel.{name}" for name in ("tp", "pp", "cp", "ep", "dp", "virtual_stages", "shard_size")),
        *(f"fit.{name}" for name in ("micro_batch", "accumulation", "seq_len", "global_batch", "tokens")),
        *("fit.step_seconds", "fit.gpu_memory_gib"),
    ),
    NUMBERS,
)
words = st.sampled_from(sorted(CHOICES)).flatmap(
    lambda key: st.sampled_from(CHOICES[key]).map(lambda value: f"{key}={value}")
)


@given(words=st.lists(words, max_size=5), program=st.sampled_from([(), ("--", "true")]))
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
