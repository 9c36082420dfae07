"""Serves a plain object over ZeroMQ: threads take turns at reading the socket, and run what they have read."""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import zmq

from persia.errors import WireError
from persia.rpc.arrays import Arrays, Decoder, encode
from persia.rpc.failures import raised
from persia.rpc.interface import Method, describe
from persia.rpc.keys import check_address, find_keys
from persia.rpc.limits import Limits
from persia.rpc.messages import Header, Kind, Message, header_bytes, parse
from persia.rpc.port import Port, server_port
from persia.rpc.streams import END, Streams

__all__ = ["Server", "serve"]

IDLE_SECONDS = 10.0
"""A thread that had no turn for so long ends, but for two."""

SPARE_THREADS = 2

TICK_SECONDS = 1.0

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


class _Job(NamedTuple):
    """A request to run, or a reply to send."""

    peer: bytes
    message: Message
    expires: float
    reply: tuple[bytes, Arrays] | None = None


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

    One thread at a time reads the socket. When it has read a request it lets the next thread read, and runs the method
    itself, so that a call changes threads once at most. Threads are added while all are busy, up to `Limits.threads`;
    then requests wait in a queue, and beyond `Limits.requests` or `Limits.request_bytes` in the clients.
    """

    def __init__(self, service: object, methods: Mapping[str, Method], port: Port, limits: Limits) -> None:
        self._service = service
        self._methods = methods
        self._port = port
        self._limits = limits
        self._streams = Streams(limits)
        self._cursor = Decoder[tuple[int, int]](tuple[int, int])
        self._process = os.getpid()
        self._turn = threading.Lock()  # Held by the thread that reads.
        self._state = threading.Lock()  # Guards all that follows.
        self._queue: collections.deque[_Job] = collections.deque()
        self._threads: set[threading.Thread] = set()
        self._busy = 0
        self._requests = 0
        self._bytes = 0
        self._paused = False
        self._closing = False
        self._tick = 0.0  # Only for the thread that reads.
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
        `handshakes_failed` (also by wrong keys); `streams_expired`.
        """
        names = ("calls", "errors", "malformed", "expired", "replies_dropped")
        with self._state:
            counted = {name: self._counts[name] for name in (*names, *sorted(set(_COUNTS.values())))}
            return {
                **counted,
                "streams_expired": self._streams.expired,
                "requests_held": self._requests,
                "bytes_held": self._bytes,
                "threads": len(self._threads),
                "streams": len(self._streams),
            }

    def close(self, seconds: float = 5.0) -> None:
        """Stops reading, lets running methods finish and reply for so long, and gives up the address.

        Calls that had not begun get no reply: their clients send them to the next server at this address.
        """
        if self._process != os.getpid():
            return
        with self._state:
            first, self._closing = not self._closing, True
            self._queue.clear()
            threads, busy = list(self._threads), self._busy > 0
        if not first:
            return
        self._port.wake()
        end = time.monotonic() + seconds
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        self._streams.close_all()
        if busy:
            # ZeroMQ drops, with the connection, replies that a client has received and not read.
            time.sleep(DELIVERY_SECONDS)
        if self._turn.acquire(timeout=max(0.1, end - time.monotonic())):
            with self._port.lock:
                self._port.close(linger_seconds=1.0)
            self._turn.release()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- threads ----------------------------------------------------------------------------------------------

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"rpc {self._port.address}", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        while not self._closing:
            if self._turn.acquire(timeout=IDLE_SECONDS):
                try:
                    job = self._read()
                finally:
                    self._turn.release()
                while job is not None:
                    self._run(job)
                    job = self._finish(job)
            elif self._retires():
                return

    def _retires(self) -> bool:
        """Whether this idle thread is one too many."""
        with self._state:
            retires = len(self._threads) - self._busy > SPARE_THREADS
            if retires:
                self._threads.discard(threading.current_thread())
            return retires

    def _take(self) -> _Job | None:
        """The next job for this thread, if it may run one now. Under `_state`."""
        if not self._queue or self._busy >= self._limits.threads:
            return None
        self._busy += 1
        if self._busy == len(self._threads) and not self._closing:
            self._add_thread()  # Somebody must read.
        return self._queue.popleft()

    def _finish(self, job: _Job) -> _Job | None:
        """Lets go of a job that this thread ran, and takes the next that waits."""
        with self._state:
            self._busy -= 1
            self._let_go(job)
            return self._take()

    def _let_go(self, job: _Job) -> None:
        self._requests -= 1
        self._bytes -= job.message.nbytes
        if self._paused:
            self._paused = False
            self._port.wake()

    def _full(self) -> bool:
        """Whether to stop reading until a request is done."""
        with self._state:
            self._paused = (
                self._requests >= self._limits.requests or self._bytes >= self._limits.request_bytes
            ) and not self._closing
            return self._paused

    # --- reading ----------------------------------------------------------------------------------------------

    def _read(self) -> _Job | None:
        """Reads until there is a job for this thread; None when the server closes."""
        while not self._closing:
            full = self._full()
            frames = None
            if not full:
                with self._port.lock:
                    frames = self._port.receive(self._limits.arrays + 1)
            if frames is None:
                if self._port.wait(TICK_SECONDS, socket=not full).monitor:
                    self._watch()
            else:
                self._arrived(frames)
                with self._state:
                    job = self._take()
                if job is not None:
                    return job
            if time.monotonic() >= self._tick:
                self._tick = time.monotonic() + TICK_SECONDS
                self._streams.expire()
        return None

    def _watch(self) -> None:
        with self._port.lock:
            events = list(self._port.events())
        with self._state:
            self._counts.update(_COUNTS[event] for event in events if event in _COUNTS)

    def _arrived(self, frames: Sequence[zmq.Frame]) -> None:
        """Puts a request into the queue, runs it at once if that is declared, or refuses it."""
        peer, now = frames[0].bytes, time.monotonic()
        try:
            message = parse(frames[1:], self._limits)
            if message.header.kind not in (Kind.CALL, Kind.NEXT, Kind.CLOSE):
                raise WireError(f"A server gets no messages of kind {message.header.kind.name}.")
        except WireError as error:
            self._count("malformed")
            # Nobody waits for this; it is for people who look at the traffic of their client.
            self._offer(peer, self._failure(0, error), now)
            return
        job = _Job(peer, message, now + message.header.seconds)
        method = self._methods.get(message.header.method)
        with self._state:
            self._requests += 1
            self._bytes += message.nbytes
            if method is None or not method.inline or message.header.kind is not Kind.CALL:
                self._queue.append(job)
                return
        reply = self._answer(job)
        sent = reply is None or self._offer(peer, reply, job.expires)
        with self._state:
            if sent:
                self._let_go(job)
            else:
                self._queue.append(job._replace(reply=reply))

    # --- running ----------------------------------------------------------------------------------------------

    def _run(self, job: _Job) -> None:
        reply = job.reply or self._answer(job)
        # A client without room for it keeps this thread, and with that is held back itself.
        while reply is not None and not self._offer(job.peer, reply, job.expires):
            time.sleep(FULL_SECONDS)

    def _answer(self, job: _Job) -> tuple[bytes, Arrays] | None:
        """Runs a request; None if there is nothing to reply."""
        header, frames, _ = job.message
        if header.kind is not Kind.CLOSE and time.monotonic() >= job.expires:
            self._count("expired")
            return None
        try:
            work = self._prepare(header, frames)
        except WireError as error:
            self._count("malformed")
            return self._failure(header.call, error)
        try:
            kind, value = work()
            return None if kind is Kind.CLOSE else self._reply(kind, header.call, value)
        except BaseException as error:
            self._count("errors")
            return self._failure(header.call, error)

    def _prepare(self, header: Header, frames: Sequence[zmq.Frame]) -> Callable[[], tuple[Kind, object]]:
        """What a request asks for, its arguments checked.

        Raises:
            WireError: there is no such method, or the arguments are not of its types.
        """
        if header.kind is not Kind.CALL:
            number, position = self._cursor.decode(header.payload, frames)
            return lambda: self._advance(header.kind, number, position)
        method = self._methods.get(header.method)
        if method is None:
            raise WireError(
                f"There is no method {header.method!r} here; there are {', '.join(self._methods)}. "
                "Connect to the address of the right service."
            )
        try:
            arguments = method.arguments.decode(header.payload, frames)
        except WireError as error:
            raise WireError(f"{method.name}: {error.message}", operation=method.name) from error
        return lambda: self._call(method, arguments)

    def _call(self, method: Method, arguments: tuple[Any, ...]) -> tuple[Kind, object]:
        self._count("calls")
        result = method.call(self._service, arguments)
        return (Kind.STREAM, self._streams.open(result)) if method.streams else (Kind.RESULT, result)

    def _advance(self, kind: Kind, number: int, position: int) -> tuple[Kind, object]:
        if kind is Kind.CLOSE:
            self._streams.close(number)
            return Kind.CLOSE, None
        item = self._streams.next(number, position)
        return (Kind.END, None) if item is END else (Kind.ITEM, item)

    def _reply(self, kind: Kind, call: int, value: object) -> tuple[bytes, Arrays]:
        payload, arrays = encode(value, self._limits.arrays)
        return header_bytes(kind, call, "", 0.0, payload, self._limits), arrays

    def _failure(self, call: int, error: BaseException) -> tuple[bytes, Arrays]:
        return self._reply(Kind.ERROR, call, raised(error))

    def _offer(self, peer: bytes, reply: tuple[bytes, Arrays], expires: float) -> bool:
        """Whether a reply is off our hands: sent, or nobody is there to take it any more."""
        header, arrays = reply
        port = self._port
        with port.lock:
            if port.closed:
                return True
            try:
                sent = port.send((peer, header), arrays)
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
