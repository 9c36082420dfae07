"""Generates synthetic click logs with known click probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.data.reader import share_of
from persia.data.zipf import Zipf
from persia.errors import ConfigError
from persia.schema import IdFeature, Schema
from persia.types import Floats, Int32Array, SourceFingerprint, SourcePart

__all__ = ["Synthetic", "expected_auc", "synthetic"]

BIAS = -0.5  # about 40 % clicks, with the default ids
PAIR_SCALE = 1.0  # standard deviation of the logit's pairwise part
FIRST_ORDER_SCALE = 1.0  # standard deviation of its first-order part
DENSE_SCALE = 0.5  # standard deviation of its dense part

RATE_ROWS, RATE_BATCH = 131_072, 8_192  # sample for the bias of a `positive_rate`

_LATENT, _FIRST = 0, 1  # use of a hash


def synthetic(
    rows: int,
    *,
    id_features: int = 12,
    ids_per_feature: int | Sequence[int] = 100_000,
    zipf: float | Sequence[float] = 1.05,
    latent_dim: int = 2,
    pairs: int | None = None,
    dense_features: int = 0,
    days: int = 1,
    drift: float = 0.0,
    extra_id_features: int = 0,
    seed: int = 0,
    batch_size: int = 1024,
    dim: int = 16,
    drop_last: bool = False,
    shard: tuple[int, int] = (0, 1),
    positive_rate: float | None = None,
) -> Synthetic:
    """Generates a click log of any length whose best possible AUC is known.

    Each feature draws its ids independently from a Zipf distribution. Each id has a latent vector u and a first-order
    effect w, fixed by hashes of (seed, feature, id), so memory stays bounded. The logit of a click is

        bias + a * (sum over pairs i, j of features of <u_i, u_j>) + b * (sum of w_i) + c * <dense, v>,

    scaled so that the pairwise and the first-order part each have variance 1 (over uniform ids), the dense part 0.25.
    Extra features carry no information: uniform ids below 2**63, as in the Criteo-Syn data sets of the Persia paper
    (section 6). Batch k of an epoch depends on (seed, epoch, k) only. Each epoch has new rows of the same distribution,
    so an `epoch` that is not trained on is a test set.

    With the defaults, the best AUC is about 0.80. Plain PyTorch reached the following on it (DeepFM with embeddings of
    16 and layers of 256 and 128, one pass, Adagrad 0.05 from accumulators of 0.01 on embeddings, Adam 1e-3 on the
    network, batch 1024, one seed; AUC on another epoch):

    - 100 ids per feature: 0.015 below the best after 1 million rows, 0.008 after 1.5, 0.005 after 3;
      with batches of 256 0.008 after 1 million.
    - 100,000 ids per feature, 3 million rows: 0.691 of 0.796; with embedding gradients 4 batches late 0.686, with
      dense gradients 8 late as well 0.683. Such a model is still learning fast, so it pays for every delay.
    - the same with `pairs=12, latent_dim=4`: 0.668 of 0.798; 4 late 0.667, dense 8 late as well 0.666.

    These AUCs are measured after training. Progressive AUC suffers more from a delay, which slows the start. The effect
    depends on the initial values of rows (here uniform in +-0.01) more than on the data; see docs/concepts/modes.md.

    Args:
        rows: rows of one epoch.
        id_features: features id_0, id_1, ... that the label depends on.
        ids_per_feature: ids are 0 (the most frequent) to this minus 1. A sequence has one number for each feature.
        zipf: exponent; 0 is uniform. A sequence has one exponent for each feature.
        latent_dim: length of u.
        pairs: number of random pairs of features that interact; None for all. All pairs form a factorization machine
            with embeddings of length latent_dim, and are easy for such a model. Few pairs need a network.
        dense_features: standard normal columns dense_0, dense_1, ...
        days: number of days over which the rows are spread evenly, in order.
        drift: angle in radians by which u and w turn each day towards other fixed vectors; 0 is stationary, and pi / 2
            gives new click probabilities every day.
        extra_id_features: features extra_0, extra_1, ... of random ids.
        seed: seed of the click probabilities and the rows.
        batch_size: samples per batch.
        dim: length of all embeddings in the schema.
        drop_last: drop a last batch that is not full.
        shard: (index, count): only batches i with i % count == index; the others are not generated.
        positive_rate: expected fraction of clicks, between 0 and 1. The bias of the logit is solved for it once, from a
            sample of rows over all days, and is the same in all epochs and shards. None keeps a bias of -0.5, which
            gives about 40 % clicks.

    Raises:
        ConfigError: an argument is out of range.
    """
    return Synthetic(
        rows,
        id_features,
        tuple(ids_per_feature) if isinstance(ids_per_feature, Sequence) else ids_per_feature,
        tuple(zipf) if isinstance(zipf, Sequence) else zipf,
        latent_dim,
        pairs,
        dense_features,
        days,
        drift,
        extra_id_features,
        seed,
        batch_size,
        dim,
        drop_last,
        shard,
        positive_rate,
    )


@dataclass(frozen=True)
class Synthetic:
    """The reader that `synthetic` returns. Its fields are the function's arguments, with `share` for `shard`."""

    new_rows_each_epoch: ClassVar[bool] = True
    """No pass repeats rows of another, so metrics of later passes are progressive, too."""

    rows: int
    id_features: int
    ids_per_feature: int | tuple[int, ...]
    zipf: float | tuple[float, ...]
    latent_dim: int
    pairs: int | None
    dense_features: int
    days: int
    drift: float
    extra_id_features: int
    seed: int
    batch_size: int
    dim: int
    drop_last: bool
    share: tuple[int, int]
    positive_rate: float | None = None

    def __post_init__(self) -> None:
        lows = {"rows": 1, "id_features": 1, "ids_per_feature": 1, "zipf": 0, "latent_dim": 1, "dense_features": 0}
        lows |= {"days": 1, "drift": 0, "extra_id_features": 0, "seed": 0, "batch_size": 1}
        for name, low in lows.items():
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            kinds = (int, float) if name in ("zipf", "drift") else (int, np.integer)
            if any(isinstance(one, bool) or not isinstance(one, kinds) for one in values):
                what = "number" if float in kinds else "whole number"
                raise ConfigError(f"synthetic: {name} = {value!r} is not a {what} of at least {low}.", field=name)
            if min(values, default=low) < low:
                raise ConfigError(f"synthetic: {name} = {value} must be at least {low}.", field=name)
            if isinstance(value, tuple) and len(value) != self.id_features:
                raise ConfigError(
                    f"synthetic: {name} has {len(value)} entries for id_features = {self.id_features}. Pass one "
                    "number for all features, or one for each.",
                    field=name,
                )
        if self.positive_rate is not None and not 0 < self.positive_rate < 1:
            raise ConfigError(
                f"synthetic: positive_rate = {self.positive_rate} must be between 0 and 1; or None.",
                field="positive_rate",
            )
        if self.pairs is not None and not 0 <= self.pairs <= self.id_features * (self.id_features - 1) // 2:
            raise ConfigError(
                f"synthetic: pairs = {self.pairs} is not between 0 and the number of pairs of features; or None.",
                field="pairs",
            )
        if not 0 <= self.share[0] < self.share[1]:
            raise ConfigError(f"shard = {self.share} is not (index, count) with 0 <= index < count.", field="shard")

    @cached_property
    def schema(self) -> Schema:
        """The schema: features id_0.., extra_0.., dense_0.., label `click`."""
        names = [f"id_{i}" for i in range(self.id_features)] + [f"extra_{i}" for i in range(self.extra_id_features)]
        dense = [f"dense_{i}" for i in range(self.dense_features)]
        return Schema([IdFeature(n, dim=self.dim) for n in names], dense_features=dense, labels=["click"])

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Iterates over one pass. Skipping the first `start` batches is free. Each epoch has new rows."""
        index, count = self.share
        stop = self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)
        for number in range(start * count + index, stop, count):
            yield self._batch(epoch, number)[0]

    def __iter__(self) -> Iterator[Batch]:
        """Iterates over the first pass."""
        return self.batches()

    def fingerprint(self) -> SourceFingerprint:
        """Returns the arguments; see `persia.services.Fingerprinted`."""
        order = ("batch_size", "share")
        names = [f.name for f in dataclasses.fields(self) if f.name not in (*order, "dim", "drop_last")]
        text = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        arguments = SourceFingerprint("synthetic", (SourcePart(f"synthetic({text})"),))
        return arguments.ordered(**{name: getattr(self, name) for name in order})

    def shard(self, index: int, count: int) -> Synthetic:
        """Returns a reader of the batches with number % count == index; the others are not generated."""
        return replace(self, share=share_of(self.share, index, count))

    def best_auc(self, rows: int = 1_000_000, *, epoch: int = 0) -> float:
        """Returns the expected AUC of the true click probabilities on the first `rows` rows of a pass.

        No model can be expected to do better, as labels are drawn from these probabilities.
        """
        numbers = range(-(-min(rows, self.rows) // self.batch_size))
        return expected_auc(np.concatenate([self._batch(epoch, n)[1] for n in numbers])[:rows])

    def probabilities(self, epoch: int, number: int) -> Floats:
        """Returns the true click probabilities [batch] of batch `number`."""
        return self._batch(epoch, number)[1]

    def _batch(self, epoch: int, number: int) -> tuple[Batch, Floats]:
        first = number * self.batch_size
        n = min(self.batch_size, self.rows - first)
        rng = np.random.Generator(np.random.PCG64((self.seed, epoch, number)))
        day = (np.arange(first, first + n) * self.days // self.rows).astype(np.int32)
        ids = self._ids(rng, n)
        dense = rng.standard_normal((n, self.dense_features), np.float32)
        logit = self._logit(ids, day, self._bias) + dense @ self._dense_weights
        probability: Floats = (1.0 / (1.0 + np.exp(-logit))).astype(np.float32)
        labels = (rng.random(n, np.float32) < probability).astype(np.float32)
        columns = {f"id_{i}": IdColumn(ids[i]) for i in range(self.id_features)}
        extra = rng.integers(0, 1 << 63, (self.extra_id_features, n), np.uint64)
        columns |= {f"extra_{i}": IdColumn(extra[i]) for i in range(self.extra_id_features)}
        return Batch(columns, dense, labels[:, None], day), probability

    def _ids(self, rng: np.random.Generator, n: int) -> NDArray[np.uint64]:
        """Samples ids [features, n]."""
        if len(self._ranks) == 1:
            return self._ranks[0].sample(rng, self.id_features * n).view(np.uint64).reshape(self.id_features, n)
        return np.stack([ranks.sample(rng, n) for ranks in self._ranks]).view(np.uint64)

    @cached_property
    def _ranks(self) -> list[Zipf]:
        """Returns the distribution of the ids of each feature, or a single one that all features share."""
        sizes, exponents = self.ids_per_feature, self.zipf
        sizes = sizes if isinstance(sizes, tuple) else (sizes,) * self.id_features
        exponents = exponents if isinstance(exponents, tuple) else (exponents,) * self.id_features
        pairs = list(zip(sizes, exponents, strict=True))
        return [Zipf(*pair) for pair in (pairs if len(set(pairs)) > 1 else pairs[:1])]

    # --- probabilities -------------------------------------------------------------------------------------------

    @cached_property
    def _bias(self) -> float:
        """Returns the bias at which a sample of rows has the mean probability `positive_rate`, by bisection."""
        if self.positive_rate is None:
            return BIAS
        rng = np.random.Generator(np.random.PCG64((self.seed, 0, 0, 3)))  # No batch has these numbers.
        parts = []
        for _ in range(0, RATE_ROWS, RATE_BATCH):
            day = rng.integers(0, self.days, RATE_BATCH, np.int32)
            dense = rng.standard_normal((RATE_BATCH, self.dense_features), np.float32) @ self._dense_weights
            parts.append(self._logit(self._ids(rng, RATE_BATCH), day, 0.0) + dense)
        logits = np.concatenate(parts).astype(np.float64)
        low, high = -50.0 - logits.max(), 50.0 - logits.min()
        while high - low > 1e-9:
            middle = (low + high) / 2
            if (1.0 / (1.0 + np.exp(-logits - middle))).mean() < self.positive_rate:
                low = middle
            else:
                high = middle
        return float(low)

    @cached_property
    def _pairs(self) -> NDArray[np.int64]:
        """Returns the pairs of features that interact, [2, pairs]."""
        all_pairs: NDArray[np.int64] = np.stack(np.triu_indices(self.id_features, 1))
        if self.pairs is None:
            return all_pairs
        return all_pairs[:, np.random.default_rng((self.seed, 1)).permutation(all_pairs.shape[1])[: self.pairs]]

    @cached_property
    def _dense_weights(self) -> Floats:
        weights = np.random.default_rng((self.seed, 2)).standard_normal(self.dense_features)
        scaled: Floats = (weights * (DENSE_SCALE / max(self.dense_features, 1) ** 0.5)).astype(np.float32)
        return scaled

    def _logit(self, ids: NDArray[np.uint64], day: Int32Array, bias: float) -> Floats:
        latent = self._factors(ids, day, _LATENT, self.latent_dim)
        left, right = self._pairs
        if self.pairs is None:
            # The sum over i < j of <u_i, u_j> is half of |sum of u_i|^2 - sum of |u_i|^2.
            total = latent.sum(axis=0)
            pairs = 0.5 * (np.einsum("nd,nd->n", total, total) - np.einsum("fnd,fnd->n", latent, latent))
        else:
            pairs = np.einsum("pnd,pnd->n", latent[left], latent[right])
        first = self._factors(ids, day, _FIRST, 1).sum(axis=(0, 2))
        pair_scale = PAIR_SCALE / max(self.latent_dim * len(left), 1) ** 0.5
        logit: Floats = bias + pair_scale * pairs + (FIRST_ORDER_SCALE / self.id_features**0.5) * first
        return logit

    def _factors(self, ids: NDArray[np.uint64], day: Int32Array, use: int, dim: int) -> Floats:
        """Returns factors [features, n, dim] of mean 0 and variance 1, rotated by `drift` radians per day."""
        factors = self._hashed(ids, 2 * use, dim)
        if self.drift == 0.0:
            return factors
        angle = (self.drift * day).astype(np.float32)[:, None]
        factors *= np.cos(angle)
        factors += np.sin(angle) * self._hashed(ids, 2 * use + 1, dim)
        return factors

    def _hashed(self, ids: NDArray[np.uint64], use: int, dim: int) -> Floats:
        """Returns uniform numbers [features, n, dim] of variance 1, keyed by (seed, feature, id); 4 per 64-bit hash."""
        parts: list[NDArray[np.uint16]] = []
        for word in range(-(-dim // 4)):
            keys = np.random.SeedSequence((self.seed, use, word)).generate_state(self.id_features, np.uint64)
            hashes = _mix(ids, keys[:, None].astype(np.uint64))
            parts.append(hashes.astype("<u8", copy=False).view("<u2").reshape(*ids.shape, 4))
        halves = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
        spread = np.float32(12**0.5 / 65_536)
        numbers: Floats = (halves[..., :dim].astype(np.float32) - np.float32(32_767.5)) * spread
        return numbers


def _mix(ids: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes ids by the keyed finaliser of splitmix64."""
    x = ids * np.uint64(0x9E3779B97F4A7C15) + keys
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def expected_auc(probabilities: Floats) -> float:
    """Returns the expected AUC, over random labels, of scoring rows by their true probabilities [n].

    The pair (i, j) counts with weight p_i (1 - p_j), and half if both are equal. A row does not pair with itself.
    """
    p = np.sort(probabilities.astype(np.float64))
    below = np.concatenate(([0.0], np.cumsum(1 - p)))
    first, last = np.searchsorted(p, p, "left"), np.searchsorted(p, p, "right")
    self_pairs = p * (1 - p)
    won = p @ ((below[first] + below[last]) / 2) - self_pairs.sum() / 2
    return float(won / (p.sum() * (1 - p).sum() - self_pairs.sum()))
