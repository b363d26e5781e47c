"""What a search keeps to: workers that cores and memory have room for, batches that fill a GPU."""

from dataclasses import replace

import pytest

from launcher.cli.tune import find_max_workers
from launcher.cli.tune_batch import expect_batch
from launcher.config.program import BUNDLED
from launcher.config.settings import FitConfig, Settings, TuneConfig
from launcher.config.training import find_fit_model
from launcher.plan.model import DataloaderConfig, Limits, Plan, Request
from launcher.plan.planner import plan
from tests.plan.lab_machines import convert, load


def plan_eight(limits: Limits) -> Plan:
    """Eight ranks on a machine with 16 cores for each of them."""
    machine = replace(convert(load("dgx-a100")), limits=limits)
    return plan(machine, Request(nproc_per_node=8))


@pytest.mark.parametrize(
    ("limits", "most", "why"),
    [
        (Limits(), 32, "2 for each"),
        (Limits(cpus=24), 6, "2 for each"),
        (Limits(cpus=8), 4, "at least 4"),
        (Limits(memory_kib=256 << 20), 16, "256 GiB of memory"),
        (Limits(shm_kib=8 << 20), 5, "8.19e+03 MiB of /dev/shm"),
        (Limits(files=1024), 8, "1024 open files"),
        (Limits(files=64), 1, "64 open files"),
    ],
)
def test_cores_memory_and_descriptors_bound_a_search(limits: Limits, most: int, why: str) -> None:
    config = Settings(dataloader=DataloaderConfig(worker_gib=0.9, worker_shm_mib=102.4))
    found, reason = find_max_workers(config, plan_eight(limits))
    assert found == most
    assert why in reason


SETTINGS = Settings(
    model={
        **{"name": "tiny", "vocab_size": 256, "layers": 4, "hidden_size": 128, "heads": 4, "kv_heads": 2},
        **{"intermediate_size": 384, "max_seq_len": 128},
    },
    program={"command": list(BUNDLED), "sections": ["model", "data"], "batch_size": 8, "seq_len": None},
    tune=TuneConfig(max_batch=1 << 20),
)


def expect(
    memory_mib: int, config: Settings = SETTINGS, program: tuple[str, ...] | None = None
) -> int | None:
    """What is expected to fit eight ranks on GPUs with so much memory; without any on two CPUs."""
    machine = convert(load("dgx-a100"))
    gpus = tuple(replace(gpu, memory_mib=memory_mib) for gpu in machine.gpus if memory_mib)
    placed = plan(replace(machine, gpus=gpus), Request(nproc_per_node=8))
    model = find_fit_model(config, program, ())
    return expect_batch(config, placed, model, is_bundled=program is None, environ={})


def test_a_gpu_is_expected_to_be_filled() -> None:
    small, large = expect(8 << 10), expect(64 << 10)
    assert small and large and large & (large - 1) == 0
    assert small >= 64 and 6 * small < large <= 16 * small, "memory grows with the size"
    assert expect(64 << 10, replace(SETTINGS, tune=TuneConfig(max_batch=100))) == 64
    assert expect(64) == 1, "estimates can be off"


def test_without_a_claim_nothing_is_expected() -> None:
    assert expect(64 << 10, replace(SETTINGS, fit=FitConfig(check="off"))) is None
    assert expect(64 << 10, program=("train.py",)) is None
    assert expect(64 << 10, replace(SETTINGS, fit=FitConfig(gpu="abacus"))) is None
    assert expect(0) is None
