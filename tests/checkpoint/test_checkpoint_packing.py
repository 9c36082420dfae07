from __future__ import annotations

import math
import random
from collections import OrderedDict, namedtuple
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from persia.checkpoint import CheckpointReader, CheckpointWriter
from persia.checkpoint.packing import pack, unpack
from persia.checkpoint.tensors import TensorView, decode, encode
from persia.errors import CheckpointError
from support.checkpoint_samples import SCHEMA


def round_trip(value: Any) -> Any:
    data = b"".join(encode(pack(value)))
    return unpack(decode(memoryview(bytearray(data)), "x"), "x")


def same(a: Any, b: Any) -> bool:
    """Equal in type and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, torch.Tensor):
        raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
keys = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.tuples(st.integers())
arrays = st.sampled_from(
    [
        np.float32([1, math.nan, -0.0]),
        np.empty((0, 3), np.int16),
        np.array(True),
        np.uint64(2**64 - 1),
        np.float64(-0.0),
        np.complex64(1 + 2j),
        torch.randn(3, 2, dtype=torch.bfloat16),
        torch.tensor(7),
        torch.zeros(0, 2),
        torch.tensor([True, False]),
        torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    ]
)
values = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=20,
)


@given(values)
def test_everything_comes_back_exactly(value: Any) -> None:
    assert same(round_trip(value), value)


def test_states_of_training_go_on_bit_identically(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2, amsgrad=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        return model, optimizer, schedule, torch.amp.GradScaler("cpu")

    def train(model: Any, optimizer: Any, schedule: Any, scaler: Any, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.randn(8, 4) * float(np.random.standard_normal()) + random.random()
            loss = model(x).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            losses.append(loss.item())
        return losses

    first = make()
    random.seed(1)
    np.random.seed(1)
    train(*first, steps=5)
    model, *states = first
    with CheckpointWriter(tmp_path, 5) as writer:
        writer.add_tensors("dense", model.state_dict())
        writer.add_state("optimizer", [state.state_dict() for state in states])
        rng = np.random.default_rng(3)
        rng.standard_normal(3)
        numpy_state = np.random.get_state()
        writer.add_state("rng", (torch.get_rng_state(), random.getstate(), numpy_state, rng.bit_generator.state))
        writer.commit(schema=SCHEMA)
    expected = train(*first, steps=5)

    second = make()
    reader = CheckpointReader(tmp_path)
    second[0].load_state_dict(reader.tensors("dense"))
    for part, state in zip(second[1:], reader.state("optimizer"), strict=True):
        part.load_state_dict(state)
    torch_state, python_state, numpy_state, bits = reader.state("rng")
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    assert bits == rng.bit_generator.state
    assert train(*second, steps=5) == expected


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        object(),
        lambda: 1,
        namedtuple("Point", "x")(1),
        np.array(["text"]),
        np.array([object()]),
        np.longdouble(1),
        torch.eye(2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.complex128),
        torch.float32,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"state\['a'\]\[1\]"):
        pack({"a": [0, value]})


def test_too_deep_or_circular() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="deeply"):
        pack(loop)


@pytest.mark.parametrize(
    "tree",
    [
        b"",
        b"{",
        b"\xff",
        b'{"tuple": 1}',
        b'{"tuple": [], "dict": []}',
        b"{}",
        b'{"dict": [[[], 1]]}',
        b'{"dict": [[1]]}',
        b'{"dict": ["ab"]}',
        b'{"int": 3}',
        b'{"int": "0xzz"}',
        b'{"float": "1"}',
        b'{"tensor": "9"}',
        b'{"tensor": []}',
        b'{"code": "import os"}',
        b"NaN",
        b"[" * 100_000,
        b"1" * 10_000,
    ],
    ids=lambda tree: repr(tree[:20]),
)
def test_hostile_trees(tree: bytes) -> None:
    with pytest.raises(CheckpointError, match="no valid state"):
        unpack({"tree": TensorView("U8", (len(tree),), memoryview(tree))}, "x")


@given(st.binary(max_size=40) | st.text(alphabet='[]{}",:tupledict0123nsor', max_size=60).map(str.encode))
def test_fuzzed_trees(tree: bytes) -> None:
    with suppress(CheckpointError):
        unpack({"tree": TensorView("U8", (len(tree),), memoryview(tree))}, "x")
