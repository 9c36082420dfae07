"""Reads Taobao's user behaviors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from persia.checks import check_choice
from persia.data.expressions import Rule
from persia.data.files import Paths, expand, found
from persia.data.from_csv import CSV_SUFFIXES, CsvFormat, CsvSource
from persia.data.reader import Order, StreamReader
from persia.data.rows import Conversion
from persia.data.selection import Selection, Split
from persia.errors import ConfigError
from persia.schema import IdFeature, Schema

__all__ = ["taobao"]

_IDS = ("user_id", "item_id", "category_id")
_BEHAVIORS = ("pv", "fav", "cart", "buy")


def taobao(
    path: Paths | None = None,
    batch_size: int = 1024,
    *,
    dim: int = 16,
    positive: Sequence[str] = ("buy",),
    where: Rule | None = None,
    split: Split | Mapping[str, Any] | None = None,
    shuffle_rows: int = 0,
    seed: int = 0,
    drop_last: bool = False,
    shard: tuple[int, int] = (0, 1),
    require_labels: bool = True,
) -> StreamReader:
    """Taobao's UserBehavior.csv (Tianchi): 100 million views, favorites, carts and purchases, sorted by user.

    Comma-separated without header: user, item, category, behavior ("pv", "fav", "cart", "buy"), and a Unix timestamp
    in seconds. ID-type features `user_id`, `item_id`, `category_id`; the label is `positive`; `Batch.day` is in days
    since 1970 (UTC).

    Args:
        path: file, directory, glob or URL, or a list of these; None takes `find("taobao")`.
        batch_size: samples of a batch.
        dim: of all embeddings.
        positive: behaviors whose label is 1; others have 0. The log has no items that were shown but not chosen: to
            learn from views, take all four, and add `negatives`.
        where: only rows for which this rule over the columns (`behavior`, `timestamp` and those of features) is true.
        split: only one part of the rows; see `parquet`.
        shuffle_rows: see `parquet`.
        seed: of the permutations.
        drop_last: leave out a last batch that is not full.
        shard: (index, count): only batches i with i % count == index.
        require_labels: if False, files without `behavior` (which then need a header) give `labels` of shape
            `[batch, 0]`.

    Raises:
        ConfigError: a behavior is unknown, or there is none.
    """
    if isinstance(positive, str) or not positive:
        raise ConfigError(f'Invalid positive = {positive!r}; expected a list such as ["buy"].', field="positive")
    for behavior in positive:
        check_choice("positive", behavior, _BEHAVIORS)
    schema = Schema([IdFeature(name, dim=dim, kind="number") for name in _IDS], labels=["positive"])
    conversion = Conversion(
        schema,
        day="timestamp",
        day_unit="s",
        require_labels=require_labels,
        labels={"positive": f"behavior in {tuple(positive)!r}"},
        selection=Selection.of(where, split),
    )
    form = CsvFormat(layouts=((*_IDS, "behavior", "timestamp"),))
    files = tuple(expand(found("taobao") if path is None else path, CSV_SUFFIXES))
    return StreamReader(
        schema, CsvSource(files, conversion, form), Order(batch_size, shuffle_rows, seed, drop_last, shard)
    )
