"""Tensors that lie one behind the other in one storage, taken as one: on a GPU each operation is a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

__all__ = ["joined", "of_one_width", "together"]


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
