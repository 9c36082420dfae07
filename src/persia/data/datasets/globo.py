"""Reads the Globo log: clicks on a news portal, in time order."""

from __future__ import annotations

from typing import Unpack

from persia.data.files import Paths, dataset_path
from persia.data.from_parquet import parquet
from persia.data.reader import StreamReader
from persia.data.row_options import RowOptions, with_options
from persia.schema import IdFeature, Schema

__all__ = ["globo"]


@with_options(RowOptions)
def globo(
    path: Paths | None = None,
    batch_size: int = 1024,
    *,
    dim: int = 16,
    **rows: Unpack[RowOptions],
) -> StreamReader:
    """Clicks on a news portal in time order, 16 days: user, article, the user's last articles, six contexts.

    Parquet files `day=NN.parquet` with columns label, timestamp_ms, user_id, article_id, history (list),
    environment, device_group, os, country, region, referrer. `history` shares the table `article_id` and is
    averaged over the ten newest; the day is the hive key. The command
    `python -m persia.data.datasets.prepare_globo SOURCE TARGET` makes them from "News Portal User Interactions by
    Globo.com" (arXiv 1904.10367), whose terms allow academic use only.

    Args:
        path: directory, file, glob or URL, or a list of these; None uses `find("globo_ctr")`.
        batch_size: samples per batch.
        dim: dim of all embeddings.
        **rows: see `RowOptions`.
    """
    contexts = ("environment", "device_group", "os", "country", "region", "referrer")
    history = IdFeature("history", dim=dim, table="article_id", pooling="mean", max_length=10)
    plain = [IdFeature(name, dim=dim) for name in ("user_id", "article_id", *contexts)]
    schema = Schema([*plain[:2], history, *plain[2:]])
    return parquet(
        dataset_path("globo_ctr") if path is None else path,
        schema,
        batch_size,
        day="day",
        **rows,
    )
