"""``hymo report --watch``: the page on this machine alone, refreshed as rows arrive."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from hymo.errors import HyMoError
from hymo.observe.report.page import content, render
from hymo.observe.report.read import RunReader, read_runs

LOOPBACK = "127.0.0.1"


class Source:
    """The page's content, read anew when a file has changed and no more than a tenth of the time."""

    def __init__(self, readers: Sequence[RunReader]):
        self._readers, self._lock = readers, threading.Lock()
        self._stamp: object = None
        self._next = 0.0
        self._version, self._body = 0, b""

    def newer_than(self, version: int) -> tuple[int, bytes | None]:
        """(the present version, its JSON or None if that is the one known)."""
        with self._lock:
            stamp = [reader.changed_at() for reader in self._readers]
            now = time.monotonic()
            if stamp != self._stamp and now >= self._next:
                body = content(read_runs(self._readers))
                self._version += 1
                self._body = json.dumps(body | {"version": self._version}, allow_nan=False).encode()
                self._stamp, self._next = stamp, time.monotonic() + 9 * (time.monotonic() - now)
            return self._version, None if version == self._version else self._body

    def page(self) -> bytes:
        with self._lock:
            return render(read_runs(self._readers), watch=True).encode()


class Server(ThreadingHTTPServer):
    """Listens on the loopback address alone."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, readers: Sequence[RunReader], port: int = 0):
        self.source = Source(readers)
        super().__init__((LOOPBACK, port), Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that went away in the middle of an answer is no news; anything else is."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        # Another site's name that leads to this address must not read the page.
        if self.headers.get("Host", "") not in {f"{h}:{self.server.server_port}" for h in (LOOPBACK, "localhost")}:
            return self._send(403, "text/plain", b"this page answers to 127.0.0.1 and localhost alone\n")
        address = urlsplit(self.path)
        try:
            if address.path == "/":
                return self._send(200, "text/html", self.server.source.page())
            if address.path == "/data.json":
                known = parse_qs(address.query).get("version", ["0"])[0]
                _, body = self.server.source.newer_than(int(known) if known.isdigit() else 0)
                return self._send(204 if body is None else 200, "application/json", body or b"")
        except HyMoError as error:
            return self._send(500, "text/plain", f"{error}\n".encode())
        self._send(404, "text/plain", b"not here\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """A line for each request would bury the address."""


def watch(readers: Sequence[RunReader], port: int) -> int:
    """Serve until Ctrl-C; returns the exit code 0."""
    try:
        server = Server(readers, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HyMoError(f"--port: {port} cannot be used ({reason}); accepted: a free port, or 0 for any") from None
    with server:
        print(f"{server.url} shows {', '.join(reader.name for reader in readers)}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("\nno longer served")
    return 0
