"""`negatives` and `shared_negatives`: add items that users did not choose, for data that have only what they chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from persia.data.item_catalogs import ItemCatalog, check_features, counted_of
from persia.data.negative_sampling import NegativeSampling
from persia.data.reader import Reader
from persia.data.shared_sampling import WINDOW, SharedNegatives
from persia.data.streams.negatives import NegativeStream
from persia.errors import ConfigError
from persia.services import SharedStream, Stream

__all__ = ["negatives", "shared_negatives"]

WINDOW_OF_STREAM = 16_384
"""Default `window` of a stream, in messages of a partition."""


def negatives(
    reader: Reader,
    features: Sequence[str],
    count: int,
    *,
    by: Literal["in_batch", "uniform", "popularity"] = "in_batch",
    catalog: ItemCatalog | None = None,
    power: float = 0.75,
    seed: int = 0,
) -> NegativeSampling | NegativeStream:
    """Adds to each positive sample `count` samples with another item and all labels 0.

    Negatives follow their positive sample and differ from it in the item's features, and in crosses and mapped
    features of these, which are computed for the drawn items. They depend on the seed, the epoch and the number of the
    batch, so a resumed run has the same negatives, and each epoch has other ones. Batches grow by the negatives;
    samples that are not positive are unchanged.

    The result for a stream, such as `kafka`, is a stream: offsets are passed on, and the draws depend on the offsets of
    a batch.

    Args:
        reader: the samples. A sample is positive if one of its labels is above 0.
        features: the item's ID-type features; they are replaced together. Each sample has one id of each. Computed
            features must not be named; they follow from the features that they are computed from.
        count: negatives per positive sample. A negative that equals the positive item is drawn again, up to 20 times,
            and then left out.
        by: "in_batch" takes items of other samples of the batch, "uniform" any item of the catalog, "popularity" items
            of the catalog with probability proportional to counts ** power.
        catalog: items, as returned by `item_catalog`; for "uniform" and "popularity".
        power: see `by`; 0.75 as in word2vec (Mikolov et al., NeurIPS 2013), 1 for the items' frequencies.
        seed: seed of the draws.

    Raises:
        ConfigError: a feature is unknown or computed; a number is out of range; a catalog is missing, is given for
            "in_batch", lacks a feature, or has only counts of 0 for "popularity"; or the reader is one of
            `shared_negatives`.
    """
    check_features(reader.schema, features)
    if isinstance(reader, SharedNegatives) or (isinstance(reader, NegativeStream) and reader.are_shared):
        raise ConfigError(
            "negatives(shared_negatives(...)) would copy the drawn items and the log(q) of a sample to samples with "
            "other items; wrap them the other way round, shared_negatives(negatives(...)), or use one of them.",
            field="reader",
        )
    sampling = NegativeSampling(reader, tuple(features), count, by, catalog, power, seed=seed)
    if not isinstance(reader, SharedStream):
        return sampling
    return NegativeStream(reader, sampling)


def shared_negatives(
    reader: Reader,
    features: Sequence[str],
    count: int | None = None,
    *,
    by: Literal["in_batch", "uniform", "popularity"] = "uniform",
    catalog: ItemCatalog | None = None,
    history: Sequence[str] | None = None,
    power: float = 0.75,
    per_sample: int = 1,
    window: int | None = None,
    seed: int = 0,
) -> SharedNegatives | NegativeStream:
    """Adds drawn items to each batch, which all its samples share as negatives, for models such as `NextItem`.

    Their rows are looked up ahead, with the batch's other rows. The schema of the result has new features:

    - `negative_<feature>` for each of `features`, un-pooled: the drawn items, divided evenly among the samples. Where a
      batch is divided among NN workers or micro-batches, each part has the items of its samples. Features that map one
      of `features`, such as a prefix of the item's codes (`CodePrefix`), have a `negative_<feature>` as well, mapped in
      the same way; crosses have none.
    - `log_q`, `history_log_q` (with `history`) and `negative_log_q`, dense: the logarithm of the probability with which
      the sample's item, each event of its history, and each of its drawn items are drawn. "uniform" has none: all are
      alike, and the correction would change nothing. "in_batch" has the first two only, for models whose negatives are
      the items of the batch, such as `NextItem` without `negatives` and `persia.nn.models.TwoTower`: the items of all
      its samples count there, positive or not.

    An item that is not in the catalog, or the window, counts as rare as the rarest one there.

    Draws depend on the seed, the epoch and the number of the batch, and for a stream on the offsets of the batch, so a
    resumed run has the same ones. Without a catalog, items are those of samples before: the batches, or the messages of
    a partition, are divided into windows, and each batch draws from the window before its own; in the first window it
    draws from itself. One window of items is in memory. A resumed run reads the window before once more. Several data
    loaders each read all batches, as the windows have those of all: give a catalog to them. Streams read each message
    twice, the second time in batches of the stream's size that neither count nor reach its dead-letter topic, and
    windows of a topic that were deleted are left out.

    Args:
        reader: the samples. Items of positive samples are drawn, those with a label above 0.
        features: the item's ID-type features; they are drawn together. Each sample has one id of each. Computed
            features must not be named.
        count: items per batch; for "uniform" and "popularity". A batch of fewer than `count / per_sample` samples has
            `per_sample` for each.
        by: "uniform" draws all items alike, "popularity" in proportion to counts ** power. "in_batch" draws none.
        catalog: items, as returned by `item_catalog`. None for the items before. For "in_batch", leave it out if some
            samples are not positive, which `item_catalog` does not count.
        history: un-pooled features of the events before the item, one for each of `features`: for data with a sample
            per user, whose events are all predicted. Their items are drawn and counted as well.
        power: see `by`; 1 for the items' frequencies.
        per_sample: most drawn items of a sample.
        window: number of batches, or of messages of a stream's partition, of which items are drawn; by default 100
            batches or 16,384 messages.
        seed: seed of the draws.

    Raises:
        ConfigError: a feature is unknown, computed or does not fit; a number is out of range; `count` exceeds what
            batches of the longest histories hold with `similar_lengths`; a name that would be added is taken; a
            catalog lacks a feature, or has only counts of 0 for "popularity"; or the reader is a joined stream or
            growing directories.
    """
    check_features(reader.schema, features)
    counted_of(reader.schema, features, history)
    stream = isinstance(reader, SharedStream)
    if isinstance(reader, Stream) and not stream:
        raise ConfigError(
            f"Shared negatives would lose the position of {type(reader).__name__}; train on it without them, as "
            "NextItem without negatives uses the items of the batch.",
            field="reader",
        )
    if window is None:
        window = WINDOW_OF_STREAM if stream else WINDOW
    sampling = SharedNegatives(
        reader,
        tuple(features),
        count,
        by,
        catalog,
        None if history is None else tuple(history),
        power,
        per_sample,
        window,
        seed=seed,
    )
    return NegativeStream(reader, sampling) if isinstance(reader, SharedStream) else sampling
