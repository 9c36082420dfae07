"""Arrays by name in one buffer, so that the cost of a message does not depend on the number of tables.

See `docs/decisions/0004-packed-arrays.md`.
"""

from __future__ import annotations

import itertools
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from collections.abc import Set as AbstractSet
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["Gradients", "Packed", "PackedGradients"]

S = TypeVar("S", bound=np.generic)
S_co = TypeVar("S_co", bound=np.generic, covariant=True)


class Packed(Mapping[str, "NDArray[S_co]"], Generic[S_co]):
    """Arrays of one dtype by name, concatenated in one buffer. Read-only; returns views.

    The arrays have shape `[n]`, or `[n, width]` with a width for each array. The constructor does not check that counts
    and widths match the buffer; `from_wire` does.

    Args:
        names: distinct names.
        counts: n of each array.
        buffer: values, `[sum of n * width]`, contiguous.
        widths: width of each array; None if the arrays have one dimension.
    """

    __slots__ = ("_by_name", "buffer", "counts", "names", "widths")

    def __init__(
        self, names: Sequence[str], counts: Sequence[int], buffer: NDArray[S_co], widths: Sequence[int] | None = None
    ) -> None:
        self.names = names
        self.counts = counts
        self.buffer = buffer
        self.widths = widths
        self._by_name: dict[str, NDArray[S_co]] | None = None  # Created by the first access by name.

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[S]], dtype: type[S]) -> Packed[S]:
        """Packs arrays by copying them; returns packed arrays unchanged.

        Raises:
            ValueError: they have another dtype, or do not all have one dimension or all two.
        """
        required = np.dtype(dtype)
        if isinstance(arrays, Packed):
            if arrays.buffer.dtype != required:
                raise ValueError(f"expected arrays of {required}, got {arrays.buffer.dtype}")
            return arrays
        for name, array in arrays.items():
            if array.dtype != required:
                raise ValueError(f"{name!r}: expected an array of {required}, got {array.dtype}")
        unpacked = list(arrays.values())
        dimensions = {array.ndim for array in unpacked}
        if dimensions - {1, 2} or len(dimensions) > 1:
            raise ValueError(f"expected arrays of one dimension, or of two, got {sorted(dimensions)}")
        flat = [array.reshape(-1) for array in unpacked]
        buffer = np.concatenate(flat) if flat else np.empty(0, required)
        widths = [array.shape[1] for array in unpacked] if dimensions == {2} else None
        return Packed(list(arrays), [len(array) for array in unpacked], buffer, widths)

    @staticmethod
    def nbytes_of(arrays: Mapping[str, NDArray[Any]]) -> int:
        """Returns the bytes of arrays, without unpacking packed ones."""
        return arrays.buffer.nbytes if isinstance(arrays, Packed) else sum(array.nbytes for array in arrays.values())

    @staticmethod
    def counts_of(arrays: Mapping[str, NDArray[Any]]) -> Sequence[int]:
        """Returns the length of each array, without unpacking packed ones."""
        return arrays.counts if isinstance(arrays, Packed) else [len(array) for array in arrays.values()]

    def arrays(self) -> list[NDArray[S_co]]:
        """Returns all arrays, in order."""
        if self.widths is None:
            ends = list(itertools.accumulate(self.counts))
            return [self.buffer[end - count : end] for end, count in zip(ends, self.counts, strict=True)]
        result = []
        start = 0
        for count, width in zip(self.counts, self.widths, strict=True):
            end = start + count * width
            result.append(self.buffer[start:end].reshape(count, width))
            start = end
        return result

    def __getitem__(self, name: str) -> NDArray[S_co]:
        return self._views()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"<Packed {self.buffer.dtype}: {dict(zip(self.names, self.counts, strict=True))}>"

    def items(self) -> ItemsView[str, NDArray[S_co]]:
        """Returns names and arrays, in order."""
        return self._views().items()

    def values(self) -> ValuesView[NDArray[S_co]]:
        """Returns the arrays, in order."""
        return self._views().values()

    def _views(self) -> dict[str, NDArray[S_co]]:
        if self._by_name is None:
            self._by_name = dict(zip(self.names, self.arrays(), strict=True))
        return self._by_name

    def to_wire(self) -> list[object]:
        """Returns the message form, with one array."""
        return [self.names, self.counts, self.widths, self.buffer]

    @classmethod
    def from_wire(cls, value: object, dtypes: AbstractSet[np.dtype[Any]]) -> Packed[Any]:
        """Restores arrays from `to_wire`; also accepts a dict of arrays, and packs it.

        Args:
            value: decoded message.
            dtypes: accepted dtypes.

        Raises:
            ValueError: the value has neither form, or names, counts and buffer do not match.
        """
        if isinstance(value, dict):
            if not all(isinstance(n, str) and isinstance(a, np.ndarray) for n, a in value.items()):
                raise ValueError("expected arrays by name")
            kinds = {array.dtype for array in value.values()} or set(dtypes)
            _check_dtypes(kinds, dtypes)
            return cls.of(value, next(iter(kinds)).type)
        if not isinstance(value, list) or len(value) != 4:
            raise ValueError("expected packed arrays: names, counts, widths, buffer")
        names, counts, widths, buffer = value
        if not _all(names, str) or not _sizes(counts) or len(counts) != len(names):
            raise ValueError("packed arrays need as many counts >= 0 as names")
        if len(set(names)) != len(names):
            raise ValueError("packed arrays have a name twice")
        if not isinstance(buffer, np.ndarray) or buffer.ndim != 1:
            raise ValueError("packed arrays need a buffer of one dimension")
        _check_dtypes({buffer.dtype}, dtypes)
        if widths is None:
            total = sum(counts)
        else:
            if not _sizes(widths) or len(widths) != len(names):
                raise ValueError("packed arrays need as many widths >= 0 as names")
            total = sum(count * width for count, width in zip(counts, widths, strict=True))
        if total != buffer.size:
            raise ValueError(f"packed arrays of {total} values, but a buffer of {buffer.size}")
        return cls(names, counts, buffer, widths)


def _check_dtypes(actual: AbstractSet[np.dtype[Any]], expected: AbstractSet[np.dtype[Any]]) -> None:
    if not actual <= expected:
        names = [" or ".join(sorted(map(str, kinds))) for kinds in (expected, actual)]
        raise ValueError(f"expected an array of {names[0]}, got {names[1]}")


def _all(values: object, kind: type) -> bool:
    return type(values) is list and all(type(value) is kind for value in values)


def _sizes(values: object) -> bool:
    # A numpy shape has signed 64 bits.
    return _all(values, int) and all(0 <= value < 1 << 63 for value in cast("list[int]", values))


class Gradients(NamedTuple):
    """Gradients of rows of one table.

    Attributes:
        ids: distinct ids, uint64 `[n]`.
        values: gradients, float32 `[n, dim]`.
    """

    ids: NDArray[np.uint64]
    values: NDArray[np.float32]


_IDS: AbstractSet[np.dtype[Any]] = frozenset({np.dtype(np.uint64)})
_ROWS: AbstractSet[np.dtype[Any]] = frozenset({np.dtype(np.float32)})


class PackedGradients(Mapping[str, Gradients]):
    """`Gradients` by table, in two buffers.

    The receiver checks that rows and ids match.

    Args:
        ids: ids by table.
        rows: gradients of their rows by table, in the same order.
    """

    __slots__ = ("ids", "rows")

    def __init__(self, ids: Packed[np.uint64], rows: Packed[np.float32]) -> None:
        self.ids = ids
        self.rows = rows

    @classmethod
    def of(cls, gradients: Mapping[str, Gradients]) -> PackedGradients:
        """Packs gradients by copying them; returns packed ones unchanged. Raises ValueError like `Packed.of`."""
        if isinstance(gradients, PackedGradients):
            return gradients
        return cls(
            Packed.of({name: part.ids for name, part in gradients.items()}, np.uint64),
            Packed.of({name: part.values for name, part in gradients.items()}, np.float32),
        )

    def __getitem__(self, name: str) -> Gradients:
        return Gradients(self.ids[name], self.rows[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def to_wire(self) -> list[object]:
        """Returns the message form, with two arrays."""
        return [self.ids.to_wire(), self.rows.to_wire()]

    @classmethod
    def from_wire(cls, value: object) -> PackedGradients:
        """Restores gradients from `to_wire`; also accepts a dict of pairs of arrays. Raises like `Packed.from_wire`."""
        if isinstance(value, dict):
            if not all(isinstance(pair, list) and len(pair) == 2 for pair in value.values()):
                raise ValueError("expected ids and rows by table")
            value = [{name: pair[place] for name, pair in value.items()} for place in (0, 1)]
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError("expected packed gradients: ids, rows")
        ids, rows = value
        return cls(Packed.from_wire(ids, _IDS), Packed.from_wire(rows, _ROWS))
