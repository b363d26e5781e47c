"""What a job gives out while it runs and at its end: notifications, pings, metrics for Prometheus.

By real jobs, and by a real HTTP server that is slow, refuses, redirects or fails first.
"""

import builtins
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launcher.config.settings import NotifyConfig
from launcher.launch import end_notice
from launcher.launch.end_notice import choose_event, describe_end, post_end
from launcher.runs.run_directory import RunDir
from launcher.runs.secrets import mask_text, mask_tree, mask_words
from launcher.watch import notify
from launcher.watch.notify import JobIdentity, Message, Notifier, build_post
from launcher.watch.prometheus import start_prometheus
from launcher.watch.watch_model import GpuSample, NodeReport, RankState
from launcher.watch.watcher_settings import NotifySettings
from tests.seam import QUICK_AGENT, run_outside, start, wait_for, write_program

SECRET = "T000-very-secret"


@dataclass
class Hook:
    """What a server was asked, and what it answers, one by one; then 200."""

    answers: list[int | str | threading.Event] = field(default_factory=list)
    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    url: str = ""
    warnings: list[str] = field(default_factory=list)


@contextmanager
def serving(answers: Sequence[int | str | threading.Event] = ()) -> Iterator[Hook]:
    hook = Hook(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            hook.requests.append((self.command, self.path, data))
            what = hook.answers.pop(0) if hook.answers else 200
            if isinstance(what, threading.Event):
                what.wait(30)
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


PROGRAM = """
import os, time
import launcher

for _ in range(5):
    time.sleep(0.05)
    launcher.step()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(600)
while not os.path.exists("go"):
    time.sleep(0.1)
    launcher.step()
"""
MEMORY = "launch_rank_resident_memory_bytes"
WORDS = (
    *("nproc_per_node=2", "binding=none", "watch.interval=1", "watch.metrics_interval=1"),
    *("watch.hang_seconds=2", "watch.on_hang=restart", "name=job"),
)


def find(text: str, name: str, **labels: str) -> list[float]:
    """The values of a metric; the text has to be what Prometheus's own parser takes."""
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return [one.value for one in samples if one.name == name and labels.items() <= one.labels.items()]


def fetch(port: int, accept: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text: bytes = answer.read()
    return text.decode()


def test_a_job_that_hangs_and_is_restarted(tmp_path: Path) -> None:
    textfile = tmp_path / "textfile"
    textfile.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving() as hook:
        urls = (f"notify.url={hook.url}", f"notify.ping_url={hook.url}/ping", "notify.ping_interval=3600")
        outputs = (f"watch.prometheus_port={port}", f"watch.textfile={textfile}")
        program = write_program(tmp_path, PROGRAM)
        with start(
            tmp_path, *WORDS, *urls, *outputs, "--", program, PYTHONPATH=QUICK_AGENT, no_proxy="*"
        ) as job:

            def list_posts() -> list[dict[str, Any]]:
                return [json.loads(data) for method, _, data in hook.requests if method == "POST"]

            def is_restarted() -> bool:
                return "recover" in [post["event"] for post in list_posts()]

            wait_for(is_restarted, "the restart", 90, job.read)

            def read_both() -> list[str]:
                return [fetch(port), *(path.read_text() for path in textfile.glob("*.prom"))]

            def have_memory() -> bool:
                return [bool(find(text, MEMORY, rank="0")) for text in read_both()] == [True, True]

            wait_for(have_memory, "the second report of the ranks", 60, job.read)
            for text in read_both():
                assert find(text, "launch_rank_steps_total", rank="1", local_rank="1")[0] > 5
                assert find(text, "launch_rank_phase", rank="0", phase="training") == [1]
                assert find(text, "launch_rank_phase", rank="0", phase="saving") == [0]
                assert find(text, MEMORY, rank="0")[0] > 1e6
                assert 0.05 < find(text, "launch_rank_step_seconds", rank="0", quantile="0.5")[0] < 5
                assert not find(text, "launch_gpu_temperature_celsius"), "what is not known is left out"
            opened = fetch(port, "application/openmetrics-text; version=1.0.0")
            assert opened.endswith("# EOF\n") and "# TYPE launch_rank_steps counter" in opened
            (tmp_path / "go").touch()
            assert job.wait(60) == 0, job.read()
        posts = list_posts()
    assert list(textfile.iterdir()) == [], "the run has ended"
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
    reports = "import glob, time\nwhile not glob.glob('runs/*/*/watch/metrics*'): time.sleep(0.1)\n"
    program = write_program(tmp_path, f"{reports}time.sleep(2)\n")
    with socket.socket() as taken, serving([403] * 9) as hook:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run_outside(
            [
                *("nproc_per_node=1", "watch.interval=1", "watch.metrics_interval=1"),
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


RANKS = (
    RankState(
        rank=8, local_rank=0, pid=7, attempt=0, phase="training", step=120, step_age=0.25, p50=0.4, p99=0.5,
        data_share=0.1, cpu=1.5, rss=1 << 30,
        gpu=GpuSample(3, utilization=0.9, sm_clock=1980, pcie_replays=2, xids=(79, 79),
                      event_reasons=("sw_power_cap",)),
    ),
    RankState(rank=9, local_rank=1, pid=8, attempt=0, phase="unwatched", step=0, step_age=None),
)  # fmt: skip
RANK = {"run": "gpt/7", "host": 'n"1\n', "rank": "8", "local_rank": "0"}


def test_metrics_of_what_only_gpus_and_clusters_have() -> None:
    nic = (("mlx5_0", 25e9),)
    report = NodeReport('n"1\n', 1, 2, 0, 1000.0, 1, 5.0, RANKS, 970.0, nic_rates=nic, io_pressure=0.03)
    export = start_prometheus("gpt/7", 'n"1\n', port=0, address="127.0.0.1", textfile=None, warn=pytest.fail)
    assert export and export.port
    export.update(report)
    found = fetch(export.port)
    export.close(10)
    assert find(found, "launch_rank_step_seconds", **RANK, quantile="0.99") == [0.5]
    assert find(found, "launch_rank_data_wait_ratio") == [0.1]
    assert find(found, "launch_rank_phase", rank="9", phase="unwatched") == [1]
    assert find(found, "launch_gpu_sm_clock_hertz", **RANK, gpu="3") == [1.98e9]
    assert find(found, "launch_gpu_xid_errors_total", xid="79") == [2]
    assert find(found, "launch_gpu_clock_event", reason="sw_power_cap") == [1]
    assert find(found, "launch_gpu_pcie_replays_total") == [2]
    assert find(found, "launch_node_network_bytes_per_second", device="mlx5_0") == [25e9]
    assert find(found, "launch_node_pressure_ratio") == [0.03]
    assert find(found, "launch_node_stalled_seconds", host='n"1\n') == [30]


def test_without_the_client_the_warning_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for port in (0, None):
        found = start_prometheus("r", "h", port=port, address="::", textfile=None, warn=warnings.append)
        assert found is None
    assert len(warnings) == 1 and "pip install 'launch-ranks[metrics]'" in warnings[0]


JOB = JobIdentity("gpt/7", "/runs/gpt/7", "n1", "4711")


def make_notifier(hook: Hook, **settings: object) -> Notifier:
    values = {"url": hook.url, "events": tuple(NotifyConfig().events), **settings}
    return Notifier(NotifySettings(**values), JOB, hook.warnings.append)  # type: ignore[arg-type]  # by name


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "DELAYS", (0.01, 0.01))
    monkeypatch.setenv("no_proxy", "*")


def test_slacks_form_is_escaped() -> None:
    message = Message("gpt/7", None, "hang", "n1", "rank 5 <!channel> & co", "hanging", 9, None, "/r", 0)

    def post(url: str, form: str) -> object:
        data = build_post(url, form, message).data
        assert isinstance(data, bytes)
        return json.loads(data)

    slack = {"text": "gpt/7 on n1 hangs at step 9: rank 5 &lt;!channel&gt; &amp; co\n/r"}
    assert post("https://hooks.slack.com/services/T0", "auto") == slack == post("https://e.org/", "slack")
    assert "text" not in str(post("https://slack.com.example.org/", "auto"))


@pytest.mark.usefixtures("no_delays")
@pytest.mark.parametrize(
    ("answers", "requests", "reason"),
    [
        ([500, 503], 3, ""),
        ([500] * 9, 3, "HTTP 500"),
        ([403] * 9, 1, "HTTP 403"),
        (["/elsewhere"] * 9, 1, "HTTP 302, a redirect"),
        (["file:///etc/passwd"] * 9, 1, "HTTP 302"),
    ],
    ids=["failing first", "broken", "refusing", "redirecting", "file"],
)
def test_what_cannot_be_posted_is_tried_again_and_one_warning_without_the_url(
    answers: list[int | str | threading.Event], requests: int, reason: str
) -> None:
    with serving(answers) as hook:
        notifier = make_notifier(hook)
        notifier.tell("start", "")
        wait_for(lambda: hook.warnings if reason else len(hook.requests) == requests, "the last try")
        assert len(hook.requests) == requests and len({data for _, _, data in hook.requests}) == 1
        if reason:
            notifier.tell("end", "")
        notifier.close(30)
    warned = [warning.startswith("notify.url could not be told (") for warning in hook.warnings]
    assert warned == [True] * bool(reason)
    assert all(reason in warning and SECRET not in warning for warning in hook.warnings)


@pytest.mark.usefixtures("no_delays")
@pytest.mark.parametrize("begin", ["http://127.0.0.1:1", "http://127.0.0.1:x", "file://"])
def test_nobody_there_is_one_warning_without_the_url(begin: str) -> None:
    hook = Hook(url=f"{begin}/{SECRET}")
    notifier = make_notifier(hook, ping_url=hook.url)
    notifier.tell("start", "")
    notifier.ping()
    notifier.close(30)
    assert len(hook.warnings) == 2 and not [text for text in hook.warnings if SECRET in text]


@pytest.mark.usefixtures("no_delays")
def test_a_server_that_does_not_answer_delays_nobody() -> None:
    stuck = threading.Event()
    with serving([stuck]) as hook:
        notifier = make_notifier(hook)
        for _ in range(2 * notify.WAITING):
            notifier.tell("straggler", "")
        notifier.close(0.05)
        assert notifier.posts and notifier.posts.thread.is_alive()
        stuck.set()
        notifier.close(30)


@pytest.mark.usefixtures("no_delays")
@pytest.mark.parametrize(
    ("target", "paths"), [("/there", [f"/{SECRET}", "/there"]), ("ftp://127.0.0.1/x", [])]
)
def test_pings_follow_redirects_within_the_scheme_as_often_as_asked_for(
    target: str, paths: list[str]
) -> None:
    with serving([target]) as hook:
        notifier = make_notifier(hook, url=None, ping_url=hook.url, ping_interval=3600)
        for _ in range(9):
            notifier.ping()
        notifier.tell("hang", "goes nowhere")
        notifier.close(30)
    if paths:
        assert [(method, path) for method, path, _ in hook.requests] == [("GET", path) for path in paths]
    assert ["notify.ping_url" in warning for warning in hook.warnings] == [True] * (not paths)


def test_urls_are_masked_wherever_settings_are_written() -> None:
    kept = {"ping_url": None, "format": "auto"}
    tree = {"notify": {"url": f"https://h/{SECRET}", **kept}, "data": {"url": "u"}}
    assert mask_tree(tree) == {"notify": {"url": "***", **kept}, "data": {"url": "u"}}
    words = [f"notify.url=https://h/{SECRET}", f"+notify.ping_url='https://h/{SECRET}'", "data.url=u"]
    assert mask_words(words) == ["notify.url=***", "+notify.ping_url=***", "data.url=u"]
    assert mask_words([f"notify={{url: https://h/{SECRET}}}"]) == ["notify={url: ***"]
    assert mask_text("curl https://hooks.slack.com/services/T0/B0/abc now") == "curl *** now"


@pytest.mark.parametrize(
    ("outcome", "event", "sentence"),
    [
        ({"state": "succeeded", "exit_code": 0}, "end", "succeeded"),
        (
            {"state": "failed", "first_failure": {"rank": 3, "host": "n2", "reason": "exited with code 1"}},
            "fail",
            "failed; rank 3 on n2 exited with code 1",
        ),
        ({"state": "requeued", "cause": "crash", "reason": "r"}, "fail", "requeued; r"),
        ({"state": "requeued", "cause": "preempted", "reason": "r"}, "end", "requeued; r"),
    ],
)
def test_what_is_told_of_an_end(outcome: dict[str, object], event: str, sentence: str) -> None:
    assert (choose_event(outcome), describe_end(outcome)) == (event, sentence)


@pytest.mark.usefixtures("no_delays")
def test_a_job_ends_in_time_whatever_the_server_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(end_notice, "PATIENCE", 0.1)
    stuck = threading.Event()
    with serving([stuck]) as hook:
        post_end(NotifyConfig(url=hook.url), RunDir(tmp_path), "n1", {"state": "failed"})
        stuck.set()
    post_end(NotifyConfig(url=hook.url), RunDir(tmp_path, node_rank=1), "n1", {"state": "failed"})
    assert len(hook.requests) == 1 and SECRET not in caplog.text
