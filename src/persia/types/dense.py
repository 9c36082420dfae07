"""Records of a network on dense PSs."""

from __future__ import annotations

from typing import NamedTuple

from persia.types.arrays import BoolArray, Bytes

__all__ = ["DenseState", "Pulled", "PushedDense", "TensorSpec"]


class Pulled(NamedTuple):
    """Dense parameters of one version.

    Attributes:
        version: number of steps applied in them.
        values: parameters and buffers of this dense PS, one after another (`persia.dense.layout`); None if the caller
            has this version.
    """

    version: int
    values: Bytes | None


class PushedDense(NamedTuple):
    """The dense part of a push to one dense PS.

    Attributes:
        weight: 0 or 1.
        gradients: gradients of its parameters, one after another; None if it has no gradient.
        present: whether each parameter has a gradient, bool `[parameters]`.
        buffers: buffers after the forward pass, one after another.
    """

    weight: float
    gradients: Bytes | None
    present: BoolArray | None
    buffers: Bytes | None


class TensorSpec(NamedTuple):
    """A tensor without its values; `dtype` is torch's name, such as "float32"."""

    name: str
    dtype: str
    shape: list[int]


class DenseState(NamedTuple):
    """A network and its optimizer, or the part of them that one dense PS owns.

    Attributes:
        parameters: of the whole network, in the order of the optimizer.
        owned: numbers of the parameters in this state.
        values: the owned parameters, one after another, then the buffers.
        buffers: of the network; one dense PS has them all, the others none.
        groups: the optimizer's parameter groups as JSON, parameters by number.
        tensors: the optimizer's state, as "number/key".
        state: the values of `tensors`, one after another.
        scalars: the rest of the optimizer's state as JSON: by number, by key.
        updates: position of the learning-rate schedule; -1 without one.
    """

    parameters: list[TensorSpec]
    owned: list[int]
    values: Bytes
    buffers: list[TensorSpec]
    groups: str
    tensors: list[TensorSpec]
    state: Bytes
    scalars: str
    updates: int
