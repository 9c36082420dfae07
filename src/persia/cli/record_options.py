"""Makes the options of a command from records, with the names, types, defaults and descriptions of their fields."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
import typer

from persia.checks import check_choice
from persia.units import parse_bytes

__all__ = ["Fields", "Shown", "descriptions", "options_from_records"]

_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}


class Shown(NamedTuple):
    """Appearance of an option in the help text, where it differs from the default.

    Attributes:
        metavar: placeholder of the value in the help text.
        name: name of the option; derived from the field by default.
        panel: panel of the help text; the record's by default.
    """

    metavar: str | None = None
    name: str | None = None
    panel: str | None = None


class Fields:
    """Marks a parameter of a command as a record whose fields are options: `Annotated[SomeOptions, Fields()]`.

    Args:
        hidden: fields without an option; they keep their defaults.
        panel: panel of the options in the help text.
        **shown: appearance of options, by field.
    """

    def __init__(self, hidden: Collection[str] = (), panel: str | None = None, **shown: Shown) -> None:
        self.hidden = hidden
        self.panel = panel
        self.shown: Mapping[str, Shown] = shown


class _Option(NamedTuple):
    """The option of a field, and the function that converts the option's value to the field's."""

    field: str
    parameter: inspect.Parameter
    value: Callable[[Any], Any]


def options_from_records(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command: a parameter that is marked with `Fields` becomes an option for each field.

    Fields with a number of bytes, `..._bytes`, accept units. Lists are repeatable.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    records: dict[str, tuple[Any, list[_Option]]] = {}
    for parameter in signature.parameters.values():
        record, *marks = get_args(parameter.annotation)
        if marks and isinstance(marks[0], Fields):
            options = _options(record, marks[0])
            records[parameter.name] = record, options
            parameters += [option.parameter for option in options]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        for name, (record, options) in records.items():
            arguments[name] = record(**{option.field: option.value(arguments.pop(option.field)) for option in options})
        command(**arguments)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def descriptions(record: type) -> dict[str, str]:
    """Returns the descriptions of a record's fields, from the section `Args` of its docstring."""
    _, _, section = (inspect.getdoc(record) or "").partition("Args:\n")
    section, _, _ = section.partition("\n\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _options(record: Any, fields: Fields) -> list[_Option]:
    described = descriptions(record)
    shown = {field.name: fields.shown.get(field.name, Shown()) for field in msgspec.structs.fields(record)}
    names = {name: show.name or f"--{name.replace('_', '-')}" for name, show in shown.items()}
    options = []
    for field in msgspec.structs.fields(record):
        if field.name in fields.hidden:
            continue
        show, text = shown[field.name], described[field.name]
        text = re.sub(r"`(\w+)`", lambda match: f"`{names.get(match[1], match[1])}`", text[0].upper() + text[1:])
        kind, default, value = _conversion(field)
        if kind == list[str] | None:
            text += " Repeatable."
        metavar = show.metavar or ("BYTES" if _is_bytes(field) else None)
        panel = show.panel or fields.panel
        option = typer.Option(names[field.name], help=text, metavar=metavar, rich_help_panel=panel)
        parameter = inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )
        options.append(_Option(field.name, parameter, value))
    return options


def _conversion(field: msgspec.structs.FieldInfo) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Returns the type and default of an option, and the function that converts its value to the field's."""
    if _is_bytes(field):
        unit = next(name for name, size in _UNITS.items() if field.default % size == 0)
        return str, f"{field.default // _UNITS[unit]}{unit}", lambda text: parse_bytes(text, field.name)
    if get_origin(field.type) is tuple:
        return list[str] | None, None, lambda words: tuple(words or ())
    union = get_args(field.type) if get_origin(field.type) in (Union, types.UnionType) else ()
    words = next((get_args(kind) for kind in union if get_origin(kind) is Literal), ())
    if bool in union and words:
        values = {"false": False, **{word: word for word in words}, "true": True}

        def chosen(word: str) -> Any:
            check_choice(field.name, word, list(values))
            return values[word]

        return str, next(word for word, value in values.items() if value == field.default), chosen
    return field.type, field.default, lambda value: value


def _is_bytes(field: msgspec.structs.FieldInfo) -> bool:
    return field.name.endswith("_bytes")
