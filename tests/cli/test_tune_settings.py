"""How many workers a search tries: by cores, and never more than memory and the like have room for."""

from dataclasses import replace

import pytest

from launcher.cli.tune_settings import find_max_workers
from launcher.config.settings import DataloaderConfig, Settings
from launcher.plan.model import Limits, Plan, Request
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
