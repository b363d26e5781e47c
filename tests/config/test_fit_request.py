"""From a command line to what is asked of memory: the model, the layout, the settings, the device."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.cli.plan import plan_node
from launcher.config import fit_settings
from launcher.config.composed import resolve
from launcher.config.composition import compose
from launcher.config.fit_request import (
    count_plan_nodes,
    find_fit_model,
    is_bundled_program,
    make_fit_request,
)
from launcher.config.model_dimensions import read_dimensions
from launcher.config.search_path import find_shipped, find_sources
from launcher.errors import UsageError
from launcher.fit import choose_settings, framework_memory
from launcher.fit.fit_model import FitRequest
from launcher.programs import options, transformer
from tests.seam import run_inside

USER = ("train.py",)


def ask(*words: str, program: Sequence[str] = (), machine: str = "dgx_h100") -> FitRequest | None:
    """What `launch plan` asks of this command line."""
    composed = compose(find_sources(None, None, None), [f"machine={machine}", *words])
    config = resolve(composed)
    model = find_fit_model(config, program, composed.given)
    return make_fit_request(
        config,
        plan_node(config, {}),
        model,
        nodes=count_plan_nodes(config.nodes, {}),
        is_bundled=is_bundled_program(config, program),
        environ={},
    )


def must_ask(*words: str, program: Sequence[str] = (), machine: str = "dgx_h100") -> FitRequest:
    request = ask(*words, program=program, machine=machine)
    assert request is not None
    return request


def test_the_bundled_programs_options_are_the_settings() -> None:
    words = ("program.batch_size=4", "program.grad_accumulation=3", "program.seq_len=512")
    request = must_ask("model=llama7b", "nodes=4", *words, "program.activation_checkpointing=true")
    settings, layout = request.settings, request.layout
    assert (settings.micro_batch, settings.accumulation, settings.seq_len) == (4, 3, 512)
    assert (settings.checkpointing, settings.precision, settings.framework) == ("full", "mixed", "fsdp")
    assert (layout.dp, layout.zero, request.gpus_per_node, request.nodes) == (32, 3, 8, 4)
    assert request.is_bundled and settings.bundled and not settings.autocast
    assert (request.device.name, request.device.memory_mib) == ("NVIDIA H100 80GB HBM3", 81559)
    assert (request.node.cores, request.node.num_workers) == (112, 2)


def test_a_small_model_has_replicas_and_autocast() -> None:
    request = must_ask("model=gpt2")
    assert (request.settings.framework, request.layout.zero, request.settings.autocast) == ("ddp", 0, True)
    assert request.settings.seq_len == 1024


@pytest.mark.parametrize(("word", "framework"), [("ddp", "ddp"), ("fsdp", "fsdp"), ("auto", "fsdp")], ids=str)
def test_the_program_shards_as_it_is_told(word: str, framework: str) -> None:
    request = must_ask("model=llama7b", f"program.parallel={word}")
    assert request.settings.framework == framework
    assert request.layout.zero == (3 if framework == "fsdp" else 0)


def test_no_bf16_on_a_v100_and_on_cpus() -> None:
    assert must_ask("model=gpt2", machine="aws_p3_16xlarge").settings.precision == "fp32"
    user = must_ask("+model=gpt2", machine="aws_p3_16xlarge", program=USER)
    assert user.settings.precision == "mixed"  # by fp16
    request = must_ask("model=tiny", machine="cpu_2s")
    assert (request.settings.precision, request.device.kind) == ("fp32", "cpu")
    assert request.device.memory_mib == 512 * 1024 // request.gpus_per_node
    assert must_ask("model=gpt2", "program.dtype=fp32").settings.precision == "fp32"
    assert must_ask("model=gpt2", "program.device=cpu").device.kind == "cpu"


def test_a_gpu_by_name() -> None:
    request = must_ask("model=gpt2", "fit.gpu=A100-40GB", machine="cpu_2s")
    assert (request.device.kind, request.device.memory_mib) == ("gpu", 40960)
    assert must_ask("model=gpt2", "fit.gpu_memory_gib=24").device.memory_mib == 24 * 1024
    assert must_ask("model=gpt2", "fit.gpu=X9000", "fit.gpu_memory_gib=24").device.memory_mib == 24 * 1024
    with pytest.raises(UsageError, match=r"fit\.gpu=X9000 is no GPU that is known"):
        ask("model=gpt2", "fit.gpu=X9000")


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    request = must_ask("model=gpt2", "nproc_per_node=16", "dataloader.num_workers=0")
    assert request.device.memory_mib == 81559 // 2


def test_a_program_of_the_users_has_no_claim_without_a_model() -> None:
    assert ask(program=USER) is None
    assert ask("fit.micro_batch=4", "parallel.tp=2", program=USER) is None
    request = must_ask("+model=llama7b", "parallel.tp=2", "parallel.zero=1", program=USER)
    assert not request.is_bundled and not request.settings.bundled
    assert (request.layout.tp, request.layout.dp, request.settings.framework) == (2, 4, "megatron")
    assert ask("+model=llama7b", "fit.check=off", program=USER) is None


def test_what_the_bundled_program_does_not_do_is_a_question() -> None:
    assert not must_ask("model=llama7b", "fit.optimizer=adamw8bit").is_bundled
    assert not must_ask("model=llama7b", "parallel.tp=2").is_bundled
    assert not must_ask("model=llama7b", "fit.micro_batch=1").is_bundled
    words = ("program.batch_size=8", "program.parallel=fsdp", "program.activation_checkpointing=full")
    assert must_ask("model=llama7b", *words, "fit.micro_batch=8", "parallel.zero=fsdp").is_bundled


@pytest.mark.parametrize(
    ("words", "framework", "zero"),
    [
        ((), "ddp", 0),
        (("parallel.zero=1",), "zero", 1),
        (("parallel.zero=fsdp",), "fsdp", 3),
        (("parallel.framework=fsdp",), "fsdp", 3),
        (("parallel.framework=zero",), "zero", 1),
        (("parallel.pp=2",), "megatron", 0),
        (("parallel.tp=2", "parallel.zero=3"), "fsdp", 3),
    ],
    ids=str,
)
def test_frameworks(words: tuple[str, ...], framework: str, zero: int) -> None:
    request = must_ask("+model=llama7b", *words, program=USER)
    assert (request.settings.framework, request.layout.zero) == (framework, zero)


def test_a_global_batch_is_solved() -> None:
    request = must_ask("+model=llama7b", "fit.global_batch=128", "fit.micro_batch=4", program=USER)
    assert (request.settings.accumulation, request.layout.dp) == (4, 8)


@pytest.mark.usefixtures("here")
def test_a_device_that_is_not_known_has_no_claim() -> None:
    assert ask("model=gpt2", machine="aws_g5_48xlarge") is not None  # the table knows its memory
    text = json.loads((find_shipped() / "machine" / "dgx_h100.json").read_text())
    for gpu in text["gpus"]:
        gpu.update(name="A new one", memory_mib=0)
    Path("new.json").write_text(json.dumps(text))
    composed = compose(find_sources(None, None, None), ["machine.snapshot=new.json", "model=gpt2"])
    config = resolve(composed)
    model = find_fit_model(config, (), composed.given)
    made = plan_node(config, {})
    assert make_fit_request(config, made, model, nodes=1, is_bundled=False, environ={}) is None
    request = make_fit_request(config, made, model, nodes=1, is_bundled=True, environ={})
    assert request and not request.device.memory_mib
    assert request.settings.micro_batch * request.settings.accumulation * 8 == 512


@pytest.mark.parametrize(
    ("nodes", "environ", "count"),
    [
        ("auto", {}, 1),
        (4, {}, 4),
        ("2:8", {}, 2),
        ("auto", {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "3"}, 3),
        ("auto", {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "x"}, 1),
        ("auto", {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "3", "SLURM_STEP_ID": "0"}, 1),
    ],
    ids=str,
)
def test_nodes(nodes: object, environ: dict[str, str], count: int) -> None:
    assert count_plan_nodes(nodes, environ) == count


def test_the_programs_own_rule_and_defaults() -> None:
    assert fit_settings.MAX_DEFAULT_SEQ_LEN == options.MAX_DEFAULT_SEQ_LEN
    assert options.TrainConfig().batch_size == choose_settings.DEFAULT_BATCH
    assert framework_memory.CHUNK == transformer.CHUNK


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"layers": 2}, "model has no vocab_size, hidden_size"),
        ({"heads": 0}, "model.heads=0"),
        ({"heads": "many"}, "model.heads"),
        ({"layers": 10**12}, "at most"),
        ({"layers": 10**400}, "too large"),
        ({"layers": -1}, "model.layers"),
        ({"kv_heads": 5}, "not divisible"),
        ({"norm": "batchnorm"}, "rmsnorm, layernorm"),
        ({"bias": 1}, "model.bias"),
        ({"hidden_size": 2}, "model.head_width"),
        ({"experts": 8}, "model.experts"),
        ({"experts": {"count": 2, "per_token": 4, "intermediate_size": 8}}, "per_token=4"),
        ({"experts": {"count": 0, "per_token": 0, "intermediate_size": 8}}, "model.experts.count=0"),
    ],
    ids=str,
)
def test_dimensions_that_make_no_model(section: dict[str, object], text: str) -> None:
    usual = {"vocab_size": 256, "layers": 4, "hidden_size": 128, "heads": 4}
    rest = {"intermediate_size": 384, "max_seq_len": 128}
    whole = section if text.startswith("model has no") else {**usual, **rest, **section}
    with pytest.raises(UsageError, match=text.replace(".", r"\.")):
        read_dimensions(whole)


def test_a_section_without_dimensions_is_a_programs_own() -> None:
    assert read_dimensions({}) is None
    assert read_dimensions({"depth": 3}) is None


def test_a_config_json(here: Path) -> None:
    (here / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "vocab_size": 32000,
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "intermediate_size": 11008,
                "max_position_embeddings": 4096,
            }
        )
    )
    found = read_dimensions({"config": "config.json"})
    assert found is not None and (found.layers, found.kv_heads) == (32, 32)


def test_a_config_json_that_is_none(here: Path) -> None:
    (here / "empty.json").write_text("{}")
    (here / "binary.json").write_bytes(b"\xff\xfe\x00")
    (here / "folder.json").mkdir()
    with (here / "huge.json").open("wb") as file:
        file.truncate(1 << 30)
    for name in ("empty", "binary", "folder", "huge", "absent"):
        run_inside(["plan", f"model.config={name}.json", "--", "true"]).assert_error(
            2, f"model.config={name}.json"
        )
