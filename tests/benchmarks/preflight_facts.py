"""Reading a node's facts before a job again and again on a healthy machine: seconds, and what is invented."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

from launcher.doctor.node_facts import JudgeSettings, NodeFacts
from launcher.doctor.node_judgement import judge_nodes
from launcher.probe.node_facts_reader import read_node_facts
from tests.benchmarks.measure import time_call
from tests.doctor.healthy_node import change_gpu, make_nodes

MANY = 1000


def bench_preflight_facts(folder: Path, rounds: int) -> None:
    """Read and judge this machine `rounds` times, then judge a thousand nodes of eight GPUs each."""
    paths = [(str(folder), "run directory"), (str(Path.cwd()), "working directory"), (str(folder), "data")]
    found: Counter[str] = Counter()
    seconds, loads = [], []
    for _ in range(rounds):
        facts = read_node_facts("/", paths)
        seconds.append(facts.seconds)
        loads.append(facts.load or 0.0)
        found.update(list_levels(facts))
    print(f"{rounds} readings of this machine: median {median(seconds):.3f} s, longest {max(seconds):.3f} s")
    print(f"  of the CPUs others used {median(loads):.0%} (median), {max(loads):.0%} at the most")
    told = ", ".join(f"{level} {count}" for level, count in sorted(found.items()))
    print(f"  findings beside that load: {told or 'none'}")
    nodes = (*make_nodes(MANY - 1), change_gpu(make_nodes(MANY)[-1], 3, nvlinks=4))
    times = [time_call(lambda: judge_nodes(nodes)) for _ in range(5)]
    print(f"judging {MANY} nodes of 8 GPUs: {median(times):.0f} ms, {len(judge_nodes(nodes))} finding")


def list_levels(facts: NodeFacts) -> list[str]:
    """Errors and warnings by their texts, and the levels of others; the machine's load is left out."""
    found = judge_nodes((replace(facts, load=None),), JudgeSettings(min_free_kib=1024))
    return [
        f"{one.finding.level}: {one.finding.what}"
        if one.finding.level in ("error", "warning")
        else one.finding.level
        for one in found
    ]
