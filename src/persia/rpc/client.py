"""The calling side of a connection: many calls in flight; one of the threads that wait does the receiving for all."""

from __future__ import annotations

import collections
import itertools
import os
import threading
import time
import weakref

import zmq

from persia.errors import PersiaError, WireError
from persia.rpc.arrays import Decoder
from persia.rpc.call import Call, Peer
from persia.rpc.failures import Failure, to_error
from persia.rpc.limits import Limits
from persia.rpc.messages import Kind, Message, header_bytes, parse
from persia.rpc.port import Port

__all__ = ["RpcConnection"]

KEEPER_SECONDS = 0.05
"""How often replies are fetched while nobody waits for them."""

KEEPER_IDLE_SECONDS = 5.0
"""How long the thread for that stays without work: to make one for each batch costs more than all else in a call."""

_HANDSHAKE_FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it speaks another protocol or encrypts otherwise",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it speaks another protocol or encrypts otherwise",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not accept our keys",
}


class RpcConnection:
    """All calls to one address. Thread-safe.

    The first thread that waits receives, for the others too; when its own reply is there it wakes one of the others to
    go on. So a lone caller changes no threads. Calls that are started and not waited for are looked after by a thread
    that lives until there have been none for a while.

    Args:
        port: being connected.
        peer: for errors, such as "embedding PS 2".
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
        self._unsent: dict[int, Call] = {}  # Of these; in order.
        self._iterators = 0  # How many of the other side are open for this one.
        self._leader: Call | None = None
        self._leading = 0  # The thread of the leader.
        self._keeper: threading.Thread | None = None
        self._kept = 0.0  # When it last had work.
        self._connected = False
        self._ever = False
        self._trouble = ""
        self._closed = False
        # Whoever appends may be the garbage collector, in a thread that holds any lock: so this has none.
        self._dropped: collections.deque[Call] = collections.deque()
        self._counts: collections.Counter[str] = collections.Counter()

    def statistics(self) -> dict[str, int]:
        """Counters: `calls`, `resent` after a reconnection, `late_replies` dropped, `malformed` replies, `connects`."""
        self._check_process()
        with self._port.lock:
            names = ("calls", "resent", "late_replies", "malformed", "connects")
            return {**{name: self._counts[name] for name in names}, "in_flight": len(self._calls)}

    def submit(self, call: Call, *, unattended: bool = False) -> None:
        """Sends a request as soon as there is a connection, without waiting for it.

        Args:
            call: its arrays must not change before it is over.
            unattended: whether nobody may wait for it soon.

        Raises:
            ClosedError: the connection is closed, or of another process.
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
                self._kept = time.monotonic()
                self._keeper = threading.Thread(
                    target=_keep, args=(weakref.ref(self),), name=f"rpc {self.peer.address}", daemon=True
                )
                self._keeper.start()

    def wait(self, call: Call) -> Message:
        """Blocks until the reply is there.

        Raises:
            DeadlineError: it did not come in time.
            PeerRestartedError: the connection was lost, and the call must not be repeated.
            ClosedError: the connection was closed meanwhile.
            PersiaError: what the method raised.
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
        """The other side has made an iterator; one `end` or `drop` follows."""
        with self._port.lock:
            self._iterators += 1

    def end(self, call: Call) -> None:
        """Sends the request to close an iterator, if there is a connection. There is no reply."""
        if self._process != os.getpid():
            return
        self.drop(call)
        with self._port.lock:
            if not self._closed:
                self._flush()

    def drop(self, call: Call) -> None:
        """The same, soon. Takes no lock, so a `__del__` may call it."""
        self._dropped.append(call)

    def close(self) -> None:
        """Ends all calls with ClosedError and gives up the connection."""
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
        """Receives until this call is over or late."""
        port = self._port
        with port.lock:
            self._watch()
            self._flush()
        while not call.over() and not self._closed and (left := call.expires - time.monotonic()) > 0:
            monitor = port.wait(left)
            with port.lock:
                if monitor:
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
        """Wakes one of those that sleep, to lead. Under the lock of the port."""
        for other in self._calls.values():
            if other.gate is not None and other.gate.locked():
                other.gate.release()
                return

    def _keep(self) -> bool:
        """Fetches what has come while nobody leads; False when there has been nothing to look after for long."""
        with self._port.lock:
            now = time.monotonic()
            if self._calls or self._iterators:
                self._kept = now
            if self._closed or now - self._kept > KEEPER_IDLE_SECONDS:
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
            if not self._send(call):
                break
            self._unsent.pop(number, None)
        while self._dropped:
            self._iterators -= 1
            call = self._dropped.popleft()
            if self._connected:  # Else the iterator is gone, or expires.
                call.number = next(self._numbers)
                self._send(call)
        self._drain()

    def _send(self, call: Call) -> bool:
        seconds = max(0.0, call.expires - time.monotonic())
        header = header_bytes(call.kind, call.number, call.method, seconds, call.body.payload)
        call.sent = self._port.send((header,), call.body.arrays)
        return call.sent

    def _drain(self) -> None:
        """Receives all that is there: the descriptor of the socket announces only what comes after it was empty."""
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
                # After a reconnection a call can be answered twice; a call that was given up, too late.
                self._counts["late_replies"] += 1
                continue
            self._end(call, reply=message)

    def _end(self, call: Call, *, reply: Message | None = None, error: PersiaError | None = None) -> None:
        self._calls.pop(call.number, None)
        self._unsent.pop(call.number, None)
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
                self._trouble = ""
                self._counts["connects"] += 1
                self._send_again()
            elif event == zmq.EVENT_DISCONNECTED:
                self._connected = False
            elif event in _HANDSHAKE_FAILURES:
                self._trouble = _HANDSHAKE_FAILURES[event]

    def _send_again(self) -> None:
        """What had been sent over the last connection is lost, or its reply is."""
        self._unsent.clear()
        for call in list(self._calls.values()):
            if call.sent and call.once:
                self._end(call, error=self.peer.restarted(call))
            else:
                self._counts["resent"] += call.sent
                call.sent = False
                self._unsent[call.number] = call

    # --- the rest -----------------------------------------------------------------------------------------------

    def _forget(self, call: Call) -> None:
        with self._port.lock:
            self._calls.pop(call.number, None)
            self._unsent.pop(call.number, None)
            if call.gate is not None and self._leader is None:
                self._promote()  # It may have been woken to lead at the moment when it gave up.

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise self.peer.forked(self._process)

    def _late(self, call: Call) -> PersiaError:
        if self._connected:
            state = "it is connected, and has not answered" if call.sent else "it is connected, and does not read"
        elif self._trouble:
            state = f"a connection fails: {self._trouble}; give both sides the same keys"
        elif self._ever:
            state = "the connection is lost"
        else:
            state = "nobody answers there"
        return self.peer.late(call, state)


def _keep(reference: weakref.ref[RpcConnection]) -> None:
    """Runs in a thread that does not keep the connection alive."""
    while True:
        time.sleep(KEEPER_SECONDS)
        connection = reference()
        if connection is None or not connection._keep():
            return
        del connection
