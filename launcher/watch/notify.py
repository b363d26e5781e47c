"""Tells somebody how a job goes: messages to a URL, and a ping as long as steps are made.

Each URL has a thread of its own, which nothing waits for but `close`, for a few seconds. URLs of hooks are
secrets: no text here has one in it, and no error's own text is shown that could.

This is urllib's work rather than urllib3's or tenacity's: neither is a dependency of this package, a loop
over two delays is all that is needed of them, and urllib follows the environment's proxies and checks
certificates too.
"""

import contextlib
import http.client
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import IO
from urllib.parse import urlsplit

from launcher.watch.watcher_settings import NotifySettings

SLACK = "hooks.slack.com"
TIMEOUT = 10.0
"""Seconds for each answer."""
DELAYS = (1.0, 4.0)
"""Seconds before the second and the third attempt."""
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""HTTP's codes after which the same request can succeed (RFC 9110, 6585)."""
WAITING = 32
"""Messages that wait for a slow server, at most."""
Send = Callable[[urllib.request.Request], None]


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The job as messages name it."""

    run: str
    """Name and identifier of the run."""
    run_dir: str
    host: str
    job_id: str | None = None
    """SLURM's."""


@dataclass(frozen=True, slots=True)
class Message:
    """What is posted as JSON, by these names."""

    run: str
    job_id: str | None
    event: str
    """As in `notify.events`."""
    host: str
    sentence: str
    state: str
    """Of the job: as in model.JobState, or the manifest's word for how it ended."""
    step: int | None
    exit_code: int | None
    run_dir: str
    time: float


class Notifier:
    """Posts messages, and pings; it never blocks and never raises."""

    def __init__(self, settings: NotifySettings, job: JobIdentity, warn: Callable[[str], None]) -> None:
        """`warn` is called once for each URL that cannot be reached, by another thread."""
        self.settings = settings
        self.job = job
        self.posts = Sender("notify.url", DELAYS, warn) if settings.url else None
        self.pings = Sender("notify.ping_url", (), warn) if settings.ping_url else None
        self.next_ping = 0.0

    def tell(
        self,
        event: str,
        sentence: str,
        *,
        state: str = "",
        step: int | None = None,
        exit_code: int | None = None,
    ) -> None:
        """Post an event, if it is one of those that are asked for."""
        if self.posts is None or event not in self.settings.events:
            return
        job = self.job
        message = Message(
            job.run, job.job_id, event, job.host, sentence, state, step, exit_code, job.run_dir, time.time()
        )
        self.posts.put(build_post(self.settings.url or "", self.settings.format, message))

    def ping(self) -> None:
        """Say that the job makes steps: to be called whenever it has made some."""
        now = time.monotonic()
        if self.pings is not None and now >= self.next_ping:
            self.next_ping = now + self.settings.ping_interval
            self.pings.put(build_request(self.settings.ping_url or "", None))

    def close(self, timeout: float = 5.0) -> None:
        """Send what waits, for so many seconds at most."""
        end = time.monotonic() + timeout
        for sender in filter(None, (self.posts, self.pings)):
            sender.close(max(0.0, end - time.monotonic()))


class Sender:
    """Sends requests in their order by a thread, which the interpreter's end does not wait for."""

    def __init__(self, key: str, delays: Sequence[float], warn: Callable[[str], None]) -> None:
        self.key = key
        self.delays = delays
        self.warn = warn
        self.has_warned = False
        self.requests: queue.Queue[urllib.request.Request | None] = queue.Queue(WAITING)
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.run, name=key, daemon=True)
        self.thread.start()

    def put(self, request: urllib.request.Request | None) -> None:
        """Leave a request to the thread; it is dropped if too many wait."""
        with contextlib.suppress(queue.Full):
            self.requests.put_nowait(request)

    def close(self, timeout: float) -> None:
        """Wait until all is sent, for so many seconds at most; attempts follow each other at once now."""
        self.closing.set()
        self.put(None)
        self.thread.join(timeout)

    def run(self) -> None:
        """Send until the end; the first request that cannot be sent is warned of."""
        send = make_send()
        while (request := self.requests.get()) is not None:
            problem = self.send_patiently(send, request)
            if problem and not self.has_warned:
                self.has_warned = True
                self.warn(f"{self.key} could not be told ({problem})")

    def send_patiently(self, send: Send, request: urllib.request.Request) -> str:
        """Send a request, again after a passing failure; return why it could not be sent, or nothing."""
        for delay in (*self.delays, None):
            problem, is_passing = try_send(send, request)
            if not problem or not is_passing or delay is None:
                break
            self.closing.wait(delay)
        return problem


class RedirectPolicy(urllib.request.HTTPRedirectHandler):
    """Follows a GET's redirects within its scheme; a POST's would lose the message."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the request to follow with; raises HTTPError."""
        is_same = urlsplit(newurl).scheme == urlsplit(req.full_url).scheme
        if req.get_method() != "GET" or not is_same:
            raise urllib.error.HTTPError(req.full_url, code, msg, headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def make_send() -> Send:
    """Return what sends a request by HTTP or HTTPS, and by nothing else; it raises OSError."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        RedirectPolicy(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)

    def send(request: urllib.request.Request) -> None:
        with opener.open(request, timeout=TIMEOUT):
            pass

    return send


def try_send(send: Send, request: urllib.request.Request) -> tuple[str, bool]:
    """Send a request; return the failure, if any, in words without the URL, and whether it may pass."""
    try:
        send(request)
    except urllib.error.HTTPError as error:
        with error:
            hint = (
                ", a redirect that is not followed: set the address it leads to" if error.code < 400 else ""
            )
            return f"HTTP {error.code}{hint}", error.code in PASSING
    except urllib.error.URLError as error:
        reason = error.reason
        return (
            reason.strerror or type(reason).__name__ if isinstance(reason, OSError) else "no such scheme"
        ), True
    except (OSError, http.client.HTTPException, ValueError) as error:
        return type(error).__name__, isinstance(error, OSError)
    return "", False


def build_request(url: str, data: bytes | None) -> urllib.request.Request:
    """Return a GET, or a POST of JSON."""
    headers = {"User-Agent": "launch", **({"Content-Type": "application/json"} if data else {})}
    return urllib.request.Request(url, data, headers)  # noqa: S310 - `make_send` knows HTTP and HTTPS alone


def build_post(url: str, form: str, message: Message) -> urllib.request.Request:
    """Return a message's request, in Slack's form or in our own."""
    is_slack = form == "slack" or (form == "auto" and urlsplit(url).hostname == SLACK)
    body: object = {"text": describe_message(message)} if is_slack else asdict(message)
    return build_request(url, json.dumps(body).encode())


def describe_message(message: Message) -> str:
    """Return a message for people, escaped as Slack's mrkdwn wants it.

    Source: https://docs.slack.dev/messaging/formatting-message-text, "Escaping text".
    """
    job = f", job {message.job_id}" if message.job_id else ""
    ends = {"start": "starts", "hang": "hangs", "recover": "goes on", "fail": "failed", "end": "ended"}
    what = ends.get(message.event, f"has a {message.event}")
    code = f" with exit code {message.exit_code}" if message.exit_code else ""
    step = f" at step {message.step}" if message.step is not None else ""
    head = f"{message.run} on {message.host}{job} {what}{step}{code}"
    text = (
        f"{head}: {message.sentence}\n{message.run_dir}" if message.sentence else f"{head}\n{message.run_dir}"
    )
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
