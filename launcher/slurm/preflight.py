"""What becomes of a job whose nodes were checked: on which it runs, or why it does not start."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.agent.endpoint import read_client_ports
from launcher.config.settings import Settings
from launcher.doctor.model import PreflightReport
from launcher.launch.signals import STOPPING
from launcher.preflight.checks import (
    Answers,
    CheckedNodes,
    PreflightRequest,
    describe_report,
    make_request,
    run_checks,
    write_preflight_report,
)
from launcher.report.findings import list_preflight_lines
from launcher.slurm.attempt import Attempt, try_write_manifest
from launcher.slurm.attempt_end import StepReport
from launcher.slurm.commands import count_restarts
from launcher.slurm.notation import expand_hosts
from launcher.slurm.slurm_environ import clean_for_step, drop_task_variables, pick_port
from launcher.slurm.srun import (
    Step,
    drop_prefix,
    give_cpus,
    has_begun,
    is_cpu_bind_complaint,
    is_slurm_line,
    parse_node_failure,
    parse_task_ends,
    render_step,
)
from launcher.slurm.step_monitor import StepMonitor
from launcher.text import count_things, name_some

logger = logging.getLogger(__name__)

MAX_NAMED = 8
"""Nodes that a sentence names."""


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The nodes to go on with."""

    action: str
    """`start`; `leave_out`: on other nodes than foreseen; `stop`; `requeue`."""
    hosts: tuple[str, ...]
    """Where the ranks run; empty if the job does not start."""
    text: str = ""
    """For people; empty if there is nothing to say."""


def choose_hosts(
    candidates: Sequence[str],
    sick: Collection[str],
    *,
    on_failure: str,
    nodes: tuple[int, int],
    owned: bool,
    reserved: int = 0,
) -> NodeChoice:
    """Choose from the job's nodes, those that are foreseen first and then its spare ones.

    `nodes` are the fewest and the most that the job runs on, `on_failure` is `preflight.on_failure`,
    `owned` says that the job is ours to requeue, and `reserved` spare nodes were asked for
    (`cluster.spares`): these replace sick ones whatever `on_failure` says.
    """
    most = nodes[1]
    foreseen = tuple(candidates[:most])
    exchanged = exchange_sick_hosts(foreseen, candidates[most : most + reserved], sick)
    text = describe_exchange(foreseen, exchanged)
    if not {*exchanged} & {*sick}:
        return NodeChoice("leave_out" if text else "start", exchanged, text)
    others = (host for host in candidates if host not in exchanged and host not in foreseen)
    choice = choose_without_spares(
        (*exchanged, *others), sick, on_failure=on_failure, nodes=nodes, owned=owned
    )
    return replace(choice, text=f"{text}; {choice.text}") if text else choice


def choose_without_spares(
    candidates: Sequence[str],
    sick: Collection[str],
    *,
    on_failure: str,
    nodes: tuple[int, int],
    owned: bool,
) -> NodeChoice:
    """Do what `preflight.on_failure` says of nodes that are sick, and that no spare one has replaced."""
    fewest, most = nodes
    foreseen = tuple(candidates[:most])
    left_out = tuple(host for host in foreseen if host in sick)
    names, rule = name_some(left_out, MAX_NAMED), f"preflight.on_failure={on_failure}"
    if on_failure == "report":
        return NodeChoice("start", foreseen, f"the job starts all the same ({rule})")
    if on_failure == "stop":
        return NodeChoice("stop", (), f"the job does not start ({rule})")
    healthy = tuple(host for host in candidates if host not in sick)[:most]
    if len(healthy) >= min(fewest, len(foreseen)) and healthy:
        spares = [host for host in healthy if host not in foreseen]
        on = f"{name_some(spares, MAX_NAMED)} in place of {names}" if spares else f"without {names}"
        return NodeChoice(
            "leave_out", healthy, f"the job goes on {on}, on {count_things(len(healthy), 'node')} ({rule})"
        )
    short = (
        f"{count_things(len(healthy), 'node')} of the {fewest} that the job needs are left without {names}"
    )
    if owned:
        return NodeChoice("requeue", (), f"{short}: it is to be requeued without it ({rule})")
    return NodeChoice(
        "stop", (), f"{short}, and this allocation is not launch's to requeue: ask for other nodes ({rule})"
    )


def exchange_sick_hosts(
    hosts: Sequence[str], spares: Sequence[str], sick: Collection[str]
) -> tuple[str, ...]:
    """Return the hosts with a healthy spare one in the place of each sick one, as far as there are any.

    A spare takes the sick node's place in the order, so that the others keep their neighbours.
    """
    healthy = iter([host for host in spares if host not in sick])
    return tuple(next(healthy, host) if host in sick else host for host in hosts)


def describe_exchange(before: Sequence[str], after: Sequence[str]) -> str:
    """Say which nodes have been replaced; empty if none has."""
    pairs = [(one, two) for one, two in zip(before, after, strict=True) if one != two]
    if not pairs:
        return ""
    spares, names = (name_some([pair[place] for pair in pairs], MAX_NAMED) for place in (1, 0))
    return f"spare {spares} takes the place of {names}"


FIXED_OPTIONS: Mapping[str, object] = {
    "input": "none",
    "output": None,
    "error": None,
    "label": None,
    "kill-on-bad-exit": 0,
    "no-kill": True,
}
"""Options of srun with which a node's answer reaches us whatever happens to the others."""
PORT_TRIAL = 50
"""Number of the port's candidate at which nodes meet for work in pairs: none of the rendezvous' own."""


def run_preflight(attempt: Attempt, monitor: StepMonitor, kind: str) -> StepReport | None:
    """Check an attempt's nodes, tell what was found, and choose those that it goes on with.

    Returns the attempt's end if its ranks are not to start.
    """
    candidates = list_candidates(attempt)
    try:
        checked = check_nodes(attempt, monitor, candidates, kind)
    except OSError as error:
        checked = CheckedNodes(None, f"srun cannot be run ({error.strerror})")
    if stop := report_early_stop(monitor):
        return stop
    if checked.report is None:
        logger.warning(f"preflight: the nodes were not checked: {checked.problem}")
        record_preflight(attempt, {"kind": kind, "problem": checked.problem})
        return None
    return act_on_report(attempt, monitor, checked.report, candidates)


def report_early_stop(monitor: StepMonitor) -> StepReport | None:
    """Return the end of an attempt that a signal has stopped before its ranks' step; None if none has."""
    monitor.take_early_signals()
    if stops := [number for number, _ in monitor.signals if number in STOPPING]:
        return StepReport(128 + stops[0], (), (), tuple(monitor.signals), monitor.checkpointed)
    return None


def list_candidates(attempt: Attempt) -> tuple[str, ...]:
    """Return the nodes to check: those that the job is to run on, and spare ones if they could be used.

    A node beyond `nodes` and `cluster.spares` can be used only by `preflight.on_failure=exclude`.
    """
    if attempt.request.config.preflight.on_failure != "exclude":
        return attempt.step_hosts
    text = attempt.environ.get("SLURM_JOB_NODELIST") or attempt.environ.get("SLURM_NODELIST", "")
    others = (host for host in expand_hosts(text) if host not in attempt.step_hosts)
    return (*attempt.step_hosts, *others)


def act_on_report(
    attempt: Attempt, monitor: StepMonitor, report: PreflightReport, candidates: Sequence[str]
) -> StepReport | None:
    """Tell what was found, write it down, and do what `preflight.on_failure` says."""
    request = attempt.request
    for line in list_preflight_lines(report):
        logger.info(f"preflight: {line}")
    choice = choose_hosts(
        candidates,
        report.sick,
        on_failure=request.config.preflight.on_failure,
        nodes=(request.min_nodes, request.max_nodes),
        owned=attempt.requeues,
        reserved=len(attempt.spares),
    )
    if choice.text:
        logger.info(f"preflight: {choice.text}")
    try:
        write_preflight_report(attempt.run.path, attempt.run.first_attempt, report)
    except OSError as error:
        logger.warning(f"preflight: its report could not be written ({error})")
    left_out = [host for host in attempt.step_hosts if host in report.sick and host not in choice.hosts]
    account = describe_report(report)
    use_hosts(attempt, choice.hosts or attempt.hosts, candidates, report.sick)
    record_preflight(attempt, {**account, "action": choice.action, "left_out": left_out})
    return None if choice.hosts else report_sickness(monitor, choice, report)


def use_hosts(
    attempt: Attempt, hosts: tuple[str, ...], candidates: Sequence[str], sick: Collection[str]
) -> None:
    """Have the attempt go on with these nodes, and with what is left of the healthy ones as its spares."""
    left = (host for host in candidates if host not in hosts and host not in sick)
    attempt.hosts = hosts
    attempt.spares = tuple(left)[: attempt.request.config.cluster.spares]
    attempt.manifest["hosts"] = list(attempt.hosts)


def record_preflight(attempt: Attempt, account: Mapping[str, object]) -> None:
    """Have the manifest tell of the checks while the job runs, too."""
    attempt.manifest["preflight"] = dict(account)
    try_write_manifest(attempt.run, attempt.manifest)


def report_sickness(monitor: StepMonitor, choice: NodeChoice, report: PreflightReport) -> StepReport:
    """Return the end of an attempt whose ranks do not start for the sake of sick nodes."""
    errors = {one.host: one for one in reversed(report.findings) if one.level == "error"}
    words = [f"{host}: {errors[host].what}" for host in report.sick if host in errors]
    sick = report.sick if choice.action == "requeue" else ()
    return StepReport(
        0,
        (),
        (),
        tuple(monitor.signals),
        monitor.checkpointed,
        sickness=tuple(words) or (choice.text,),
        sick=sick,
    )


def check_nodes(
    attempt: Attempt, monitor: StepMonitor, candidates: tuple[str, ...], kind: str
) -> CheckedNodes:
    """Run the step to its end, or to its limit; raises OSError if there is no srun."""
    request, config = attempt.request, attempt.request.config
    words = request.words or config.program.get("command") or ()
    asked = describe_checks(
        config, attempt.environ, candidates, Path(request.directory), attempt.run.path, kind, words
    )
    return check_by_step(config, asked, attempt.environ, monitor)


def check_spare_nodes(attempt: Attempt) -> CheckedNodes:
    """Check the spare nodes alone while the others work, if nothing has checked them before the start."""
    config, directory = attempt.request.config, Path(attempt.request.directory)
    asked = describe_checks(
        config, attempt.environ, attempt.spares, directory, attempt.run.path, "light", ("-m",)
    )
    try:
        return check_by_step(config, asked, attempt.environ)
    except OSError as error:
        return CheckedNodes(None, f"srun cannot be run ({error.strerror})")


def check_allocation(config: Settings, environ: Mapping[str, str], hosts: tuple[str, ...]) -> CheckedNodes:
    """Check the nodes of an allocation without a run."""
    asked = describe_checks(config, environ, hosts, Path.cwd(), None, config.preflight.kind, ("-m",))
    try:
        return check_by_step(config, asked, environ)
    except OSError as error:
        return CheckedNodes(None, f"srun cannot be run ({error.strerror})")


def describe_checks(
    config: Settings,
    environ: Mapping[str, str],
    hosts: tuple[str, ...],
    directory: Path,
    run_path: Path | None,
    kind: str,
    words: Sequence[str],
) -> PreflightRequest:
    """Return what the nodes are asked."""
    job, restarts = int(environ.get("SLURM_JOB_ID", "0")), count_restarts(environ)
    port = pick_port(job, restarts, PORT_TRIAL, read_client_ports())
    return make_request(
        config,
        hosts,
        directory=directory,
        run_path=run_path,
        kind=kind,
        words=words,
        environ={**environ, **config.env},
        endpoint=f"{hosts[0]}:{port}",
    )


def check_by_step(
    config: Settings,
    request: PreflightRequest,
    environ: Mapping[str, str],
    monitor: StepMonitor | None = None,
) -> CheckedNodes:
    """Start a task on each node, outside of any container, and judge what they answer.

    Raises OSError if there is no srun. Signals go to the `monitor`, which says whether one ends the checks.
    """
    answers = run_checks(
        render_step(describe_check_step(config, request, environ)),
        request,
        {**drop_task_variables(clean_for_step(environ)), **config.env},
        wakeup=monitor.inbox.wakeup if monitor else None,
        is_stopped=monitor.take_early_signals if monitor else lambda: False,
    )
    return judge_check_step(environ, answers)


def describe_check_step(config: Settings, request: PreflightRequest, environ: Mapping[str, str]) -> Step:
    """Return the step; its tasks begin in `/`, since any other folder may be stuck."""
    own = {name.replace("_", "-"): value for name, value in give_cpus(config.cluster.srun, environ).items()}
    return Step(
        nodes=len(request.hosts),
        nodelist=request.hosts,
        elastic=True,
        directory="/",
        command=request.command,
        options={**own, **FIXED_OPTIONS},
    )


def judge_check_step(environ: Mapping[str, str], answers: Answers) -> CheckedNodes:
    """Tell nodes that hold the checks up from those whose checks failed for a reason of their own."""
    hosts = answers.request.hosts
    lines = [line for line in answers.errors if not is_cpu_bind_complaint(line)]
    if answers.ended and not answers.facts and not has_begun(lines):
        words = "; ".join(map(drop_prefix, lines[-3:])) or f"srun ended with {answers.exit_code}"
        return CheckedNodes(None, words)
    lost = {host for line in lines if (names := parse_node_failure(line)) for host in expand_hosts(names)}
    silent = [host for host in answers.missing if host in lost or not answers.ended]
    ends = parse_task_ends(lines)
    problems = {
        host: f"its program ended: {ends.get(host, 'it printed no answer')}"
        for host in answers.missing
        if host not in silent
    }
    if len(problems) == len(hosts):
        own = [line for line in lines if not is_slurm_line(line)]
        return CheckedNodes(None, own[-1] if own else "its program printed no answer")
    return CheckedNodes(answers.make_report(silent, problems, count_node_gpus(environ)))


def count_node_gpus(environ: Mapping[str, str]) -> int | None:
    """Return the GPUs that SLURM has given the job on each node; None if it does not tell."""
    text = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    return int(text) if text.isascii() and text.isdecimal() else None
