"""The watcher of a node: reads heartbeats once a second, reports, and finds out when ranks stand still.

Nothing in its loop waits for anything but time and the supervisor: the run directory has a thread of its own,
and so has each gathering of evidence.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from launcher.text import count_things
from launcher.watch.evidence import gather_node
from launcher.watch.flight_recorder import CollectiveReader
from launcher.watch.hang import HangJudge, choose_limit, find_stall_begin, list_orders, list_stalled
from launcher.watch.job_view import Exchange, JobView, SharedFiles, is_judge, make_job_view
from launcher.watch.metrics import MetricsEvent, MetricsLog, start_prometheus
from launcher.watch.model import (
    Hang,
    JobState,
    NodeEvidence,
    NodeReport,
    RankEntry,
    RankMessage,
    Straggler,
    WatcherSettings,
)
from launcher.watch.notify import Notifier
from launcher.watch.ranks import GpuReader, RankBook, ReadGpus, read_heartbeat
from launcher.watch.run_files import (
    REQUEST_PATIENCE,
    hang_path,
    is_silent,
    read_evidence,
    watch_path,
    write_evidence,
    write_hang,
    write_stack_answer,
)
from launcher.watch.samples import FindCgroups, Sample, Sampler
from launcher.watch.stragglers import StragglerFinder, explain_straggler, list_slow_ranks

TICK = 1.0
"""Seconds from one look at the heartbeats to the next."""
_LATE = 5.0
"""Seconds without a look, after which this process is taken to have been stopped, perhaps with the ranks."""
_HURRY = 0.5
"""Share of the limit without progress from which on nodes exchange reports with each look."""
_STILL, _STILL_INTERVAL = 3.0, 2.0
"""Seconds without progress from which on activity is sampled whole, and so often at least."""


class NodeWatcher:
    """Watches a node's ranks, and judges the job if this node is the one that does."""

    def __init__(
        self,
        settings: WatcherSettings,
        send: Callable[[dict[str, object]], None],
        is_suspended: Callable[[], bool],
        open_gpus: Callable[[], ReadGpus | None],
        find_cgroups: FindCgroups,
    ) -> None:
        """`send` tells the supervisor something; the user may have stopped the job, as by Ctrl-Z."""
        self.settings = settings
        self.folder = Path(settings.folder)
        self.send = send
        self.is_suspended = is_suspended
        self.book = RankBook(self.folder, read_heartbeat)
        self.files = SharedFiles(Path(settings.run_dir))
        self.judge = HangJudge(settings.watch.on_hang, settings.watch.hang_seconds)

        def warn(text: str) -> None:
            self._send("warning", text)

        self.log = MetricsLog(Path(settings.run_dir), settings.host, settings.watch.metrics_interval, warn)
        self.notifier = Notifier(
            settings.notify,
            warn,
            run=settings.run,
            run_dir=settings.run_dir,
            host=settings.host,
            job_id=os.environ.get("SLURM_JOB_ID"),
        )
        self.give_out = start_prometheus(settings, warn)
        self.collectives = CollectiveReader(self.folder, settings.ranks * settings.nodes)
        self.read_gpus = GpuReader(open_gpus, settings.watch.interval).latest
        self.stragglers = StragglerFinder()
        self.sampler = Sampler(find_cgroups)
        self.sample = Sample()
        self.steps = StepCount()
        self.state = "starting"
        """Of the job, as this node has written it last."""
        self.pinged = 0
        """The last step that was pinged for."""
        self.number = 0
        """Of the last report."""
        self.gathering = False
        """Since the last sample, ranks were asked for evidence."""
        self.gatherers: list[threading.Thread] = []
        self.begin = self.last_look = time.monotonic()
        self.next_sample = self.next_exchange = 0.0
        self.answered = 0
        """The last question that this node gathers evidence for."""
        self.evidence: dict[str, NodeEvidence] = {}
        """Of the question that is open, by host."""
        self.stack_request = 0
        """Number of the last request for a rank's stack."""
        self.acted = 0
        """Number of the last hang that is dealt with."""
        self.was_judge = False
        self.told: dict[str, str] = {}
        """Warnings that were given."""

    def take(self, message: RankMessage) -> None:
        """Take the supervisor's word on ranks."""
        self.book.add_ranks(message.found)
        self.book.note_ends(message.ended)

    def tick(self, now: float) -> None:
        """Look at the heartbeats, and do what is due; `now` is monotonic."""
        if now - self.last_look > _LATE or self.is_suspended():
            self.book.forgive(now)
        self.last_look = now
        self.book.look(now)
        if now >= self.next_sample:
            still = self.book.list_still(_STILL)
            interval = self.settings.watch.interval
            self.next_sample = now + (min(interval, _STILL_INTERVAL) if still else interval)
            running = [known.entry.pid for known in self.book.ranks.values() if not known.has_ended]
            self.sample = self.sampler.sample(running, still)
            if not self.gathering:  # what ranks answer is no activity of theirs
                self.book.note_activity(self.sample, self.read_gpus())
            self.gathering = any(thread.is_alive() for thread in self.gatherers)
            self.book.measure_data_shares()
        own, state = self._make_report(now), None
        if is_judge(own, self.files.view, now, stuck=self.files.is_stuck(now)):
            state = self._judge_job(own, now)
        else:
            self.was_judge, self.judge.asks = False, 0
            self._follow_judge(own, now)
        self._exchange(own, state, now)
        self._check_files(now)

    def _make_report(self, now: float) -> NodeReport:
        """Return this node's report of now."""
        settings, node, wall = self.settings, self.sample.node, time.time()
        limit = choose_limit(
            settings.watch.hang_seconds, self.book.find_slow_step(), self.judge.longest_pause
        )
        job = self.files.view.job if self.files.view else None
        waits = self.stragglers.waits or dict(job.value.wait_shares if job else ())
        ranks = self.book.list_ranks(self.sample, self.read_gpus(), waits)
        return NodeReport(
            host=settings.host,
            node_rank=settings.node_rank,
            nodes=settings.nodes,
            attempt=settings.attempt,
            time=wall,
            number=self.number,
            interval=settings.watch.interval,
            ranks=ranks,
            stalled_since=find_stall_begin(list_stalled(ranks, limit), wall),
            limit=limit,
            asks=self.judge.asks,
            collectives=self.collectives.read(tuple(self.book.list_beats().values()), wall),
            **{item.name: getattr(node, item.name) for item in fields(node)},
        )

    def _exchange(self, own: NodeReport, state: JobState | None, now: float) -> None:
        """Have the report written and others' read, if it is time: at each look once ranks may hang."""
        idle = [rank.idle for rank in own.ranks if rank.idle is not None]
        hurry = bool(self.judge.asks) or max(idle, default=0.0) > _HURRY * (own.limit or 0.0)
        if now < self.next_exchange and not (hurry and self.files.is_idle()):
            return
        self.number += 1
        if self.number == 1 and self.settings.node_rank == 0:
            nodes = f" on each of {own.nodes} nodes" if own.nodes > 1 else ""
            text = f"{count_things(self.settings.ranks, 'rank')}{nodes}"
            self._record(MetricsEvent("start", own.time, text), "starting")
        self.log.add_report(own)
        self.give_out(own)
        if state is not None:
            if state.step > self.pinged:
                self.notifier.ping()
            self.pinged, self.state = state.step, state.state
        self.next_exchange = now + self.settings.watch.interval
        reads_all = self.settings.nodes > 1 and (state is not None or own.stalled_since is not None)
        self.files.submit(Exchange(own, state, reads_all))
        self._look_for_stack_request(now)

    # The judge

    def _judge_job(self, own: NodeReport, now: float) -> JobState:
        """Judge the job; return what is to be written of it."""
        shared, judge, limit = self.files.view, self.judge, own.limit or 0.0
        if job := shared.find_word(own, now, self.begin) if shared else None:
            judge.adopt(job)
            self.steps.adopt(job.step)
        self.was_judge = True
        view = make_job_view(own, shared, now)
        judge.note_pauses(view.ranks, limit)
        if judge.asks:
            self._collect_evidence(view, now)
            if judge.is_answered(view.fresh, self.evidence, now):
                gathered = {node.host: node for node in (*view.list_ended_ranks(), *self.evidence.values())}
                evidence = tuple(sorted(gathered.values(), key=lambda node: node.node_rank))
                number = 1 + (shared.hangs if shared else 0)
                reports = (*view.fresh, *view.silent)
                found = judge.conclude(view.ranks, reports, evidence, limit, now=now, number=number)
                if isinstance(found, Hang):
                    self._tell_hang(found, evidence)
                elif found:
                    self._send("note", found)
        elif judge.should_ask(view.ranks, limit, now):
            self._answer(judge.ask(now, int(time.time())))
        if hang := judge.find_recovery(view.ranks, limit):
            self._tell_recovery(hang)
        self._act(judge.hangs, now)
        self.stragglers.start(view.fresh, now, self._tell_straggler)
        return self._describe_job(own, view)

    def _describe_job(self, own: NodeReport, view: JobView) -> JobState:
        """Return what is to be written of the job."""
        judge, finder = self.judge, self.stragglers
        return view.describe(
            own,
            hanging=judge.is_hanging(view.ranks),
            notes=tuple(self.told.values()),
            step=self.steps.count(view),
            hangs=tuple(judge.hangs),
            restarts=judge.restarts,
            asks=judge.asks,
            stragglers=finder.told,
            wait_shares=tuple(sorted(finder.waits.items())),
        )

    def _collect_evidence(self, view: JobView, now: float) -> None:
        """Have the other nodes' answers read."""
        missing = [report.host for report in view.fresh if report.host not in self.evidence]
        if missing and len(view.fresh) > 1 and self.files.is_idle() and now > self.judge.asked_at + TICK:
            number = self.judge.asks

            def read() -> None:
                for node in read_evidence(watch_path(self.files.run_path), number, own=True):
                    if number == self.answered:
                        self.evidence.setdefault(node.host, node)

            self.files.add_task(read)

    def _tell_hang(self, hang: Hang, evidence: Sequence[NodeEvidence]) -> None:
        """Tell of a hang, and keep what is known of it."""
        since, verdict = hang.time - hang.stalled_since, hang.verdict
        step = f"after step {hang.step}" if hang.step else "before the first step"
        text = f"hang {hang.number} {step}, {since:.0f} s without a step: {verdict.sentence}"
        self._send("hang", text, hang=asdict(hang))
        found = MetricsEvent(
            "hang", hang.time, verdict.sentence, hang.step, verdict.ranks, verdict.hosts, hang.number
        )
        self._record(found, "hanging")
        if hang.action == "restart":
            self.log.add_event(replace(found, event="restart", attempt=self.settings.attempt))

        def keep() -> None:
            write_hang(self.files.run_path, hang, evidence)
            self._send("note", f"stacks in {hang_path(self.files.run_path, hang.number)}")

        self.files.add_task(keep)
        self.next_exchange = 0.0

    def _tell_recovery(self, hang: Hang) -> None:
        """Tell that steps go on."""
        over = hang.recovered or hang.time
        seconds = f"{over - hang.stalled_since:.0f} s"
        self._send("recovered", f"hang {hang.number} is over after {seconds}: steps go on", hang=asdict(hang))
        text = f"steps go on after {seconds}"
        self._record(MetricsEvent("recovered", over, text, hang.step, number=hang.number), "running")
        self.files.add_task(lambda: write_hang(self.files.run_path, hang))
        self.next_exchange = 0.0

    def _tell_straggler(self, found: Straggler) -> None:
        """Tell of a straggler: in the thread of the search."""
        text = explain_straggler(found)
        self._send("straggler", text, straggler=asdict(found))
        event = MetricsEvent("straggler", found.time, text, found.last_step, (found.rank,), (found.host,))
        self._record(event, self.state)

    def _record(self, event: MetricsEvent, state: str) -> None:
        """Write down what happened to the job, and notify of it."""
        self.log.add_event(replace(event, attempt=self.settings.attempt))
        name = "recover" if event.event == "recovered" else event.event
        self.notifier.tell(name, event.sentence, state=state, step=event.step)

    # Every node

    def _follow_judge(self, own: NodeReport, now: float) -> None:
        """Answer the judging node's question, and act upon its hangs."""
        shared = self.files.view
        job = shared.find_word(own, now, self.begin) if shared else None
        if job is None or not shared or not shared.job or is_silent(now - shared.job.seen, own.interval):
            return
        if job.asks > self.answered:
            self._answer(job.asks)
        self._act(job.hangs, now)

    def _look_for_stack_request(self, now: float) -> None:
        """Answer somebody who looks at the run and asks for a rank's stack."""
        stored = self.files.view.request if self.files.view else None
        if (
            stored is None
            or stored.value.number <= self.stack_request
            or now - stored.seen > REQUEST_PATIENCE
        ):
            return
        self.stack_request = stored.value.number
        if known := self.book.ranks.get(stored.value.rank):
            self._gather([known.entry], 0, lambda found: write_stack_answer(self.files.run_path, found))

    def _answer(self, number: int) -> None:
        """Gather this node's evidence for a question, in a thread."""
        self.answered, self.evidence = number, {}

        def keep(found: NodeEvidence) -> None:
            if number == self.answered:
                write_evidence(self.files.run_path, found)

        self._gather([known.entry for known in self.book.ranks.values()], number, keep)

    def _gather(self, ranks: Sequence[RankEntry], number: int, keep: Callable[[NodeEvidence], None]) -> None:
        """Ask ranks for evidence in a thread, and have it kept; nothing waits for a reading of the GPUs."""

        def gather() -> None:
            found = gather_node(
                self.folder,
                ranks,
                self.book.list_beats(),
                host=self.settings.host,
                node_rank=self.settings.node_rank,
                number=number,
                sample_gpu=self.read_gpus().get,
            )
            if number and number == self.answered:
                self.evidence[found.host] = found
            self.files.add_task(lambda: keep(found))

        self.gathering = True
        thread = threading.Thread(target=gather, name="evidence", daemon=True)
        self.gatherers = [one for one in self.gatherers if one.is_alive()] + [thread]
        thread.start()

    def _act(self, hangs: Sequence[Hang], now: float) -> None:
        """Have ranks ended for hangs; not while the run directory hangs, which may be all that is wrong."""
        if self.files.is_stuck(now) or self.files.twin is not None:
            return
        for order in list_orders(hangs, self.acted, self.book.list_pids()):
            self.send(order)
        self.acted = max([self.acted, *(hang.number for hang in hangs)])

    def _check_files(self, now: float) -> None:
        """Warn once if the run directory hangs, or cannot be written."""
        if self.files.is_stuck(now):
            text = "the run directory does not answer: reports of watching are not written for now"
            self.warn("stuck", f"{text} ({self.files.run_path})")
        elif (twin := self.files.twin) is not None:
            self.judge.on_hang = "report"
            text = (
                f"node {twin} has the same host name as this one, {self.settings.host}: reports of watching"
            )
            self.warn("twin", f"{text} overwrite each other, and hangs are only reported")
        elif trouble := self.files.trouble:
            self.warn("trouble", f"reports of watching cannot be written ({trouble})")

    def warn(self, key: str, text: str) -> None:
        """Give a warning once."""
        if key not in self.told:
            self.told[key] = text
            self._send("warning", text)

    def _send(self, event: str, line: str, **values: object) -> None:
        """Send the supervisor a line to log, and a hang or straggler."""
        self.send({"event": event, "lines": [line], **values})

    def end(self, seconds: float) -> None:
        """Write a last report, if that takes no longer than this."""
        now = time.monotonic()
        own, state = self._make_report(now), None
        if self.was_judge:
            self.judge.asks = 0
            state = self._describe_job(own, make_job_view(own, self.files.view, now))
            state = replace(state, state="ended")
            if slow := list_slow_ranks(self.stragglers.told):
                self._send("note", f"stragglers: {slow}")
        self.files.submit(Exchange(own, state, reads_all=False))
        self.files.wait_idle(seconds)
        self.log.close(seconds)
        self.notifier.close(seconds)


class StepCount:
    """Counts the steps of the job: those of ranks that were started again are added to those before."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}
        """Steps of earlier processes, by rank."""
        self._last: dict[int, tuple[int, int]] = {}
        """PID and steps, by rank."""
        self._least = 0

    def adopt(self, steps: int) -> None:
        """Take over from another node, which has counted so many."""
        self._least = max(self._least, steps)

    def count(self, view: JobView) -> int:
        """Return the steps of the rank that has made most."""
        for rank in view.ranks:
            pid, step = self._last.get(rank.rank, (rank.pid, 0))
            if pid != rank.pid:
                self._before[rank.rank] = self._before.get(rank.rank, 0) + step
            self._last[rank.rank] = rank.pid, rank.step
        found = (self._before.get(rank, 0) + step for rank, (_, step) in self._last.items())
        self._least = max([self._least, *found])
        return self._least
