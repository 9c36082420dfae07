"""Reads and writes safetensors without copies, for numpy and torch.

The safetensors library copies every tensor on write and on read, and needs torch for torch dtypes. Checkpoints are
larger than memory, and parameter servers do not import torch. The format is a length, a JSON header and the bytes.
Tests compare this module with the library in both directions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = [
    "MAX_HEADER_BYTES",
    "TensorView",
    "Value",
    "decode",
    "encode",
    "encode_header",
    "header_length",
    "parse_header",
    "view",
]

MAX_HEADER_BYTES = 32 << 20
MAX_RANK = 32

Value: TypeAlias = "NDArray[Any] | torch.Tensor"

# safetensors name: (bytes per element, numpy name, torch name)
_DTYPES: dict[str, tuple[int, str | None, str | None]] = {
    "BOOL": (1, "bool", "bool"),
    "U8": (1, "uint8", "uint8"),
    "I8": (1, "int8", "int8"),
    "U16": (2, "uint16", "uint16"),
    "I16": (2, "int16", "int16"),
    "U32": (4, "uint32", "uint32"),
    "I32": (4, "int32", "int32"),
    "U64": (8, "uint64", "uint64"),
    "I64": (8, "int64", "int64"),
    "F16": (2, "float16", "float16"),
    "F32": (4, "float32", "float32"),
    "F64": (8, "float64", "float64"),
    "C64": (8, "complex64", "complex64"),
    "BF16": (2, None, "bfloat16"),
    "F8_E4M3": (1, None, "float8_e4m3fn"),
    "F8_E5M2": (1, None, "float8_e5m2"),
    "F8_E8M0": (1, None, "float8_e8m0fnu"),
}
_FROM_NUMPY = {numpy: code for code, (_, numpy, _) in _DTYPES.items() if numpy}
_FROM_TORCH = {f"torch.{torch}": code for code, (_, _, torch) in _DTYPES.items() if torch}

Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a header."""

    dtype: str
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_RANK)]
    data_offsets: tuple[Size, Size]


_entry_decoder = msgspec.json.Decoder(_Entry)
_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class TensorView(NamedTuple):
    """A tensor of any framework: safetensors name of the dtype, shape, and bytes (little-endian, C order)."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def numpy(self) -> NDArray[Any]:
        """Returns a numpy array on the same memory.

        Raises:
            CheckpointError: numpy does not have the dtype.
        """
        size, name, _ = _DTYPES[self.dtype]
        if name is None:
            raise CheckpointError(f"numpy has no dtype for {self.dtype}; read it as torch tensor.", dtype=self.dtype)
        data = self._aligned(size)
        try:
            return np.frombuffer(data, np.dtype(name).newbyteorder("<")).reshape(self.shape)
        except ValueError as error:
            raise CheckpointError(f"Invalid tensor of shape {self.shape}: {error}.", shape=self.shape) from None

    def torch(self) -> torch.Tensor:
        """Returns a torch CPU tensor on the same memory."""
        import torch

        size, _, name = _DTYPES[self.dtype]
        dtype = getattr(torch, str(name), None)
        if dtype is None:
            raise CheckpointError(f"This torch has no dtype {name}; install a newer one.", dtype=self.dtype)
        try:
            if not len(self.data):
                return torch.empty(self.shape, dtype=dtype)
            return torch.frombuffer(self._aligned(size), dtype=dtype).reshape(self.shape)
        except (ValueError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"Invalid tensor of shape {self.shape}: {error}.", shape=self.shape) from None

    def _aligned(self, size: int) -> memoryview:
        address = np.frombuffer(self.data, np.uint8).ctypes.data if len(self.data) else 0
        return memoryview(bytearray(self.data)) if address % size else self.data


def is_torch(value: object) -> bool:
    """Whether a value is a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def view(value: Value, where: str) -> TensorView:
    """Returns a view of an array or tensor. Copies the value unless it is contiguous, little-endian and in CPU memory.

    Args:
        value: numpy array or strided torch tensor.
        where: name of the value, for error messages.

    Raises:
        CheckpointError: safetensors cannot represent the value.
    """
    code: str | None = None
    if isinstance(value, np.ndarray):
        code = _FROM_NUMPY.get(value.dtype.newbyteorder("=").name)
        if code:
            array = np.asarray(value, value.dtype.newbyteorder("<"), order="C")
            return TensorView(code, value.shape, array.reshape(-1).view(np.uint8).data)
    elif is_torch(value):
        code = _FROM_TORCH.get(str(value.dtype))
        if code and str(value.layout) == "torch.strided" and value.device.type != "meta":
            import torch

            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            return TensorView(code, tuple(value.shape), flat.numpy().data)
    kind = f"{type(value).__name__} of {getattr(value, 'dtype', 'no dtype')}"
    raise CheckpointError(
        f"{where} is a {kind}, which safetensors cannot hold; convert it to a dense array or tensor first.", name=where
    )


def encode(views: Mapping[str, TensorView]) -> list[memoryview]:
    """Encodes a safetensors file as a list of buffers: the header, then the memory of each tensor.

    Tensors with wider elements come first and the header is padded to 8 bytes, so every tensor is aligned.
    """
    header, starts = encode_header({name: (each.dtype, each.shape) for name, each in views.items()})
    return [memoryview(header), *(views[name].data for name in starts)]


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Encodes the header of a safetensors file whose tensors are written later.

    Args:
        tensors: safetensors name of the dtype, and shape, by name.

    Returns:
        The first bytes of the file, and the position of each tensor's first byte in the file, by name and in order.

    Raises:
        CheckpointError: there are too many tensors.
    """
    order = sorted(tensors, key=lambda name: (-_DTYPES[tensors[name][0]][0], name))
    entries: dict[str, _Entry] = {}
    offset = 0
    for name in order:
        dtype, shape = tensors[name]
        end = offset + math.prod(shape) * _DTYPES[dtype][0]
        entries[name] = _Entry(dtype, shape, (offset, end))
        offset = end
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(tensors)} tensors are too many for one file; split them.", tensors=len(tensors))
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + entry.data_offsets[0] for name, entry in entries.items()}


def header_length(data: bytes | memoryview, path: str) -> int:
    """Reads the length of the header from the first 8 bytes of a file."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path} is not a safetensors file: its header is missing or too long.", path=path)
    return length


def parse_header(header: bytes | memoryview, body: int, path: str) -> dict[str, _Entry]:
    """Parses a header without its `__metadata__`; checks that the tensors fill `body` bytes without gap or overlap.

    Raises:
        CheckpointError: the header is invalid.
    """
    try:
        raw = _header_decoder.decode(header)
        raw.pop("__metadata__", None)
        entries = {name: _entry_decoder.decode(entry) for name, entry in raw.items()}
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}.", path=path) from None
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{path}: tensor {name[:64]!r} has unknown dtype {entry.dtype[:16]!r}.", path=path)
        if begin != position or end - begin != math.prod(entry.shape) * _DTYPES[entry.dtype][0]:
            raise CheckpointError(f"{path}: the offsets of tensor {name[:64]!r} do not fit its shape.", path=path)
        position = end
    if position != body:
        raise CheckpointError(f"{path} holds {body} bytes of tensors, its header describes {position}.", path=path)
    return entries


def decode(data: memoryview, path: str) -> dict[str, TensorView]:
    """Decodes a safetensors file in memory; the tensors share that memory.

    Raises:
        CheckpointError: the file is invalid.
    """
    start = 8 + header_length(data, path)
    entries = parse_header(bytes(data[8:start]), len(data) - start, path)
    return {
        name: TensorView(entry.dtype, entry.shape, data[start + entry.data_offsets[0] : start + entry.data_offsets[1]])
        for name, entry in entries.items()
    }
