"""Moves looked-up rows to the device and gradients back, without holding up the training thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from persia.errors import ConfigError

__all__ = ["CpuStaging", "CudaStaging", "Staging", "staging_for"]

Ready = Callable[[], None]
"""Called by the thread that will use the tensors, before it does."""

Then = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class Staging(Protocol):
    """How arrays of the host become tensors of a device and back."""

    device: torch.device

    def to_device(
        self, arrays: Mapping[str, NDArray[np.generic]], then: Then | None = None
    ) -> tuple[dict[str, torch.Tensor], Ready]:
        """Tensors on the device; call the second result in the using thread first.

        Args:
            arrays: on the host.
            then: what becomes of the tensors on the device, beside what it computes.
        """

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, Any]]:
        """Starts copying; the result blocks until the copies are there. Called by the training thread."""


class CpuStaging:
    """The host is the device: tensors and arrays share memory."""

    device = torch.device("cpu")

    def to_device(
        self, arrays: Mapping[str, NDArray[np.generic]], then: Then | None = None
    ) -> tuple[dict[str, torch.Tensor], Ready]:
        """Wraps the arrays."""
        # torch has no read-only tensors: it warns, and writing would be a fault.
        writable = {n: array if array.flags.writeable else array.copy() for n, array in arrays.items()}
        tensors = {name: torch.from_numpy(array) for name, array in writable.items()}
        return tensors if then is None else then(tensors), _nothing

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, Any]]:
        """Wraps the tensors."""
        arrays = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
        return lambda: arrays


class CudaStaging:
    """Pinned memory and one side stream per direction, so that copies overlap with computing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)

    def to_device(
        self, arrays: Mapping[str, NDArray[np.generic]], then: Then | None = None
    ) -> tuple[dict[str, torch.Tensor], Ready]:
        """Copies on the side stream; the using stream waits for an event, not the thread."""
        tensors: dict[str, torch.Tensor] = {}
        with torch.cuda.stream(self._up):
            for name, array in arrays.items():
                pinned = torch.from_numpy(array).pin_memory()
                tensors[name] = pinned.to(self.device, non_blocking=True)
            if then is not None:
                tensors = then(tensors)
            copied = torch.cuda.Event()
            copied.record(self._up)

        def ready() -> None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in tensors.values():
                # The caching allocator may not hand the memory out again before this stream has used it.
                tensor.record_stream(stream)

        return tensors, ready

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, Any]]:
        """Copies on the side stream, after what the training stream has queued."""
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        pinned: dict[str, torch.Tensor] = {}
        with torch.cuda.stream(self._down):
            for name, tensor in tensors.items():
                tensor.record_stream(self._down)
                pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                pinned[name].copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._down)

        def wait() -> dict[str, Any]:
            copied.synchronize()
            return {name: tensor.numpy() for name, tensor in pinned.items()}

        return wait


def staging_for(name: str) -> Staging:
    """The staging of a device.

    Raises:
        ConfigError: the device is unknown, or not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device = {name!r} is unknown; use cpu, cuda or cuda:N.", field="device") from error
    if device.type == "cpu":
        return CpuStaging()
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(f"device = {name!r} is not available here; use cpu.", field="device")
    return CudaStaging(device)


def _nothing() -> None:
    pass
