"""Options of commands that are the fields of records."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from persia.cli.record_options import Fields, Shown, descriptions, options_from_records
from persia.errors import ConfigError
from persia.serve.http.limits import ServeLimits
from persia.serve.http.options import HttpOptions
from persia.serve.options import RowServerOptions, ServeOptions


class Lamp(msgspec.Struct, frozen=True):
    """A lamp.

    Args:
        watts: power of the bulb, in
            watts. See `bulbs`.
        bulbs: makers of bulbs.
        on: whether it is on.
        dim: whether it is dimmed.
        case_bytes: size of the case.
        hidden: not on the command line.

    Raises:
        ConfigError: never.
    """

    watts: float = 40.0
    bulbs: tuple[str, ...] = ()
    on: bool = False
    dim: bool | Literal["auto"] = "auto"
    case_bytes: int = 1 << 20
    hidden: int | None = 7


GIVEN = []
lamp_app = typer.Typer()


@lamp_app.command()
@options_from_records
def light(
    room: Annotated[str, typer.Argument(help="Room.")],
    *,
    lamp: Annotated[Lamp, Fields(hidden=["hidden"], panel="Lamp", bulbs=Shown("MAKER", name="--bulb"))],
    times: Annotated[int, typer.Option(help="Times.")] = 1,
) -> None:
    """Light a room."""
    GIVEN.append((room, lamp, times))


def run(*arguments):
    GIVEN.clear()
    result = CliRunner().invoke(lamp_app, arguments)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return GIVEN[0] if GIVEN else result.output


def test_missing_fields_have_the_defaults_of_the_record():
    assert run("hall") == ("hall", Lamp(), 1)


def test_options_fill_the_record():
    options = ["--watts", "5.5", "--bulb", "a", "--bulb", "b", "--on", "--dim", "false", "--case-bytes", "3kB"]
    assert run("hall", *options, "--times", "2") == ("hall", Lamp(5.5, ("a", "b"), True, False, 3000), 2)
    assert run("hall", "--dim", "true")[1].dim is True


def test_what_does_not_fit_a_field_is_refused():
    with pytest.raises(ConfigError, match=r"Invalid dim = 'maybe'; expected one of: false, auto, true\."):
        run("hall", "--dim", "maybe")
    with pytest.raises(ConfigError, match="Invalid case_bytes = 'much'"):
        run("hall", "--case-bytes", "much")


def test_help_has_what_the_record_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("--help")
    for text in ("Power of the bulb, in watts. See --bulb.", "MAKER", "Makers of bulbs. Repeatable.", "1MiB", "auto"):
        assert text in shown.replace("`", "")
    assert "--hidden" not in shown


@pytest.mark.parametrize("record", [HttpOptions, RowServerOptions, ServeLimits, ServeOptions])
def test_all_fields_are_described(record):
    assert list(descriptions(record)) == list(record.__struct_fields__)
