"""What becomes of a job whose nodes were checked: on which it runs, or why it does not start."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config.settings import Settings
from launcher.doctor.model import PreflightReport
from launcher.launch.job import read_client_ports
from launcher.preflight import describe_report, make_request, run_checks, write_preflight_report
from launcher.report.findings import list_preflight_lines
from launcher.slurm import commands, step
from launcher.slurm.attempt_end import StepReport
from launcher.slurm.first_node import FirstNode, pick_port
from launcher.text import count_things, name_some

logger = logging.getLogger(__name__)

MAX_NAMED = 8
"""Nodes that a sentence names."""
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
    (`cluster.spares`): these replace sick ones whatever `on_failure` says. A spare takes the sick node's
    place in the order, so that the others keep their neighbours.
    """
    fewest, most = nodes
    planned = tuple(candidates[:most])

    def replace_sick(spares: Sequence[str]) -> tuple[str, ...]:
        unused = iter([host for host in spares if host not in sick])
        return tuple(next(unused, host) if host in sick else host for host in planned)

    foreseen = replace_sick(candidates[most : most + reserved])
    if on_failure == "exclude":
        foreseen = replace_sick(candidates[most:])
    added = [host for host in foreseen if host not in planned]
    gone = [host for host in planned if host not in foreseen]
    left = [host for host in foreseen if host in sick]
    healthy = tuple(host for host in foreseen if host not in sick)
    count, said = count_things(len(healthy), "node"), []
    if added:
        said.append(f"{name_some(added, MAX_NAMED)} in place of {name_some(gone, MAX_NAMED)}")
    if not left:
        text = f"the job goes on {said[0]}, on {count}" if added else ""
        return NodeChoice("leave_out" if added else "start", foreseen, text)
    rule, names = f"(preflight.on_failure={on_failure})", name_some(left, MAX_NAMED)
    short = f"{count} of the {fewest} that the job needs are left without {names}"
    if on_failure == "report":
        return NodeChoice("start", foreseen, f"the job starts all the same {rule}")
    if on_failure == "stop":
        return NodeChoice("stop", (), f"the job does not start {rule}")
    if healthy and len(healthy) >= min(fewest, len(foreseen)):
        on = " and ".join((*said, f"without {names}"))
        return NodeChoice("leave_out", healthy, f"the job goes on {on}, on {count} {rule}")
    if owned:
        return NodeChoice("requeue", (), f"{short}: it is to be requeued without it {rule}")
    not_ours = "this allocation is not launch's to requeue: ask for other nodes"
    return NodeChoice("stop", (), f"{short}, and {not_ours} {rule}")


def run_preflight(first: FirstNode, kind: str) -> StepReport | None:
    """Check an attempt's nodes, tell what was found, and choose those that it goes on with.

    Returns the attempt's end if its ranks are not to start. A node beyond `nodes` and `cluster.spares` is
    checked if it could be used, by `preflight.on_failure=exclude`.
    """
    attempt, spares = first.attempt, len(first.attempt.spares)
    request, config = attempt.request, attempt.request.config.preflight
    candidates = attempt.step_hosts
    if config.on_failure == "exclude":
        candidates = tuple(dict.fromkeys((*candidates, *commands.list_job_hosts(attempt.environ))))
    report = check_allocation(request.config, attempt.environ, candidates, kind, first)
    if first.take_early_signals():
        return None  # whoever starts the step sees it
    if isinstance(report, str):
        problem = f"the nodes were not checked: {report}"
        logger.warning(f"preflight: {problem}")
        attempt.manifest["preflight"] = {"kind": kind, "problem": report, "lines": [problem]}
        attempt.write()
        return None
    choice = choose_hosts(
        candidates,
        report.sick,
        on_failure=config.on_failure,
        nodes=(request.min_nodes, request.max_nodes),
        owned=attempt.requeues,
        reserved=spares,
    )
    lines = [*list_preflight_lines(report), *filter(None, [choice.text])]
    for line in lines:
        logger.info(f"preflight: {line}")
    try:
        write_preflight_report(attempt.run.path, attempt.run.first_attempt, report)
    except OSError as error:
        logger.warning(f"preflight: its report could not be written ({error})")
    left_out = [host for host in attempt.step_hosts if host in report.sick and host not in choice.hosts]
    account = {**describe_report(report), "action": choice.action, "left_out": left_out, "lines": lines}
    attempt.manifest |= {"hosts": list(choice.hosts or attempt.hosts), "preflight": account}
    if spares:
        left = [host for host in candidates if host not in attempt.hosts and host not in report.sick]
        attempt.manifest["spares"] = left[: request.config.cluster.spares]
    attempt.write()
    if choice.hosts:
        return None
    errors = {one.host: one.what for one in reversed(report.findings) if one.level == "error"}
    told = tuple(f"{host}: {errors[host]}" for host in report.sick if host in errors)
    sick = report.sick if choice.action == "requeue" else ()
    return StepReport(0, signals=tuple(first.signals), sickness=told or (choice.text,), sick=sick)


def check_allocation(
    config: Settings,
    environ: Mapping[str, str],
    hosts: tuple[str, ...],
    kind: str = "",
    first: FirstNode | None = None,
) -> PreflightReport | str:
    """Start a task on each node, outside of any container, and judge what they answer, or say why none did.

    Its tasks begin in `/`, since any other folder may be stuck. `first` is about to run a program on the
    nodes, and gets the signals, of which it says whether one ends the checks.
    """
    job, restarts = int(environ.get("SLURM_JOB_ID", "0")), commands.count_restarts(environ)
    asked = first.attempt.request if first else None
    request = make_request(
        config,
        hosts,
        directory=Path(asked.directory) if asked else Path.cwd(),
        run_path=first.attempt.run.path if first else None,
        kind=kind,
        words=asked.words or config.program.get("command") or () if asked else ("-m",),
        environ={**environ, **config.env},
        endpoint=f"{hosts[0]}:{pick_port(job, restarts, PORT_TRIAL, read_client_ports())}",
    )
    try:
        answers = run_checks(
            step.Step(hosts, request.command, {**config.cluster.srun, **FIXED_OPTIONS}).render(environ),
            request,
            {**commands.drop_task_variables(commands.clean_for_step(environ)), **config.env},
            wakeup=first.inbox.wakeup if first else None,
            is_stopped=first.take_early_signals if first else lambda: False,
        )
    except OSError as error:
        return f"srun cannot be run ({error.strerror})"
    lines = [line for line in answers.errors if step.CPU_BIND_COMPLAINT not in line]
    if answers.ended and not answers.facts and not step.has_begun(lines):
        return step.join_lines(lines) or f"srun ended with {answers.exit_code}"
    return answers.judge(
        [line for line in lines if not line.startswith(step.SLURM_PREFIXES)],
        {host for line in lines for host in step.parse_node_failure(line)},
        step.find_task_ends(lines),
        commands.count_gpus(environ),
    )
