"""Scales the gradients of all rows of a batch down to a global norm.

Numbers that are not finite do not count: PSs skip their rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from persia.nn.joined_tensors import joined
from persia.types import Packed

__all__ = ["clipped", "clipped_tensors"]


def clipped(gradients: Packed[np.float32], limit: float | None) -> Packed[np.float32]:
    """Scales gradients in place if their L2 norm exceeds the limit, and returns them; None is no limit."""
    if limit is not None:
        values = gradients.buffer.astype(np.float64)  # In which no square of a float32 overflows.
        norm = np.linalg.norm(np.where(np.isfinite(values), values, 0.0))
        if norm > limit:
            gradients.buffer *= np.float32(limit / norm)
    return gradients


def clipped_tensors(gradients: Mapping[str, torch.Tensor], limit: float) -> dict[str, torch.Tensor]:
    """Does the same on the device of tensors, at least one, without waiting for it."""
    parts = list(gradients.values())
    whole = joined(parts)
    values = whole.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    factor = (limit / torch.linalg.vector_norm(values)).clamp(max=1.0).float()
    for part in [whole] if whole.data_ptr() == parts[0].data_ptr() else parts:  # As one, where they are one.
        part.mul_(factor)
    return dict(gradients)
