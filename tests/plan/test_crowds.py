"""Ranks against cores: several on a GPU, more than cores, fewer than GPUs; threads, classes, reserves."""

from dataclasses import replace

from launcher.plan.model import Cpu, Machine, NumaNode, Request
from launcher.plan.planner import plan

from .lab_machines import convert, describe, masks, workers


def make_hybrid(big: int, small: int) -> Machine:
    """One package: big cores of two threads, then small ones, four under each cache; GPUs set by callers."""
    cpus = [Cpu(at, at // 2 * 2, 0, 0, 0, 1024 - at) for at in range(2 * big)]
    cpus += [Cpu(2 * big + at, 2 * big + at, 0, 0, 0, 600) for at in range(small)]
    everything = frozenset(cpu.id for cpu in cpus)
    node = NumaNode(0, 2**25, True, ((0, 10),))
    return Machine(tuple(cpus), (node,), (), everything, frozenset({0}))


def test_hybrid_ranks_run_on_big_cores_and_workers_on_small_ones_too() -> None:
    made = plan(make_hybrid(8, 16), Request(2))
    assert masks(made) == ["0-7", "8-15"]
    assert workers(made) == ["0-7,16-23", "8-15,24-31"]


def test_hybrid_with_too_few_big_cores_deals_each_class_evenly() -> None:
    made = plan(make_hybrid(2, 8), Request(4))
    assert masks(made) == ["0-1,4-5", "2-3,6-7", "8-9", "10-11"]


def test_mig_instances_share_out_the_cores_next_to_their_gpus() -> None:
    machine = convert(describe(["0-7", "8-15"], [0, 1]))
    gpus = (replace(machine.gpus[0], mig=("MIG-a", "MIG-b", "MIG-c")), machine.gpus[1])
    made = plan(replace(machine, gpus=gpus), Request(devices="own"))
    assert masks(made) == ["0-2", "3-5", "6-7", "8-11"]


def test_hybrid_cores_with_several_threads_and_caches() -> None:
    machine = make_hybrid(4, 8)
    cpus = tuple(replace(cpu, l3=8 + (cpu.id - 8) // 4 * 4) if cpu.id >= 8 else cpu for cpu in machine.cpus)
    made = plan(replace(machine, cpus=cpus), Request(2))
    assert (masks(made), workers(made)) == (["0-3", "4-7"], ["0-3,8-11", "4-7,12-15"])
