"""Serves the page of a running cluster over HTTP, on this host only."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from persia.dashboard.report import style
from persia.dashboard.view import Watch
from persia.errors import ConfigError
from persia.membership.observing import Answer
from persia.telemetry.process import LOOPBACK

__all__ = ["serve_page"]

PORTS = 256
"""Number of ports to try, so that each run of a host gets its own page."""

INTERVAL_SECONDS = 1.0

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@contextlib.contextmanager
def serve_page(ask: Callable[[], Sequence[Answer]], port: int, interval: float = INTERVAL_SECONDS) -> Iterator[str]:
    """Serves the page of a cluster at 127.0.0.1 during the block; yields its URL.

    To open the page from another host, forward the port: `ssh -L 8060:127.0.0.1:8060 HOST`.

    Args:
        ask: returns the answers of all processes.
        port: first port to try; 0 for any free port.
        interval: seconds between two queries of the cluster.

    Raises:
        ConfigError: no port is free.
    """
    watch: Watch | None = None

    class Handler(_Handler):
        def views(self, since: float) -> bytes:
            return msgspec.json.encode(watch.views(since) if watch is not None else [])

    server = _bound(port, Handler)
    watch = Watch(ask, interval)
    thread = threading.Thread(target=server.serve_forever, name="persia-page", daemon=True)
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_port}/"
    finally:
        watch.close()
        server.shutdown()
        server.server_close()
        thread.join()


def _bound(port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    failure: OSError | None = None
    for candidate in range(port, min(port + PORTS, 1 << 16)) if port else (0,):
        try:
            return ThreadingHTTPServer((LOOPBACK, candidate), handler)
        except OSError as error:
            failure = error
    raise ConfigError(
        f"No free port on {LOOPBACK} among the {PORTS} ports from observe.ui_port = {port} ({failure}). Choose another "
        "port.",
        field="observe.ui_port",
    )


class _Handler(BaseHTTPRequestHandler):
    """Answers GET for the page and its data."""

    server_version = "persia"
    sys_version = ""
    timeout = 10.0

    def views(self, since: float) -> bytes:
        """Returns the views after a time as JSON."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Answers a request."""
        url = urlsplit(self.path)
        # Another site could point its own name at this address, and read the page in the user's browser.
        if not self._is_local(self.headers.get("Host", "")):
            self._reply(HTTPStatus.FORBIDDEN, "text/plain", b"Open the page by its address, http://127.0.0.1:PORT/.")
        elif url.path == "/":
            page = resources.files("persia.dashboard").joinpath("page.html").read_text(encoding="utf-8")
            self._reply(HTTPStatus.OK, "text/html", page.replace("/* style.css */", style()).encode())
        elif url.path == "/views":
            self._reply(HTTPStatus.OK, "application/json", self.views(_since(url.query)))
        else:
            self._reply(HTTPStatus.NOT_FOUND, "text/plain", b"There is only /.")

    def log_message(self, format: str, *args: Any) -> None:
        """No-op: requests do not belong in the log of a run."""

    def _is_local(self, host: str) -> bool:
        return host.rpartition(":")[0] in (LOOPBACK, "localhost")

    def _reply(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):  # The client has disconnected.
            self.send_response(status)
            for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def _since(query: str) -> float:
    try:
        since = float(parse_qs(query)["since"][0])
    except (KeyError, ValueError):
        return 0.0
    return since if math.isfinite(since) else 0.0
