"""What sinfo tells, and what is asked for on each node."""

import math
from dataclasses import replace
from typing import Any

import pytest

from launcher.config.settings import ClusterConfig
from launcher.errors import SchedulerError
from launcher.slurm.resources import NodeKind, check_limits, fill_auto_resources, parse_gres, parse_sinfo
from launcher.slurm.sbatch_options import Resources

SINFO = """\
CLUSTER: big
gpu*|60|128|2:32:2|1031000|gpu:a100:8(S:0-1)|alloc|2-00:00:00|a100,ib|UNLIMITED
gpu*|4|128|2:32:2|1031000|gpu:a100:8(S:0-1)|down*|2-00:00:00|a100,ib|UNLIMITED
mixed|2|48|2:12:2|386000|gpu:v100:4|idle|infinite|v100|UNLIMITED
mixed|2|256|2:64:2|515000|gpu:a100:8(S:0,1),nvme:2|mix|infinite|a100|UNLIMITED
cpu|10|96|2:48:1|190000|(null)|idle|30:00|(null)|64
odd|1|?|2:48:1|190000|(null)|idle|30:00|(null)|64
empty|0|0|0:0:0|0|(null)|n/a|infinite||UNLIMITED
"""
GPU_NODE = NodeKind("gpu", True, 4, 128, 64, 1031000, (("a100", 8),), "idle", math.inf, ())
CPU_NODE = replace(GPU_NODE, gpus=())


def test_sinfo() -> None:
    inventory = parse_sinfo(SINFO)
    assert inventory.list_partitions() == ("gpu", "mixed", "cpu")
    assert inventory.select(None) == (
        NodeKind("gpu", True, 60, 128, 64, 1031000, (("a100", 8),), "alloc", 2880, ("a100", "ib")),
        NodeKind("gpu", True, 4, 128, 64, 1031000, (("a100", 8),), "down*", 2880, ("a100", "ib")),
    )
    assert inventory.select("cpu") == (NodeKind("cpu", False, 10, 64, 64, 190000, (), "idle", 30, ()),)
    assert [kind.partition for kind in inventory.select("cpu,mixed")] == ["mixed", "mixed", "cpu"]
    assert inventory.select("nope") == ()


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:8", ((None, 8),)),
        ("gpu", ((None, 1),)),
        ("gpu:a100:8(S:0-1)", (("a100", 8),)),
        ("gpu:mi250:4(S:0,2),nvme:2", (("mi250", 4),)),
        ("gpu:a100_3g.20gb:2(S:0),gpu:a100_1g.5gb:7(S:1)", (("a100_3g.20gb", 2), ("a100_1g.5gb", 7))),
        ("gres/gpu:h100:8", (("h100", 8),)),
        ("shard:16,mps:400", ()),
        ("(null)", ()),
        ("", ()),
    ],
)
def test_gres(text: str, gpus: tuple[tuple[str | None, int], ...]) -> None:
    assert parse_gres(text) == gpus


@pytest.mark.parametrize(
    ("values", "nproc", "kinds", "expected"),
    [
        # All of a node's GPUs: all of it.
        ({}, None, (GPU_NODE,), ("8", "128", "0")),
        ({}, 8, (GPU_NODE,), ("8", "128", "0")),
        # A number of ranks: their GPUs, and these GPUs' share.
        ({}, 2, (GPU_NODE,), ("2", "32", "257750M")),
        ({}, 16, (GPU_NODE,), ("8", "128", "0")),
        ({"gpus_per_node": "a100:4"}, None, (GPU_NODE,), ("a100:4", "64", "515500M")),
        ({"gpus_per_node": 1, "mem": "10G"}, None, (GPU_NODE,), ("1", "16", "10G")),
        ({"gpus_per_node": 1, "mem": None, "cpus_per_task": None}, None, (GPU_NODE,), ("1", None, None)),
        # None: the whole node.
        ({}, None, (CPU_NODE,), (None, "128", "0")),
        ({}, 4, (CPU_NODE,), (None, "128", "0")),
        ({"gpus_per_node": 0}, None, (GPU_NODE,), ("0", "128", "0")),
        ({"gpus_per_node": None}, None, (GPU_NODE,), (None, "128", "0")),
        # Nodes that differ: what fits on each that has enough GPUs.
        ({}, None, parse_sinfo(SINFO).select("mixed"), ("4", "48", "257500M")),
        ({"gpus_per_node": 8}, None, parse_sinfo(SINFO).select("mixed"), ("8", "256", "0")),
        ({"gpus_per_node": "v100:2"}, None, parse_sinfo(SINFO).select("mixed"), ("v100:2", "24", "193000M")),
        ({"constraint": "a100"}, None, parse_sinfo(SINFO).select("mixed"), ("8", "256", "0")),
        ({"constraint": "a100|v100"}, None, parse_sinfo(SINFO).select("mixed"), ("4", "48", "257500M")),
        ({}, None, (CPU_NODE, replace(CPU_NODE, cpus=64, cores=64)), (None, "64", "0")),
        # More than any node has is SLURM's to refuse.
        ({"gpus_per_node": 9}, None, (GPU_NODE,), ("9", None, None)),
        # Shares are whole cores, and never none.
        ({"gpus_per_node": 3}, None, (replace(GPU_NODE, cpus=20, cores=10),), ("3", "6", "386625M")),
        ({"gpus_per_node": 1}, None, (replace(GPU_NODE, cpus=4, cores=4),), ("1", "1", "128875M")),
        # The user's own options for the same thing.
        ({"exclusive": True}, None, (GPU_NODE,), ("8", None, "0")),
        ({"additional": {"mem_per_cpu": "2G"}}, None, (GPU_NODE,), ("8", "128", None)),
        ({"additional": {"gres": "gpu:a100:4"}}, None, (GPU_NODE,), (None, "128", "0")),
        ({"additional": {"hint": "nomultithread"}}, None, (GPU_NODE,), ("8", "64", "0")),
        ({"additional": {"threads-per-core": 1}}, 2, (GPU_NODE,), ("2", "16", "257750M")),
        # sinfo failed.
        ({}, None, (), (None, None, None)),
        ({}, 4, (), (None, None, None)),
        ({"gpus_per_node": 4}, None, (), ("4", None, None)),
    ],
)
def test_fill_in(
    values: dict[str, Any], nproc: int | None, kinds: tuple[NodeKind, ...], expected: tuple[str | None, ...]
) -> None:
    assert fill_auto_resources(ClusterConfig(**values), nproc, kinds, {}) == Resources(*expected)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SBATCH_GPUS_PER_NODE": "a100:4"}, ("a100:4", "64", "515500M")),
        ({"SBATCH_MEM_PER_CPU": "1G"}, ("8", "128", None)),
        ({"SBATCH_HINT": "nomultithread"}, ("8", "64", "0")),
    ],
)
def test_defaults_in_the_environment_stand(environ: dict[str, str], expected: tuple[str | None, ...]) -> None:
    assert fill_auto_resources(ClusterConfig(), None, (GPU_NODE,), environ) == Resources(*expected)
    asked = ClusterConfig(gpus_per_node=2, mem=1000, cpus_per_task=3)
    assert fill_auto_resources(asked, None, (GPU_NODE,), environ) == Resources("2", "3", "1000")


def test_limits() -> None:
    kinds = parse_sinfo(SINFO).select(None)
    check_limits(ClusterConfig(time="2-00:00:00"), 64, Resources("8", None, None), kinds)
    check_limits(ClusterConfig(time="99-0"), 9999, Resources("8", None, None), ())
    with pytest.raises(SchedulerError, match="nodes=65, and partition gpu has 64 with 8 GPUs: set nodes=64"):
        check_limits(ClusterConfig(), 65, Resources("8", None, None), kinds)
    with pytest.raises(
        SchedulerError, match=r"cluster\.time=2-00:00:01 is over the limit of .*gpu, 2-00:00:00"
    ):
        check_limits(ClusterConfig(time="2-00:00:01"), 1, Resources(None, None, None), kinds)
    mixed = parse_sinfo(SINFO).select("mixed")
    check_limits(ClusterConfig(time="UNLIMITED"), 4, Resources("4", "256", None), mixed)
    with pytest.raises(SchedulerError, match="nodes=3, and partition mixed has 2 with 8 GPUs"):
        check_limits(ClusterConfig(), 3, Resources("8", None, None), mixed)
    check_limits(ClusterConfig(spares=1), 1, Resources("8", None, None), mixed)
    with pytest.raises(SchedulerError, match=r"nodes=2 and cluster\.spares=3, .* has 2 with 8 .*spares=0"):
        check_limits(ClusterConfig(spares=3), 2, Resources("8", None, None), mixed)
    both = parse_sinfo(SINFO).select("gpu,cpu")
    with pytest.raises(SchedulerError, match="nodes=70, and partition cpu, gpu has 64"):
        check_limits(ClusterConfig(), 70, Resources(None, None, None), both)
    with pytest.raises(SchedulerError, match="cpus_per_task=65, and nodes of partition cpu have 64 CPUs"):
        check_limits(ClusterConfig(), 1, Resources(None, "65", None), parse_sinfo(SINFO).select("cpu"))
