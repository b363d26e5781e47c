"""A node's program: it reads the node's facts, has the work done, and answers twice on stdout."""

import re
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NoReturn, TextIO

from launcher.doctor.node_facts import NodeFacts, WorkResult
from launcher.doctor.pair_checks import Pair, name_pair, plan_pairs
from launcher.preflight.preflight_request import NodeAnswer, PreflightRequest, render_answer
from launcher.preflight.work_child import ChildWork, GpuOfTorch, run_work
from launcher.probe.node_facts_reader import FactSources, read_node_facts
from launcher.protocol import name_host

WORK = "measured work"
MARGIN = 0.5
"""Seconds that are kept for the answer."""
LEAST = 3.0
"""Seconds without which work does not begin: torch alone takes about as long to import."""
PAIR_SHARE = 0.5
"""Share of the time that pairs have at the end, if nodes are measured in pairs."""
PORTS = 16
"""Pairs whose ports differ; more than that are on different machines, or not at the same time."""
GPU = re.compile(r"GPU (\d{1,4})(?:-(\d{1,4}))?")


def run_node_checks(request: PreflightRequest, environ: Mapping[str, str], out: TextIO) -> None:
    """Answer with the facts, and again with the work."""
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, leave_at_signal)
    facts = read_facts(request, environ)
    print_answer(NodeAnswer(facts, is_final=False), out)
    deadline = begin + request.seconds - MARGIN
    facts = add_work(facts, request, deadline)
    facts = replace(facts, seconds=round(time.monotonic() - begin, 3))
    print_answer(NodeAnswer(facts), out)


def leave_at_signal(number: int, _: object) -> NoReturn:
    """End by a signal, so that the child is ended, too."""
    raise SystemExit(128 + number)


def print_answer(answer: NodeAnswer, out: TextIO) -> None:
    """Print an answer."""
    out.write(render_answer(answer))
    out.flush()


def read_facts(request: PreflightRequest, environ: Mapping[str, str]) -> NodeFacts:
    """Read the node's facts."""
    host = name_host(environ)
    paths = [(each.path, each.purpose) for each in request.paths]
    paths.append((tempfile.gettempdir(), "temporary directory"))
    facts = read_node_facts(
        paths=paths,
        host=host,
        node_rank=request.hosts.index(host) if host in request.hosts else 0,
        sources=FactSources(python=request.python or None, gpus=environ.get("CUDA_VISIBLE_DEVICES")),
    )
    return replace(facts, asked=request.asked)


def add_work(facts: NodeFacts, request: PreflightRequest, deadline: float) -> NodeFacts:
    """Do the work, with other nodes last, and add what it has found."""
    turns = list(list_turns(request, facts.host)) if request.kind == "deep" and request.endpoint else []
    left = deadline - time.monotonic()
    work = try_work(request, left * (PAIR_SHARE if turns else 1.0))
    facts = replace(
        facts,
        torch=facts.torch or work.torch,
        torch_cuda=facts.torch_cuda or work.torch_cuda,
        work=tuple(rename_gpus(one, work.gpus, facts) for one in work.results),
        unchecked=(*facts.unchecked, *((f"{WORK}: {work.problem}",) if work.problem else ())),
    )
    if work.problem and not work.torch:
        return facts
    first, length = deadline - left * PAIR_SHARE, left * PAIR_SHARE / max(1, len(turns))
    for number, options in enumerate(turns):
        met = try_work(request, first + (number + 1) * length - time.monotonic(), options)
        problem = (f"{WORK} with another node: {met.problem}",) if met.problem else ()
        facts = replace(facts, work=(*facts.work, *met.results), unchecked=(*facts.unchecked, *problem))
    return facts


def try_work(request: PreflightRequest, seconds: float, options: tuple[str, ...] = ()) -> ChildWork:
    """Do the work if there is time for it."""
    if seconds < LEAST:
        return ChildWork(problem="no time was left")
    return run_work(request.python, request.kind, seconds, options)


def list_turns(request: PreflightRequest, host: str) -> Iterator[tuple[str, ...]]:
    """Give the options of the work in each round in which the node has a partner."""
    port = int(request.endpoint.rpartition(":")[2])
    for number, pairs in enumerate(plan_pairs(request.hosts)):
        for place, pair in enumerate(pairs):
            if host in pair:
                yield describe_turn(pair, host, port + number * PORTS + place % PORTS)


def describe_turn(pair: Pair, host: str, port: int) -> tuple[str, ...]:
    """Return the options of the work with a partner."""
    rank = str(pair.index(host))
    return ("--pair", f"{pair[0]}:{port}", "--pair-rank", rank, "--pair-name", name_pair(pair))


def rename_gpus(result: WorkResult, gpus: tuple[GpuOfTorch, ...], facts: NodeFacts) -> WorkResult:
    """Return a result with NVML's number of the GPU, which is not torch's if the job has some of them."""
    found = GPU.fullmatch(result.where)
    if not found:
        return result
    by_uuid = {gpu.uuid: gpu.index for gpu in facts.gpus}
    numbers = {gpu.index: by_uuid.get(gpu.uuid, gpu.index) for gpu in gpus}
    named = [str(numbers.get(int(text), int(text))) for text in found.groups() if text]
    return replace(result, where=f"GPU {'-'.join(named)}")
