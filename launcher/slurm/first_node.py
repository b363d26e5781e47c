"""An attempt of a SLURM job, on its first node or in its user's shell: nodes, preflight, steps, signals."""

import contextlib
import errno
import logging
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config.settings import Settings
from launcher.config.start import parse_endpoint
from launcher.errors import EXIT_MACHINE, EXIT_SCHEDULER, LaunchError, MachineError, SchedulerError
from launcher.files import open_below
from launcher.launch.coordinator import Coordinator
from launcher.launch.job import choose_restarts, find_free_port, list_ports, read_client_ports
from launcher.launch.processes import adopt_orphans, end_leftovers, prepare_agent
from launcher.launch.signals import (
    FORWARDED,
    KILL_GRACE,
    STOPPING,
    SignalQueue,
    StopStages,
    catch_signals,
    make_signal_channel,
    name_signal,
)
from launcher.protocol import LAUNCH_ATTEMPT, LAUNCH_NODE_ORDER, LAUNCH_RENDEZVOUS
from launcher.runs.provenance import describe_sources
from launcher.runs.records import read_nodes, refuse_node
from launcher.runs.run_directory import RunDir, explain_write_error, open_run_dir
from launcher.slurm import commands
from launcher.slurm import step as srun
from launcher.slurm.attempt import (
    MAX_NAMED,
    Attempt,
    NodeOrder,
    choose_stop_time,
    end_attempt,
    is_taken_over,
    prepare_for_kill,
    start_attempt,
)
from launcher.slurm.job_request import JobRequest, read_job_request
from launcher.slurm.step import CLOSE_TIMEOUT, OWN_GAP, NodeStep, Step, StepReport
from launcher.text import count_things, name_some

if TYPE_CHECKING:
    from launcher.doctor.model import PreflightReport

logger = logging.getLogger(__name__)

RETRY = 5.0
"""Seconds until the next try, if slurmctld is away or the nodes are not ready for another step."""
REFUSALS = 5
"""Tries of which slurmctld itself says that the nodes are not ready."""
RECORD_TIMEOUT = 5.0
"""Seconds for a record to come into sight of this node, on a filesystem that tells late of new files."""
TICK = 1.0
"""Seconds between two looks at clocks and records."""
SRUN_GRACE = 10.0
"""Seconds that srun has to end a step that did not end by itself."""
ELASTIC_GRACE = 30.0
"""Seconds that the other nodes have to see by themselves that one of them has failed for good."""
LONGEST_ORDER = 120_000
"""Characters of a variable; the kernel takes 128 KiB (MAX_ARG_STRLEN). It is enough for 10,000 nodes in any
order."""
STEP_ID_CYCLE = 4
"""Attempts after which a step may have the number of an earlier one's again: by then the node that a signal
waits for has been lost for longer than several waits in the queue."""


def run_batch_script(run_path: Path) -> int:
    """Run one attempt of a submitted job and return its exit code; raises LaunchError."""
    request = read_job_request(run_path, os.environ)
    try:
        run = open_run_dir(run_path, None)
    except OSError as error:
        raise MachineError(
            f"{os.uname().nodename} cannot write the run directory, {error.filename} ({error.strerror}):"
            " runs_dir=DIR chooses one on a filesystem that all nodes share"
        ) from None
    return run_attempt(request, run, os.environ, requeues=True)


def order_job_nodes(environ: Mapping[str, str], request: JobRequest) -> NodeOrder:
    """Return the nodes to run on and the spare ones, in the order of their ranks; raises MachineError.

    Says which order that is if it is not SLURM's own, and what is wrong with what was asked for.
    """
    cluster = request.config.cluster
    hosts = commands.list_job_hosts(environ)[: request.max_nodes + cluster.spares]
    order = find_node_order(cluster.node_order, hosts, environ, request.directory)
    for warning in order.warnings:
        logger.warning(f"node order: {warning}")
    if order.source != "slurm":
        logger.info(f"ranks are in the order of {order.why}: {commands.fold_in_order(order.hosts)}")
    return order


def run_attempt(request: JobRequest, run: RunDir, environ: Mapping[str, str], *, requeues: bool) -> int:
    """Run one attempt to its end and return the exit code; raises LaunchError before it starts."""
    order = order_job_nodes(environ, request)
    adopt_orphans()
    checkpoint, _ = commands.parse_signal(request.config.cluster.signal)
    with catch_signals((checkpoint,)) as inbox, contextlib.ExitStack() as stack:
        attempt = start_attempt(request, run, environ, order, requeues=requeues)
        first, guards = FirstNode(attempt, inbox), list["subprocess.Popen[bytes]"]()
        try:
            if attempt.is_guarded and len(attempt.step_hosts) > 1:
                from launcher.slurm.lost_nodes import start_guards  # few jobs have use for it

                guards = stack.enter_context(start_guards(attempt))
            os.close(open_below(run.path, "logs", str(run.first_attempt)))
            skip_step_ids(attempt)
            if first.check_nodes():
                first.run_steps()
        except OSError as error:
            status, reason = EXIT_MACHINE, f"the step could not be started ({error})"
            if error.filename == "srun":
                fix = "load SLURM's module, as cluster.setup can"
                status, reason = EXIT_SCHEDULER, f"srun cannot be run ({error.strerror}): {fix}"
            elif error.errno in (errno.ENOSPC, errno.EDQUOT):
                reason = explain_write_error(run, error)
            first.refuse(reason, status)
        except LaunchError as error:
            first.refuse(str(error), error.exit_code)
        finally:
            end_leftovers(KILL_GRACE, [guard.pid for guard in guards])
        return end_attempt(attempt)


@dataclass(slots=True)
class FirstNode:
    """The batch script's process during an attempt: its steps, the signals that it got, a stop's stages."""

    attempt: Attempt
    inbox: SignalQueue
    deferred: list[int] = field(default_factory=list)
    """Signals for the ranks that came before there were any."""
    stop: StopStages | None = None
    stop_at: float | None = None
    """When the ranks are to be stopped before the time limit, in seconds since the epoch."""

    def refuse(self, reason: str, status: int) -> None:
        """Report a step that there is none of, with a record of ours that says why."""
        record = refuse_node(self.attempt.hosts[0], 0, status, reason, time.time())
        self.attempt.step = StepReport(status, (record,), signals=self.attempt.step.signals)

    def check_nodes(self) -> bool:
        """Check the nodes if that is wanted; tells whether the ranks are to start.

        `preflight.kind=auto` is light for a job with GPUs. A mistake of the checks' own ends no job.
        """
        kind = self.attempt.request.config.preflight.kind
        if kind == "auto":
            kind = "light" if commands.count_gpus(self.attempt.environ) else "off"
        try:
            return kind == "off" or run_preflight(self, kind)
        except Exception as error:
            logger.warning(f"preflight failed ({type(error).__name__}: {error}): report it")
            return True

    def run_steps(self) -> None:
        """Run the step, again while slurmctld is away or the nodes are not ready for it."""
        attempt, refused = self.attempt, 0
        while True:
            if self.take_early_signals():
                attempt.step = StepReport(128 + attempt.step.stops[0], signals=attempt.step.signals)
                return
            if is_taken_over(attempt.run):
                self.refuse("another node has ended this attempt", EXIT_MACHINE)
                return
            attempt.step = StepReport(signals=attempt.step.signals)
            self.run_step()
            refusal = "".join(record.agent_said for record in attempt.step.records)
            if attempt.step.signals or not refusal.startswith(srun.NOT_STARTED):
                return
            # If slurmctld answers nobody, what srun says can have any words.
            can_ask = shutil.which("squeue", path=attempt.environ.get("PATH"))
            is_away = bool(can_ask) and attempt.ask_status(commands.SHORT_TIMEOUT) is None
            refused += not is_away
            if not is_away and (refused >= REFUSALS or not srun.TEMPORARY.search(refusal)):
                return
            until = "until slurmctld answers, " if is_away else ""
            logger.warning(f"{refusal}: {until}it is tried again")
            self.poll(RETRY)
            self.take_early_signals()

    def run_step(self) -> None:
        """Run the step of a task on each node, which starts its ranks and writes the node's record."""
        attempt, run, first = self.attempt, self.attempt.run, self.attempt.hosts[0]
        config, coordinator = attempt.request.config, None

        def find_endpoint(host: str, restart: int) -> tuple[str, int]:
            """Return where the ranks of a start meet; a node that replaces the first one has SLURM's name."""
            address, port = parse_endpoint(endpoint)
            given = address if host == first else host
            return given, choose_port(host, attempt.environ) if restart else port

        endpoint = config.rdzv_endpoint or f"{first}:{choose_port(first, attempt.environ)}"
        if attempt.request.agent == "direct":  # else torchrun decides about the starts of ranks
            restarts = choose_restarts(config, attempt.environ) or 0
            coordinator = Coordinator(attempt.step_hosts, len(attempt.hosts), restarts, find_endpoint)
        step = start_nodes(attempt, endpoint, coordinator)
        if attempt.manifest.git is None:  # else the submission has told of the sources
            attempt.manifest.add_sources(describe_sources(Path(attempt.request.directory)))
        if step.coordinator and attempt.spares:
            from launcher.slurm.lost_nodes import NodeReplacement  # most jobs have no use for it

            replacement = NodeReplacement(attempt, step)
            try:
                self.run_to_end(step, replacement.attend)
            finally:
                replacement.close()
        else:
            self.run_to_end(step)
        step.close()
        code, report = step.process.returncode, attempt.step
        deadline = time.monotonic() + RECORD_TIMEOUT
        while True:  # records may come late if srun knows of no failure
            records = [one for one in read_nodes(run.path, run.first_attempt) if one.host in attempt.hosts]
            if len(records) >= len(attempt.hosts) or code or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        # If no task ever ran, no node was lost: SLURM refused the step.
        if not records and not report.signals and code < 0:
            self.refuse(f"srun was ended by {name_signal(-code)}, and its step", 128 - code)
        elif not records and not report.signals and code and not srun.has_begun(report.srun_lines):
            words = srun.join_lines(report.srun_lines) or "it printed nothing"
            self.refuse(f"{srun.NOT_STARTED} (code {code}): {words}", EXIT_SCHEDULER)
        else:
            report.srun_exitcode, report.records, report.hosts = code, records, attempt.hosts

    def run_to_end(self, step: NodeStep, attend: Callable[[], None] = lambda: None) -> None:
        """Stay with a step to its end; `attend` is called again and again."""
        for number in self.deferred:
            self.pass_on(number, step)
        self.deferred.clear()
        pidfd = os.pidfd_open(step.process.pid)
        try:
            while step.process.poll() is None:
                began = time.monotonic()
                self.poll(TICK, pidfd)
                if time.monotonic() - began > OWN_GAP and is_taken_over(self.attempt.run):
                    logger.info("this node was taken for lost while it slept: its ranks are killed")
                    step.send(signal.SIGKILL)
                    self.stop = StopStages([], time.monotonic() + KILL_GRACE)
                for number in self.inbox.take():
                    self.attempt.step.signals.append((number, time.time()))
                    if number not in STOPPING:
                        self.pass_on(number, step)
                        continue
                    if number == signal.SIGTERM:
                        prepare_for_kill(self.attempt)
                    if self.attempt.prepared is None:  # else SLURM has told the ranks, and KillWait runs
                        self.advance_stop(number, step)
                attend()
                now, failed_at = time.monotonic(), step.failed_at
                if self.stop:
                    if now >= self.stop.deadline:
                        self.advance_stop(signal.SIGTERM, step)
                elif self.stop_at and time.time() >= self.stop_at:
                    logger.info("the time limit is near")
                    self.advance_stop(signal.SIGTERM, step)
                elif failed_at and self.attempt.is_elastic and now > failed_at + ELASTIC_GRACE:
                    self.advance_stop(signal.SIGTERM, step)  # other ranks may wait for it in a collective
        finally:
            os.close(pidfd)

    def poll(self, seconds: float, *others: int) -> None:
        """Let time pass; a signal ends that, or another descriptor."""
        poller = select.poll()
        for descriptor in (self.inbox.wakeup, *others):
            poller.register(descriptor, select.POLLIN)
        poller.poll(seconds * 1000)

    def take_early_signals(self) -> bool:
        """Take the signals that came before the ranks' step; tell whether one of them ends the attempt."""
        taken = self.inbox.take()
        self.attempt.step.signals += [(number, time.time()) for number in taken]
        self.deferred += [number for number in taken if number not in STOPPING]
        if signal.SIGTERM in taken:
            prepare_for_kill(self.attempt)
        return bool(self.attempt.step.stops)

    def pass_on(self, number: int, step: NodeStep) -> None:
        """Send the ranks a signal that does not stop them; theirs may be the time limit's."""
        step.send(number)
        config = self.attempt.request.config
        checkpoint, seconds = commands.parse_signal(config.cluster.signal)
        if number == checkpoint:
            now, status = time.time(), self.attempt.ask_status(commands.SHORT_TIMEOUT)
            end_time, grace = status.end_time if status else None, config.torchrun.shutdown_timeout
            self.stop_at = choose_stop_time(now, end_time, seconds, grace)
            self.attempt.step.near_limit = self.stop_at is not None

    def advance_stop(self, number: int, step: NodeStep) -> None:
        """Enter the next stage of ending the step: the signal, SIGTERM, SIGKILL, and then srun's own ways."""
        grace = self.attempt.request.config.torchrun.shutdown_timeout
        self.stop = self.stop or StopStages.begin(number, grace)
        if self.stop.current is None and self.stop.deadline:  # srun was asked before
            step.process.kill()
        elif (stage := self.stop.next_stage()) is None:
            step.process.terminate()
        else:
            again = "; once more goes on at once"
            is_users = not self.attempt.requeues and stage == signal.SIGINT
            logger.info(f"{name_signal(stage)} to the ranks{again if is_users else ''}")
            step.send(stage)
            return
        self.stop.deadline = time.monotonic() + SRUN_GRACE


def describe_node_step(attempt: Attempt) -> Step:
    """Return the step over the nodes of an attempt."""
    config, run_path, directory = attempt.request.config, attempt.run.path, attempt.request.directory
    box = config.cluster.container
    # As the batch script starts this process: PYTHONPATH may name the working directory, and is for ranks.
    isolation = "-I" if sys.flags.isolated and not box.image else "-P"
    mounts = [f"{run_path}:{run_path}", f"{directory}:{directory}", *box.mounts]
    python = box.python if box.image else sys.executable
    return Step(
        attempt.step_hosts,
        (python, isolation, "-m", "launcher.slurm.task", str(run_path)),
        config.cluster.srun,
        elastic=attempt.is_elastic or bool(attempt.spares),
        directory=directory,
        container=replace(box, mounts=mounts) if box.image else None,
    )


def start_nodes(attempt: Attempt, endpoint: str, coordinator: Coordinator | None = None) -> NodeStep:
    """Start a task on each node, which are to meet at `endpoint`; raises OSError if there is no srun."""
    variables = {LAUNCH_ATTEMPT: str(attempt.run.first_attempt), LAUNCH_RENDEZVOUS: endpoint}
    order = commands.fold_in_order(attempt.step_hosts)
    if len(order) <= LONGEST_ORDER:
        variables[LAUNCH_NODE_ORDER] = order
    step, parent = describe_node_step(attempt), os.getpid()
    reading, writing = make_signal_channel()
    try:
        process = step.start(
            {**attempt.environ, **variables},
            stdin=reading,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: prepare_agent(parent, FORWARDED),
        )
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return NodeStep(process, writing, attempt.step, step.elastic, coordinator)


def skip_step_ids(attempt: Attempt) -> None:
    """Use up as many numbers of steps as give this attempt's step another one than those before it had.

    Numbers begin at 0 in each attempt. slurmctld keeps a signal to a step for a node that does not answer,
    and sends it again a minute later: then the step with that number may be the next attempt's (seen with
    SLURM 22.05; the request that waits names job and step alone).
    """
    step = Step(attempt.hosts[:1], ("true",), {"input": "none", "gres": "none"}, elastic=False)
    for _ in range(attempt.restarts % STEP_ID_CYCLE):
        with contextlib.suppress(subprocess.TimeoutExpired):  # if no step can be started, the real one tells
            subprocess.run(
                step.render(attempt.environ),
                env=commands.clean_for_step(attempt.environ),
                capture_output=True,
                timeout=CLOSE_TIMEOUT,
                check=False,
            )


def choose_port(host: str, environ: Mapping[str, str]) -> int:
    """Return a port of a node: a free one if this process is there, else any outside of the kernel's own.

    Of jobs that share a node, two have the same one in some 20,000 cases once. Then the ranks start again if
    this process decides about their starts; with torchrun's agent the job ends.
    """
    if host == environ.get("SLURMD_NODENAME"):  # not on a login node with `salloc`
        return find_free_port()
    return random.SystemRandom().choice(list_ports(*read_client_ports()))


# The order of the nodes

TOPOLOGY_GROUP = re.compile(r"(?:^|\s)(?:SwitchName|BlockName|AggregatedBlock)=(\S+)")
TOPOLOGY_NODES = re.compile(r"(?:^|\s)Nodes=(\S+)")
TOPOLOGY_TIMEOUT = 10.0
"""Seconds that SLURM has to tell of its switches: a job starts without, if slurmctld is busy."""
ORDER_KEPT = "the nodes stay in SLURM's order"
NO_SWITCHES = "node"
"""SLURM_TOPOLOGY_ADDR_PATTERN if there are no switches: then SLURM need not be asked (srun(1))."""

Groups = tuple[tuple[str, frozenset[str]], ...]
"""Nodes that are near each other, those below a switch or of a block, with its name."""


def parse_topology(text: str) -> Groups:
    """Read what `scontrol show topology` prints: a line for each switch, block or aggregated block.

    What is between the groups need not be told: that follows from the nodes that they have in common. A line
    that cannot be read is left out, since an order is no reason to end a job.
    """
    groups = []
    for line in text.splitlines():
        name, nodes = TOPOLOGY_GROUP.search(line), TOPOLOGY_NODES.search(line)
        with contextlib.suppress(ValueError):
            if (
                name
                and nodes
                and nodes[1] != "(null)"
                and (found := frozenset(commands.expand_hosts(nodes[1])))
            ):
                groups.append((name[1], found))
    return tuple(groups)


def order_nodes(hosts: Sequence[str], groups: Groups) -> tuple[str, ...]:
    """Return the nodes so that those of each group follow each other, at every level of the network.

    A level's groups, and the nodes of the lowest, are in the natural order of their names, with numbers
    as numbers: n2 comes before n10. Nodes in no group come last.
    """
    paths: dict[str, list[tuple[tuple[int, int, str], ...]]] = {host: [] for host in hosts}
    # Of the groups that a node is in, the largest is the highest switch: all paths begin there.
    for name, nodes in sorted(
        groups, key=lambda group: (-len(group[1]), commands.make_natural_key(group[0]))
    ):
        for host in nodes & paths.keys():
            paths[host].append(commands.make_natural_key(name))
    return tuple(
        sorted(hosts, key=lambda host: (not paths[host], paths[host], commands.make_natural_key(host)))
    )


def find_node_order(
    setting: str, hosts: Sequence[str], environ: Mapping[str, str], directory: str
) -> NodeOrder:
    """Return the order that `cluster.node_order` asks for. What cannot be had is told of, and ends no job.

    `directory` is where the path of a file starts.
    """
    if len(hosts) < 2 or setting == "slurm":
        return NodeOrder(tuple(hosts), "slurm", "one node" if len(hosts) < 2 else "cluster.node_order=slurm")
    if setting not in ("auto", "topology"):
        return order_by_file(hosts, setting, directory)
    groups, why = Groups(), "SLURM knows of no switches or blocks with this job's nodes"
    if environ.get("SLURM_TOPOLOGY_ADDR_PATTERN") != NO_SWITCHES:
        try:
            text = commands.run_slurm(("scontrol", "show", "topology"), environ, timeout=TOPOLOGY_TIMEOUT)
            groups = tuple(group for group in parse_topology(text) if group[1].intersection(hosts))
        except SchedulerError as error:
            why = f"the switches are not known ({error})"
    if not groups:
        warnings = () if setting == "auto" else (f"{why}: {ORDER_KEPT}",)
        return NodeOrder(tuple(hosts), "slurm", why, warnings)
    placed = frozenset[str]().union(*(nodes for _, nodes in groups))
    left = [host for host in hosts if host not in placed]
    last = f"{name_some(left, MAX_NAMED)}: on none of SLURM's switches, and so last in the order"
    why = f"SLURM's topology, {len(groups)} groups"
    return NodeOrder(order_nodes(hosts, groups), "topology", why, (last,) if left else ())


def order_by_file(hosts: Sequence[str], setting: str, directory: str) -> NodeOrder:
    """Order a job's nodes as a file of the user's names them; those that it does not name come last.

    Each line of the file has a node, or SLURM's form for several; `#` begins a comment. Nodes that the job
    does not have are passed over: the file can be that of a whole cluster.
    """
    names, why = list[str](), ""
    try:
        for line in Path(directory, Path(setting).expanduser()).read_text(encoding="utf-8").splitlines():
            text = line.partition("#")[0].strip()
            if " " in text or not text.isprintable():
                raise ValueError(f"{text[:80]!r} is no node")
            names += commands.expand_hosts(text)
    except (OSError, ValueError) as error:
        why = f"cluster.node_order={setting}: {error}"
    places = {name: place for place, name in reversed([*enumerate(names)])}  # the first place counts
    left = [host for host in hosts if host not in places]
    if len(left) == len(hosts):
        why = why or f"{setting} names none of the job's nodes, such as {hosts[0]}"
    if why:
        return NodeOrder(tuple(hosts), "slurm", why, (f"{why}: {ORDER_KEPT}",))
    ordered = sorted(hosts, key=lambda host: (places.get(host, len(names)), commands.make_natural_key(host)))
    last = f"{setting} does not name {name_some(left, MAX_NAMED)}, which come last"
    return NodeOrder(tuple(ordered), "file", setting, (last,) if left else ())


# Preflight: on which of the nodes that were checked the job runs, or why it does not start


FIXED_OPTIONS: Mapping[str, object] = {
    "input": "none",
    "output": None,
    "error": None,
    "label": None,
    "kill-on-bad-exit": 0,
    "no-kill": True,
}
"""Options of srun with which a node's answer reaches us whatever happens to the others."""


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
    planned, spares = candidates[:most], candidates[most:]
    if on_failure != "exclude":
        spares = spares[:reserved]
    unused = iter([host for host in spares if host not in sick])
    foreseen = tuple(next(unused, host) if host in sick else host for host in planned)
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


def run_preflight(first: FirstNode, kind: str) -> bool:
    """Check an attempt's nodes, tell what was found, and choose those that it goes on with.

    Tells whether the ranks are to start; else the attempt's step has the reason. A node beyond `nodes` and
    `cluster.spares` is checked if it could be used, by `preflight.on_failure=exclude`.
    """
    from launcher.preflight import describe_report, write_preflight_report
    from launcher.report.findings import list_preflight_lines

    attempt, spares = first.attempt, len(first.attempt.spares)
    request, config = attempt.request, attempt.request.config.preflight
    candidates = attempt.step_hosts
    if config.on_failure == "exclude":
        candidates = tuple(dict.fromkeys((*candidates, *commands.list_job_hosts(attempt.environ))))
    report = check_allocation(
        request.config,
        attempt.environ,
        candidates,
        first,
        directory=Path(request.directory),
        run_path=attempt.run.path,
        kind=kind,
        words=request.words or request.config.program.get("command") or (),
    )
    if first.take_early_signals():
        return True  # whoever starts the step sees it
    if isinstance(report, str):
        logger.warning(f"preflight: the nodes were not checked: {report}")
        attempt.manifest.last.preflight = {"kind": kind, "problem": report}
        attempt.write()
        return True
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
    last = attempt.manifest.last
    last.hosts, last.preflight = list(choice.hosts or attempt.hosts), account
    if spares:
        left = [host for host in candidates if host not in attempt.hosts and host not in report.sick]
        last.spares = left[: request.config.cluster.spares]
    attempt.write()
    if choice.hosts:
        return True
    errors = {one.host: one.what for one in reversed(report.findings) if one.level == "error"}
    attempt.step.srun_exitcode = 0
    told = [f"{host}: {errors[host]}" for host in report.sick if host in errors]
    attempt.step.sickness = told or [choice.text]
    attempt.step.sick = report.sick if choice.action == "requeue" else ()
    return False


def check_allocation(
    config: Settings,
    environ: Mapping[str, str],
    hosts: tuple[str, ...],
    first: FirstNode | None = None,
    **asked: Any,  # noqa: ANN401 - of `make_request`
) -> "PreflightReport | str":
    """Start a task on each node, outside of any container, and judge what they answer, or say why none did.

    Its tasks begin in `/`, since any other folder may be stuck. `first` is about to run a program on the
    nodes, and gets the signals, of which it says whether one ends the checks.
    """
    from launcher.preflight import make_request, run_checks  # most jobs on CPUs have no use for it

    endpoint, merged = f"{hosts[0]}:{choose_port(hosts[0], environ)}", {**environ, **config.env}
    request = make_request(config, hosts, environ=merged, endpoint=endpoint, **asked)
    try:
        answers = run_checks(
            Step(hosts, request.command, {**config.cluster.srun, **FIXED_OPTIONS}).render(environ),
            request,
            {**commands.drop_task_variables(commands.clean_for_step(environ)), **config.env},
            wakeup=first.inbox.wakeup if first else None,
            is_stopped=first.take_early_signals if first else lambda: False,
        )
    except OSError as error:
        return f"srun cannot be run ({error.strerror})"
    lines = [line for line in answers.errors if srun.CPU_BIND_COMPLAINT not in line]
    if answers.ended and not answers.facts and not srun.has_begun(lines):
        return srun.join_lines(lines) or f"srun ended with {answers.exit_code}"
    return answers.judge(
        [line for line in lines if not line.startswith(srun.SLURM_PREFIXES)],
        {host for line in lines for host in srun.parse_node_failure(line)},
        srun.find_task_ends(lines),
        commands.count_gpus(environ),
    )
