"""Packs nested Python values (states of optimizers, schedulers, scalers and RNGs) into tensors and a JSON tree.

There is no pickle: unpacking cannot run code. Values come back exactly: tuples stay tuples, int keys stay ints, and
NaN, infinities and -0.0 are preserved. A value that cannot be preserved exactly is rejected; the error names its place.

In the tree, None, bool, text, 64-bit ints and finite floats are JSON values, and a list is an array. Any other
value is an object with one key: `tuple`, `dict` and `ordered_dict` (list of pairs), `int` and `float` (as text), and
`tensor`, `array`, `scalar` (numpy) and `bytes`, which name a tensor of the file.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from persia.checkpoint.tensors import TensorView, is_torch, view
from persia.errors import CheckpointError

__all__ = ["TREE", "pack", "unpack"]

TREE = "tree"
"""Name of the tensor (uint8) that holds the JSON tree."""

MAX_TREE_BYTES = 64 << 20
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def pack(state: Any, where: str = "state") -> dict[str, TensorView]:
    """Converts a nested value to tensors; its JSON tree is the tensor named `tree`.

    Args:
        state: dict (keys: None, bool, int, float, str, tuple), OrderedDict, list, tuple, torch tensor, numpy array or
            scalar, int, float, bool, str, bytes, None, nested to any reasonable depth.
        where: name of the value, for error messages.

    Raises:
        CheckpointError: a nested value has another type; the message names its place.
    """
    tensors: dict[str, TensorView] = {}

    def store(kind: str, value: Any, place: str) -> dict[str, str]:
        name = str(len(tensors))
        tensors[name] = view(value, place)
        return {kind: name}

    def node(value: Any, place: str) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 63 else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is list:
            return [node(item, f"{place}[{i}]") for i, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": [node(item, f"{place}[{i}]") for i, item in enumerate(value)]}
        if kind is dict or kind is OrderedDict:
            pairs = [[node(key, f"{place} key"), node(item, f"{place}[{key!r}]")] for key, item in value.items()]
            return {"dict" if kind is dict else "ordered_dict": pairs}
        if kind is bytes:
            return store("bytes", np.frombuffer(value, np.uint8), place)
        if isinstance(value, np.generic):
            return store("scalar", np.asarray(value), place)
        if kind is np.ndarray:
            return store("array", value, place)
        if is_torch(value):
            return store("tensor", value, place)
        raise CheckpointError(
            f"{place} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; "
            "store it as dict, list, tuple, number, text, array or tensor.",
            place=place,
        )

    try:
        text = json.dumps(node(state, where), allow_nan=False, separators=(",", ":")).encode()
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply, or contains itself; flatten it.", place=where) from None
    if len(text) > MAX_TREE_BYTES:
        raise CheckpointError(f"{where} has too many numbers outside tensors; store them as arrays.", place=where)
    tensors[TREE] = TensorView("U8", (len(text),), memoryview(text))
    return tensors


def unpack(tensors: Mapping[str, TensorView], path: str) -> Any:
    """Restores the value given to `pack`; its tensors and arrays share the memory of `tensors`.

    Raises:
        CheckpointError: the tree is missing or invalid.
    """
    try:
        return _value(json.loads(_tree(tensors), parse_constant=_refuse), tensors)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{path} holds no valid state: {type(error).__name__}: {error}.", path=path) from None


def _tree(tensors: Mapping[str, TensorView]) -> bytes:
    tree = tensors[TREE]
    if tree.dtype != "U8" or len(tree.data) > MAX_TREE_BYTES:
        raise ValueError("the tree is not text")
    return bytes(tree.data)


def _value(node: Any, tensors: Mapping[str, TensorView]) -> Any:
    if isinstance(node, list):
        return [_value(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    match kind:
        case "tuple":
            return tuple(_value(item, tensors) for item in _list(content))
        case "dict" | "ordered_dict":
            pairs = [(_value(key, tensors), _value(item, tensors)) for key, item in map(_list, _list(content))]
            return dict(pairs) if kind == "dict" else OrderedDict(pairs)
        case "int":
            return int(content, 16)
        case "float":
            return _FLOATS[content]
        case "tensor":
            return tensors[content].torch()
        case "array":
            return tensors[content].numpy()
        case "scalar":
            return tensors[content].numpy().reshape(())[()]
        case "bytes":
            return bytes(tensors[content].data)
    raise ValueError(f"unknown kind {kind[:32]!r}")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _list(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError("a list is expected")
    return content
