"""Describes callable methods: the public methods of a Protocol or class, and the types of their annotations."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from persia.errors import ConfigError
from persia.rpc.array_encoding import Decoder

__all__ = ["Method", "describe", "inline", "once", "waits"]

F = TypeVar("F", bound=Callable[..., Any])

_ONCE = "__rpc_once__"
_INLINE = "__rpc_inline__"
_WAITS = "__rpc_waits__"


def once(method: F) -> F:
    """Marks a method that must not be repeated: a call raises if it may have run before its connection was lost.

    Calls of all other methods are sent again after a reconnection, so these must be safe to repeat.
    """
    setattr(method, _ONCE, True)
    return method


def inline(method: F) -> F:
    """Marks a method that takes microseconds and never waits. It runs on the thread that reads the socket.

    This saves a thread switch. The server reads no other request while the method runs.
    """
    setattr(method, _INLINE, True)
    return method


def waits(method: F) -> F:
    """Marks a method that waits for calls of other clients.

    While it runs, it does not count toward `Limits.threads`, `requests` and `request_bytes`, so the call that it waits
    for is always read and run. Clients must bound the number of its calls that they have in flight: beyond
    `Limits.waiting` or `waiting_bytes` the server refuses them.
    """
    setattr(method, _WAITS, True)
    return method


class Method(NamedTuple):
    """A method as both sides describe it.

    Attributes:
        name: name of the method.
        parameters: names and defaults in order; `inspect.Parameter.empty` without a default.
        positional: number of parameters that may be passed by position.
        arguments: decoder of the arguments.
        result: decoder of the result, or of an item of a stream.
        streams: whether it returns an iterator.
        once: whether it must not be repeated.
        inline: whether it runs on the reading thread.
        waits: whether it waits for calls of other clients.
    """

    name: str
    parameters: tuple[tuple[str, Any], ...]
    positional: int
    arguments: Decoder[tuple[Any, ...]]
    result: Decoder[Any]
    streams: bool
    once: bool
    inline: bool
    waits: bool

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Returns all arguments in order.

        Raises:
            TypeError: the arguments do not match the parameters.
        """
        if len(args) > self.positional:
            raise TypeError(f"{self.name}() takes {self.positional} positional arguments, got {len(args)}")
        if not kwargs and len(args) == len(self.parameters):
            return args
        rest = dict(kwargs)
        values = list(args)
        for name, default in self.parameters[len(args) :]:
            value = rest.pop(name, default)
            if value is inspect.Parameter.empty:
                raise TypeError(f"{self.name}() is missing its argument {name!r}")
            values.append(value)
        if rest:
            raise TypeError(f"{self.name}() has no such argument: {', '.join(rest)}")
        return tuple(values)

    def call(self, service: object, arguments: tuple[Any, ...]) -> Any:
        """Calls the method of an object with the result of `bind`."""
        function = getattr(service, self.name)
        if self.positional == len(arguments):
            return function(*arguments)
        named = zip(self.parameters[self.positional :], arguments[self.positional :], strict=True)
        return function(*arguments[: self.positional], **{name: value for (name, _), value in named})


@functools.cache
def describe(protocol: type) -> Mapping[str, Method]:
    """Describes the public methods of a Protocol or class by name.

    Raises:
        ConfigError: an annotation is missing or not supported; the message names the method.
    """
    return {
        name: _describe(protocol, name, function)
        for name, function in inspect.getmembers(protocol, inspect.isfunction)
        if not name.startswith("_")
    }


def _describe(protocol: type, name: str, function: Callable[..., Any]) -> Method:
    place = f"{protocol.__qualname__}.{name}"
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name not in hints:
            raise ConfigError(
                f"{place}: parameter {parameter.name!r} needs its own name and annotation to be callable "
                "from another process.",
                field=place,
            )
    if "return" not in hints:
        raise ConfigError(f"{place} needs a return annotation.", field=place)
    result = hints["return"]
    streams = typing.get_origin(result) in (Iterator, Generator)
    try:
        return Method(
            name,
            tuple((p.name, p.default) for p in parameters),
            sum(p.kind is not p.KEYWORD_ONLY for p in parameters),
            Decoder(tuple[tuple(hints[p.name] for p in parameters)] if parameters else tuple[()]),  # type: ignore[misc]
            Decoder(typing.get_args(result)[0] if streams else result),
            streams,
            getattr(function, _ONCE, False),
            getattr(function, _INLINE, False),
            getattr(function, _WAITS, False),
        )
    except ConfigError as error:
        raise ConfigError(f"{place}: {error.message}", field=place) from error
