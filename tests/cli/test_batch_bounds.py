"""Where a search for a micro-batch begins: by the estimate of the model's memory on GPUs alone."""

from dataclasses import replace

from launcher.cli.batch_bounds import expect_batch
from launcher.config.program import BUNDLED
from launcher.config.settings import FitConfig, Settings, TuneConfig
from launcher.plan.model import Plan, Request
from launcher.plan.planner import plan
from tests.plan.lab_machines import convert, load

TINY = {
    "name": "tiny",
    "vocab_size": 256,
    "layers": 4,
    "hidden_size": 128,
    "heads": 4,
    "kv_heads": 2,
    "intermediate_size": 384,
    "max_seq_len": 128,
}
PROGRAM = {"command": list(BUNDLED), "sections": ["model", "data"], "batch_size": 8, "seq_len": None}


def plan_gpus(memory_mib: int) -> Plan:
    """A plan of eight ranks on GPUs with so much memory."""
    machine = convert(load("dgx-a100"))
    gpus = tuple(replace(gpu, memory_mib=memory_mib) for gpu in machine.gpus)
    return plan(replace(machine, gpus=gpus), Request(nproc_per_node=8))


def expect(memory_mib: int, config: Settings, *, program: tuple[str, ...] | None = None) -> int | None:
    return expect_batch(config, plan_gpus(memory_mib), program, frozenset(), {})


def test_a_gpu_is_expected_to_be_filled() -> None:
    config = Settings(model=dict(TINY), program=dict(PROGRAM), tune=TuneConfig(max_batch=1 << 20))
    small, large = expect(8 << 10, config), expect(64 << 10, config)
    assert small is not None and large is not None
    assert 64 <= small < large
    assert large & (large - 1) == 0
    assert expect(64 << 10, replace(config, tune=TuneConfig(max_batch=100))) == 64


def test_without_a_claim_nothing_is_expected() -> None:
    config = Settings(model=dict(TINY), program=dict(PROGRAM))
    assert expect(64 << 10, replace(config, fit=FitConfig(check="off"))) is None
    assert expect(64 << 10, config, program=("train.py",)) is None
    assert expect(64 << 10, replace(config, fit=FitConfig(gpu="abacus"))) is None
    machine = replace(convert(load("dgx-a100")), gpus=())
    on_cpus = plan(machine, Request(nproc_per_node=2))
    assert expect_batch(config, on_cpus, None, frozenset(), {}) is None
