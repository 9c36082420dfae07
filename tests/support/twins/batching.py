"""The slow, readable twin of :mod:`persia.batching`: the same results, bit by bit, with plain loops.

Used by tests, and to be read first. Arguments and results are as there, less `pool` and `scratch`; valid input only.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from persia.batching.duplicates import UniqueIds
from persia.batching.pooling import FeaturePlan, Pooled
from persia.batching.row_copies import CopiedTable
from persia.batching.texts import TextBuffers
from persia.schema import IdKind
from persia.types import BoolArray, BucketMap, Floats, Halves, Ids, Int32Array, Int64Array, Inverse
from persia.types.packed import Packed
from support.twins.random_rows import GOLDEN, mix64

__all__ = [
    "ChangeFilter",
    "average_gradients",
    "bucket",
    "decode_rows",
    "encode_rows",
    "group_by_owner",
    "hash_cross",
    "keep",
    "merge_gradients",
    "owner",
    "plan_copies",
    "pool_backward",
    "pool_forward",
    "put_places",
    "take_places",
    "text_ids",
    "text_numbers",
    "unique",
    "xxh64",
]

S = TypeVar("S", bound=np.generic)


def unique(groups: Sequence[Sequence[Ids]]) -> list[UniqueIds]:
    """Twin of :func:`persia.batching.unique`."""
    result: list[UniqueIds] = []
    for features in groups:
        place: dict[int, int] = {}
        inverses = [[place.setdefault(id_, len(place)) for id_ in ids.tolist()] for ids in features]
        found: list[Inverse] = [
            np.array(inverse, np.uint16) if len(place) <= 65_536 else np.array(inverse, np.uint32)
            for inverse in inverses
        ]
        result.append((np.array(list(place), np.uint64), found))
    return result


def merge_gradients(parts: Sequence[tuple[Ids, Floats]]) -> tuple[Ids, Floats]:
    """Twin of :func:`persia.batching.merge_gradients`."""
    ((ids, inverses),) = unique([[ids for ids, _ in parts]])
    merged = np.zeros((len(ids), parts[0][1].shape[1]), np.float32)
    for (_, gradients), inverse in zip(parts, inverses, strict=True):
        for row, gradient in zip(inverse, gradients, strict=True):
            merged[row] += gradient
    return ids, merged


def encode_rows(rows: Floats) -> tuple[Halves, Floats]:
    """Twin of :func:`persia.batching.encode_rows`."""
    largest = np.fmax.reduce(np.abs(rows), axis=1, initial=np.float32(0))
    scales = np.where(largest == 0, np.float32(1), np.maximum(largest / np.float32(2**15), np.float32(2.0**-126)))
    with np.errstate(invalid="ignore"):
        return (rows / scales[:, None]).astype(np.float16), scales


def decode_rows(halves: Halves, scales: Floats) -> Floats:
    """Twin of :func:`persia.batching.decode_rows`."""
    with np.errstate(invalid="ignore"):
        return halves.astype(np.float32) * scales[:, None]


def take_places(values: Packed[S], places: Packed[np.uint32]) -> Packed[S]:
    """Twin of :func:`persia.batching.take_places`."""
    taken = [value for table in values for value in (values[table][place] for place in places[table].tolist())]
    return Packed(values.names, places.counts, np.array(taken, values.buffer.dtype))


def put_places(rows: Packed[np.float32], places: Packed[np.uint32], fresh: Packed[np.float32]) -> None:
    """Twin of :func:`persia.batching.put_places`."""
    for table in rows:
        for place, row in zip(places[table].tolist(), fresh[table], strict=True):
            rows[table][place] = row


def keep(values: Packed[S], kept: BoolArray) -> Packed[S]:
    """Twin of :func:`persia.batching.keep`."""
    flags = iter(kept.tolist())
    parts = {table: [row for row in array if next(flags)] for table, array in values.items()}
    flat = [value for part in parts.values() for row in part for value in np.ravel(row)]
    counts = [len(part) for part in parts.values()]
    return Packed(values.names, counts, np.array(flat, values.buffer.dtype), values.widths)


def plan_copies(
    tables: Sequence[CopiedTable], step: int, applied: int, limit: int, places: Int32Array
) -> tuple[list[int], int]:
    """Twin of :func:`persia.batching.plan_copies`."""
    hits: list[tuple[int, int]] = []
    misses: list[tuple[int, int]] = []
    counts: list[int] = []
    oldest = 0
    for table in tables:
        slots = [(id_ * 0x9E3779B97F4A7C15 % (1 << 64) >> 32) % len(table.slot_ids) for id_ in table.ids.tolist()]
        before = len(hits)
        for row, (id_, slot) in enumerate(zip(table.ids, slots, strict=True)):
            lacking = step + 1 - int(table.slot_steps[slot])
            table.wanted[row] = not (table.slot_steps[slot] and table.slot_ids[slot] == id_ and lacking <= limit)
            if not table.wanted[row]:
                hits.append((table.first_row + row, table.first_slot + slot))
                oldest = max(oldest, lacking)
        counts.append(len(hits) - before)
        missed = [(row, slot) for row, slot in enumerate(slots) if table.wanted[row]]
        for row, slot in missed:
            table.slot_ids[slot], table.slot_steps[slot] = table.ids[row], applied + 1
        for row, slot in missed:
            has = table.slot_ids[slot] == table.ids[row]
            misses.append((table.first_row + row, table.first_slot + slot if has else table.spare))
    places[:] = [place for pairs in (hits, misses) for column in (0, 1) for place in (pair[column] for pair in pairs)]
    return counts, oldest


class ChangeFilter:
    """Twin of :class:`persia.batching.ChangeFilter`."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._newest: dict[int, int] = {}  # Version by slot.

    def _slots(self, table: int, ids: Ids) -> list[int]:
        return [((id_ + (table + 1) * GOLDEN) * GOLDEN & _WORD) >> (64 - self._bits) for id_ in ids.tolist()]

    def mark(self, tables: Sequence[int], ids: Packed[np.uint64], version: int) -> None:
        for table, marked in zip(tables, ids.arrays(), strict=True):
            for slot in self._slots(table, marked):
                self._newest[slot] = max(self._newest.get(slot, 0), version)

    def changed(self, tables: Sequence[int], ids: Packed[np.uint64], since: int) -> dict[str, list[int]]:
        result = {}
        for name, table, asked in zip(ids.names, tables, ids.arrays(), strict=True):
            slots = self._slots(table, asked)
            result[name] = [place for place, slot in enumerate(slots) if self._newest.get(slot, 0) > since]
        return result


def bucket(table: str, id_: int) -> int:
    """The bucket of an id."""
    return mix64(xxh64(table.encode()) ^ id_) * 4096 >> 64


def owner(table: str, id_: int, buckets: BucketMap) -> int:
    """The number of the embedding PS that owns an id."""
    end = 0
    for server, count in buckets.runs:
        end += count
        if bucket(table, id_) < end:
            return server
    raise AssertionError("the map lacks buckets")


def group_by_owner(tables: Sequence[str], found: Sequence[UniqueIds], buckets: BucketMap) -> list[Int64Array]:
    """Twin of :func:`persia.batching.group_by_owner`."""
    result: list[Int64Array] = []
    for table, (ids, inverses) in zip(tables, found, strict=True):
        owners = np.array([owner(table, id_, buckets) for id_ in ids.tolist()], np.int64)
        order = np.argsort(owners, kind="stable")  # Place, of the id that is to be there.
        for inverse in inverses:
            inverse[:] = np.argsort(order)[inverse]
        ids[:] = ids[order]
        result.append(np.searchsorted(owners[order], np.arange(buckets.servers + 1)).astype(np.int64))
    return result


def average_gradients(
    parts: Sequence[tuple[Ids, Floats]], weights: Sequence[float], total: float | None
) -> tuple[Ids, Floats]:
    """Twin of :func:`persia.batching.average_gradients`."""
    divisor: dict[int, float] = {}
    having: dict[int, int] = {}
    for (ids, _), weight in zip(parts, weights, strict=True):
        for id_ in ids.tolist():
            divisor[id_] = total if total is not None else divisor.get(id_, 0.0) + weight
            having[id_] = having.get(id_, 0) + 1
    average = {id_: np.zeros(parts[0][1].shape[1], np.float32) for id_ in divisor}
    alone = {id_ for id_, count in having.items() if count == 1 and total is None}
    for (ids, gradients), weight in zip(parts, weights, strict=True):
        for id_, gradient in zip(ids.tolist(), gradients, strict=True):
            average[id_] += gradient if id_ in alone else np.float32(weight / weights[0]) * gradient
    for id_ in average.keys() - alone:
        average[id_] *= np.float32(weights[0] / divisor[id_])
    return np.array(list(average), np.uint64), np.array(list(average.values()), np.float32)


def _bags(plan: FeaturePlan) -> Iterator[tuple[list[int], list[np.float32]]]:
    """For each sample the rows of its values, truncated, and their weights."""
    offsets = plan.offsets if plan.offsets is not None else np.arange(len(plan.inverse) + 1)
    weights = np.ones(len(plan.inverse), np.float32) if plan.weights is None else plan.weights
    for begin, end in itertools.pairwise(offsets):
        bag = [int(row) for row in plan.inverse[begin:end][: plan.max_length]]
        yield bag, list(weights[begin : begin + len(bag)])


def _divisor(plan: FeaturePlan, weights: list[np.float32]) -> np.float32:
    if plan.pooling == "mean":
        return np.float32(sum(map(float, weights)))
    if plan.pooling == "sqrtn":
        return np.float32(math.sqrt(sum(float(w) ** 2 for w in weights)))
    return np.float32(1)


def pool_forward(rows: Sequence[Floats], plans: Sequence[FeaturePlan]) -> Pooled:
    """Twin of :func:`persia.batching.pool_forward`."""
    pooled = Pooled([], [])
    for plan in plans:
        table = rows[plan.table]
        if plan.pooling is None:
            assert plan.max_length is not None
            values = np.zeros((plan.batch, plan.max_length, table.shape[1]), np.float32)
            mask: BoolArray | None = np.zeros((plan.batch, plan.max_length), np.bool_)
            assert mask is not None
            for sample, (bag, _) in enumerate(_bags(plan)):
                values[sample, : len(bag)] = table[bag]
                mask[sample, : len(bag)] = True
        else:
            values = np.zeros((plan.batch, table.shape[1]), np.float32)
            mask = None
            for sample, (bag, weights) in enumerate(_bags(plan)):
                divisor = _divisor(plan, weights)
                if not bag or divisor == 0:
                    continue
                total = table[bag[0]] * weights[0]
                for row, weight in zip(bag[1:], weights[1:], strict=True):
                    total += table[row] * weight
                values[sample] = total / divisor
        pooled.values.append(values)
        pooled.masks.append(mask)
    return pooled


def pool_backward(
    shapes: Sequence[tuple[int, int]], plans: Sequence[FeaturePlan], gradients: Sequence[Floats | None]
) -> list[Floats]:
    """Twin of :func:`persia.batching.pool_backward`."""
    out = [np.zeros(shape, np.float32) for shape in shapes]
    for plan, gradient in zip(plans, gradients, strict=True):
        if gradient is None:
            continue
        for sample, (bag, weights) in enumerate(_bags(plan)):
            divisor = _divisor(plan, weights)
            for position, (row, weight) in enumerate(zip(bag, weights, strict=True)):
                if plan.pooling is None:
                    out[plan.table][row] += gradient[sample, position]
                elif divisor != 0:
                    out[plan.table][row] += gradient[sample] / divisor * weight
    return out


_WORD = 2**64 - 1
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def _rotate(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (64 - bits))) & _WORD


def _round(total: int, word: int) -> int:
    return _rotate((total + word * _P2) & _WORD, 31) * _P1 & _WORD


def xxh64(data: bytes, seed: int = 0) -> int:
    """XXH64 of the bytes, by the steps of its specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md)."""
    at = 0
    if len(data) >= 32:
        sums = [(seed + _P1 + _P2) & _WORD, (seed + _P2) & _WORD, seed, (seed - _P1) & _WORD]
        while len(data) - at >= 32:
            sums = [_round(s, word) for s, word in zip(sums, struct.unpack_from("<4Q", data, at), strict=True)]
            at += 32
        total = sum(_rotate(s, bits) for s, bits in zip(sums, (1, 7, 12, 18), strict=True)) & _WORD
        for s in sums:
            total = ((total ^ _round(0, s)) * _P1 + _P4) & _WORD
    else:
        total = (seed + _P5) & _WORD
    total = (total + len(data)) & _WORD
    while len(data) - at >= 8:
        total = (_rotate(total ^ _round(0, struct.unpack_from("<Q", data, at)[0]), 27) * _P1 + _P4) & _WORD
        at += 8
    if len(data) - at >= 4:
        total = (_rotate(total ^ (struct.unpack_from("<I", data, at)[0] * _P1 & _WORD), 23) * _P2 + _P3) & _WORD
        at += 4
    for byte in data[at:]:
        total = _rotate(total ^ (byte * _P5 & _WORD), 11) * _P1 & _WORD
    total = (total ^ (total >> 33)) * _P2 & _WORD
    total = (total ^ (total >> 29)) * _P3 & _WORD
    return total ^ (total >> 32)


_WHOLE = re.compile(rb"[ \t]*((-?)(?:0|[1-9][0-9]*))(?:\.0+)?[ \t]*", re.ASCII)
_TRUTH = {b"true": 1, b"True": 1, b"TRUE": 1, b"false": 0, b"False": 0, b"FALSE": 0}
_MISSING = b"NA N/A n/a #N/A <NA> NULL Null null NaN nan NAN None none \\N".split(b" ")
_DECIMAL = re.compile(rb"\+?(-?)(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)


def _texts(texts: TextBuffers) -> list[bytes]:
    """Each text; a null as an empty one."""
    found = [texts.data[a:b].tobytes() for a, b in itertools.pairwise(texts.offsets)]
    if texts.validity is None:
        return found
    bits = np.unpackbits(texts.validity, bitorder="little")[texts.validity_start :]
    return [text if bit else b"" for text, bit in zip(found, bits, strict=False)]


def text_ids(texts: TextBuffers, kind: IdKind = "auto") -> list[int | None]:
    """Twin of :func:`persia.batching.text_ids`: None where there is no id; ValueError(position) in place of `bad`."""
    ids: list[int | None] = []
    for position, text in enumerate(_texts(texts)):
        match = _WHOLE.fullmatch(text)
        number = int(match[1]) if match else _TRUTH.get(text.strip(b" \t"), -1)
        if not text:
            ids.append(None)
        elif kind != "text" and 0 <= number <= _WORD:
            ids.append(number)
        elif kind != "number":
            ids.append(xxh64(match[1] if match and kind == "auto" else text))
        elif text.strip(b" \t") in (b"", *_MISSING):
            ids.append(None)
        else:
            raise ValueError(position)
    return ids


def _in_range(text: bytes) -> bool:
    """Whether a float64 can hold the number, neither as infinity nor, unless it is 0, as 0."""
    zero = not text.lower().split(b"e")[0].strip(b"+-.0")
    return math.isfinite(float(text)) and (zero or float(text) != 0)


def text_numbers(texts: TextBuffers) -> list[float | None]:
    """Twin of :func:`persia.batching.text_numbers`: None for missing; ValueError(position) where it has a `bad`."""
    numbers: list[float | None] = []
    for position, text in enumerate(_texts(texts)):
        text = text.strip(b" \t")
        if text in (b"", *_MISSING):
            numbers.append(None)
        elif text in _TRUTH:
            numbers.append(_TRUTH[text])
        elif _DECIMAL.fullmatch(text) and not text.startswith(b"+-") and _in_range(text):
            numbers.append(float(text))
        else:
            raise ValueError(position)
    return numbers


def hash_cross(columns: Sequence[Ids], *, seed: int = 0) -> Ids:
    """Twin of :func:`persia.batching.hash_cross`."""
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return np.array([xxh64(struct.pack(f"<{len(row)}Q", *row), seed) for row in rows], np.uint64)
