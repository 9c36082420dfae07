"""The client side of a connection. Many calls are in flight; one of the waiting threads receives for all."""

from __future__ import annotations

import collections
import itertools
import os
import threading
import time
import weakref
from typing import NamedTuple

import zmq

from persia.errors import ClosedError, DeadlineError, PeerRestartedError, PersiaError, WireError
from persia.rpc.array_encoding import Decoder
from persia.rpc.failures import Failure, to_error
from persia.rpc.limits import Limits
from persia.rpc.messages import Body, Kind, Message, header_bytes, parse
from persia.rpc.port import DEAD_SECONDS, REDIAL_SECONDS, Port

__all__ = ["Call", "RpcConnection"]

KEEPER_SECONDS = 0.05
"""Seconds between two reads of replies while no caller waits."""

KEEPER_IDLE_SECONDS = 5.0
"""Seconds that the background thread stays idle. Starting one per batch would cost more than the call itself."""

_HANDSHAKE_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it uses another protocol or another encryption",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it uses another protocol or another encryption",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not accept our keys",
}


class Call:
    """One request and its outcome. The connection owns its fields.

    Attributes:
        reply: the reply, if it has arrived.
        error: the error, if the call failed.
        waits: whether the server may hold it until other clients call. It then takes no share from further calls.
    """

    __slots__ = (
        "body", "error", "expires", "gate", "kind", "losses", "method", "number", "once", "reply", "seconds", "sent",
        "waits",
    )  # fmt: skip

    def __init__(self, kind: Kind, method: str, body: Body, seconds: float, once: bool, waits: bool = False) -> None:
        self.kind = kind
        self.method = method
        self.body = body
        self.seconds = seconds
        self.expires = time.monotonic() + seconds
        self.once = once
        self.waits = waits
        self.number = 0
        self.sent = False
        self.losses = 0  # Number of connections that were lost after the call was sent.
        self.reply: Message | None = None
        self.error: PersiaError | None = None
        # Locked while the calling thread sleeps; created before its first sleep.
        self.gate: threading.Lock | None = None

    def over(self) -> bool:
        """Whether there is a reply or an error."""
        return self.reply is not None or self.error is not None


class Peer(NamedTuple):
    """The called process; creates errors that name it.

    Attributes:
        name: name such as "embedding PS 2".
        address: address on which it listens.
    """

    name: str
    address: str

    def closed(self, call: Call) -> ClosedError:
        """Makes the error for a closed stub."""
        return ClosedError(
            f"{call.method}: the stub of {self.name} at {self.address} is closed; connect again.",
            peer=self.name, address=self.address, operation=call.method,
        )  # fmt: skip

    def forked(self, process: int) -> ClosedError:
        """Makes the error for a stub that another process made."""
        return ClosedError(
            f"The stub of {self.name} at {self.address} was made in process {process}, and this is a fork of it; "
            "connect again here, or start processes with the spawn method.",
            peer=self.name, address=self.address,
        )  # fmt: skip

    def late(self, call: Call, state: str) -> DeadlineError:
        """Makes the error for a reply that did not arrive in time; `state` describes the connection."""
        seconds = round(call.seconds, 3)
        return DeadlineError(
            f"{self.name} at {self.address} is late: {call.method} took more than {seconds:g} s; {state}. "
            "Check that it runs, or allow more time.",
            peer=self.name, address=self.address, operation=call.method, seconds=seconds,
        )  # fmt: skip

    def restarted(self, call: Call) -> PeerRestartedError:
        """Makes the error for a lost connection during a call that must not be repeated."""
        return PeerRestartedError(
            f"{self.name} at {self.address}: the connection was lost during {call.method}, which must not be repeated; "
            "it ran once or not at all. Find out which before you call it again.",
            peer=self.name, address=self.address, operation=call.method,
        )  # fmt: skip

    def unreadable(self, call: Call, error: WireError) -> WireError:
        """Makes the error for a reply that exceeds a limit."""
        return WireError(
            f"{self.name} at {self.address} sent a reply to {call.method} that cannot be read: {error.message}",
            peer=self.name, address=self.address, operation=call.method,
        )  # fmt: skip


class RpcConnection:
    """All calls to one address. Thread-safe.

    The first waiting thread is the leader: it receives replies for all. When its own reply has arrived, it wakes
    another waiting thread to lead. A single caller therefore never switches threads. A background thread receives
    replies to calls that no thread waits for, and ends after a while without such calls.

    Args:
        port: port that is being connected.
        peer: the called process, for errors.
        limits: bounds on messages.
    """

    def __init__(self, port: Port, peer: str, limits: Limits) -> None:
        self.peer = Peer(peer, port.address)
        self.limits = limits
        self._port = port
        self._process = os.getpid()
        self._failure = Decoder[Failure](Failure)
        self._numbers = itertools.count(1)
        # Guarded by the lock of the port.
        self._calls: dict[int, Call] = {}
        self._unsent: dict[int, Call] = {}  # The calls of `_calls` that are still to be sent, in order.
        self._share = limits.of_peer(waits=False)
        self._held = [0, 0]  # Calls that the server may hold now, and their bytes.
        self._iterators = 0  # Number of iterators that the server keeps open for this connection.
        self._leader: Call | None = None
        self._leading = 0  # Thread id of the leader.
        self._keeper: threading.Thread | None = None
        self._last_work = 0.0  # When the background thread last had work.
        self._connected = False
        self._ever = False
        self._trouble = ""
        self._failed_handshakes = 0  # Since the last one that succeeded.
        self._refused = False  # Whether the last handshake failed.
        self._stopped = False  # Whether ZeroMQ does not try again.
        self._closed = False
        # The garbage collector may append, in a thread that holds any lock: so appending takes no lock.
        self._dropped: collections.deque[Call] = collections.deque()
        self._counts: collections.Counter[str] = collections.Counter()

    def statistics(self) -> dict[str, int]:
        """Returns `calls`, `resent` calls, dropped `late_replies`, `malformed` replies and `connects`."""
        self._check_process()
        with self._port.lock:
            names = ("calls", "resent", "late_replies", "malformed", "connects")
            return {**{name: self._counts[name] for name in names}, "in_flight": len(self._calls)}

    def submit(self, call: Call, *, unattended: bool = False) -> None:
        """Sends a request as soon as there is a connection. Does not block.

        Args:
            call: the call; its arrays must not change before it is over.
            unattended: whether the caller may wait for it late or not at all.

        Raises:
            ClosedError: the connection is closed, or belongs to another process.
        """
        self._check_process()
        with self._port.lock:
            if self._closed:
                raise self.peer.closed(call)
            call.number = next(self._numbers)
            self._calls[call.number] = self._unsent[call.number] = call
            self._counts["calls"] += 1
            if self._connected:
                self._flush()
            if unattended and self._keeper is None:
                self._last_work = time.monotonic()
                self._keeper = threading.Thread(
                    target=_keep, args=(weakref.ref(self),), name=f"rpc {self.peer.address}", daemon=True
                )
                self._keeper.start()

    def wait(self, call: Call) -> Message:
        """Blocks until the reply has arrived.

        Raises:
            DeadlineError: the reply did not arrive in time.
            PeerRestartedError: the connection was lost, and the call must not be repeated.
            ClosedError: the connection was closed meanwhile.
            PersiaError: the method raised it.
        """
        self._check_process()
        try:
            while not call.over() and time.monotonic() < call.expires:
                with self._port.lock:
                    if call.over():
                        break
                    leads = self._leader is None
                    if leads:
                        self._leader, self._leading = call, threading.get_ident()
                    else:
                        gate = call.gate = call.gate or threading.Lock()
                        gate.acquire(blocking=False)
                if leads:
                    try:
                        self._lead(call)
                    finally:
                        self._resign()
                else:
                    gate.acquire(timeout=max(0.0, call.expires - time.monotonic()))
        finally:
            self._forget(call)
        if call.error is not None:
            raise call.error
        if call.reply is None:
            raise self._late(call)
        if call.reply.header.kind is Kind.ERROR:
            failure = self._failure.decode(call.reply.header.payload, call.reply.frames)
            raise to_error(failure, peer=self.peer.name, address=self.peer.address, operation=call.method)
        return call.reply

    def opened(self) -> None:
        """Notes that the server has opened an iterator. One `end` or `drop` must follow."""
        with self._port.lock:
            self._iterators += 1

    def end(self, call: Call) -> None:
        """Sends the request to close an iterator if connected. There is no reply."""
        if self._process != os.getpid():
            return
        self.drop(call)
        with self._port.lock:
            if not self._closed:
                self._flush()

    def drop(self, call: Call) -> None:
        """Schedules `end`. Takes no lock, so that `__del__` may call it."""
        self._dropped.append(call)

    def close(self) -> None:
        """Ends all calls with ClosedError and closes the connection."""
        if self._process != os.getpid():
            return
        with self._port.lock:
            if self._closed:
                return
            self._closed = True
            for call in list(self._calls.values()):
                self._end(call, error=self.peer.closed(call))
            if self._leader is None:
                self._port.close(linger_seconds=0.1)
            else:
                self._port.wake()  # The thread that leads closes the port when it is done.

    def __del__(self) -> None:
        self.close()

    # --- one thread at a time leads -----------------------------------------------------------------------------

    def _lead(self, call: Call) -> None:
        """Receives replies until this call is over or late."""
        port = self._port
        with port.lock:
            self._watch()
            self._flush()
        while not call.over() and not self._closed and (left := call.expires - time.monotonic()) > 0:
            monitor = port.wait(min(left, REDIAL_SECONDS) if self._refused else left)
            with port.lock:
                if monitor or self._refused:
                    self._watch()
                self._flush()

    def _resign(self) -> None:
        with self._port.lock:
            self._leader = None
            if self._closed:
                self._port.close(linger_seconds=0.1)
            else:
                self._promote()

    def _promote(self) -> None:
        """Wakes one of the waiting threads to lead. The caller holds the lock of the port."""
        for other in self._calls.values():
            if other.gate is not None and other.gate.locked():
                other.gate.release()
                return

    def _keep(self) -> bool:
        """Receives replies while there is no leader. Returns False after a while without unattended calls."""
        with self._port.lock:
            now = time.monotonic()
            if self._calls or self._iterators:
                self._last_work = now
            if self._closed or now - self._last_work > KEEPER_IDLE_SECONDS:
                self._keeper = None
                return False
            if self._leader is None:
                self._watch()
                self._flush()
            for call in [c for c in self._calls.values() if c.expires < now]:
                self._end(call, error=self._late(call))
            return True

    # --- under the lock of the port -----------------------------------------------------------------------------

    def _flush(self) -> None:
        while self._unsent and self._connected:
            number, call = next(iter(self._unsent.items()))
            if not self._has_share(call) or not self._send(call):
                break
            self._unsent.pop(number, None)
            self._count_held(call, 1)
        while self._dropped:
            self._iterators -= 1
            call = self._dropped.popleft()
            if self._connected:  # Otherwise the iterator is gone, or expires.
                call.number = next(self._numbers)
                self._send(call)
        self._drain()

    def _has_share(self, call: Call) -> bool:
        """Whether the server may hold this call in addition to those that were sent; see `Limits.peer_share`."""
        (calls, nbytes), (most_calls, most_bytes) = self._held, self._share
        return call.waits or not calls or (calls < most_calls and nbytes + call.body.decoded_bytes <= most_bytes)

    def _count_held(self, call: Call, change: int) -> None:
        if not call.waits:
            self._held[0] += change
            self._held[1] += change * call.body.decoded_bytes

    def _send(self, call: Call) -> bool:
        seconds = max(0.0, call.expires - time.monotonic())
        header = header_bytes(call.kind, call.number, call.method, seconds, call.body.payload)
        call.sent = self._port.send((header,), call.body.arrays)
        return call.sent

    def _drain(self) -> None:
        """Receives all pending messages, as the socket's descriptor only signals messages after it was empty."""
        while (frames := self._port.receive(self.limits.arrays)) is not None:
            try:
                message = parse(frames, self.limits)
            except WireError as error:
                self._counts["malformed"] += 1
                unreadable = self._calls.get(error.fields.get("call", 0))
                if unreadable is not None:
                    self._end(unreadable, error=self.peer.unreadable(unreadable, error))
                continue
            call = self._calls.get(message.header.call)
            if call is None or message.header.kind < Kind.RESULT:
                # After a reconnection a call can get two replies. The reply to an abandoned call arrives too late.
                self._counts["late_replies"] += 1
                continue
            self._end(call, reply=message)

    def _end(self, call: Call, *, reply: Message | None = None, error: PersiaError | None = None) -> None:
        self._remove(call)
        call.reply, call.error = reply, error
        if call is self._leader:
            if threading.get_ident() != self._leading:
                self._port.wake()
        elif call.gate is not None and call.gate.locked():
            call.gate.release()

    def _watch(self) -> None:
        for event, _ in self._port.events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = self._ever = True
                self._trouble, self._failed_handshakes = "", 0
                self._counts["connects"] += 1
                self._send_again()
            elif event == zmq.EVENT_DISCONNECTED:
                self._connected = False
            elif event in _HANDSHAKE_FAILURES:
                self._refused = True
                self._failed_handshakes += 1
                # The connections of a process that exits close before its listening socket, so a client that reconnects
                # immediately may lose one handshake. A single failure without detail therefore has no cause to report.
                if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or self._failed_handshakes > 1:
                    self._trouble = _HANDSHAKE_FAILURES[event]
                self._stopped |= event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        if self._connected or (self._refused and self._port.redial(stopped=self._stopped)):
            self._refused = self._stopped = False

    def _send_again(self) -> None:
        """Sends all open calls again after a reconnection, since requests or replies may be lost."""
        self._unsent.clear()
        for call in list(self._calls.values()):
            if call.sent and call.once:
                self._end(call, error=self.peer.restarted(call))
            else:
                self._counts["resent"] += call.sent
                call.losses += call.sent
                call.sent = False
                self._unsent[call.number] = call
        self._held = [0, 0]

    # --- ends and errors ----------------------------------------------------------------------------------------

    def _forget(self, call: Call) -> None:
        with self._port.lock:
            self._remove(call)
            if call.gate is not None and self._leader is None:
                self._promote()  # This thread may have been woken to lead just as it gave up.

    def _remove(self, call: Call) -> None:
        """Drops a call that is over, or that its caller has given up."""
        known = self._calls.pop(call.number, None)
        waiting = self._unsent.pop(call.number, None)
        if known is not None and waiting is None:
            self._count_held(call, -1)
            if self._unsent:
                self._port.wake()  # The leader sends the calls that waited for this one.

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise self.peer.forked(self._process)

    def _late(self, call: Call) -> PersiaError:
        if self._connected:
            state = "it is connected, and has not answered" if call.sent else "it is connected, and does not read"
        elif self._trouble:
            state = (
                f"a connection fails: {self._trouble}; give both sides the same keys (PERSIA_CURVE_KEYS), or run both "
                "as the same user of one host, with the same home"
            )
        elif self._ever:
            state = "the connection is lost"
        else:
            state = "nothing answers there"
        if call.losses:
            state += (
                f"; connections lost since it was sent: {call.losses}, as happens if a request or reply "
                f"takes more than {DEAD_SECONDS} s on a slow network: send less at a time"
            )
        return self.peer.late(call, state)


def _keep(reference: weakref.ref[RpcConnection]) -> None:
    """Runs the background thread, which does not keep the connection alive."""
    while True:
        time.sleep(KEEPER_SECONDS)
        connection = reference()
        if connection is None or not connection._keep():
            return
        del connection
