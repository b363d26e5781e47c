"""What a job gives out while it runs: notifications, pings, metrics for Prometheus and in a file."""

import builtins
import html
import json
import socket
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from launcher.codec import convert
from launcher.config.settings import NotifyConfig
from launcher.launch.ending import describe_outcome, post_end
from launcher.runs.manifest import FirstFailure, Outcome
from launcher.runs.run_directory import RunDir
from launcher.watch.metrics import (
    MetricsEvent,
    MetricsLog,
    Prometheus,
    read_metrics,
)
from launcher.watch.model import NodeReport, WatchSettings
from tests.seam import PATIENCE, QUICK_AGENT, find_port, run_outside, start, wait_for, write_program

PROGRAMS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())

SECRET = "T000-very-secret"

MEMORY = "launch_rank_resident_memory_bytes"
WORDS = (
    *("nproc_per_node=2", "binding=none", "watch.interval=1", "watch.metrics_interval=1"),
    *("watch.hang_seconds=2", "watch.on_hang=restart", "name=job"),
)


@dataclass
class Hook:
    """What a server was asked, and what it answers, one by one; then 200."""

    answers: list[int | str | threading.Event] = field(default_factory=list)
    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(answers: Sequence[int | str | threading.Event] = ()) -> Iterator[Hook]:
    hook = Hook(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            hook.requests.append((self.command, self.path, data))
            what = hook.answers.pop(0) if hook.answers else 200
            if isinstance(what, threading.Event):
                what.wait(PATIENCE)
                what = 200
            if isinstance(what, str):
                self.send_response(302)
                self.send_header("Location", what)
            else:
                self.send_response(what)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = answer  # noqa: N815 - the library's names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hook.url = f"http://127.0.0.1:{server.server_port}/{SECRET}"
    try:
        yield hook
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def find(text: str, name: str, **labels: str) -> list[float]:
    """The values of a metric; the text has to be what Prometheus's own parser takes."""
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return [one.value for one in samples if one.name == name and labels.items() <= one.labels.items()]


def fetch(port: int, accept: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        text: bytes = answer.read()
    return text.decode()


@pytest.mark.slow
def test_a_job_that_hangs_and_is_restarted(tmp_path: Path) -> None:
    port = find_port()
    with serving() as hook:
        urls = (f"notify.url={hook.url}", f"notify.ping_url={hook.url}/ping", "notify.ping_interval=3600")
        program = write_program(tmp_path, PROGRAMS["steps"])
        with start(
            tmp_path,
            *WORDS,
            *urls,
            f"watch.prometheus_port={port}",
            "--",
            program,
            PYTHONPATH=QUICK_AGENT,
            no_proxy="*",
        ) as job:

            def list_posts() -> list[dict[str, Any]]:
                return [json.loads(data) for method, _, data in hook.requests if method == "POST"]

            def is_restarted() -> bool:
                return "recover" in [post["event"] for post in list_posts()]

            wait_for(is_restarted, "the restart", tell=job.read)

            wait_for(lambda: find(fetch(port), MEMORY, rank="0"), "the second report", tell=job.read)
            assert find(fetch(port), "launch_rank_steps_total", rank="1", local_rank="1")[0] > 5
            opened = fetch(port, "application/openmetrics-text; version=1.0.0")
            assert opened.endswith("# EOF\n") and "# TYPE launch_rank_steps counter" in opened
            (tmp_path / "go").touch()
            assert job.wait() == 0, job.read()
        posts = list_posts()
    assert [post["event"] for post in posts] == ["start", "hang", "recover", "end"]
    begin, hang, recovery, end = posts
    run_dir = job.run_dir()
    assert {(post["run"], post["run_dir"], post["job_id"]) for post in posts} == {
        (f"job/{run_dir.name}", str(run_dir), None)
    }
    assert (begin["sentence"], hang["state"], hang["step"]) == ("2 ranks", "hanging", 5)
    told = json.loads((run_dir / "manifest.json").read_text())["hangs"][0]
    assert hang["sentence"] == told["verdict"]["sentence"] and told["action"] == "restart"
    assert (end["state"], end["exit_code"]) == ("succeeded", 0)
    assert recovery["state"] == "running"
    assert [path for method, path, _ in hook.requests if method == "GET"] == [f"/{SECRET}/ping"]
    (metrics,) = run_dir.glob("watch/metrics-*.jsonl")
    lines = metrics.read_text().splitlines()
    events = [found["event"] for line in lines if "event" in (found := json.loads(line))]
    assert events == ["start", "hang", "restart", "recovered"]
    for path in (path for path in run_dir.rglob("*") if path.is_file()):
        assert SECRET not in path.read_text(errors="replace"), path
    assert SECRET not in job.read() + job.read("stdout")


@pytest.mark.usefixtures("quick_agent")
def test_what_cannot_be_given_out_is_a_warning_each_and_the_job_goes_on(tmp_path: Path) -> None:
    """Its ranks fail once, and are started again, which is written down."""
    program = write_program(tmp_path, PROGRAMS["restarted"])
    with socket.socket() as taken, serving([403] * 9) as hook:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run_outside(
            [
                *("nproc_per_node=1", "restarts=1", "watch.interval=1", "watch.metrics_interval=1"),
                *(f"watch.prometheus_port={taken.getsockname()[1]}", f"watch.textfile={tmp_path}/none"),
                *(f"notify.url={hook.url}", "notify.events=[start]", "--", program),
            ],
            tmp_path,
            {"no_proxy": "*"},
        )
    assert done.code == 0, done
    for setting in ("watch.prometheus_port", "watch.textfile", "notify.url"):
        assert done.err.count(setting) == 1, (setting, done.err)
    assert "403" in done.err and SECRET not in done.err + done.out
    (file,) = tmp_path.glob("runs/*/*/watch/metrics-*.jsonl")
    events = [json.loads(line) for line in file.read_text().splitlines() if line.startswith('{"event"')]
    assert [event["event"] for event in events] == ["start", "restart"]
    assert events[1]["sentence"] == "the ranks were started again, attempt 1"


# Notifications, as the end of a job posts them

FAILED = Outcome("failed", exit_code=1, first_failure=FirstFailure(3, 0, "n<2>", reason="exited with code 1"))


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.watch.notify.DELAYS", (0.01, 0.01))
    monkeypatch.setenv("no_proxy", "*")


def post(folder: Path, **settings: Any) -> None:
    run = folder / "gpt" / "7"
    run.mkdir(parents=True, exist_ok=True)
    post_end(NotifyConfig(**settings), RunDir(run), "n1", FAILED, job_id="4711")


@pytest.mark.usefixtures("no_delays")
def test_a_message_in_both_forms_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving([500, 503]) as hook:
        post(tmp_path, url=hook.url)
    assert len({data for _, _, data in hook.requests}) == 1
    assert [one[:2] for one in hook.requests] == [("POST", f"/{SECRET}")] * 3
    found = json.loads(hook.requests[0][2])
    assert found.pop("time") == pytest.approx(time.time(), abs=60)
    job = {"run": "gpt/7", "run_dir": str(tmp_path / "gpt/7"), "host": "n1", "job_id": "4711"}
    sentence = "failed; rank 3 on n<2> exited with code 1"
    assert found == {
        **job, "event": "fail", "state": "failed", "step": None, "sentence": sentence, "exit_code": 1
    }  # fmt: skip
    text = f"gpt/7 on n1, job 4711 failed with exit code 1: {sentence}\n{tmp_path}/gpt/7"
    with serving() as hook:
        monkeypatch.delenv("no_proxy")
        monkeypatch.setenv("http_proxy", hook.url.rpartition("/")[0])
        slack, plain = "http://hooks.slack.com/services/T0", "http://slack.com.example.org/"
        for url, form in ((slack, "auto"), (plain, "slack"), (plain, "auto")):
            post(tmp_path, url=url, format=form)
    assert [path for _, path, _ in hook.requests] == [slack, plain, plain]
    *shown, own = [json.loads(data) for _, _, data in hook.requests]
    assert shown == [{"text": html.escape(text, quote=False)}] * 2 and "text" not in own


@pytest.mark.usefixtures("no_delays")
@pytest.mark.parametrize(
    ("answers", "requests", "reason"),
    [
        ([500] * 9, 3, "HTTP 500"),
        ([403] * 9, 1, "HTTP 403"),
        (["/elsewhere"] * 9, 1, "HTTP 302, a redirect"),
        ("http://127.0.0.1:1/", 0, "refused"),
        ("http://127.0.0.1:x/", 0, "InvalidURL"),
        ("file:///", 0, "ValueError"),
    ],
)
def test_what_cannot_be_posted_is_one_warning_without_the_url(
    answers: list[int | str | threading.Event] | str,
    requests: int,
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving([] if isinstance(answers, str) else answers) as hook:
        post(tmp_path, url=answers + SECRET if isinstance(answers, str) else hook.url)
    (warning,) = caplog.messages
    assert warning.startswith("notify.url could not be told (") and reason in warning
    assert len(hook.requests) == requests and SECRET not in warning


@pytest.mark.usefixtures("no_delays")
def test_a_server_that_does_not_answer_delays_nobody_and_one_node_alone_posts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("launcher.launch.ending.NOTICE_PATIENCE", 0.1)
    stuck = threading.Event()
    with serving([stuck]) as hook:
        post_end(NotifyConfig(url=hook.url), RunDir(tmp_path, node_rank=1), "n1", FAILED)
        post(tmp_path, url=hook.url)
        wait_for(lambda: hook.requests, "the request")
        stuck.set()
    assert len(hook.requests) == 1 and SECRET not in caplog.text


@pytest.mark.parametrize(
    ("outcome", "event", "sentence"),
    [
        ({"state": "succeeded", "exit_code": 0}, "end", "succeeded"),
        ({"state": "stopped", "exit_code": 143}, "end", "stopped"),
        ({"state": "requeued", "cause": "crash", "reason": "r"}, "fail", "requeued; r"),
        ({"state": "requeued", "cause": "preempted", "reason": "r"}, "end", "requeued; r"),
    ],
)
def test_what_is_told_of_an_end(outcome: dict[str, Any], event: str, sentence: str) -> None:
    assert describe_outcome(Outcome(**outcome)) == (event, sentence)


# Metrics

TIME = 1767225600.25
HEAD = {"host": "n2", "node_rank": 1, "nodes": 2, "attempt": 0, "time": TIME, "interval": 5.0, "number": 1}
GPU = {"index": 3, "utilization": 0.9, "sm_clock": 1980, "pcie_replays": 2, "xids": [79, 79]}
RANK: dict[str, Any] = {
    "rank": 8, "local_rank": 0, "pid": 7, "attempt": 0, "phase": "training", "step": 120, "step_age": 0.25,
    "p50": 0.412, "p99": 0.5, "data_share": 0.1, "wait_share": 0.25, "cpu": 1.5, "rss": 1 << 30,
    "gpu": {**GPU, "event_reasons": ["sw_power_cap"]},
}  # fmt: skip
OTHER = {**dict.fromkeys(("local_rank", "attempt", "step"), 0), "rank": 9, "pid": 8, "phase": "unwatched"}
REPORT = convert(
    NodeReport,
    {
        **HEAD,
        "ranks": [RANK, {**OTHER, "step_age": None}],
        "stalled_since": TIME - 30,
        "io_pressure": 0.03,
    },
)
EVENT = MetricsEvent("hang", TIME, "rank 5 on n2 has not joined all_reduce #1042", 120, (5,), ("n2",), 1)


def test_what_prometheus_gets_is_what_the_report_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = "gpt/7", 'n"1\n'
    port = find_port()
    folder = tmp_path / "textfile"
    folder.mkdir()
    export = Prometheus(*who, WatchSettings(prometheus_port=port, textfile=str(folder)), pytest.fail)
    export.take(replace(REPORT, host='n"1\n'))
    found = fetch(port)
    wait_for(lambda: list(folder.glob("*.prom")), "the file")
    assert (folder / "launch-gpt_7-n_1_.prom").read_text() == found
    export.close(PATIENCE)
    assert list(folder.iterdir()) == []
    labels = {"run": "gpt/7", "host": 'n"1\n', "rank": "8", "local_rank": "0"}
    assert find(found, "launch_rank_steps_total", **labels) == [120]
    assert find(found, "launch_rank_step_seconds", **labels, quantile="0.99") == [0.5]
    assert find(found, "launch_rank_data_wait_ratio") == [0.1]
    assert find(found, "launch_rank_phase", rank="9", phase="unwatched") == [1]
    assert find(found, "launch_rank_phase", rank="9", phase="saving") == [0]
    assert find(found, "launch_gpu_sm_clock_hertz", **labels, gpu="3") == [1.98e9]
    assert find(found, "launch_gpu_xid_errors_total", xid="79") == [2]
    assert find(found, "launch_gpu_clock_event", reason="sw_power_cap") == [1]
    assert find(found, "launch_gpu_pcie_replays_total") == [2]
    assert find(found, "launch_node_pressure_ratio") == [0.03]
    assert find(found, "launch_node_stalled_seconds", host='n"1\n') == [30]

    warnings: list[str] = []
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for asked in (0, None):
        Prometheus(*who, WatchSettings(prometheus_port=asked), warnings.append).take(REPORT)
    assert len(warnings) == 1 and "pip install 'launch-ranks[metrics]'" in warnings[0]


def test_the_textfile_of_a_slow_folder_is_removed_once_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, written, write = threading.Event(), threading.Event(), prometheus_client.write_to_textfile

    def write_late(path: str, registry: prometheus_client.CollectorRegistry) -> None:
        answer.wait(PATIENCE)
        write(path, registry)
        written.set()

    monkeypatch.setattr(prometheus_client, "write_to_textfile", write_late)
    export = Prometheus("gpt/7", "n2", WatchSettings(textfile=str(tmp_path)), pytest.fail)
    export.take(REPORT)
    export.close(0.1)  # whose end waits no longer
    answer.set()
    assert written.wait(PATIENCE)
    wait_for(lambda: not list(tmp_path.iterdir()), "the end of the file")


def test_a_metrics_file_is_compact_and_ends_in_whole_lines(tmp_path: Path) -> None:
    odd = replace(REPORT, ranks=(replace(REPORT.ranks[0], p50=1 / 3, cpu=float("nan"), notes=("x",)),))
    path = tmp_path / "watch/metrics-n2.jsonl"
    for report in (odd, REPORT):  # each by another process
        log = MetricsLog(tmp_path, "n2", 30.0, lambda write: write(), pytest.fail)
        log.add_report(report)
        log.add_report(report)  # too soon
        log.add(EVENT)
        if report is odd:
            path.write_bytes(path.read_bytes()[:-20])  # as one that has died leaves it
    (rank,) = json.loads(path.read_text().splitlines()[0])["ranks"]
    assert (rank["p50"], rank["cpu"]) == (0.33333, None) and "notes" not in rank and "exit_code" not in rank
    rows, events = read_metrics(tmp_path)
    assert rows[0].ranks[0].cpu is None and rows[1:] == [REPORT] and events == [EVENT]
    MetricsLog(tmp_path / "none", "n2", 0, lambda write: write(), pytest.fail).add(EVENT)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")  # others' files and links are not written to
    warnings: list[str] = []
    log = MetricsLog(tmp_path, "n2", 30.0, lambda write: write(), warnings.append)
    for _ in range(2):
        log.add(EVENT)
    (warning,) = warnings
    assert "metrics-n2.jsonl could not be written" in warning and read_metrics(tmp_path) == ([], [])


def test_samples_are_left_out_evenly(tmp_path: Path) -> None:
    lines = [json.dumps({**HEAD, "number": number, "ranks": []}) for number in range(10)]
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch/metrics-n2.jsonl").write_text("\n".join(lines))
    for most, numbers in ((None, range(10)), (10, range(10)), (3, (1, 5, 9))):
        assert [row.number for row in read_metrics(tmp_path, most)[0]] == [*numbers]
