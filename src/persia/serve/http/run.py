"""Runs the application of a prediction server on uvicorn, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import uvicorn

from persia.checks import is_loopback
from persia.errors import ConfigError, PersiaError
from persia.serve.http.app import create_app
from persia.serve.http.keys import read_keys
from persia.serve.http.options import HttpOptions
from persia.serve.http.uvicorn_protocol import limited_protocol
from persia.telemetry.logs import get_logger

if TYPE_CHECKING:
    from persia.serve.predictor import Predictor
    from persia.serve.retriever import Retriever

__all__ = ["Listening", "run_server"]

LOG = get_logger("persia.serve")

SIGNALS = (signal.SIGINT, signal.SIGTERM)

QUIET_SECONDS = 60.0
"""Minimum interval between two equal warnings of uvicorn."""


class Listening(NamedTuple):
    """A server whose port is open. Its predictor may still be loading.

    Attributes:
        url: address of the server.
        stop: drains and stops the server, as a signal does; a second call stops it immediately. Thread-safe.
    """

    url: str
    stop: Callable[[], object]


def run_server(
    predictor: Predictor,
    options: HttpOptions,
    listening: Callable[[Listening], object] = lambda _: None,
    retriever: Retriever | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM. Blocks. Outside the main thread only `Listening.stop` stops it.

    The first signal drains: `/health` answers 503, no new connections are accepted, requests in progress are answered.
    A second signal stops the server immediately: it waits neither for requests nor for the predictor, which is stopped
    but not closed.

    Args:
        predictor: predictor, which this starts and closes.
        options: options of the server.
        listening: called once the port is open.
        retriever: retriever of this predictor, which this starts and closes; None for a server without `/retrieve`.

    Raises:
        ConfigError: an option is invalid, or the port is taken.
        PersiaError: the predictor cannot start.
    """
    keys = read_keys(options.key_file)
    local = is_loopback(options.host)
    if not local and keys is None and not options.insecure:
        raise ConfigError(
            f"host = {options.host!r} lets other hosts in without a key. Give keys (--key-file, PERSIA_SERVE_KEYS), or "
            "set insecure if only trusted clients can reach it.",
            field="host",
        )
    if options.insecure and keys is not None:
        LOG.warning("insecure is set, but clients need keys, as keys are set, too")
    app = create_app(predictor, limits=options.limits, keys=keys, local=local and keys is None, retriever=retriever)
    server = app.state.server
    with _listener(options) as listener:
        scheme = "http" if options.tls_cert is None else "https"
        host, port = listener.getsockname()[:2]
        config = uvicorn.Config(
            app,
            http=limited_protocol(
                options.limits.head_seconds, options.limits.body_seconds, options.limits.max_connections
            ),
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            limit_concurrency=options.limits.max_connections + 1,  # Uvicorn refuses from this number on.
            timeout_graceful_shutdown=max(1, round(options.drain_seconds)),
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
            backlog=min(2048, options.limits.max_connections),
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is one.
            raise ConfigError(f"Cannot use the certificate {options.tls_cert}: {error}.", field="tls_cert") from error
        runner = _Server(config, lambda: setattr(server, "stopping", True), server.force)
        server.on_failure = runner.stop
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        runner.on_listening = lambda stop: listening(Listening(url, stop))
        with _quiet_uvicorn():
            asyncio.run(runner.serve(sockets=[listener]))
    if server.failed is not None:
        if isinstance(server.failed, PersiaError):
            raise server.failed
        raise RuntimeError("The server could not start.") from server.failed


class _Server(uvicorn.Server):
    """Drains at the first signal, and then exits with status 0; uvicorn would raise the signal again."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], object], on_force: Callable[[], object]) -> None:
        super().__init__(config)
        self.on_listening: Callable[[Callable[[], object]], object] = lambda _stop: None
        self._on_stop = on_stop
        self._on_force = on_force

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        self.on_listening(lambda: loop.call_soon_threadsafe(self.stop))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # Python runs handlers there only.
            yield
            return
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._stopped_by, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Drains and stops the server; a second call stops it immediately."""
        self._on_stop()
        if self.should_exit:
            self.force_exit = True
            self._on_force()
        self.should_exit = True

    def _stopped_by(self, number: int) -> None:
        name = signal.Signals(number).name
        LOG.info("%s: %s", name, "stopping immediately" if self.should_exit else "answering requests in progress")
        self.stop()


@contextlib.contextmanager
def _listener(options: HttpOptions) -> Iterator[socket.socket]:
    host, port = options.host, options.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without the protocol asyncio leaves Nagle's algorithm on, and an answer waits 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if options.reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on {host} port {port}: {error}. Choose another one.", field="port"
            ) from error
        yield listener
    finally:
        listener.close()


class _RateLimit(logging.Filter):
    """Passes each message once in `QUIET_SECONDS`, as clients can cause a message with every request."""

    def __init__(self) -> None:
        super().__init__()
        self._due: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if record.levelno > logging.WARNING or now >= self._due.get(str(record.msg), now):
            self._due[str(record.msg)] = now + QUIET_SECONDS
            return True
        return False


@contextlib.contextmanager
def _quiet_uvicorn() -> Iterator[None]:
    """Limits uvicorn's log to errors and some warnings, as the server has its own log messages."""
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logger, rate_limit = logging.getLogger("uvicorn.error"), _RateLimit()
    logger.addFilter(rate_limit)
    try:
        yield
    finally:
        logger.removeFilter(rate_limit)
