"""Tensors that lie one behind the other in one storage, taken as one: on a GPU each operation is a kernel.

The thread that launches them holds the interpreter, and so does the one that cuts a tensor into parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

__all__ = ["JoinedTensors", "joined", "of_one_width", "together"]


class JoinedTensors(Mapping[str, torch.Tensor]):
    """Tensors `[n, width]` by name, one behind the other in one tensor; read-only.

    Args:
        names: distinct names.
        counts: n of each tensor.
        widths: of each tensor.
        flat: all values, `[sum of n * width]`.
    """

    __slots__ = ("_by_name", "counts", "flat", "names", "widths")

    def __init__(self, names: Sequence[str], counts: Sequence[int], widths: Sequence[int], flat: torch.Tensor) -> None:
        self.names = names
        self.counts = counts
        self.widths = widths
        self.flat = flat
        self._by_name: dict[str, torch.Tensor] | None = None  # Created by the first access by name.

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def _views(self) -> dict[str, torch.Tensor]:
        if self._by_name is None:
            parts = self.flat.split([count * width for count, width in zip(self.counts, self.widths, strict=True)])
            shapes = zip(self.names, parts, self.counts, self.widths, strict=True)
            self._by_name = {name: part.view(count, width) for name, part, count, width in shapes}
        return self._by_name


def of_one_width(rows: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Returns the names of tables, grouped by the width of their rows."""
    groups: dict[int, list[str]] = {}
    for name, values in rows.items():
        groups.setdefault(values.shape[1], []).append(name)
    return list(groups.values())


def together(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the rows `[n, dim]` of tables of one width: a view where they lie one behind the other."""
    return joined(rows).view(-1, rows[0].shape[1])


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns all values in one dimension: a view if the tensors are contiguous in one storage, else a copy."""
    if not tensors:
        return torch.empty(0)
    first = tensors[0]
    base, end = first.untyped_storage().data_ptr(), first.storage_offset()
    start = end
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != base or tensor.storage_offset() != end or not tensor.is_contiguous():
            return torch.cat([tensor.reshape(-1) for tensor in tensors])
        end += tensor.numel()
    return first.as_strided((end - start,), (1,), start)
