"""Messages and pings to a real HTTP server: slow, refusing, redirecting, failing first."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.config.settings import NotifyConfig
from launcher.launch import ending
from launcher.launch.ending import describe_outcome, post_end
from launcher.runs.run_directory import RunDir
from launcher.runs.secrets import mask_text, mask_tree, mask_words
from launcher.watch import notify
from launcher.watch.model import NotifySettings
from launcher.watch.notify import Message, Notifier, build_post
from tests.watch.hook_server import SECRET, Hook, serving

JOB = {"run": "gpt/7", "run_dir": "/runs/gpt/7", "host": "n1", "job_id": "4711"}
EVENTS = tuple(NotifyConfig().events)


def make_notifier(hook: Hook, **settings: object) -> Notifier:
    values = {"url": hook.url, "events": EVENTS, **settings}
    return Notifier(NotifySettings(**values), hook.warnings.append, **JOB)  # type: ignore[arg-type]  # by name


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "DELAYS", (0.01, 0.01))
    monkeypatch.setenv("no_proxy", "*")


def wait_for(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_message_has_what_somebody_needs_to_know() -> None:
    with serving() as hook:
        notifier = make_notifier(hook, events=("hang",))
        notifier.tell("start", "not asked for")
        notifier.tell("hang", "rank 5 on n2 has not joined all_reduce #1042", state="hanging", step=120)
        notifier.close(30)
    ((method, path, data),) = hook.requests
    found = json.loads(data)
    assert (method, path) == ("POST", f"/{SECRET}")
    assert found.pop("time") == pytest.approx(time.time(), abs=60)
    assert found == {
        "run": "gpt/7", "job_id": "4711", "event": "hang", "host": "n1", "state": "hanging", "step": 120,
        "sentence": "rank 5 on n2 has not joined all_reduce #1042", "exit_code": None,
        "run_dir": "/runs/gpt/7",
    }  # fmt: skip
    assert hook.warnings == []


def test_slacks_form_is_escaped() -> None:
    message = Message("gpt/7", None, "hang", "n1", "rank 5 <!channel> & co", "hanging", 9, None, "/r", 0)
    posts = [
        build_post("https://hooks.slack.com/services/T0", "auto", message),
        build_post("https://example.org/", "slack", message),
    ]
    for post in posts:
        assert isinstance(post.data, bytes)
        assert json.loads(post.data) == {
            "text": "gpt/7 on n1 hangs at step 9: rank 5 &lt;!channel&gt; &amp; co\n/r"
        }
    plain = build_post("https://slack.com.example.org/", "auto", message).data
    assert isinstance(plain, bytes) and "text" not in json.loads(plain)


def test_a_failure_that_passes_is_tried_again() -> None:
    with serving([500, 503]) as hook:
        notifier = make_notifier(hook)
        notifier.tell("end", "")
        wait_for(lambda: len(hook.requests) == 3)
        notifier.close(30)
    assert hook.warnings == [] and len({data for _, _, data in hook.requests}) == 1


@pytest.mark.parametrize(
    ("answers", "requests", "reason"),
    [
        ([500] * 9, 3, "HTTP 500"),
        ([403] * 9, 1, "HTTP 403"),
        (["/elsewhere"] * 9, 1, "HTTP 302, a redirect"),
        (["file:///etc/passwd"] * 9, 1, "HTTP 302"),
    ],
    ids=["broken", "refusing", "redirecting", "file"],
)
def test_what_cannot_be_posted_is_one_warning_without_the_url(
    answers: list[int | str | threading.Event], requests: int, reason: str
) -> None:
    with serving(answers) as hook:
        notifier = make_notifier(hook)
        notifier.tell("start", "")
        wait_for(lambda: hook.warnings)
        assert len(hook.requests) == requests
        notifier.tell("end", "")
        notifier.close(30)
    (warning,) = hook.warnings
    assert (
        warning.startswith("notify.url could not be told (") and reason in warning and SECRET not in warning
    )


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/T000-very-secret",
        "http://127.0.0.1:x/T000-very-secret",
        "file:///T000-very-secret",
    ],
)
def test_nobody_there_is_one_warning_without_the_url(url: str) -> None:
    warnings: list[str] = []
    notifier = Notifier(NotifySettings(url=url, ping_url=url, events=EVENTS), warnings.append, **JOB)
    notifier.tell("start", "")
    notifier.ping()
    notifier.close(30)
    assert len(warnings) == 2 and not [text for text in warnings if SECRET in text]


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


def test_pings_come_as_often_as_asked_for_and_follow_redirects_within_the_scheme() -> None:
    with serving(["/there"]) as hook:
        notifier = make_notifier(hook, url=None, ping_url=hook.url, ping_interval=3600)
        for _ in range(9):
            notifier.ping()
        notifier.tell("hang", "goes nowhere")
        notifier.close(30)
    assert [(method, path) for method, path, _ in hook.requests] == [("GET", f"/{SECRET}"), ("GET", "/there")]


def test_a_ping_is_not_sent_to_another_scheme() -> None:
    with serving(["ftp://127.0.0.1/x"]) as hook:
        notifier = make_notifier(hook, url=None, ping_url=hook.url)
        notifier.ping()
        notifier.close(30)
    assert len(hook.warnings) == 1 and "notify.ping_url" in hook.warnings[0]


def test_urls_are_masked_wherever_settings_are_written() -> None:
    tree = {
        "notify": {"url": f"https://h/{SECRET}", "ping_url": None, "format": "auto"},
        "data": {"url": "u"},
    }
    assert mask_tree(tree) == {
        "notify": {"url": "***", "ping_url": None, "format": "auto"},
        "data": {"url": "u"},
    }
    words = [f"notify.url=https://h/{SECRET}", f"+notify.ping_url='https://h/{SECRET}'", "data.url=u"]
    assert mask_words(words) == ["notify.url=***", "+notify.ping_url=***", "data.url=u"]
    assert mask_words([f"notify={{url: https://h/{SECRET}}}"]) == ["notify={url: ***"]
    hook = "https://hooks.slack.com/services/T0/B0/abc"
    assert mask_text(f"curl {hook} now") == "curl *** now"


@pytest.mark.parametrize(
    ("outcome", "event", "sentence"),
    [
        ({"state": "succeeded", "exit_code": 0}, "end", "succeeded"),
        ({"state": "stopped", "exit_code": 143}, "end", "stopped"),
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
    assert describe_outcome(outcome) == (event, sentence)


def test_a_job_ends_in_time_and_as_it_did_whatever_the_server_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ending, "NOTICE_PATIENCE", 0.1)
    stuck = threading.Event()
    with serving([stuck]) as hook:
        post_end(NotifyConfig(url=hook.url), RunDir(tmp_path), "n1", {"state": "failed"})
        stuck.set()
    post_end(NotifyConfig(url=hook.url), RunDir(tmp_path, node_rank=1), "n1", {"state": "failed"})
    assert len(hook.requests) == 1 and SECRET not in caplog.text
