"""Hashes and start values of the native store, in plain Python integers."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from persia.store.table_config import TableConfig

__all__ = [
    "GOLDEN",
    "MASK",
    "Sketch",
    "admission_draw",
    "initial_embedding",
    "mix64",
    "random_bits",
    "row_key",
    "shard_of",
]

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
F = np.float32


def mix64(x: int) -> int:
    """Finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def shard_of(id_: int, shards: int) -> int:
    """Shard of an id."""
    return mix64((id_ + GOLDEN) & MASK) & (shards - 1)


def _hash_name(name: str) -> int:
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return mix64(h)


def row_key(seed: int, name: str, id_: int) -> int:
    """Key of the random numbers of an id."""
    return mix64(mix64((seed + _hash_name(name)) & MASK) ^ mix64(id_))


def random_bits(key: int, counter: int) -> int:
    """Number of this position in the random sequence of a key: 64 bits."""
    return mix64((key + (counter + 1) * GOLDEN) & MASK)


def admission_draw(config: TableConfig, id_: int, occurrence: int) -> float:
    """Uniform in [0, 1), keyed by (seed, table, id, occurrence)."""
    key = row_key(config.seed ^ MASK, config.name, id_)
    return (random_bits(key, occurrence) >> 11) * 2.0**-53


def initial_embedding(config: TableConfig, id_: int) -> NDArray[np.float32]:
    """First values of the row of an id, float32 [dim]."""
    if config.initializer == "zeros":
        return np.zeros(config.dim, F)
    key = row_key(config.seed, config.name, id_)
    halves: list[int] = []
    for pair in range((config.dim + 1) // 2):
        bits = random_bits(key, pair)
        halves += [(bits & 0xFFFFFFFF) >> 8, bits >> 40]
    a, b = (F(value) for value in config.initial_range)
    if config.initializer == "normal":
        return _normal(halves, float(a), float(b))[: config.dim]
    return a + (b - a) * (np.array(halves[: config.dim], F) * F(2.0**-24))


def _normal(halves: list[int], mean: float, deviation: float) -> NDArray[np.float32]:
    """Box and Muller 1958."""
    values: list[float] = []
    for first, second in zip(halves[::2], halves[1::2], strict=True):
        radius = math.sqrt(-2.0 * math.log((first + 1) * 2.0**-24))
        angle = 2.0 * math.pi * (second * 2.0**-24)
        values += [mean + deviation * (radius * math.cos(angle)), mean + deviation * (radius * math.sin(angle))]
    return np.array(values).astype(F)


class Sketch:
    """Count-min sketch with conservative update: 4 rows of saturating 16-bit counters."""

    ROWS = 4
    MAX = 65535

    def __init__(self, capacity: int) -> None:
        width = 1 << max(0, capacity - 1).bit_length()
        self.counters = np.zeros((self.ROWS, min(max(width, 1 << 10), 1 << 20)), np.uint16)

    def add(self, id_: int) -> int:
        """Counts an occurrence; the count includes it."""
        h = mix64(id_ ^ 0x5DEECE66D1CE4E5B)
        step = (h >> 32) | 1
        width = self.counters.shape[1]
        cells = [(row, (h + row * step) & (width - 1)) for row in range(self.ROWS)]
        least = min(int(self.counters[cell]) for cell in cells)
        if least == self.MAX:
            return self.MAX
        for cell in cells:
            self.counters[cell] = max(int(self.counters[cell]), least + 1)
        return least + 1
