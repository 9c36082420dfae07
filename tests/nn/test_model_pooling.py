"""The native pooling and the torch twin that runs on a GPU give the same values and gradients."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia.nn.pooling import Expander, expand_with_torch


@st.composite
def cases(draw):
    batch = draw(st.integers(1, 6))
    dim = draw(st.integers(1, 5))
    unique = draw(st.integers(1, 7))
    features, inverse, offsets = [], {}, {}
    for i in range(draw(st.integers(1, 4))):
        name = f"f{i}"
        pooling = draw(st.sampled_from(["sum", "mean", "sqrtn", None]))
        features.append(persia.IdFeature(name, dim=dim, table="t", pooling=pooling, max_length=3))
        lengths = draw(st.lists(st.integers(0, 3), min_size=batch, max_size=batch))
        single = draw(st.booleans())
        count = batch if single else sum(lengths)
        inverse[name] = np.array(
            draw(st.lists(st.integers(0, unique - 1), min_size=count, max_size=count)), dtype=np.uint16
        )
        offsets[name] = None if single else np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return features, unique, dim, inverse, offsets


@settings(max_examples=60, deadline=None)
@given(cases())
def test_native_equals_torch(case):
    features, unique, dim, inverse, offsets = case
    schema = persia.Schema(features)
    values = torch.randn(unique, dim)
    results = []
    for native in (True, False):
        leaf = values.clone().requires_grad_()
        if native:
            found = Expander(schema, torch.device("cpu"), 2)({"t": leaf}, inverse, offsets)
        else:
            found = expand_with_torch(
                {f.name: ("t", f.pooling, f.max_length) for f in features},
                {"t": leaf},
                {n: torch.from_numpy(a.astype(np.int64)) for n, a in inverse.items()},
                {n: None if o is None else torch.from_numpy(o) for n, o in offsets.items()},
            )
        tensors = [f.values if isinstance(f, persia.nn.SequenceEmbedding) else f for f in found.values()]
        (0 * leaf.sum() + sum((t * (i + 1)).square().sum() for i, t in enumerate(tensors))).backward()
        masks = [f.mask for f in found.values() if isinstance(f, persia.nn.SequenceEmbedding)]
        results.append((tensors, masks, leaf.grad))
    (ours, our_masks, our_grad), (theirs, their_masks, their_grad) = results
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(our_masks, their_masks, strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-4, atol=1e-5)
