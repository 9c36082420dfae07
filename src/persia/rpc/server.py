"""Serves a plain object over ZeroMQ. Each thread reads a request, runs it and sends the reply."""

from __future__ import annotations

import collections
import functools
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence

import zmq

from persia.errors import PersiaError, WireError
from persia.retry import Deadline
from persia.rpc.dispatch import Backlog, Dispatcher, Job, Reply
from persia.rpc.intake import Intake
from persia.rpc.interface import Method, describe
from persia.rpc.keys import keys_to_listen
from persia.rpc.limits import Limits
from persia.rpc.messages import Kind, parse
from persia.rpc.port import Port, server_port
from persia.telemetry.logs import get_logger
from persia.telemetry.metrics import Readings, metrics_of
from persia.telemetry.tracing import Tracer

__all__ = ["Server", "serve"]

_log = get_logger("persia.rpc")

IDLE_SECONDS = 10.0
"""Seconds after which an idle thread ends, except two."""

SPARE_THREADS = 2

TICK_SECONDS = 1.0

HANDSHAKE_TICK_SECONDS = 0.05
"""Seconds between two checks of the bytes that a peer sends during its handshake."""

UNREAD_TICK_SECONDS = 0.1
"""Seconds between two checks of all connections while much is unread. They take at most 2% of the time."""

CLOSE_SECONDS = 60.0
"""Seconds that a request to close an iterator may wait; it gets no reply."""

DELIVERY_SECONDS = 0.2
"""Seconds for which a closing server keeps its last replies. Clients that do not fetch them call again."""

FULL_SECONDS = 0.002
"""Seconds between two attempts to send a reply to a client whose buffer is full."""

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
    tracer: Tracer | None = None,
) -> Server:
    """Makes the methods of an object callable from other processes. Returns immediately; threads serve the calls.

    Args:
        service: any object with thread-safe methods. Values that they return must not change afterwards, as arrays are
            sent without a copy.
        address: `tcp://host:port`; port `*` chooses a free one, see `Server.address`.
        protocol: Protocol with the methods to serve; None for the methods of the object's class.
        keys: file made by `make_keys`; None for the file that PERSIA_CURVE_KEYS names, if any. Without one, an address
            of this host admits only processes of the same user.
        insecure: allows an address that other hosts can reach without keys.
        limits: bounds on messages, work and memory.
        tracer: records each call that is run; None for none.

    Raises:
        ConfigError: the address is in use, or other hosts can reach it without keys; the keys are invalid; or a method
            has unsupported annotations.
    """
    credentials = keys_to_listen(address, keys, insecure=insecure)
    methods = describe(protocol or type(service))
    limits = limits or Limits()
    port = server_port(limits)
    try:
        port.bind(address, credentials)
    except BaseException:
        port.close(0)
        raise
    return Server(service, methods, port, limits, tracer)


class Server:
    """A served object, made by `serve`. Thread-safe.

    Idle threads wait for the socket, and the kernel wakes one of them. It reads a request, runs the method and sends
    the reply, so a call does not switch threads. When all are busy, the server adds a thread, up to `Limits.threads`;
    threads whose method `waits` for other clients do not count. Further requests wait in a queue, and beyond
    `Limits.requests` or `Limits.request_bytes` in the clients.
    """

    def __init__(
        self,
        service: object,
        methods: Mapping[str, Method],
        port: Port,
        limits: Limits,
        tracer: Tracer | None = None,
    ) -> None:
        self._port = port
        self._limits = limits
        self._dispatcher = Dispatcher(service, methods, limits, self._count, tracer or Tracer())
        self._process = os.getpid()
        self._state = threading.Lock()  # Guards the fields below.
        self._backlog = Backlog(limits)
        self._threads: set[threading.Thread] = set()
        self._busy = 0
        self._paused = False
        self._closing = False
        self._tick = 0.0
        # Guarded by the lock of the port.
        number = port.address.rpartition(":")[2]
        self._intake = Intake(limits, int(number) if number.isdecimal() else 0, port.handshake_bytes)
        self._look = 0.0
        self._counts: collections.Counter[str] = collections.Counter()
        with self._state:
            self._add_thread()

    @property
    def address(self) -> str:
        """The address on which it listens, with the actual port."""
        return self._port.address

    def statistics(self) -> dict[str, int]:
        """Returns counters since the start, and the current `requests_held`, `bytes_held`, `threads` and `streams`.

        Counters: `calls`; `errors` raised by methods; `malformed` messages, which are rejected; `expired` calls, which
        are not run as their deadline has passed; `replies_dropped` as the client was gone; `key_changes`, after each of
        which clients connect again; `requests_refused`, as their client held its share; `connections`;
        `disconnections`; `handshakes_failed` (also due to wrong keys); `connections_refused`, which were too
        many, or sent more or took more memory than an honest client does; `streams_expired`.
        """
        names = ("calls", "errors", "malformed", "expired", "replies_dropped", "key_changes", "requests_refused")
        streams = self._dispatcher.streams
        with self._state:
            counters = {name: self._counts[name] for name in (*names, *sorted(set(_COUNTS.values())))}
            return {
                **counters,
                "connections_refused": self._intake.closed,
                "streams_expired": streams.expired,
                "requests_held": self._backlog.requests,
                "bytes_held": self._backlog.nbytes,
                "threads": len(self._threads),
                "streams": len(streams),
            }

    def observe(self) -> Readings:
        """Returns the counters as metrics, and the latencies of methods."""
        return Readings(metrics_of("rpc", self.statistics()), self._dispatcher.latencies())

    def close(self, seconds: float = 5.0) -> None:
        """Stops reading, waits up to this time for running methods and their replies, and frees the address.

        Calls that have not started get no reply. Their clients send them to the next server at this address.
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
        deadline = Deadline(seconds)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(deadline.left)
        self._dispatcher.streams.close_all()
        if busy:
            # When the connection closes, ZeroMQ drops replies that the client has received but not read.
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
        except RuntimeError:  # The system allows no more threads: the existing ones serve the queue.
            self._threads.discard(thread)
            _log.exception("%s: cannot start another thread.", self._port.address)

    def _work(self) -> None:
        try:
            while not self._closing:
                try:
                    job = self._next()
                except Exception:  # For example, memory is short. A later attempt may succeed.
                    _log.exception("Reading from %s failed; retrying.", self._port.address)
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
                self._port.wake()  # The next thread, which wakes another.

    def _retires(self) -> bool:
        """Whether this idle thread should end."""
        with self._state:
            retires = len(self._threads) - self._busy > SPARE_THREADS
            if retires:
                self._threads.discard(threading.current_thread())
            return retires

    def _take(self) -> Job | None:
        """Takes the next job for this thread, if it may run one now. The caller holds `_state`."""
        backlog = self._backlog
        job = backlog.take(only_waiting=self._busy - backlog.waiting >= self._limits.threads)
        if job is None:
            return None
        self._busy += 1
        if self._busy == len(self._threads) and not self._closing:
            self._add_thread()  # One thread must read.
        if job.waits:
            # Without another thread nothing would read the call that it waits for.
            if not backlog.admits(job) or backlog.waiting + 1 >= len(self._threads):
                return backlog.refuse(job, functools.partial(self._refuse, job))
            backlog.wait(job)
            self._resume()
        return job

    def _refuse(self, job: Job) -> Reply:
        """Makes the reply to a call that may not wait here."""
        backlog, limits = self._backlog, self._limits
        error = PersiaError(
            f"{self._port.address} refused a call that waits for calls of other clients: {backlog.waiting} such calls "
            f"with {backlog.waiting_nbytes} bytes (decoded; headers count 128 times) wait here, on "
            f"{len(self._threads)} threads. The limits are {limits.waiting} calls, {limits.waiting_bytes} bytes, and "
            "the threads that the system grants this process. Raise `pids.max` of its container, or `ulimit -u`; or "
            "find the client that makes too many calls.",
            waiting=backlog.waiting,
            threads=len(self._threads),
        )
        self._count("errors")
        return self._dispatcher.failure(job.call, error)

    def _run(self, job: Job) -> None:
        """Runs a job and sends its reply. Never raises, as the thread must continue."""
        try:
            try:
                reply = job.work()
            finally:
                with self._state:  # Before the reply, as the client may send its next request right after it.
                    self._backlog.ran(job)
            # A client with a full buffer blocks this thread, which throttles the client.
            while reply is not None and not self._offer(job.peer, reply, job.expires):
                time.sleep(FULL_SECONDS)
        except BaseException:
            _log.exception("A request to %s could not be answered.", self._port.address)
            self._count("replies_dropped")

    def _finish(self, job: Job) -> Job | None:
        """Ends a job that this thread ran, and takes the next one."""
        with self._state:
            self._busy -= 1
            self._backlog.done(job)
            self._resume()
            return self._take()

    def _resume(self) -> None:
        """Resumes reading if it was paused. The caller holds `_state`."""
        if self._paused:
            self._paused = False
            self._port.wake()

    def _full(self) -> bool:
        """Whether to stop reading until a request has finished."""
        with self._state:
            self._paused = self._backlog.full and not self._closing
            return self._paused

    # --- reading ----------------------------------------------------------------------------------------------

    def _next(self) -> Job | None:
        """Returns the next job for this thread; None after a long idle time, or if the server closes."""
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
            if self._intake.strangers and now >= self._look:
                self._look = now + HANDSHAKE_TICK_SECONDS
                with self._port.lock:
                    self._intake.check_strangers()
            if now >= self._tick:
                self._tend(behind=full or frames is not None)
            if frames is None:
                if now >= end:
                    return None
                if self._port.wait(min(self._interval, end - now)):
                    self._watch()
        return None

    def _read(self) -> list[zmq.Frame] | None:
        """Reads a message, if one is pending, and lets another thread read the next."""
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

    @property
    def _interval(self) -> float:
        """Seconds until a thread should check the connections again."""
        if self._intake.strangers:
            return min(TICK_SECONDS, HANDSHAKE_TICK_SECONDS)
        return min(TICK_SECONDS, UNREAD_TICK_SECONDS) if self._intake.watching else TICK_SECONDS

    def _watch(self) -> None:
        with self._port.lock:
            if not self._port.closed:
                self._note_events()

    def _note_events(self) -> None:
        """Notes connections that were made or lost. The caller holds the lock of the port."""
        events = list(self._port.events())
        for event, descriptor in events:
            if event == zmq.EVENT_ACCEPTED:
                self._intake.accepted(descriptor)
            elif event == zmq.EVENT_DISCONNECTED:
                self._intake.gone(descriptor)
        with self._state:
            self._counts.update(_COUNTS[event] for event, _ in events if event in _COUNTS)

    def _tend(self, *, behind: bool) -> None:
        """Ends expired requests, streams and connections. Runs no code of the service, which may block or fail."""
        streams, now = self._dispatcher.streams, time.monotonic()
        with self._state:
            if now < self._tick:
                return  # Another thread was faster.
            self._tick = now + TICK_SECONDS
        self._watch()  # Removes closed connections: their descriptors may belong to other files by now.
        if self._port.stale():
            self._renew()
        with self._port.lock:
            began = time.monotonic()
            self._intake.check(behind=behind)
            interval = max(UNREAD_TICK_SECONDS, 50 * (time.monotonic() - began))
        with self._state:
            if self._intake.watching:
                self._tick = min(self._tick, now + interval)
            late = self._backlog.drop_late(now)
            self._counts["expired"] += late
            if late:
                self._resume()
            waiting = behind or bool(self._backlog)
        if waiting:
            streams.refresh()
        elif streams.late():
            with self._state:
                self._backlog.put(Job(b"", 0, math.inf, streams.expire))

    def _renew(self) -> None:
        """Listens with the new first key. Ends all connections: clients connect again, and repeat their calls."""
        with self._port.lock:
            if self._port.closed or not self._port.stale():  # Another thread was faster.
                return
            self._note_events()
            self._intake.end_all()
            name = self._port.rebind()
        self._count("key_changes")
        _log.info("%s listens with the key %s now; clients connect again.", self._port.address, name)

    def _arrived(self, frames: Sequence[zmq.Frame]) -> None:
        """Queues a request, runs it immediately if its method is inline, or rejects it."""
        peer, now = frames[0].bytes, time.monotonic()
        try:
            message = parse(frames[1:], self._limits)
            header = message.header
            if header.kind not in (Kind.CALL, Kind.NEXT, Kind.CLOSE):
                raise WireError(f"A client sent a message of kind {header.kind.name}; expected CALL, NEXT or CLOSE.")
        except WireError as error:
            self._count("malformed")
            # No caller waits for call 0; the reply helps with debugging a client's traffic.
            self._offer(peer, self._dispatcher.failure(error.fields.get("call", 0), error), now)
            return
        expires = now + (CLOSE_SECONDS if header.kind is Kind.CLOSE else header.seconds)
        work = functools.partial(self._dispatcher.answer, message, expires)
        job = Job(peer, message.decoded_bytes, expires, work, self._dispatcher.waits(message), header.call)
        if inline := self._dispatcher.inline(message):
            reply = job.work()
            if reply is None or self._offer(peer, reply, expires):
                return
            job = job._replace(work=lambda: reply, waits=False)
        with self._state:
            refused = not (inline or header.kind is Kind.CLOSE or self._backlog.has_share(job))
            if not refused:
                self._backlog.put(job)
        if refused:
            self._offer(peer, self._share_refusal(job), now)

    def _share_refusal(self, job: Job) -> Reply:
        """Makes the reply to a request beyond the share of its connection."""
        with self._state:
            (calls, nbytes), (most_calls, most_bytes) = self._backlog.held(job), self._limits.of_peer(waits=job.waits)
            self._counts["requests_refused"] += 1
        error = PersiaError(
            f"{self._port.address} refused a call of {job.nbytes} bytes: this client already has {calls} calls with "
            f"{nbytes} bytes here (decoded; headers count 128 times). One client may have {most_calls} calls and "
            f"{most_bytes} bytes, as Limits.peer_share is {self._limits.peer_share:g}. Give client and server the same "
            "Limits, or wait for replies before you make further calls.",
            calls=calls,
            bytes=nbytes,
        )
        return self._dispatcher.failure(job.call, error)

    # --- sending ----------------------------------------------------------------------------------------------

    def _offer(self, peer: bytes, reply: Reply, expires: float) -> bool:
        """Tries to send a reply. Returns True if it was sent, or if the client is gone."""
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
