"""A server for notifications, which answers as a test asks."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
