"""Reads the Globo log: clicks on a news portal, in time order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persia.data.expressions import Rule
from persia.data.files import Paths, found
from persia.data.from_parquet import parquet
from persia.data.reader import StreamReader
from persia.data.selection import Split
from persia.schema import IdFeature, Schema

__all__ = ["globo"]


def globo(
    path: Paths | None = None,
    batch_size: int = 1024,
    *,
    dim: int = 16,
    where: Rule | None = None,
    split: Split | Mapping[str, Any] | None = None,
    shuffle_rows: int = 0,
    seed: int = 0,
    drop_last: bool = False,
    shard: tuple[int, int] = (0, 1),
    require_labels: bool = True,
) -> StreamReader:
    """Clicks on a news portal in time order, 16 days: user, article, the user's last articles, six contexts.

    Parquet files `day=NN.parquet` with columns label, timestamp_ms, user_id, article_id, history (list),
    environment, device_group, os, country, region, referrer. `history` shares the table `article_id` and is
    averaged over the ten newest; the day is the hive key.

    Args:
        path: directory, file, glob or URL, or a list of these; None takes `find("globo_ctr")`.
        batch_size: samples of a batch.
        dim: of all embeddings.
        where: only rows for which this rule over the columns of the file is true; see `parquet`.
        split: only one part of the rows; see `parquet`.
        shuffle_rows: see `parquet`.
        seed: of the permutations.
        drop_last: leave out a last batch that is not full.
        shard: (index, count): only batches i with i % count == index.
        require_labels: if False, files without labels give `labels` of shape `[batch, 0]`.
    """
    contexts = ("environment", "device_group", "os", "country", "region", "referrer")
    history = IdFeature("history", dim=dim, table="article_id", pooling="mean", max_length=10)
    plain = [IdFeature(name, dim=dim) for name in ("user_id", "article_id", *contexts)]
    schema = Schema([*plain[:2], history, *plain[2:]])
    return parquet(
        found("globo_ctr") if path is None else path,
        schema,
        batch_size,
        day="day",
        where=where,
        split=split,
        shuffle_rows=shuffle_rows,
        seed=seed,
        drop_last=drop_last,
        shard=shard,
        require_labels=require_labels,
    )
