"""Whatever facts come from nodes, they are judged without a traceback, and findings can be shown and kept."""

import json
import math
from dataclasses import asdict

import hypothesis.strategies as st
from hypothesis import given

from launcher.codec import DecodeError, convert
from launcher.doctor.finding import LEVELS
from launcher.doctor.node_facts import (
    GpuFacts,
    GpuProcess,
    JudgeSettings,
    KernelXid,
    NicFacts,
    NodeFacts,
    PathFacts,
)
from launcher.doctor.node_judgement import judge_nodes

FEW = st.text(max_size=6)
STATES = st.sampled_from(
    ("ok", "missing", "denied", "read_only", "stuck", "failed", "ACTIVE", "DOWN", "INIT", "")
)
PURPOSES = st.sampled_from(("run directory", "data", "home", "temporary directory", "checkpoints", "x"))
NUMBERS = st.none() | st.integers(-(1 << 70), 1 << 70) | st.integers(0, 20)
REALS = st.floats() | st.floats(0, 1e10)
GPUS = st.builds(
    GpuFacts,
    index=st.integers(0, 9),
    uuid=FEW,
    name=st.sampled_from(("A", "B", "")),
    pci=st.sampled_from(("0000:01:00.0", "0000:02:00.0", "")),
    memory_mib=st.integers(-5, 1 << 40),
    used_mib=NUMBERS,
    processes=st.none() | st.lists(st.builds(GpuProcess, st.integers(), FEW, NUMBERS), max_size=6).map(tuple),
    problem=FEW,
    recovery_action=st.none() | FEW | st.sampled_from(("none", "gpu_reset", "drain_p2p")),
    ecc_uncorrected=NUMBERS,
    remapped_uncorrectable=NUMBERS,
    remap_pending=st.none() | st.booleans(),
    remap_failed=st.none() | st.booleans(),
    clock_reasons=st.lists(st.sampled_from(("hw_slowdown", "sw_thermal_slowdown", "x")), max_size=3).map(
        tuple
    ),
    sm_clock=NUMBERS,
    max_sm_clock=NUMBERS,
    temperature=NUMBERS,
    nvlinks=NUMBERS,
    max_nvlinks=NUMBERS,
    pcie_width=NUMBERS,
    max_pcie_width=NUMBERS,
    peers=st.none() | st.lists(st.integers(0, 9), max_size=9).map(tuple),
)
PLACES = st.builds(
    PathFacts, FEW, PURPOSES, STATES | FEW, REALS, free_kib=NUMBERS, free_inodes=NUMBERS, detail=FEW
)
NODES = st.builds(
    NodeFacts,
    host=st.sampled_from(("n1", "n2", "")),
    node_rank=st.integers(0, 3),
    time=REALS,
    asked=st.none() | REALS,
    answered=st.none() | REALS,
    gpus=st.lists(GPUS, max_size=4).map(tuple),
    lost_gpus=st.lists(FEW, max_size=2).map(tuple),
    gpu_problem=FEW,
    nics=st.lists(st.builds(NicFacts, FEW, STATES, REALS, NUMBERS), max_size=4).map(tuple),
    paths=st.lists(PLACES, max_size=4).map(tuple),
    xids=st.none()
    | st.lists(
        st.builds(
            KernelXid, st.sampled_from(("0000:01:00.0", "x")), st.integers(0, 150), FEW, st.none() | REALS
        ),
        max_size=4,
    ).map(tuple),
    driver=FEW | st.sampled_from(("570.1.2", "470.57", "9" * 400)),
    cuda_driver=FEW | st.sampled_from(("12.8", "11.4")),
    torch=FEW,
    torch_cuda=FEW | st.sampled_from(("12.8", "13.0")),
    cpus=st.integers(-1, 1 << 20),
    memory_kib=st.integers(-1, 1 << 50),
    free_memory_kib=NUMBERS,
    shm_kib=NUMBERS,
    free_shm_kib=NUMBERS,
    load=st.none() | REALS,
    boot_id=st.sampled_from(("", "a", "b")),
    unchecked=st.lists(FEW, max_size=3).map(tuple),
)
WANTED = st.none() | st.builds(JudgeSettings, st.none() | st.integers(-3, 20), REALS)


@given(nodes=st.lists(NODES, max_size=4), wanted=WANTED)
def test_any_facts_are_judged(nodes: list[NodeFacts], wanted: JudgeSettings | None) -> None:
    found = judge_nodes(nodes, wanted)
    assert found == judge_nodes(nodes, wanted) or any(math.isnan(node.time) for node in nodes)
    hosts = {node.host for node in nodes} | {""}
    for one in found:
        assert one.host in hosts
        assert one.finding.level in LEVELS and one.finding.level != "ok"
        assert one.finding.subject and one.finding.what
    json.dumps([asdict(one) for one in found])


@given(node=NODES)
def test_facts_survive_the_way_over_json_or_are_refused(node: NodeFacts) -> None:
    try:
        again = convert(NodeFacts, json.loads(json.dumps(asdict(node))))
    except DecodeError:
        return
    assert repr(again) == repr(node)
