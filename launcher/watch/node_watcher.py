"""The watcher of a node: reads heartbeats once a second, reports, and finds out when ranks stand still.

Nothing in its loop waits for anything but time and the supervisor: the run directory has a thread of its own,
and so has each gathering of evidence.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

from launcher.watch.collective_times import CollectiveReader
from launcher.watch.evidence import WatchedRank
from launcher.watch.gpu_reader import ReadGpus
from launcher.watch.hang_actions import HangActions
from launcher.watch.hang_judge import HangJudge
from launcher.watch.hang_records import write_hang, write_verdict
from launcher.watch.job_view import (
    JobView,
    describe_job_state,
    find_word,
    is_judge,
    limit_age,
    list_ended_ranks,
    make_job_view,
)
from launcher.watch.node_reports import hang_path, read_evidence, write_evidence
from launcher.watch.node_samples import NodeSample
from launcher.watch.process_samples import Sample, Sampler
from launcher.watch.progress_limit import choose_limit, find_stall_begin, list_stalled
from launcher.watch.rank_book import RankBook
from launcher.watch.shared_files import Exchange, SharedFiles
from launcher.watch.stack_requests import read_stack_request, write_stack_answer
from launcher.watch.straggler_search import StragglerSearch
from launcher.watch.stragglers import list_slow_ranks
from launcher.watch.watch_model import Hang, JobState, NodeEvidence, NodeReport
from launcher.watch.watch_outputs import WatchOutputs
from launcher.watch.watcher_settings import RankMessage, WatcherSettings

TICK = 1.0
"""Seconds from one look at the heartbeats to the next."""
LATE = 5.0
"""Seconds without a look, after which this process is taken to have been stopped, perhaps with the ranks."""
HURRY = 0.5
"""Share of the limit without progress from which on nodes exchange reports with each look."""
STILL, STILL_INTERVAL = 3.0, 2.0
"""Seconds without progress from which on activity is sampled whole, and so often at least."""
Gather = Callable[[Sequence[WatchedRank], RankBook, int], NodeEvidence]
"""Gathers evidence of ranks for a question."""


@dataclass(slots=True)
class NodeWatcher:
    """Watches a node's ranks, and judges the job if this node is the one that does."""

    settings: WatcherSettings
    book: RankBook
    files: SharedFiles
    judge: HangJudge
    gather: Gather
    send: Callable[[dict[str, object]], None]
    """Tells the supervisor something."""
    is_suspended: Callable[[], bool]
    """Tells whether the user has stopped the job, as by Ctrl-Z."""
    outputs: WatchOutputs
    collectives: CollectiveReader
    read_gpus: ReadGpus = dict
    """Gives the last reading of the ranks' GPUs, by local rank."""
    search: StragglerSearch = field(init=False)
    sampler: Sampler = field(default_factory=Sampler)
    sample: Sample = field(default_factory=lambda: Sample({}, NodeSample()))
    number: int = 0
    """Of the last report."""
    gathering: bool = False
    """Since the last sample, ranks were asked for evidence."""
    gatherers: list[threading.Thread] = field(default_factory=list)
    last_look: float = field(default_factory=time.monotonic)
    next_sample: float = 0.0
    next_exchange: float = 0.0
    answered: int = 0
    """The last question that this node gathers evidence for."""
    evidence: dict[str, NodeEvidence] = field(default_factory=dict)
    """Of the question that is open, by host."""
    stack_request: int = 0
    """Number of the last request for a rank's stack."""
    actions: HangActions = field(default_factory=HangActions)
    begin: float = field(default_factory=time.monotonic)
    was_judge: bool = False
    told: dict[str, str] = field(default_factory=dict)
    """Warnings that were given."""

    def __post_init__(self) -> None:
        """Join the parts that tell the supervisor something by themselves."""
        self.search = StragglerSearch(self.send)

    def take(self, message: RankMessage) -> None:
        """Take the supervisor's word on ranks."""
        self.book.add_ranks(message.found)
        self.book.note_ends(message.ended)

    def tick(self, now: float) -> None:
        """Look at the heartbeats, and do what is due; `now` is monotonic."""
        if now - self.last_look > LATE or self.is_suspended():
            self.book.forgive(now)
        self.last_look = now
        self.book.look(now)
        if now >= self.next_sample:
            still = self.book.list_still(STILL)
            interval = self.settings.watch.interval
            self.next_sample = now + (min(interval, STILL_INTERVAL) if still else interval)
            self.sample = self.sampler.sample(self.book.list_pids(), still)
            if not self.gathering:  # what ranks answer is no activity of theirs
                self.book.note_activity(self.sample.ranks, self.read_gpus())
            self.gathering = any(thread.is_alive() for thread in self.gatherers)
            self.book.measure_data_shares()
        self.note_waits()
        own, state = self.make_report(now), None
        if is_judge(own, self.files.view, now, stuck=self.files.is_stuck(now)):
            state = self.judge_job(own, now)
        else:
            self.was_judge, self.judge.asks = False, 0
            self.follow_judge(own, now)
        self.exchange(own, state, now)
        self.check_files(now)

    def find_limit(self) -> float:
        """Return the seconds without progress after which ranks are looked at."""
        hang_seconds = self.settings.watch.hang_seconds
        return choose_limit(hang_seconds, self.book.find_slow_step(), self.judge.longest_pause)

    def make_report(self, now: float) -> NodeReport:
        """Return this node's report of now."""
        settings, node, limit, wall = self.settings, self.sample.node, self.find_limit(), time.time()
        stalled = list_stalled(self.book.list_progress(), limit)
        return NodeReport(
            host=settings.host,
            node_rank=settings.node_rank,
            nodes=settings.nodes,
            attempt=settings.attempt,
            time=wall,
            number=self.number,
            interval=settings.watch.interval,
            ranks=self.book.list_states(self.sample.ranks, self.read_gpus()),
            stalled_since=find_stall_begin(stalled, wall),
            limit=limit,
            asks=self.judge.asks,
            nic_rates=node.nic_rates,
            memory_pressure=node.memory_pressure,
            cpu_pressure=node.cpu_pressure,
            io_pressure=node.io_pressure,
            throttled=node.throttled,
            collectives=self.collectives.read(tuple(self.book.list_beats().values()), wall),
        )

    def exchange(self, own: NodeReport, state: JobState | None, now: float) -> None:
        """Have the report written and others' read, if it is time: at each look once ranks may hang."""
        idle = [rank.idle for rank in own.ranks if rank.idle is not None]
        hurry = bool(self.judge.asks) or max(idle, default=0.0) > HURRY * (own.limit or 0.0)
        if now < self.next_exchange and not (hurry and self.files.is_idle()):
            return
        self.number += 1
        if self.number == 1 and self.settings.node_rank == 0:
            self.outputs.tell_start(own, self.settings.ranks)
        self.outputs.add_report(own)
        if state is not None:
            self.outputs.add_state(state)
        self.next_exchange = now + self.settings.watch.interval
        reads_all = self.settings.nodes > 1 and (state is not None or own.stalled_since is not None)
        self.files.submit(Exchange(own, state, reads_all))
        self.files.add_task(self.look_for_stack_request)

    def judge_job(self, own: NodeReport, now: float) -> JobState:
        """Judge the job; return what is to be written of it."""
        shared, judge, limit = self.files.view, self.judge, own.limit or 0.0
        if job := find_word(own, shared, now, self.begin):
            judge.adopt(job)
        self.was_judge = True
        view = make_job_view(own, shared, now)
        judge.note_pauses(view, limit)
        if judge.asks:
            self.collect_evidence(view, now)
            if judge.is_answered(view, tuple(self.evidence.values()), now):
                gathered = {node.host: node for node in (*list_ended_ranks(view), *self.evidence.values())}
                evidence = tuple(sorted(gathered.values(), key=lambda node: node.node_rank))
                number = 1 + (shared.hangs if shared else 0)
                found = judge.conclude(view, evidence, limit, now=now, number=number)
                if isinstance(found, Hang):
                    self.tell_hang(found, evidence)
                elif found:
                    text = f"no step for {found.seconds:.0f} s: {found.verdict.sentence}"
                    self.send_lines("note", [text])
        elif judge.should_ask(view, limit, now):
            self.answer(judge.ask(now, int(time.time())))
        if hang := judge.find_recovery(view, limit):
            self.tell_recovery(hang)
        self.act(judge.hangs, now)
        self.search.start(view.fresh, now)
        return self.describe_job(own, view, judge.asks)

    def describe_job(self, own: NodeReport, view: JobView, asks: int) -> JobState:
        """Return what is to be written of the job."""
        judge = self.judge
        state = describe_job_state(
            own,
            view,
            judge.hangs,
            hanging=judge.hang is not None and not judge.has_restarted(judge.hang, view),
            restarts=judge.restarts,
            asks=asks,
            notes=tuple(self.told.values()),
        )
        finder = self.search.finder
        waits = tuple(sorted(finder.waits.items()))
        return replace(state, stragglers=finder.told, wait_shares=waits)

    def note_waits(self) -> None:
        """Note what the judging node has found of the ranks' waiting for each other."""
        job = self.files.view.job if self.files.view else None
        shares = self.search.finder.waits or dict(job.wait_shares if job else ())
        self.book.wait_shares = shares

    def follow_judge(self, own: NodeReport, now: float) -> None:
        """Answer the judging node's question, and act upon its hangs."""
        shared = self.files.view
        job = find_word(own, shared, now, self.begin)
        if job is None or shared is None or shared.job_age + now - shared.time > limit_age(own.interval):
            return
        if job.asks > self.answered:
            self.answer(job.asks)
        self.act(job.hangs, now)

    def list_watched(self) -> list[WatchedRank]:
        """Return this node's ranks as those know them who gather evidence."""
        host, entries = self.settings.host, [known.entry for known in self.book.ranks.values()]
        return [
            WatchedRank(one.rank, one.local_rank, one.attempt, one.pid, host, one.exit_code)
            for one in entries
        ]

    def look_for_stack_request(self) -> None:
        """Answer somebody who looks at the run and asks for a rank's stack: in the run directory's thread."""
        view = self.files.view
        request = read_stack_request(self.files.run_path, view.written) if view else None
        if request is None or request.number <= self.stack_request:
            return
        self.stack_request = request.number
        if ranks := [one for one in self.list_watched() if one.rank == request.rank]:

            def gather() -> None:
                evidence = self.gather(ranks, self.book, 0)
                self.files.add_task(lambda: write_stack_answer(self.files.run_path, evidence))

            self.start_gathering(gather)

    def answer(self, number: int) -> None:
        """Gather this node's evidence for a question, in a thread."""
        self.answered, self.evidence = number, {}
        host, ranks = self.settings.host, self.list_watched()

        def gather() -> None:
            evidence = self.gather(ranks, self.book, number)
            if number == self.answered:
                self.evidence[host] = evidence
                self.files.add_task(lambda: write_evidence(self.files.run_path, evidence))

        self.start_gathering(gather)

    def start_gathering(self, gather: Callable[[], None]) -> None:
        """Ask ranks for evidence in a thread."""
        self.gathering = True
        thread = threading.Thread(target=gather, name="evidence", daemon=True)
        self.gatherers = [one for one in self.gatherers if one.is_alive()] + [thread]
        thread.start()

    def collect_evidence(self, view: JobView, now: float) -> None:
        """Have the other nodes' answers read."""
        missing = [report.host for report in view.fresh if report.host not in self.evidence]
        number = self.judge.asks
        if missing and len(view.fresh) > 1 and self.files.is_idle() and now > self.judge.asked_at + TICK:
            self.files.add_task(lambda: self.read_answers(number))

    def read_answers(self, number: int) -> None:
        """Read what nodes have gathered for a question: in the run directory's thread."""
        for node in read_evidence(self.files.run_path, number, own=True):
            if number == self.answered:
                self.evidence.setdefault(node.host, node)

    def tell_hang(self, hang: Hang, evidence: Sequence[NodeEvidence]) -> None:
        """Tell of a hang, and keep what is known of it."""
        since = hang.time - hang.stalled_since
        step = f"after step {hang.step}" if hang.step else "before the first step"
        self.send_lines(
            "hang",
            [f"hang {hang.number} {step}, {since:.0f} s without a step: {hang.verdict.sentence}"],
            hang,
        )
        self.outputs.tell_hang(hang)

        def keep() -> None:
            write_hang(self.files.run_path, hang, evidence)
            self.send_lines("note", [f"stacks in {hang_path(self.files.run_path, hang.number)}"])

        self.files.add_task(keep)
        self.next_exchange = 0.0

    def tell_recovery(self, hang: Hang) -> None:
        """Tell that steps go on."""
        seconds = (hang.recovered or hang.time) - hang.stalled_since
        self.send_lines("recovered", [f"hang {hang.number} is over after {seconds:.0f} s: steps go on"], hang)
        self.outputs.tell_recovery(hang)
        self.files.add_task(lambda: write_verdict(self.files.run_path, hang))
        self.next_exchange = 0.0

    def act(self, hangs: Sequence[Hang], now: float) -> None:
        """Have ranks ended for hangs; not while the run directory hangs, which may be all that is wrong."""
        if self.files.is_stuck(now) or self.files.twin is not None:
            return
        pids = {rank: known.entry.pid for rank, known in self.book.ranks.items()}
        for order in self.actions.list_orders(hangs, pids):
            self.send({"event": "act", **asdict(order)})

    def check_files(self, now: float) -> None:
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
            self.send_lines("warning", [text])

    def send_lines(self, event: str, lines: Iterable[str], hang: Hang | None = None) -> None:
        """Send the supervisor lines to log, and a hang."""
        self.send({"event": event, "lines": list(lines), **({"hang": asdict(hang)} if hang else {})})

    def end(self, seconds: float) -> None:
        """Write a last report, if that takes no longer than this."""
        own = self.make_report(time.monotonic())
        shared, state = self.files.view, None
        if self.was_judge:
            view = make_job_view(own, shared, time.monotonic())
            state = self.describe_job(own, view, 0)
            if slow := list_slow_ranks(self.search.finder.told):
                self.send_lines("note", [f"stragglers: {slow}"])
        self.files.submit(Exchange(own, end_state(state), reads_all=False))
        self.files.wait_idle(seconds)
        self.outputs.close(seconds)


def end_state(state: JobState | None) -> JobState | None:
    """Return the state of a job that has ended."""
    return replace(state, state="ended") if state else None
