"""`launch plan` and `fit.check`: what is shown of memory, what is refused at a start, and what never is."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.plan import plan_node
from launcher.config import fit_check
from launcher.config.composed import resolve
from launcher.config.composition import compose
from launcher.config.fit_request import find_fit_model, make_fit_request
from launcher.config.fit_validation import check_fit_settings
from launcher.config.schema import FitConfig, LaunchConfig, ParallelConfig
from launcher.config.search_path import find_sources
from launcher.errors import UsageError
from launcher.fit.fit_decision import assess
from launcher.plan.model import Plan
from tests.fuzzing import scalars
from tests.seam import Launch, clean_environ, list_loaded, run_outside
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


def test_json_has_the_key_if_there_is_a_claim(launch: Launch) -> None:
    fit = read_fit(launch, "+model=gpt2", H100)
    assert fit is not None and fit["verdict"] == "fits"
    assert fit["layout"]["world_size"] == 8  # type: ignore[index]
    assert read_fit(launch, "+model=gpt2", H100, "fit.check=off") is None
    assert read_fit(launch, H100, "--", "true") is None
    assert read_fit(launch, "+model=gpt2", H100, "--", "true") is not None


def test_a_plan_loads_no_torch(tmp_path: Path) -> None:
    words = ["plan", "+model=llama7b", "nodes=4", H100]
    loaded = list_loaded(words, tmp_path)
    assert "launcher.fit.memory_estimate" in loaded
    assert not loaded & {"torch", "numpy", "launcher.programs"}


def test_a_program_without_a_model_loads_no_estimate(tmp_path: Path) -> None:
    words = ["watch.enabled=false", "--", "true"]
    loaded = list_loaded(words, tmp_path)
    assert "launcher.runs.memory_prediction" in loaded
    assert not [name for name in loaded if name.startswith(("launcher.fit.", "launcher.preflight"))]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("parallel.tp=3",), "tp 3 * dp 2 is 6 GPUs"),
        (("parallel.tp=64", "nodes=64"), "parallel.tp=64"),
        (("parallel.dp=3",), "set parallel.dp=8"),
        (("parallel.framework=ddp", "parallel.zero=2"), "parallel.framework=ddp"),
        (("fit.global_batch=100", "fit.micro_batch=3"), "fit.global_batch=100"),
        (("parallel.pp=33", "nodes=33"), "parallel.pp"),
        (("model.heads=7",), "model.heads=7"),
    ],
    ids=str,
)
def test_what_no_job_can_be(launch: Launch, words: tuple[str, ...], text: str) -> None:
    launch("plan", "+model=llama7b", H100, *words, "--", "true").assert_error(2, text)


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


def test_a_job_that_cannot_fit_is_refused(launch: Launch, here: Path) -> None:
    done = launch("+model=llama7b", SMALL, "program.parallel=ddp")
    done.assert_error(3, "llama7b does not fit", "A100-40GB", "GiB", "program.", "fit.check=warn")
    assert not list(here.iterdir())


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


@pytest.fixture(scope="module")
def node() -> tuple[LaunchConfig, Plan]:
    config = resolve(compose(find_sources(None, None, None), [H100, "model=gpt2"]))
    return config, plan_node(config, {})


fits = st.fixed_dictionaries(
    {},
    optional={
        "micro_batch": scalars,
        "accumulation": scalars,
        "seq_len": scalars,
        "global_batch": st.none() | st.integers(),
        "precision": st.sampled_from(["auto", "fp32", "bf16", "mixed", "fp8", "x"]),
        "optimizer": st.sampled_from(["adamw", "adamw8bit", "adafactor", "lion", "sgd", "muon"]),
        "checkpointing": st.sampled_from(["auto", "none", "selective", "full"]),
        "offload": st.sampled_from(["none", "optimizer", "parameters"]),
        "gpu_memory_gib": st.none() | st.floats(),
        "tokens": st.none() | st.floats(),
        "step_seconds": st.none() | st.floats(),
        "flash_attention": st.booleans(),
    },
)
sizes = st.integers(-1, 16) | st.sampled_from([32, 64, 10**6, 10**400])
layouts = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("tp", "pp", "cp", "ep", "virtual_stages"), sizes),
        "dp": st.just("auto") | scalars | sizes,
        "zero": st.just("auto") | st.sampled_from([0, 1, 2, 3, "fsdp"]) | scalars,
        "framework": st.sampled_from(["auto", "ddp", "fsdp", "zero", "megatron", "x"]),
        "shard_size": st.none() | sizes,
        "sequence_parallel": st.booleans(),
    },
)
models = st.sampled_from(
    [
        {},
        {"layers": 10**9, "hidden_size": 10**9},
        {"heads": 3, "kv_heads": 3, "head_dim": 1},
        {"vocab_size": 1},
        {"experts": {"count": 8, "per_token": 2, "intermediate_size": 64}},
    ]
)


@given(
    fit=fits,
    parallel=layouts,
    model=models,
    job=st.tuples(st.sampled_from([1, 2, 7, 64, 10**6]), st.booleans()),
)
def test_no_value_makes_a_traceback_or_negative_memory(
    node: tuple[LaunchConfig, Plan],
    fit: dict[str, object],
    parallel: dict[str, object],
    model: dict[str, object],
    job: tuple[int, bool],
) -> None:
    config, plan = node
    nodes, bundled = job
    changed = replace(
        config,
        fit=FitConfig(**fit),  # type: ignore[arg-type]
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
        model={**config.model, **model},
    )
    try:
        check_fit_settings(changed)
        found = find_fit_model(changed, () if bundled else ("train.py",), ("model",))
        request = make_fit_request(changed, plan, found, nodes=nodes, is_bundled=bundled, environ={})
        report = assess(request) if request else None
    except UsageError as error:
        assert len(str(error)) < 1000
        return
    if report is None:
        return
    ranges = [part.bytes for part in report.estimate.parts] + [change.total for change in report.changes]
    assert all(0 <= one.low <= one.expected <= one.high for one in ranges)
    total = report.estimate.total
    assert 0 < total.low <= total.expected <= total.high
    assert all(line.needed >= 0 for line in report.budget)
