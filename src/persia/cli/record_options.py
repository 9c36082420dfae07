"""Options of a command from the records that they fill, with the names, types, defaults and descriptions of fields."""

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
    """Appearance of an option in the help text, where its record does not say it.

    Attributes:
        metavar: stands for its value in the help text.
        name: of the option, if it is not that of the field.
        panel: in the help text, if it is not that of the record.
    """

    metavar: str | None = None
    name: str | None = None
    panel: str | None = None


class Fields:
    """Marks a parameter of a command as a record whose fields are options: `Annotated[SomeOptions, Fields()]`.

    Args:
        hidden: fields without an option; they keep their defaults.
        panel: of the options in the help text.
        **shown: what some options have that the record does not say, by field.
    """

    def __init__(self, hidden: Collection[str] = (), panel: str | None = None, **shown: Shown) -> None:
        self.hidden = hidden
        self.panel = panel
        self.shown: Mapping[str, Shown] = shown


class _Option(NamedTuple):
    """The option of a field, and the function that makes the field's value from what was given."""

    field: str
    parameter: inspect.Parameter
    value: Callable[[Any], Any]


def options_from_records(command: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command: parameters that are marked with `Fields` become an option for each field.

    Fields with a number of bytes, `..._bytes`, take units. Lists are repeatable.
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
    def run(**given: Any) -> None:
        for name, (record, options) in records.items():
            given[name] = record(**{option.field: option.value(given.pop(option.field)) for option in options})
        command(**given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def descriptions(record: type) -> dict[str, str]:
    """Returns the descriptions of a record's fields, from the section `Args` of its docstring."""
    _, _, section = (inspect.getdoc(record) or "").partition("Args:\n")
    section, _, _ = section.partition("\n\n")
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _options(record: Any, fields: Fields) -> list[_Option]:
    described = descriptions(record)
    shown = {field.name: fields.shown.get(field.name, Shown()) for field in msgspec.structs.fields(record)}
    names = {name: show.name or f"--{name.replace('_', '-')}" for name, show in shown.items()}
    options = []
    for field in msgspec.structs.fields(record):
        if field.name in fields.hidden:
            continue
        show, text = shown[field.name], described[field.name]
        text = re.sub(r"`(\w+)`", lambda found: f"`{names.get(found[1], found[1])}`", text[0].upper() + text[1:])
        kind, default, value = _taken(field)
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


def _taken(field: msgspec.structs.FieldInfo) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Returns the type and default of an option, and the function that makes the field's value from what was given."""
    if _is_bytes(field):
        unit = next(name for name, size in _UNITS.items() if field.default % size == 0)
        return str, f"{field.default // _UNITS[unit]}{unit}", lambda given: parse_bytes(given, field.name)
    if get_origin(field.type) is tuple:
        return list[str] | None, None, lambda given: tuple(given or ())
    union = get_args(field.type) if get_origin(field.type) in (Union, types.UnionType) else ()
    words = next((get_args(kind) for kind in union if get_origin(kind) is Literal), ())
    if bool in union and words:
        values = {"false": False, **{word: word for word in words}, "true": True}

        def chosen(given: str) -> Any:
            check_choice(field.name, given, list(values))
            return values[given]

        return str, next(word for word, value in values.items() if value == field.default), chosen
    return field.type, field.default, lambda given: given


def _is_bytes(field: msgspec.structs.FieldInfo) -> bool:
    return field.name.endswith("_bytes")
