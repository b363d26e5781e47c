"""Values of `parallel` and `fit` that mean nothing are refused with what may be given."""

from collections.abc import Callable

import pytest

from tests.seam import Result


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("parallel.tp=0", "at least 1"),
        ("parallel.pp=-1", "at least 1"),
        ("parallel.cp=99999999999999999999999999", "at most 1000000"),
        ("parallel.tp=1.5", "Integer"),
        ("parallel.dp=nan", "or auto"),
        ("parallel.dp=true", "or auto"),
        ("parallel.zero=4", "choose from auto, fsdp, 0, 1, 2, 3"),
        ("parallel.zero=true", "choose from auto"),
        ("parallel.framework=horovod", "ddp, fsdp, zero, megatron"),
        ("parallel.shard_size=0", "at least 1"),
        ("parallel.virtual_stages=2", "parallel.pp=1"),
        ("fit.check=maybe", "error, warn, off"),
        ("fit.precision=fp4", "fp32, bf16, mixed, fp8"),
        ("fit.optimizer=adam", "adamw8bit"),
        ("fit.micro_batch=0", "or auto"),
        ("fit.accumulation=-2", "or auto"),
        ("fit.seq_len=1e400", "or auto"),
        ("fit.global_batch=0", "at least 1"),
        ("fit.tokens=nan", "above 0"),
        ("fit.tokens=-1", "above 0"),
        ("fit.tokens=1e300", "at most 1e+20"),
        ("fit.step_seconds=0", "above 0"),
        ("fit.gpu_memory_gib=inf", "above 0"),
        ("fit.gpu=", "fit.gpu is empty"),
        ("fit.lora.rank=0", "at least 1"),
        ("fit.lora.targets=[query]", "q_proj"),
        ("fit.lora.targets=[q_proj]", "fit.lora.rank=8"),
        ("fit.quantization=nf4", "fit.lora.rank=8"),
        ("fit.quantization=fp4", "nf4, int8"),
        ("fit.recompute_modules=[mlp]", "fit.checkpointing=selective"),
        ("fit.recompute_modules=[norm]", "core_attn"),
        ("fit.adapter=8", "launch fit -- PROGRAM"),
    ],
)
def test_a_value_that_means_nothing(launch: Callable[..., Result], word: str, fix: str) -> None:
    launch("plan", word).assert_error(2, word.partition("=")[0], fix)
    launch(word, "--", "true").assert_error(2, word.partition("=")[0], fix)


def test_gradients_that_are_freed_are_not_accumulated(launch: Callable[..., Result]) -> None:
    words = ("+model=gpt2", "fit.gpu=H100", "fit.optimizer_in_backward=true", "fit.accumulation=4")
    launch("plan", *words, "--", "true").assert_error(2, "fit.accumulation=4", "fit.accumulation=1")


def test_parameters_of_replicas_are_not_offloaded(launch: Callable[..., Result]) -> None:
    words = ("fit.offload=parameters", "parallel.zero=1")
    launch("plan", *words).assert_error(2, "parallel.zero=1", "parallel.zero=3")
