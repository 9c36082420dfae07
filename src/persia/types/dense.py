"""Records of a network on dense PSs."""

from __future__ import annotations

from typing import NamedTuple

from persia.types.arrays import BoolArray, Bytes

__all__ = ["DenseState", "Pulled", "PushedDense", "TensorSpec"]


class Pulled(NamedTuple):
    """Dense parameters of one version.

    Attributes:
        version: number of steps applied to them.
        values: concatenated parameters and buffers of this dense PS (`persia.dense.tensor_layout`); None if the caller
            has this version.
    """

    version: int
    values: Bytes | None


class PushedDense(NamedTuple):
    """The dense part of a push to one dense PS.

    Attributes:
        decay: of the gradient, 0 or 1.
        gradients: concatenated gradients of its parameters; None without a gradient.
        present: whether each parameter has a gradient, bool `[parameters]`.
        buffers: concatenated buffers after the forward pass.
    """

    decay: float
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
        parameters: parameters of the whole network, in the order of the optimizer.
        owned: numbers of the parameters in this state.
        values: the owned parameters, then the buffers, concatenated.
        buffers: buffers of the network; one dense PS has all of them, the others have none.
        groups: the optimizer's parameter groups as JSON, parameters by number.
        tensors: the tensors of the optimizer's state, named "number/key".
        state: the values of `tensors`, concatenated.
        scalars: the other parts of the optimizer's state as JSON, by number and key.
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
