"""`negatives`: adds samples of items that users did not choose, for data that have only what they chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from persia.data.negative_sampling import ItemCatalog, NegativeSampling, check_features
from persia.data.reader import Reader
from persia.data.streams.negatives import NegativeStream
from persia.services import SharedStream

__all__ = ["negatives"]


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
            "in_batch", lacks a feature, or has only counts of 0 for "popularity".
    """
    check_features(reader.schema, features)
    sampling = NegativeSampling(reader, tuple(features), count, by, catalog, power, seed)
    if not isinstance(reader, SharedStream):
        return sampling
    return NegativeStream(reader, sampling)
