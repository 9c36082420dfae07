"""Reads KuaiRand: logs of short videos."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from persia.checks import check_choice
from persia.data.files import Paths, dataset_path
from persia.data.from_csv import csv
from persia.data.reader import StreamReader
from persia.data.row_options import RowOptions, with_options
from persia.errors import ConfigError
from persia.schema import IdFeature, Schema

__all__ = ["kuairand"]

_SIGNALS = (
    "is_click",
    "is_like",
    "is_follow",
    "is_comment",
    "is_forward",
    "is_hate",
    "long_view",
    "is_profile_enter",
)


@with_options(RowOptions)
def kuairand(
    path: Paths | None = None,
    batch_size: int = 1024,
    *,
    dim: int = 16,
    signals: Sequence[str] = ("is_click",),
    **rows: Unpack[RowOptions],
) -> StreamReader:
    """KuaiRand (Gao et al., CIKM 2022), short videos of Kuaishou that users clicked, liked, watched to the end, ...

    Comma-separated with header. ID-type features `user_id`, `video_id` and `tab` (the place in the app); labels are
    `signals`; `Batch.day` is in days since 1970 (UTC), from `time_ms`. Other columns can be named in `where`:
    "is_rand == 1" takes videos that were shown at random.

    Args:
        path: file, directory, glob or URL, or a list of these; None uses `find("kuairand")`. In a directory and its
            subdirectories, the files `log_standard_*.csv` are read.
        batch_size: samples per batch.
        dim: dim of all embeddings.
        signals: labels among "is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view" and
            "is_profile_enter". Several labels are for `persia.nn.models.MMoE` and `PLE`.
        **rows: see `RowOptions`.

    Raises:
        ConfigError: a signal is unknown, or there is none.
    """
    if isinstance(signals, str) or not signals:
        raise ConfigError(f'Invalid signals = {signals!r}; expected a list such as ["is_click"].', field="signals")
    for signal in signals:
        check_choice("signals", signal, _SIGNALS)
    path = dataset_path("kuairand") if path is None else path
    if isinstance(path, str | os.PathLike) and Path(path).is_dir():
        path = str(Path(path) / "**" / "log_standard_*.csv")
    features = [IdFeature(name, dim=dim, kind="number") for name in ("user_id", "video_id", "tab")]
    return csv(
        path,
        Schema(features, labels=list(signals)),
        batch_size,
        day="time_ms",
        day_unit="ms",
        **rows,
    )
