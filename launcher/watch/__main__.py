"""`python -P -m launcher.watch`: the watcher of a node, which a supervisor starts.

It reads lines of JSON from stdin (`model.WatcherSettings`, then lists of `model.RankEntry`) and writes lines
of JSON to stdout. The end of stdin is its own end.

It reads heartbeats once a second, reports, and finds out when ranks stand still. Nothing in its loop waits
for anything but time and the supervisor: the run directory has a thread of its own, and so has each
gathering of evidence. One node judges, the job's first: it reads all nodes' reports, asks for evidence, and
tells what it finds in a file that the others follow.
"""

import json
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from launcher.codec import load
from launcher.files import read_stat
from launcher.probe.limits import list_cgroups
from launcher.probe.nvml import GpuSampler, import_nvml
from launcher.probe.sysfs import Tree
from launcher.text import count_things
from launcher.watch.evidence import gather_node
from launcher.watch.flight_recorder import CollectiveReader
from launcher.watch.hang import (
    HangJudge,
    JobView,
    choose_limit,
    find_quantile,
    find_word,
    is_judge,
    list_orders,
    list_stalled,
    make_job_view,
)
from launcher.watch.metrics import MetricsEvent, MetricsLog, Prometheus
from launcher.watch.model import (
    UNWATCHED,
    GpuSample,
    Hang,
    JobState,
    NodeEvidence,
    NodeReport,
    Rank,
    RankEntry,
    Straggler,
    WatcherSettings,
    list_fields,
)
from launcher.watch.notify import Notifier
from launcher.watch.procfs import Sample, Sampler
from launcher.watch.ranks import GpuReader, RankBook, read_planned_gpus
from launcher.watch.run_files import SharedFiles, Stored, is_silent, write_hang, write_value
from launcher.watch.stragglers import StragglerFinder, explain_straggler

_TICK = 1.0
"""Seconds from one look at the heartbeats to the next."""
_LATE = 5.0
"""Seconds without a look, after which this process is taken to have been stopped, perhaps with the ranks."""
_HURRY = 0.5
"""Share of the limit without progress from which on nodes exchange reports with each look."""
_STILL, _STILL_INTERVAL = 3.0, 2.0
"""Seconds without progress from which on activity is sampled whole, and so often at least."""
_REQUEST_PATIENCE = 30.0
"""Seconds after which a request for a stack is no longer answered: who asked has gone on."""
_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP),
)
"""SLURM sends a job's signals to every process; ranks may take their time to end, and are watched then."""
_NICENESS = 5
_LAST = 0.2
"""Seconds for the last report: the supervisor waits for this process."""


class NodeWatcher:
    """Watches a node's ranks, and judges the job if this node is the one that does."""

    def __init__(self, settings: WatcherSettings) -> None:
        run_path, watch, host = Path(settings.run_dir), settings.watch, settings.host
        self.settings = settings
        self.supervisor = os.getppid()
        self.book = RankBook(Path(settings.folder))
        self.files = SharedFiles(run_path)
        self.judge = HangJudge(watch.on_hang, watch.hang_seconds)

        def warn(text: str) -> None:
            self.send("warning", text)

        job = {"run": settings.run, "job_id": os.environ.get("SLURM_JOB_ID"), "host": host}
        self.log = MetricsLog(run_path, host, watch.metrics_interval, self.files.put_metrics, warn)
        self.notifier = Notifier(settings.notify, warn, {**job, "run_dir": settings.run_dir})
        self.prometheus = Prometheus(settings.run, host, watch, warn)
        self.collectives = CollectiveReader(self.book.folder, settings.ranks * settings.nodes)
        self.stragglers = StragglerFinder()
        self.sampler = Sampler(lambda pid: list_cgroups(Tree(), ("cpu",), pid)["cpu"][1])
        self.sample = Sample()

        def open_gpus() -> Callable[[], Mapping[int, GpuSample]] | None:
            gpus = read_planned_gpus(run_path, host)
            nvml = import_nvml() if gpus else None
            return GpuSampler(gpus, nvml).sample if nvml else None

        self.gpus = GpuReader(open_gpus, watch.interval)
        self.pinged = 0
        """The last step that was pinged for."""
        self.number = 0
        """Of the last report."""
        self.gatherers: list[threading.Thread] = []
        self.gathering = False
        """Since the last sample, ranks were asked for evidence: what they answer is no activity of theirs."""
        self.begin = self.last_look = time.monotonic()
        self.next_sample = self.next_exchange = 0.0
        self.answered = 0
        """The last question that this node gathers evidence for."""
        self.evidence: tuple[NodeEvidence, ...] = ()
        """This node's, of the last question."""
        self.stack_request = self.acted = 0
        """Numbers of the last request for a rank's stack, and of the last hang that is dealt with."""
        self.is_judge = False
        self.newest, self.saving = settings.attempt, False
        """The last start of the ranks, and whether one of them writes a checkpoint."""
        self.told: dict[str, str] = {}
        """Warnings that were given."""

    def send(self, event: str, *lines: str, **values: object) -> None:
        """Send the supervisor lines to log, a hang, a straggler or an order, whole; several threads do."""
        try:
            sys.stdout.buffer.write((json.dumps({"event": event, "lines": lines, **values}) + "\n").encode())
            sys.stdout.buffer.flush()
        except OSError:  # it is gone, and so is the reason for this process
            os._exit(1)

    def warn(self, key: str, text: str) -> None:
        """Give a warning once."""
        if key not in self.told:
            self.told[key] = text
            self.send("warning", text)

    def try_tick(self) -> None:
        """Look at the ranks; a defect in that is a warning, and ends neither this process nor the job.

        Each kind is told of once: the log may be in memory.
        """
        try:
            self.tick(time.monotonic())
        except Exception as error:
            kind = type(error).__name__
            if kind not in self.told:
                traceback.print_exc()
            self.warn(kind, f"the ranks are not watched as they should be: {kind}: {error}")

    def tick(self, now: float) -> None:
        """Look at the heartbeats, and do what is due; `now` is monotonic."""
        watch, book = self.settings.watch, self.book
        with suppress(OSError):
            # This process or the supervisor was stopped, and perhaps the ranks with it, as by Ctrl-Z.
            if now - self.last_look > _LATE or read_stat(self.supervisor)[1][0] == "T":
                book.counts_from = now
        self.last_look = now
        book.look(now)
        if now >= self.next_sample:
            still = book.list_still(_STILL)
            self.next_sample = now + (min(watch.interval, _STILL_INTERVAL) if still else watch.interval)
            running = [known.entry.pid for known in book.ranks.values() if not known.entry.has_ended]
            self.sample = self.sampler.sample(running, still)
            book.take_sample(self.sample, self.gpus.latest(), counts=not self.gathering)
            self.gathering = any(thread.is_alive() for thread in self.gatherers)
        own, state = self._make_report(now), None
        if own.node_rank == 0:
            self._note_progress(own)
        word = find_word(own, self.files.found, self.begin)
        self.is_judge = is_judge(own, self.files.found, self.begin, now)
        if self.is_judge:
            state = self._judge_job(own, word, now)
        else:
            self.judge.asks = 0
            if word and not is_silent(now - word.seen, own.interval):
                if word.value.asks > self.answered:
                    self._answer(own, word.value.asks)
                self._act(word.value.hangs, now)
        # Reports are written and others' read if it is time: at each look once ranks may hang.
        idle = max((rank.idle for rank in own.ranks if rank.idle is not None), default=0.0)
        hurry = (self.judge.asks or idle > _HURRY * (own.limit or 0.0)) and self.files.worker.wait_idle(0.0)
        if now >= self.next_exchange or hurry:
            self._exchange(own, state, now)
        if self.files.is_stuck(now):
            text = "the run directory does not answer: reports of watching are not written for now"
            self.warn("stuck", f"{text} ({self.files.run_path})")
        elif trouble := self.files.trouble:
            self.warn("trouble", f"reports of watching cannot be written ({trouble})")

    def _make_report(self, now: float) -> NodeReport:
        """Return this node's report of now."""
        settings, wall = self.settings, time.time()
        beats = self.book.list_beats()
        durations = [beat.durations for beat in beats.values()]
        limit = choose_limit(settings.watch.hang_seconds, durations, self.judge.longest_pause)
        job = self.files.found.job
        waits = self.stragglers.waits or dict(job.value.wait_shares if job else ())
        ranks = self.book.list_ranks(self.sample, self.gpus.latest(), waits)
        stalled = [rank.idle or 0.0 for rank in list_stalled(ranks, limit)]
        return NodeReport(
            host=settings.host,
            node_rank=settings.node_rank,
            nodes=settings.nodes,
            attempt=settings.attempt,
            time=wall,
            number=self.number,
            interval=settings.watch.interval,
            ranks=ranks,
            stalled_since=wall - min(stalled) if stalled else None,
            limit=limit,
            collectives=self.collectives.read(tuple(beats.values()), wall),
            **list_fields(self.sample.node),
        )

    def _note_progress(self, own: NodeReport) -> None:
        """Write down that the ranks were started again, and that they write a checkpoint."""
        newest = max((rank.attempt for rank in own.ranks), default=0)
        saving = [rank.step for rank in own.ranks if rank.phase == "saving"]
        if newest > self.newest:
            text = f"the ranks were started again, attempt {newest}"
            self.log.add(MetricsEvent("restart", own.time, text))
        if saving and not self.saving:
            self.log.add(MetricsEvent("checkpoint", own.time, step=max(saving)))
        self.newest, self.saving = max(newest, self.newest), bool(saving)

    def _exchange(self, own: NodeReport, state: JobState | None, now: float) -> None:
        """Have the report written, give it out, and have others' read."""
        self.number += 1
        if self.number == 1 and self.settings.node_rank == 0:
            nodes = f" on each of {own.nodes} nodes" if own.nodes > 1 else ""
            text = f"{count_things(self.settings.ranks, 'rank')}{nodes}"
            self._record(MetricsEvent("start", own.time, text), "starting")
        self.log.add_report(own)
        self.prometheus.take(own)
        if state is not None and state.step != self.pinged:
            self.notifier.ping()
            self.pinged = state.step
        self.next_exchange = now + self.settings.watch.interval
        self.files.submit(own, state)
        # Somebody who looks at the run may have asked for a rank's stack.
        request = self.files.found.request
        if request and request.value.number > self.stack_request and now - request.seen <= _REQUEST_PATIENCE:
            self.stack_request = request.value.number
            if ranks := [rank for rank in own.ranks if rank.rank == request.value.rank]:
                self._gather(ranks, 0)

    # The judge

    def _judge_job(self, own: NodeReport, word: Stored[JobState] | None, now: float) -> JobState:
        """Judge the job; return what is to be written of it."""
        judge, view = self.judge, make_job_view(own, self.files.found, now)
        if word:
            judge.adopt(word.value)
        answers = (*self.files.found.evidence, *self.evidence)
        evidence = {node.host: node for node in answers if node.number == judge.asks}
        match judge.look(view, evidence, own.limit or 0.0, now):
            case int(question):
                self._answer(own, question)
            case str(notice):
                self.send("note", notice)
            case Hang() as hang:
                self._tell_hang(hang, (*view.ended, *evidence.values()))
        self._act(judge.hangs, now)
        self.stragglers.start(view.fresh, now, self._tell_straggler)
        return self._describe_job(own, view)

    def _describe_job(self, own: NodeReport, view: JobView) -> JobState:
        """Return what is to be written of the job."""
        judge, finder, ranks = self.judge, self.stragglers, view.ranks
        ages = [one.step_age for one in ranks if one.phase not in UNWATCHED and one.step_age is not None]
        step = max((one.step for one in ranks), default=0)
        missing = own.nodes - len(view.fresh) - len(view.silent) - len(view.ended)
        late = [f"{missing} of {own.nodes} nodes have not reported yet"] if missing > 0 else []
        return JobState(
            time=own.time,
            host=own.host,
            attempt=own.attempt,
            state="hanging" if judge.is_hanging(ranks) else "running" if step else "starting",
            step=step,
            step_age=min(ages, default=None),
            p50=find_quantile([one.p50 for one in ranks if one.p50 is not None], 0.5),
            nodes=own.nodes,
            silent=tuple(report.host for report in view.silent),
            hangs=tuple(judge.hangs),
            restarts=sum(hang.action == "restart" for hang in judge.hangs),
            stragglers=finder.told,
            notes=(*late, *self.told.values()),
            asks=judge.asks,
            wait_shares=tuple(sorted(finder.waits.items())),
        )

    def _tell_hang(self, hang: Hang, evidence: Sequence[NodeEvidence]) -> None:
        """Tell of a hang, or that steps go on, and keep what is known of it."""
        verdict, run_path, number = hang.verdict, self.files.run_path, hang.number
        if hang.recovered is None:
            step = f"after step {hang.step}" if hang.step else "before the first step"
            since = f"{hang.time - hang.stalled_since:.0f} s"
            text = f"hang {number} {step}, {since} without a step: {verdict.sentence}"
            who = hang.step, verdict.ranks, verdict.hosts, number
            event, state = MetricsEvent("hang", hang.time, verdict.sentence, *who), "hanging"
        else:
            since = f"{hang.recovered - hang.stalled_since:.0f} s"
            text, evidence = f"hang {number} is over after {since}: steps go on", ()
            said = f"steps go on after {since}"
            event = MetricsEvent("recovered", hang.recovered, said, hang.step, number=number)
            state = "running"
        self.send(event.event, text, hang=asdict(hang))
        self._record(event, state)

        def keep() -> None:
            write_hang(run_path, hang, evidence)
            if hang.recovered is None:
                self.send("note", f"stacks in {run_path / hang.folder}")

        self.files.worker.put(keep)
        self.next_exchange = 0.0

    def _tell_straggler(self, found: Straggler) -> None:
        """Tell of a straggler: in the thread of the search."""
        text = explain_straggler(found)
        self.send("straggler", text, straggler=asdict(found))
        event = MetricsEvent("straggler", found.time, text, found.last_step, (found.rank,), (found.host,))
        self._record(event, "running")

    def _record(self, event: MetricsEvent, state: str) -> None:
        """Write down what happened to the job, and notify of it."""
        self.log.add(replace(event, attempt=self.settings.attempt))
        name = "recover" if event.event == "recovered" else event.event
        self.notifier.tell(name, event.sentence, state=state, step=event.step)

    # Every node

    def _answer(self, own: NodeReport, number: int) -> None:
        """Gather this node's evidence for a question."""
        self.answered = number
        self._gather(own.ranks, number)

    def _gather(self, ranks: Sequence[Rank], number: int) -> None:
        """Ask ranks for evidence in a thread, and have it written; `number` is a hang's, or 0."""
        beats, settings = self.book.list_beats(), self.settings

        def gather() -> None:
            found = gather_node(self.book.folder, ranks, beats, settings.host, settings.node_rank, number)
            if number == self.answered:
                self.evidence = (found,)

            def keep() -> None:
                if number in (0, self.answered):  # else a later question has its answer in the file's place
                    write_value(self.files.run_path, found)

            self.files.worker.put(keep)

        self.gathering = True
        thread = threading.Thread(target=gather, name="evidence", daemon=True)
        self.gatherers = [one for one in self.gatherers if one.is_alive()] + [thread]
        thread.start()

    def _act(self, hangs: Sequence[Hang], now: float) -> None:
        """Have ranks ended for hangs; not while the run directory hangs, which may be all that is wrong."""
        if not self.files.is_stuck(now):
            pids = {rank: known.entry.pid for rank, known in self.book.ranks.items()}
            for order in list_orders(hangs, self.acted, pids):
                self.send("act", **order)
            self.acted = max([self.acted, *(hang.number for hang in hangs)])

    def end(self, seconds: float) -> None:
        """Write a last report, if that takes no longer than this."""
        now, self.judge.asks = time.monotonic(), 0
        own, state = self._make_report(now), None
        if self.is_judge:
            view = make_job_view(own, self.files.found, now)
            state = replace(self._describe_job(own, view), state="ended")
        self.files.submit(own, state)
        self.files.worker.wait_idle(seconds)
        self.prometheus.close(seconds)
        self.notifier.close(seconds)


def main() -> None:
    """Watch until stdin ends."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    stdin = os.fdopen(0, "rb", buffering=0)  # of which no line is read before it is asked for
    if not (line := stdin.readline()):
        return
    watcher = NodeWatcher(load(WatcherSettings, line))
    due = time.monotonic()
    while line:
        if select.select([stdin], [], [], max(0.0, due - time.monotonic()))[0] and (line := stdin.readline()):
            with suppress(ValueError):
                watcher.book.take(load(tuple[RankEntry, ...], line))
        if line and time.monotonic() >= due:
            watcher.try_tick()
            due = max(due + _TICK, time.monotonic())
    watcher.end(_LAST)
    if os.getppid() != watcher.supervisor:  # the supervisor was killed, and cannot do it
        shutil.rmtree(watcher.settings.folder, ignore_errors=True)
    os._exit(0)  # threads that wait for a filesystem would hold the interpreter's end up


if __name__ == "__main__":
    main()
