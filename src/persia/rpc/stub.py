"""Stubs: objects with the methods of a Protocol that run in another process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

from persia.rpc.array_encoding import Decoder
from persia.rpc.client import Call, RpcConnection
from persia.rpc.interface import Method, describe
from persia.rpc.keys import find_keys, keys_to_connect
from persia.rpc.limits import Limits
from persia.rpc.messages import Kind, body
from persia.rpc.port import client_port

__all__ = ["Future", "cast_to", "close", "connect", "start", "statistics", "within"]

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")

DEFAULT_SECONDS = 60.0


def connect(
    address: str,
    protocol: Callable[..., T],
    *,
    peer: str = "",
    timeout: float = DEFAULT_SECONDS,
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    limits: Limits | None = None,
) -> T:
    """Makes a stub that calls the methods of a Protocol at an address. Returns immediately, even if not connected.

    A stub is thread-safe. A call blocks until its reply has arrived. If the connection breaks, the call is sent again
    after the reconnection, until its deadline. Arguments must not change before the call returns; after a
    DeadlineError, arrays may still be read for a while. The caller owns returned arrays, which are writable.

    Args:
        address: `tcp://host:port`.
        protocol: the Protocol, or a class.
        peer: name of the peer in errors, such as "embedding PS 2"; None for the Protocol's name.
        timeout: deadline of each call in seconds.
        keys: file made by `make_keys`; None for the file that PERSIA_CURVE_KEYS names, if any. Without one, an address
            of this host must belong to a process of the same user.
        insecure: the server was made with `insecure`, so it takes no password from this host either.
        limits: bounds on messages.

    Raises:
        ConfigError: the address or the keys are invalid, or the Protocol has unsupported annotations.
    """
    kind = cast("type", protocol)
    methods = describe(kind)
    credentials = find_keys(keys) if insecure else keys_to_connect(address, keys)
    port = client_port()
    try:
        port.connect(address, credentials)
    except BaseException:
        port.close(0)
        raise
    return cast("T", Stub(RpcConnection(port, peer or kind.__name__, limits or Limits()), methods, timeout))


class Stub:
    """A stub made by `connect`; the remote methods are its attributes."""

    def __init__(self, connection: RpcConnection, methods: Mapping[str, Method], timeout: float) -> None:
        self._connection = connection
        self._methods = methods
        self._timeout = timeout
        for name, method in methods.items():
            setattr(self, name, RemoteMethod(connection, method, timeout))

    def __repr__(self) -> str:
        return f"<stub of {self._connection.peer.name} at {self._connection.peer.address}>"


class Future(Protocol[R_co]):
    """A started call."""

    def result(self) -> R_co:
        """Waits for the call; returns its result or raises its error. May be called again."""


class RemoteMethod:
    """A method of a stub."""

    def __init__(self, connection: RpcConnection, method: Method, timeout: float) -> None:
        self._connection = connection
        self._method = method
        self._timeout = timeout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the method and waits for the result."""
        call = self._call(args, kwargs)
        self._connection.submit(call)
        return self._value(call)

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Calls the method without waiting."""
        call = self._call(args, kwargs)
        self._connection.submit(call, unattended=True)
        return _Started(lambda: self._value(call))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        method = self._method
        arguments = body(method.bind(args, kwargs), self._connection.limits)
        return Call(Kind.CALL, method.name, arguments, self._timeout, method.once, method.waits)

    def _value(self, call: Call) -> Any:
        header, frames, _ = self._connection.wait(call)
        if header.kind is Kind.STREAM:
            number = _NUMBER.decode(header.payload, frames)
            return RemoteIterator(self._connection, self._method, self._timeout, number)
        return self._method.result.decode(header.payload, frames)


class RemoteIterator(Iterator[Any]):
    """Iterates over the items that a remote method yields. Requests an item while the caller uses the previous one.

    Not thread-safe. Read it to the end or `close` it; otherwise it expires on the server.
    """

    def __init__(self, connection: RpcConnection, method: Method, timeout: float, number: int) -> None:
        self._connection = connection
        self._method = method
        self._timeout = timeout
        self._number = number
        self._position = 0
        connection.opened()
        self._open = True
        self._ahead = self._ask()

    def __next__(self) -> Any:
        if not self._open:
            raise StopIteration
        try:
            header, frames, _ = self._connection.wait(self._ahead)
            item = None if header.kind is Kind.END else self._method.result.decode(header.payload, frames)
        except BaseException:
            self.close()
            raise
        if header.kind is Kind.END:
            self.close()
            raise StopIteration
        self._position += 1
        self._ahead = self._ask()
        return item

    def close(self) -> None:
        """Closes the iterator on the server, too."""
        if self._open:
            self._open = False
            self._connection.end(self._message(Kind.CLOSE))

    def __del__(self) -> None:
        try:
            if self._open:
                self._connection.drop(self._message(Kind.CLOSE))
        except (AttributeError, TypeError):  # Python shuts down, and module globals are None.
            pass

    def _ask(self) -> Call:
        call = self._message(Kind.NEXT)
        self._connection.submit(call, unattended=True)
        return call

    def _message(self, kind: Kind) -> Call:
        cursor = body((self._number, self._position), self._connection.limits)
        return Call(kind, self._method.name, cursor, self._timeout, once=False)


class _Started(Generic[R]):
    """A Future whose reply is received by the first caller of `result`."""

    def __init__(self, work: Callable[[], R]) -> None:
        self._work: Callable[[], R] | None = work
        self._value: R | None = None
        self._error: BaseException | None = None

    def result(self) -> R:
        work, self._work = self._work, None
        if work is not None:
            try:
                self._value = work()
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return cast("R", self._value)


def start(method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Starts a call without waiting for it, so that several peers work concurrently without a thread for each.

    Args:
        method: method of a stub, which is sent now. Any other function is called immediately in this thread.
        *args: arguments of the method.
        **kwargs: arguments of the method.
    """
    if isinstance(method, RemoteMethod):
        return method.start(args, kwargs)
    future = _Started(lambda: method(*args, **kwargs))
    with contextlib.suppress(Exception):  # Raised by result().
        future.result()
    return future


def within(service: T, seconds: float) -> T:
    """Returns a stub on the same connection with another deadline per call; returns other objects unchanged."""
    if not isinstance(service, Stub):
        return service
    return cast("T", Stub(service._connection, service._methods, seconds))


def cast_to(protocol: Callable[..., T], service: object) -> T:
    """Returns a stub of another Protocol on the same connection; returns other objects unchanged.

    The peer must serve both Protocols.
    """
    if not isinstance(service, Stub):
        return cast("T", service)
    return cast("T", Stub(service._connection, describe(cast("type", protocol)), service._timeout))


def close(service: object) -> None:
    """Closes the connection of a stub: calls in flight and later calls raise ClosedError. Ignores other objects."""
    if isinstance(service, Stub):
        service._connection.close()


def statistics(service: object) -> dict[str, int]:
    """Returns the counters of a stub's connection; {} for other objects.

    `calls`, `resent` after a reconnection, `late_replies` (dropped), `malformed` replies (dropped), `connects`,
    `in_flight`.
    """
    return service._connection.statistics() if isinstance(service, Stub) else {}


_NUMBER = Decoder[int](int)
