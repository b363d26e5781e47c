"""The measured work of preflight on each GPU: values, equal bits, and nothing that stays on the GPUs."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence

from launcher.doctor.node_facts import NodeFacts, WorkResult
from launcher.preflight.preflight_report import make_report
from launcher.preflight.preflight_request import PreflightRequest, parse_answer
from tests.gpu.context import Context, run_program

SECONDS = {"light": 10.0, "deep": 60.0}
HOST = "this"


def run(context: Context) -> None:
    """Run the node's program as a job would, lightly and deeply."""
    before = [] if context.cpu else read_memory()
    runs = {kind: check_node(context, kind) for kind in (["light"] if context.cpu else ["light", "deep"])}
    for kind, facts in runs.items():
        record_work(context, kind, facts)
    if context.cpu:
        context.record.leave_out("each GPU is measured, and is free afterwards", "needs a GPU")
        return
    for kind, facts in runs.items():
        check_gpus(context, kind, facts)
    bits = {kind: [one.checksum for one in facts.work if one.checksum] for kind, facts in runs.items()}
    same = len({bit for bits_of_kind in bits.values() for bit in bits_of_kind}) == 1
    context.record.check("all GPUs and both runs give the same bits", same, str(bits))
    after = read_memory()
    is_free = all(now <= then + 64 for now, then in zip(after, before, strict=True))
    context.record.check("nothing stays on the GPUs", is_free, f"MiB before {before}, after {after}")


def check_node(context: Context, kind: str) -> NodeFacts:
    """Return what the program found; raises RuntimeError if it does not end well."""
    request = PreflightRequest(kind, (HOST,), SECONDS[kind], time.time())
    command = [sys.executable, "-P", "-m", "launcher.preflight", request.to_json()]
    environ = {"SLURMD_NODENAME": HOST}
    ended = run_program(command, context.folder / kind, SECONDS[kind] + 20, environ).demand()
    answers = [answer for line in ended.out.splitlines() if (answer := parse_answer(line))]
    facts = next(answer.facts for answer in answers if answer.is_final)
    limit = SECONDS[kind] + 2
    context.record.check(f"{kind} ends in time", ended.seconds <= limit, f"{ended.seconds:.1f} s")
    report = make_report(request, {HOST: facts}, (), {}, gpus=None, seconds=ended.seconds)
    for one in report.findings:
        context.record.row("Findings", kind=kind, level=one.finding.level, found=one.finding.what)
    (context.output / f"preflight-{kind}.json").write_text(json.dumps([str(one) for one in facts.work]))
    return facts


def record_work(context: Context, kind: str, facts: NodeFacts) -> None:
    """Record the figures, and that none of the work failed."""
    for one in facts.work:
        context.record.row(
            f"Measured work, {kind}",
            measure=one.measure,
            where=one.where,
            value=one.value,
            unit=one.unit,
            device=one.device,
            remark=one.problem or one.reason,
        )
    failed = [f"{one.measure} {one.where}: {one.problem}" for one in facts.work if one.problem]
    context.record.check(f"{kind}: none of the work failed", not failed, "; ".join(failed))


def check_gpus(context: Context, kind: str, facts: NodeFacts) -> None:
    """Each GPU has its results, by NVML's number; several GPUs have those between them."""
    names = [f"GPU {gpu.index}" for gpu in facts.gpus]
    for measure in ("matmul", "copy_to", "copy_from"):
        places = select_places(facts.work, measure)
        context.record.check(f"{kind}: {measure} of each GPU", places == names, f"{places}, {names}")
    between = {one.measure for one in facts.work if one.value} & {"peer_copy", "all_reduce"}
    if len(names) > 1:
        context.record.check(f"{kind}: copies between GPUs and all_reduce", len(between) == 2, str(between))
    else:
        context.record.leave_out(f"{kind}: copies between GPUs and all_reduce", "there is one GPU")


def select_places(work: Sequence[WorkResult], measure: str) -> list[str]:
    """Where something has a value."""
    return [one.where for one in work if one.measure == measure and one.value]


def read_memory() -> list[int]:
    """MiB that are used on each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return [int(line) for line in done.stdout.split()]
