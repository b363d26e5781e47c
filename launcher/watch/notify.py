"""Tells somebody how a job goes: messages to a URL, and a ping as long as steps are made.

Each URL has a thread of its own, which nothing waits for but `close`, for a few seconds. URLs of hooks are
secrets: no text here has one in it, and no error's own text is shown that could.

This is urllib's work rather than urllib3's or tenacity's: neither is a dependency of this package, a loop
over two delays is all that is needed of them, and urllib follows the environment's proxies and checks
certificates too.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO
from urllib.parse import urlsplit

from launcher.watch.model import NotifySettings
from launcher.watch.worker import Worker

_SLACK = "hooks.slack.com"
_TIMEOUT = 10.0
"""Seconds for each answer."""
DELAYS = (1.0, 4.0)
"""Seconds before the second and the third attempt."""
_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""HTTP's codes after which the same request can succeed (RFC 9110, 6585)."""
WAITING = 32
"""Messages that wait for a slow server, at most."""


@dataclass(frozen=True, slots=True)
class Message:
    """What is posted as JSON, by these names."""

    run: str
    """Name and identifier of the run."""
    job_id: str | None
    """SLURM's."""
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

    def __init__(
        self,
        settings: NotifySettings,
        warn: Callable[[str], None],
        *,
        run: str,
        run_dir: str,
        host: str,
        job_id: str | None = None,
    ) -> None:
        """`warn` is called once for each URL that cannot be reached, by another thread."""
        self._settings = settings
        self._job = Message(run, job_id, "", host, "", "", None, None, run_dir, 0.0)
        self.posts = _start_sender("notify.url", DELAYS, warn) if settings.url else None
        self._pings = _start_sender("notify.ping_url", (), warn) if settings.ping_url else None
        self._next_ping = 0.0

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
        if self.posts is None or event not in self._settings.events:
            return
        message = replace(
            self._job,
            event=event,
            sentence=sentence,
            state=state,
            step=step,
            exit_code=exit_code,
            time=time.time(),
        )
        self.posts.put(build_post(self._settings.url or "", self._settings.format, message))

    def ping(self) -> None:
        """Say that the job makes steps: to be called whenever it has made some."""
        now = time.monotonic()
        if self._pings is not None and now >= self._next_ping:
            self._next_ping = now + self._settings.ping_interval
            self._pings.put(_build_request(self._settings.ping_url or "", None))

    def close(self, timeout: float = 5.0) -> None:
        """Send what waits, for so many seconds at most."""
        end = time.monotonic() + timeout
        for sender in filter(None, (self.posts, self._pings)):
            sender.close(max(0.0, end - time.monotonic()))


class _SendError(OSError):
    """A request could not be sent: the text says why, without the URL."""

    def __init__(self, text: str, *, is_passing: bool) -> None:
        super().__init__(text)
        self.is_passing = is_passing


def _start_sender(
    key: str, delays: Sequence[float], warn: Callable[[str], None]
) -> "Worker[urllib.request.Request]":
    """Start what sends requests, and again after these delays (none in the end) if a failure may pass."""

    def send(request: urllib.request.Request) -> None:
        for delay in delays:
            try:
                return _send(request)
            except _SendError as error:
                if not error.is_passing:
                    raise
                worker.closing.wait(delay)
        return _send(request)

    worker = Worker(key, send, WAITING, lambda error: warn(f"{key} could not be told ({error})"))
    return worker


class _RedirectPolicy(urllib.request.HTTPRedirectHandler):
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


def _send(request: urllib.request.Request) -> None:
    """Send a request by HTTP or HTTPS, and by nothing else; raises _SendError."""
    if request.type not in ("http", "https"):
        raise _SendError("no such scheme", is_passing=False)
    try:
        with urllib.request.build_opener(_RedirectPolicy).open(request, timeout=_TIMEOUT):
            return
    except urllib.error.HTTPError as error:
        with error:
            hint = (
                ", a redirect that is not followed: set the address it leads to" if error.code < 400 else ""
            )
            text, is_passing = f"HTTP {error.code}{hint}", error.code in _PASSING
    except urllib.error.URLError as error:
        reason = error.reason
        text = (isinstance(reason, OSError) and reason.strerror) or type(reason).__name__
        is_passing = True
    except (OSError, http.client.HTTPException, ValueError) as error:
        text, is_passing = type(error).__name__, isinstance(error, OSError)
    raise _SendError(text, is_passing=is_passing)


def _build_request(url: str, data: bytes | None) -> urllib.request.Request:
    """Return a GET, or a POST of JSON."""
    headers = {"User-Agent": "launch", **({"Content-Type": "application/json"} if data else {})}
    return urllib.request.Request(url, data, headers)  # noqa: S310 - `_send` takes HTTP and HTTPS alone


def build_post(url: str, form: str, message: Message) -> urllib.request.Request:
    """Return a message's request, in Slack's form or in our own."""
    is_slack = form == "slack" or (form == "auto" and urlsplit(url).hostname == _SLACK)
    body: object = {"text": _describe_message(message)} if is_slack else asdict(message)
    return _build_request(url, json.dumps(body).encode())


def _describe_message(message: Message) -> str:
    """Return a message for people, escaped as Slack's mrkdwn wants it.

    Source: https://docs.slack.dev/messaging/formatting-message-text, "Escaping text".
    """
    ends = {"start": "starts", "hang": "hangs", "recover": "goes on", "fail": "failed", "end": "ended"}
    job = f", job {message.job_id}" if message.job_id else ""
    text = f"{message.run} on {message.host}{job} {ends.get(message.event, f'has a {message.event}')}"
    text += f" at step {message.step}" if message.step is not None else ""
    text += f" with exit code {message.exit_code}" if message.exit_code else ""
    text += f": {message.sentence}" if message.sentence else ""
    text += f"\n{message.run_dir}"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
