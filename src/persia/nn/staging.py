"""Moves arrays between the host and the device of the network, in one block each way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from persia import batching
from persia.errors import ConfigError
from persia.memory import host_memory
from persia.nn.options import check_device

__all__ = [
    "CpuStaging",
    "CudaStaging",
    "Ready",
    "Staging",
    "Then",
    "array_block",
    "block_tensors",
    "copied_array",
    "nothing_to_do",
    "staging_for",
    "tensor_block",
]

Ready = Callable[[], None]
"""To be called by the thread that uses the tensors, before it does."""

Then = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class Staging(Protocol):
    """Moves arrays of the host to tensors of a device, and back."""

    device: torch.device

    @property
    def on_host(self) -> bool:
        """Whether tensors and arrays share memory, so that the native core can work on both."""

    def to_device(
        self, arrays: Mapping[str, NDArray[np.generic]], then: Then | None = None
    ) -> tuple[dict[str, torch.Tensor], Ready]:
        """Returns tensors on the device; call the second result in the using thread first.

        Args:
            arrays: on the host.
            then: maps the tensors on the device to those that are returned.
        """

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, Any]]:
        """Starts copying; the result blocks until the copies are there. Called by the training thread."""

    def free_bytes(self) -> int:
        """Returns the memory of the device that new tensors can take."""


class CpuStaging:
    """Staging without a device: tensors and arrays share memory."""

    device = torch.device("cpu")
    on_host = True

    def to_device(
        self, arrays: Mapping[str, NDArray[np.generic]], then: Then | None = None
    ) -> tuple[dict[str, torch.Tensor], Ready]:
        """Wraps the arrays."""
        # torch has no read-only tensors: it warns, and a write would crash.
        tensors = {
            name: torch.from_numpy(array) if array.flags.writeable else copied_array(array)
            for name, array in arrays.items()
        }
        return tensors if then is None else then(tensors), nothing_to_do

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, Any]]:
        """Wraps the tensors."""
        arrays = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
        return lambda: arrays

    def free_bytes(self) -> int:
        """Returns the free memory of the host."""
        return host_memory().free


class CudaStaging:
    """One copy from and one to a block of pinned memory, on a side stream per direction that overlaps with computing.

    The blocks are tested on a CPU, the streams by `make gpu`.
    """

    on_host = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)
        # The network is on the device, so these threads need not leave processors to it.
        self._pool = batching.ThreadPool(batching.default_threads())

    def to_device(
        self, arrays: Mapping[str, NDArray[np.generic]], then: Then | None = None
    ) -> tuple[dict[str, torch.Tensor], Ready]:
        """Copies on the side stream; the using stream waits for an event, the thread does not."""
        block, parts = array_block(arrays, self._pool, pin_memory=True)
        with torch.cuda.stream(self._up):
            tensors = block_tensors(block.to(self.device, non_blocking=True), parts)
            if then is not None:
                tensors = then(tensors)
            copied = torch.cuda.Event()
            copied.record(self._up)
        # Most tensors are views into the block: one of each storage is enough.
        storages = list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors.values()}.values())

        def ready() -> None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in storages:
                # The caching allocator must not reuse the memory before this stream has used it.
                tensor.record_stream(stream)

        return tensors, ready

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, Any]]:
        """Copies on the side stream, after the work that the training stream has queued."""
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            for tensor in tensors.values():
                tensor.record_stream(self._down)
            block, parts = tensor_block(tensors)
            pinned = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
            pinned.copy_(block, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._down)

        def wait() -> dict[str, Any]:
            copied.synchronize()
            return {name: tensor.numpy() for name, tensor in block_tensors(pinned, parts).items()}

        return wait

    def free_bytes(self) -> int:
        """Returns the free memory of the device, with what torch has reserved and does not use."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)


def staging_for(name: str) -> Staging:
    """Returns the staging of a device of this process.

    Args:
        name: see `CollectionOptions.device`.

    Raises:
        ConfigError: the device is unknown, or not there.
    """
    check_device(name)
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not available):
        return CpuStaging()
    index = int(name[len("cuda:") :]) if name.startswith("cuda:") else None
    if not available or (index is not None and index >= available):
        raise ConfigError(
            f"Device {name!r} is not available in this process: torch {torch.__version__} sees {available} CUDA "
            "devices. Use cpu or auto, a torch with CUDA, or on a cluster RayOptions(gpus=1), which gives each NN "
            "worker a GPU.",
            field="device",
        )
    # By number: other threads may have another current device.
    return CudaStaging(torch.device("cuda", torch.cuda.current_device() if index is None else index))


LARGE = 1 << 20
"""Bytes of an array that several threads copy."""

ALIGNMENT = 256
"""Bytes between which the parts of a block of arrays begin: that of memory which a device allocates by itself."""


class BlockPart(NamedTuple):
    """A part of a block of bytes.

    Attributes:
        start: first byte.
        dtype: of its values.
        shape: of its values.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def array_block(
    arrays: Mapping[str, NDArray[np.generic]], pool: batching.ThreadPool | None = None, *, pin_memory: bool = False
) -> tuple[torch.Tensor, dict[str, BlockPart]]:
    """Copies arrays into one block of bytes, so that one copy brings them to a device.

    Args:
        arrays: of any dtype that torch has, and of any layout; they may be read-only.
        pool: threads for a large array that is contiguous; None for the calling one.
        pin_memory: whether a CUDA device can copy from the block by itself.

    Returns:
        The block, uint8, and the place of each array in it.
    """
    parts: dict[str, BlockPart] = {}
    end = 0
    for name, array in arrays.items():
        parts[name] = BlockPart(end, _dtype(array), array.shape)
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    block = torch.empty(end, dtype=torch.uint8, pin_memory=pin_memory)
    whole = block.numpy()
    for array, part in zip(arrays.values(), parts.values(), strict=True):
        place = whole[part.start : part.start + array.nbytes].view(array.dtype).reshape(array.shape)
        _copy(place, array, pool)
    return block, parts


def tensor_block(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, BlockPart]]:
    """Returns contiguous tensors in one block of bytes on their device: the tensor itself, if it is only one.

    Args:
        tensors: on one device. They are laid out by the size of their values, the widest first, so all are aligned.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    parts: dict[str, BlockPart] = {}
    end = 0
    for name, tensor in ordered:
        parts[name] = BlockPart(end, tensor.dtype, tuple(tensor.shape))
        end += tensor.nbytes
    views = [(t.contiguous() if t.dim() == 1 else t.reshape(-1)).view(torch.uint8) for _, t in ordered]
    return views[0] if len(views) == 1 else torch.cat(views), parts


def block_tensors(block: torch.Tensor, parts: Mapping[str, BlockPart]) -> dict[str, torch.Tensor]:
    """Returns tensors in the memory of a block, wherever it is.

    Torch does not take them for views of one tensor: after a change of one in place, autograd still trusts the others.

    Args:
        block: uint8.
        parts: the places of the tensors; see `array_block`.
    """
    views: dict[str, torch.Tensor] = {}
    for name, (start, dtype, shape) in parts.items():
        size = math.prod(shape) * dtype.itemsize
        view = block[start : start + size].view(dtype)
        views[name] = (view if len(shape) == 1 else view.view(shape)).data  # With a version counter of its own.
    return views


def copied_array(array: NDArray[np.generic]) -> torch.Tensor:
    """Returns a tensor with a copy of an array, which may be read-only and of any layout. Copies once.

    `torch.from_numpy(array).clone()` warns of read-only arrays.

    Args:
        array: of any dtype that torch has.
    """
    copy = torch.empty(array.shape, dtype=_dtype(array))
    np.copyto(copy.numpy(), array)
    return copy


def _dtype(array: NDArray[np.generic]) -> torch.dtype:
    """Returns the dtype in torch of the values of an array."""
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def _copy(place: NDArray[Any], array: NDArray[np.generic], pool: batching.ThreadPool | None) -> None:
    if pool is not None and array.nbytes >= LARGE and array.flags.c_contiguous:
        batching.copy_array(place, array, pool)
    else:
        np.copyto(place, array)


def nothing_to_do() -> None:
    """No-op: the tensors are ready."""
