"""The options that readers share: declared once, named by every signature, and checked with the nearest name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia import data
from persia.config import call
from persia.data import row_options
from persia.errors import ConfigError
from persia.schema import IdFeature, Schema

SCHEMA = Schema([IdFeature("user", dim=2)], labels=["click"])
ROWS = set(data.RowOptions.__annotations__)
COLUMNS = set(data.ColumnOptions.__annotations__)
READERS: dict[str, set[str]] = {
    **dict.fromkeys(("parquet", "csv", "jsonl", "arrow", "event_log"), ROWS | COLUMNS),
    **dict.fromkeys(("growing", "kafka"), COLUMNS),
    **dict.fromkeys(
        ("criteo", "avazu", "movielens", "globo", "amazon", "diginetica", "kuairand", "mind", "taobao"), ROWS
    ),
    "adult": ROWS - {"split"},
}


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.csv"
    path.write_text("user,click\n" + "".join(f"{i},{i % 2}\n" for i in range(100)))
    return path


@pytest.mark.parametrize("name", READERS)
def test_a_reader_takes_the_shared_options_and_declares_none(name: str) -> None:
    reader = getattr(data, name)
    shown = inspect.signature(reader).parameters
    declared = set(inspect.signature(reader.__wrapped__).parameters)
    assert READERS[name] <= set(shown)
    assert not declared & READERS[name]
    assert all(shown[option].kind is inspect.Parameter.KEYWORD_ONLY for option in READERS[name])


@pytest.mark.parametrize("kind", [data.RowOptions, data.ColumnOptions])
def test_each_option_is_documented_once(kind: type) -> None:
    documented = re.findall(r"^        (\w+): ", kind.__doc__ or "", re.MULTILINE)
    assert sorted(documented) == sorted(kind.__annotations__)


def test_signatures_show_the_defaults() -> None:
    shown = inspect.signature(data.parquet).parameters
    given: dict[str, Any] = {name: shown[name].default for name in ROWS | COLUMNS}
    assert given["shard"] == (0, 1)
    assert given["day_unit"] == "day"
    assert row_options.order_of(8, **given) == row_options.order_of(8)
    assert row_options.conversion_of(SCHEMA, **given) == row_options.conversion_of(SCHEMA)


@pytest.mark.parametrize(
    ("name", "option", "nearest"),
    [
        ("parquet", "shufle_rows", "shuffle_rows"),
        ("csv", "delimeter", "delimiter"),
        ("growing", "renames", "rename"),
        ("kafka", "lables", "labels"),
        ("adult", "drop-last", "drop_last"),
        ("globo", "Where", "where"),
    ],
)
def test_an_unknown_option_suggests_the_nearest_name(name: str, option: str, nearest: str) -> None:
    reader: Callable[..., Any] = getattr(data, name)
    message = f"Unknown option '{option}' of {name}; expected one of: .* Did you mean '{nearest}'"
    with pytest.raises(ConfigError, match=message) as caught:
        reader("clicks", **{option: 1})
    assert caught.value.fields["field"] == option
    with pytest.raises(ConfigError, match=rf"data\.options\.{option}.* Did you mean '{nearest}'"):
        call(reader, {option: 1}, "data.options", "clicks")


def test_a_missing_option_is_named(clicks: Path) -> None:
    options = {"schema": SCHEMA, "owner": "user"}
    message = r"^data\.options: time is missing; set data\.options\.time\.$"
    with pytest.raises(ConfigError, match=message) as caught:
        call(data.event_log, options, "data.options", clicks)
    assert caught.value.fields["field"] == "data.options.time"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("shuffle_rows", -1),
        ("seed", "one"),
        ("drop_last", "no"),
        ("shard", 3),
        ("shard", (0, 1, 2)),
        ("shard", ("0", "2")),
        ("require_labels", "no"),
        ("split", "train"),
        ("day_unit", "week"),
    ],
)
def test_an_invalid_value_names_the_option(clicks: Path, option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option) as caught:
        data.csv(clicks, SCHEMA, **{option: value})  # type: ignore[arg-type]
    assert caught.value.fields["field"] == option


def test_readers_can_share_a_record(clicks: Path) -> None:
    shared: data.RowOptions = {"where": "user < 50", "shard": (np.int64(1), np.int64(2)), "drop_last": True}
    train = data.csv(clicks, SCHEMA, 8, split=data.Split("train"), **shared)
    test = data.csv(clicks, SCHEMA, 8, split=data.Split("test"), **shared)
    assert all(len(batch) == 8 for reader in (train, test) for batch in reader)
    assert sum(map(len, train)) > sum(map(len, test))
