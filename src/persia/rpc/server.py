"""Serves a plain object over ZeroMQ: each thread reads a request, runs it, and sends the reply."""

from __future__ import annotations

import collections
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence

import zmq

from persia.errors import WireError
from persia.rpc.backlog import Backlog, Job
from persia.rpc.dispatch import Dispatcher, Reply
from persia.rpc.intake import Intake
from persia.rpc.interface import Method, describe
from persia.rpc.keys import check_address, find_keys
from persia.rpc.limits import Limits
from persia.rpc.messages import Kind, parse
from persia.rpc.port import UNREAD_MESSAGES, Port, server_port
from persia.telemetry.metrics import Readings, figures

__all__ = ["Server", "serve"]

_log = logging.getLogger("persia.rpc")

IDLE_SECONDS = 10.0
"""A thread that had no turn for so long ends, but for two."""

SPARE_THREADS = 2

TICK_SECONDS = 1.0

CLOSE_SECONDS = 60.0
"""How long a request to close an iterator may wait; nobody waits for it."""

DELIVERY_SECONDS = 0.2
"""What a closing server leaves its clients to fetch their last replies; those who do not will call again."""

FULL_SECONDS = 0.002
"""How often a reply is offered to a client that has no room for it."""

_COUNTS = {
    zmq.EVENT_ACCEPTED: "connections",
    zmq.EVENT_DISCONNECTED: "disconnections",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshakes_failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshakes_failed",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "handshakes_failed",
}


def serve(
    service: object,
    address: str = "tcp://127.0.0.1:*",
    *,
    protocol: type | None = None,
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    limits: Limits | None = None,
) -> Server:
    """Makes the methods of an object callable from other processes. Returns at once; threads do the work.

    Args:
        service: any object whose methods are safe to call from several threads. What they return must not change
            afterwards: arrays are sent from where they are.
        address: `tcp://host:port`; port `*` takes a free one, see `Server.address`.
        protocol: whose public methods are offered; None for those of the object's class.
        keys: file made by `make_keys`; None for the one that PERSIA_CURVE_KEYS names, if any.
        insecure: allows an address that other hosts reach without keys.
        limits: bounds on messages, work and memory.

    Raises:
        ConfigError: the address is in use or open to others without keys; the keys are not valid; a method has
            annotations that cannot be sent.
    """
    found = find_keys(keys)
    check_address(address, found, insecure)
    methods = describe(protocol or type(service))
    port = server_port(limits or Limits())
    try:
        port.bind(address, found)
    except BaseException:
        port.close(0)
        raise
    return Server(service, methods, port, limits or Limits())


class Server:
    """An object that is being served. Thread-safe. Made by `serve`.

    Idle threads wait for the socket, and the kernel wakes one of them. It reads a request, runs the method and sends
    the reply, so that a call changes no threads. One is always idle: threads are added while all are busy, up to
    `Limits.threads`; then requests wait in a queue, and beyond `Limits.requests` or `Limits.request_bytes` in the
    clients.
    """

    def __init__(self, service: object, methods: Mapping[str, Method], port: Port, limits: Limits) -> None:
        self._port = port
        self._limits = limits
        self._dispatcher = Dispatcher(service, methods, limits, self._count)
        self._process = os.getpid()
        self._state = threading.Lock()  # Guards all that follows.
        self._backlog = Backlog(limits)
        self._threads: set[threading.Thread] = set()
        self._busy = 0
        self._paused = False
        self._closing = False
        self._tick = 0.0
        # Guarded by the lock of the port.
        self._intake = Intake(limits.message_bytes, limits.arrays + 1, UNREAD_MESSAGES)
        self._counts: collections.Counter[str] = collections.Counter()
        with self._state:
            self._add_thread()

    @property
    def address(self) -> str:
        """Where it listens, with the actual port."""
        return self._port.address

    def statistics(self) -> dict[str, int]:
        """Counters since the start, and what is in work now (`requests_held`, `bytes_held`, `threads`, `streams`).

        `calls` run; `errors` raised by methods; `malformed` messages, refused; `expired` calls, not run because their
        deadline had passed; `replies_dropped` because the client was gone; `connections`, `disconnections`,
        `handshakes_failed` (also by wrong keys); `endless` messages, whose connections were closed; `streams_expired`.
        """
        names = ("calls", "errors", "malformed", "expired", "replies_dropped", "endless")
        streams = self._dispatcher.streams
        with self._state:
            counted = {name: self._counts[name] for name in (*names, *sorted(set(_COUNTS.values())))}
            return {
                **counted,
                "streams_expired": streams.expired,
                "requests_held": self._backlog.requests,
                "bytes_held": self._backlog.nbytes,
                "threads": len(self._threads),
                "streams": len(streams),
            }

    def observe(self) -> Readings:
        """The same as figures, and how long methods have run."""
        return Readings(figures("rpc", self.statistics()), self._dispatcher.latencies())

    def close(self, seconds: float = 5.0) -> None:
        """Stops reading, lets running methods finish and reply for so long, and gives up the address.

        Calls that had not begun get no reply: their clients send them to the next server at this address.
        """
        if self._process != os.getpid():
            return
        with self._state:
            first, self._closing = not self._closing, True
            self._backlog.clear()
            threads, busy = list(self._threads), self._busy > 0
        if not first:
            return
        self._port.wake()
        end = time.monotonic() + seconds
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        self._dispatcher.streams.close_all()
        if busy:
            # ZeroMQ drops, with the connection, replies that a client has received and not read.
            time.sleep(DELIVERY_SECONDS)
        with self._port.lock:
            self._port.close(linger_seconds=1.0)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- threads ----------------------------------------------------------------------------------------------

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"rpc {self._port.address}", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # The system allows no more; those that are there go on, one request after another.
            self._threads.discard(thread)
            _log.exception("%s has too few threads.", self._port.address)

    def _work(self) -> None:
        try:
            while not self._closing:
                try:
                    job = self._next()
                except Exception:  # Memory is short, say. Later it may be better.
                    _log.exception("Reading from %s failed; it is tried again.", self._port.address)
                    self._port.wait(TICK_SECONDS)
                    continue
                if job is None and self._retires():
                    return
                while job is not None:
                    self._run(job)
                    job = self._finish(job)
        finally:
            with self._state:
                self._threads.discard(threading.current_thread())
            if self._closing:
                self._port.wake()  # The next one, who wakes another.

    def _retires(self) -> bool:
        """Whether this idle thread is one too many."""
        with self._state:
            retires = len(self._threads) - self._busy > SPARE_THREADS
            if retires:
                self._threads.discard(threading.current_thread())
            return retires

    def _take(self) -> Job | None:
        """The next job for this thread, if it may run one now. Under `_state`."""
        if not self._backlog.waits or self._busy >= self._limits.threads:
            return None
        self._busy += 1
        if self._busy == len(self._threads) and not self._closing:
            self._add_thread()  # Somebody must read.
        return self._backlog.take()

    def _run(self, job: Job) -> None:
        """Runs a job and sends its reply. Never raises: the thread must go on."""
        try:
            reply = job.work()
            # A client without room for it keeps this thread, and with that is held back itself.
            while reply is not None and not self._offer(job.peer, reply, job.expires):
                time.sleep(FULL_SECONDS)
        except BaseException:
            _log.exception("A request to %s could not be answered.", self._port.address)
            self._count("replies_dropped")

    def _finish(self, job: Job) -> Job | None:
        """Lets go of a job that this thread ran, and takes the next that waits."""
        with self._state:
            self._busy -= 1
            self._backlog.done(job)
            self._resume()
            return self._take()

    def _resume(self) -> None:
        """Lets somebody read again, if that was stopped. Under `_state`."""
        if self._paused:
            self._paused = False
            self._port.wake()

    def _full(self) -> bool:
        """Whether to stop reading until a request is done."""
        with self._state:
            self._paused = self._backlog.full and not self._closing
            return self._paused

    # --- reading ----------------------------------------------------------------------------------------------

    def _next(self) -> Job | None:
        """The next job for this thread; None if there was none for long, or the server closes."""
        end = time.monotonic() + IDLE_SECONDS
        while not self._closing:
            with self._state:
                job = self._take()
            if job is not None:
                return job
            full = self._full()
            frames = None if full else self._read()
            if frames is not None:
                self._arrived(frames)
            now = time.monotonic()
            if now >= self._tick:
                self._tend(behind=full or frames is not None)
            if frames is None:
                if now >= end:
                    return None
                if self._port.wait(min(TICK_SECONDS, end - now)):
                    self._watch()
        return None

    def _read(self) -> list[zmq.Frame] | None:
        """A message, if there is one; somebody else reads the next."""
        port = self._port
        with port.lock:
            if port.closed:
                return None
            frames = port.receive(self._limits.arrays + 1)
            if frames is None:
                return None
            self._intake.delivered(frames[-1].get(zmq.SRCFD))
            pending = port.pending()
        if pending:
            port.wake()
        return frames

    def _watch(self) -> None:
        with self._port.lock:
            if self._port.closed:
                return
            events = list(self._port.events())
            for event, descriptor in events:
                if event == zmq.EVENT_ACCEPTED:
                    self._intake.accepted(descriptor)
                elif event == zmq.EVENT_DISCONNECTED:
                    self._intake.gone(descriptor)
        with self._state:
            self._counts.update(_COUNTS[event] for event, _ in events if event in _COUNTS)

    def _tend(self, *, behind: bool) -> None:
        """Ends what has lasted too long. Runs no code of the service: that may block, or fail."""
        streams, now = self._dispatcher.streams, time.monotonic()
        with self._state:
            if now < self._tick:
                return  # Another thread was faster.
            self._tick = now + TICK_SECONDS
        with self._port.lock:
            endless = self._intake.check(behind=behind)
        with self._state:
            self._counts["endless"] += endless
            late = self._backlog.drop_late(now)
            self._counts["expired"] += late
            if late:
                self._resume()
            waiting = behind or self._backlog.waits
        if waiting:
            streams.refresh()
        elif streams.late():
            self._enqueue(Job(b"", 0, math.inf, streams.expire))

    def _arrived(self, frames: Sequence[zmq.Frame]) -> None:
        """Puts a request into the queue, runs it at once if that is declared, or refuses it."""
        peer, now = frames[0].bytes, time.monotonic()
        try:
            message = parse(frames[1:], self._limits)
            header = message.header
            if header.kind not in (Kind.CALL, Kind.NEXT, Kind.CLOSE):
                raise WireError(f"A server gets no messages of kind {header.kind.name}.")
        except WireError as error:
            self._count("malformed")
            # With call 0 nobody waits for this; it is for people who look at the traffic of their client.
            self._offer(peer, self._dispatcher.failure(error.fields.get("call", 0), error), now)
            return
        expires = now + (CLOSE_SECONDS if header.kind is Kind.CLOSE else header.seconds)
        job = Job(peer, message.nbytes, expires, functools.partial(self._dispatcher.answer, message, expires))
        if self._dispatcher.inline(message):
            reply = job.work()
            if reply is None or self._offer(peer, reply, expires):
                return
            job = job._replace(work=lambda: reply)
        self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        with self._state:
            self._backlog.put(job)

    # --- sending ----------------------------------------------------------------------------------------------

    def _offer(self, peer: bytes, reply: Reply, expires: float) -> bool:
        """Whether a reply is off our hands: sent, or nobody is there to take it any more."""
        port = self._port
        with port.lock:
            if port.closed:
                return True
            try:
                sent = port.send((peer, reply.header), reply.arrays)
            except zmq.ZMQError:
                sent, expires = False, 0.0  # The peer is gone.
            pending = port.pending()
        if pending:
            port.wake()
        if not sent and (time.monotonic() >= expires or self._closing):
            self._count("replies_dropped")
            return True
        return sent

    def _count(self, name: str) -> None:
        with self._state:
            self._counts[name] += 1
