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
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from launcher.watch.model import NotifySettings
from launcher.watch.run_files import Worker

_SLACK = "hooks.slack.com"
_TIMEOUT = 10.0
"""Seconds for each answer."""
DELAYS = (1.0, 4.0)
"""Seconds before the second and the third attempt."""
_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""HTTP's codes after which the same request can succeed (RFC 9110, 6585)."""
WAITING = 32
"""Messages that wait for a slow server, at most."""


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
        """`run` is the run's name and identifier; `job_id` is SLURM's.

        `warn` is called once for each URL that cannot be reached, by another thread.
        """
        self._settings = settings
        self._job = {"run": run, "job_id": job_id, "host": host, "run_dir": run_dir}
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
        """Post an event, if it is one of those that are asked for.

        `state` is the job's: as in model.JobState, or the manifest's word for how it ended.
        """
        if self.posts is None or event not in self._settings.events:
            return
        what = {"event": event, "sentence": sentence, "state": state, "step": step, "exit_code": exit_code}
        message = {**self._job, **what, "time": time.time()}
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


def _start_sender(
    key: str, delays: Sequence[float], warn: Callable[[str], None]
) -> "Worker[urllib.request.Request]":
    """Start what sends requests, and again after these delays if a failure may pass."""

    def send(request: urllib.request.Request) -> None:
        for delay in (*delays, None):
            reason, is_passing = _send(request)
            if not reason:
                return
            if delay is None or not is_passing:
                raise OSError(reason)
            worker.closing.wait(delay)

    worker = Worker(key, send, WAITING, lambda error: warn(f"{key} could not be told ({error})"))
    return worker


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows none: a POST's would lose the message."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


def _send(request: urllib.request.Request) -> tuple[str, bool]:
    """Send a request by HTTP or HTTPS, and by nothing else.

    Return why that failed, without the URL, and whether another attempt may succeed; an empty text if it is
    done.
    """
    if request.type not in ("http", "https"):
        return "no such scheme", False
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT):
            return "", False
    except urllib.error.HTTPError as error:
        with error:
            hint = ", a redirect: set the address that it leads to" if error.code < 400 else ""
            return f"HTTP {error.code}{hint}", error.code in _PASSING
    except urllib.error.URLError as error:
        reason = error.reason
        return (isinstance(reason, OSError) and reason.strerror) or type(reason).__name__, True
    except (OSError, http.client.HTTPException, ValueError) as error:
        return type(error).__name__, isinstance(error, OSError)


def _build_request(url: str, data: bytes | None) -> urllib.request.Request:
    """Return a GET, or a POST of JSON."""
    headers = {"User-Agent": "launch", **({"Content-Type": "application/json"} if data else {})}
    return urllib.request.Request(url, data, headers)  # noqa: S310 - `_send` takes HTTP and HTTPS alone


def build_post(url: str, form: str, message: Mapping[str, object]) -> urllib.request.Request:
    """Return a message's request, in Slack's form or in our own.

    Slack's mrkdwn is escaped: https://docs.slack.dev/messaging/formatting-message-text, "Escaping text".
    """
    if form != "slack" and (form != "auto" or urlsplit(url).hostname != _SLACK):
        return _build_request(url, json.dumps(message).encode())
    ends = {"start": "starts", "hang": "hangs", "recover": "goes on", "fail": "failed", "end": "ended"}
    event = str(message["event"])
    text = f"{message['run']} on {message['host']}"
    text += f", job {message['job_id']}" if message["job_id"] else ""
    text += f" {ends.get(event, f'has a {event}')}"
    text += f" at step {message['step']}" if message["step"] is not None else ""
    text += f" with exit code {message['exit_code']}" if message["exit_code"] else ""
    text += f": {message['sentence']}" if message["sentence"] else ""
    text += f"\n{message['run_dir']}"
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _build_request(url, json.dumps({"text": text}).encode())
