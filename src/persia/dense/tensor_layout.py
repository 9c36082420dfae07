"""Layout of tensors of any dtypes in one array of bytes, as sent between NN worker and dense PS."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from persia.errors import StoreError
from persia.types import Bytes, TensorSpec

__all__ = ["Layout", "spec_of"]

ALIGNMENT = 16
"""Alignment of each tensor in bytes."""


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Returns the spec of a tensor: everything except its values."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))


class Layout:
    """Positions of tensors in an array of bytes.

    Args:
        specs: specs of the tensors, in order.

    Raises:
        StoreError: a dtype is unknown.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = list(specs)
        self._places: list[tuple[int, int, torch.dtype, list[int]]] = []
        end = 0
        for spec in specs:
            dtype = getattr(torch, spec.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise StoreError(f"tensor {spec.name!r} has the unknown dtype {spec.dtype!r}.", tensor=spec.name)
            size = int(np.prod(spec.shape, dtype=np.int64)) * dtype.itemsize
            self._places.append((end, end + size, dtype, spec.shape))
            end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
        self.nbytes = end

    def views(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors as views of uint8 `[nbytes]` on any device."""
        if data.shape != (self.nbytes,):
            raise StoreError(
                f"The {len(self.specs)} tensors have {self.nbytes} bytes, got {tuple(data.shape)}. Use the same model "
                "on all NN workers and dense PSs."
            )
        return [data[start:end].view(dtype).view(shape) for start, end, dtype, shape in self._places]

    def pack(self, tensors: Sequence[torch.Tensor | None]) -> Bytes:
        """Copies tensors; None means zeros. Copies from a GPU to the host once."""
        device = next((t.device for t in tensors if t is not None), torch.device("cpu"))
        data = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        for view, tensor in zip(self.views(data), tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor.detach())
        return data.cpu().numpy()

    def unpack(self, data: Bytes, device: torch.device | None = None) -> list[torch.Tensor]:
        """Returns the tensors: views of the array, or of its copy on a device."""
        flat = torch.from_numpy(data if data.flags.writeable else data.copy())
        return self.views(flat if device is None or device.type == "cpu" else flat.to(device))
