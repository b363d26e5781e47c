"""Tells somebody how a job goes: messages to a URL, and a ping as long as steps are made.

Each URL has a thread of its own, which nothing waits for but `close`, for a few seconds. URLs of hooks are
secrets: no text here has one in it, and no error's own text is shown that could.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
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
        self, settings: NotifySettings, warn: Callable[[str], None], job: Mapping[str, object]
    ) -> None:
        """`job` is in every message: `run` (`NAME/ID`), SLURM's `job_id` or None, `host` and `run_dir`.

        `warn` is called once for each URL that cannot be reached, by another thread.
        """
        self._settings = settings
        self._job = job
        self.posts = _Sender("notify.url", DELAYS, warn) if settings.url else None
        self._pings = _Sender("notify.ping_url", (), warn) if settings.ping_url else None
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
        url, form = self._settings.url or "", self._settings.format
        if form == "slack" or (form == "auto" and urlsplit(url).hostname == _SLACK):
            message = {"text": _write_text(message)}
        self.posts.put(_make_request(url, json.dumps(message).encode()))

    def ping(self) -> None:
        """Say that the job makes steps: to be called whenever it has made some."""
        now = time.monotonic()
        if self._pings is not None and now >= self._next_ping:
            self._next_ping = now + self._settings.ping_interval
            self._pings.put(_make_request(self._settings.ping_url or "", None))

    def close(self, timeout: float = 5.0) -> None:
        """Send what waits, for so many seconds at most."""
        end = time.monotonic() + timeout
        for sender in filter(None, (self.posts, self._pings)):
            sender.close(max(0.0, end - time.monotonic()))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows none: a POST's would lose the message."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


class _Sender(Worker[urllib.request.Request]):
    """Sends requests to the URL of a setting, and again after some delays if a failure may pass."""

    def __init__(self, key: str, delays: tuple[float, ...], warn: Callable[[str], None]) -> None:
        self.delays = delays
        super().__init__(key, self.send, WAITING, lambda error: warn(f"{key} could not be told ({error})"))

    def send(self, request: urllib.request.Request) -> None:
        """Send a request by HTTP or HTTPS, and by nothing else; raises OSError, without the URL in it."""
        for delay in (*self.delays, None):
            try:
                if request.type not in ("http", "https"):
                    raise ValueError
                with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT):
                    return
            except urllib.error.HTTPError as error:
                with error:
                    hint = ", a redirect: set the address that it leads to" if error.code < 400 else ""
                    reason, may_pass = f"HTTP {error.code}{hint}", error.code in _PASSING
            except (OSError, http.client.HTTPException, ValueError) as error:
                cause = getattr(error, "reason", error)
                reason = (isinstance(cause, OSError) and cause.strerror) or type(cause).__name__
                may_pass = isinstance(error, OSError)
            if delay is None or not may_pass:
                raise OSError(reason)
            self.closing.wait(delay)


def _make_request(url: str, data: bytes | None) -> urllib.request.Request:
    """Return a GET, or a POST of JSON."""
    headers = {"User-Agent": "launch", **({"Content-Type": "application/json"} if data else {})}
    return urllib.request.Request(url, data, headers)  # noqa: S310 - `_Sender` takes HTTP and HTTPS alone


def _write_text(message: Mapping[str, object]) -> str:
    """Return a message for Slack.

    Its mrkdwn is escaped: https://docs.slack.dev/messaging/formatting-message-text, "Escaping text".
    """
    ends = {"start": "starts", "hang": "hangs", "recover": "goes on", "fail": "failed", "end": "ended"}
    event = str(message["event"])
    text = f"{message['run']} on {message['host']}"
    text += f", job {message['job_id']}" if message["job_id"] else ""
    text += f" {ends.get(event, f'has a {event}')}"
    text += f" at step {message['step']}" if message["step"] is not None else ""
    text += f" with exit code {message['exit_code']}" if message["exit_code"] else ""
    text += f": {message['sentence']}" if message["sentence"] else ""
    text += f"\n{message['run_dir']}"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
