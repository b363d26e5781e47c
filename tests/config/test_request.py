"""The planner's request, made from the configuration field by field."""

from dataclasses import fields, replace

import pytest

from launcher.config.request import make_request
from launcher.config.settings import Settings
from launcher.plan.gc_policy import GcPolicy
from launcher.plan.model import Request


def make_config() -> Settings:
    """A configuration in which no setting that the planner is told of has its default."""
    config = Settings(nproc_per_node=3, devices="own", env={"OMP_NUM_THREADS": "5", "API_TOKEN": "sesame"})
    config.binding.policy, config.binding.strict = "numa", True
    config.binding.reserve_cores, config.binding.nic = 4, True
    config.dataloader.workload, config.dataloader.num_workers = "vision", 7
    config.dataloader.worker_gib, config.dataloader.worker_shm_mib = 1.5, 64.0
    config.dataloader.default, config.dataloader.measured = True, True
    config.gc.policy, config.gc.warmup, config.gc.every, config.gc.log = "synchronized", 9, 8, True
    config.allocator = {"max_split_size_mb": 64, "host": "jemalloc"}
    return config


EXPECTED = Request(
    nproc_per_node=3,
    binding="numa",
    strict=True,
    reserve_cores=4,
    devices="own",
    workload="vision",
    num_workers=7,
    worker_gib=1.5,
    worker_shm_mib=64.0,
    loader_default=True,
    measured=True,
    gc=GcPolicy("synchronized", 9, 8, log=True),
    allocator="max_split_size_mb:64",
    host_allocator="jemalloc",
    nic=True,
    caches="/tmp/caches",
    environ=(("OMP_NUM_THREADS", "5"),),
    configured=(("OMP_NUM_THREADS", "5"), ("API_TOKEN", "***")),
)


def test_each_setting_reaches_the_planner() -> None:
    config = make_config()
    found = make_request(config, config.env, caches="/tmp/caches")
    for field in fields(Request):
        if field.name != "configured":
            assert getattr(found, field.name) == getattr(EXPECTED, field.name), field.name
    names, values = zip(*found.configured, strict=True)
    assert names == ("OMP_NUM_THREADS", "API_TOKEN") and values[0] == "5" and "sesame" not in values[1]


def test_no_expected_value_is_a_default() -> None:
    """Otherwise a field that is not handed over would pass."""
    looked_up_on_the_node = {"host_library"}
    same = {
        field.name
        for field in fields(Request)
        if getattr(EXPECTED, field.name) == getattr(Request(), field.name)
    }
    assert same == looked_up_on_the_node


@pytest.mark.parametrize(
    ("group", "key", "field"),
    [
        ("binding", "strict", "strict"),
        ("binding", "nic", "nic"),
        ("dataloader", "default", "loader_default"),
        ("dataloader", "measured", "measured"),
    ],
)
def test_a_switch_sets_its_own_field_alone(group: str, key: str, field: str) -> None:
    config, usual = Settings(), make_request(Settings(), {})
    setattr(getattr(config, group), key, True)
    assert make_request(config, {}) == replace(usual, **{field: True})  # type: ignore[arg-type]  # a switch
