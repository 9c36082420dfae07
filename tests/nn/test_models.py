"""The networks: shapes, formulas against plain ones, mixed precision, errors, and that each can learn."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from persia.errors import ConfigError
from persia.nn.models import DLRM, FFNN, PLE, DCNv2, DeepFM, FinalMLP, MaskNet, MMoE
from persia.nn.pooling import SequenceEmbedding
from persia.schema import IdFeature, Schema, Table


class SerialMaskNet(MaskNet):
    def __init__(self, schema, **options):
        super().__init__(schema, kind="serial", **options)


MODELS = [FFNN, DeepFM, DLRM, DCNv2, FinalMLP, MaskNet, SerialMaskNet, MMoE, PLE]


def schema(labels=("click",), dims=(8, 8, 8), dense=2):
    return Schema(
        [IdFeature(f"f{i}", dim=d) for i, d in enumerate(dims)],
        dense_features=[f"d{i}" for i in range(dense)],
        labels=labels,
    )


def inputs(s, rows=5, requires_grad=False, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    tables = s.resolved_tables()
    embeddings = {}
    for f in s.id_features:
        dim = tables[f.table_name].dim
        if f.pooling is not None:
            embeddings[f.name] = torch.randn(rows, dim, generator=generator).to(device).requires_grad_(requires_grad)
            continue
        mask = torch.arange(f.max_length) < torch.arange(rows).unsqueeze(1)  # row i has i ids
        values = torch.randn(rows, f.max_length, dim, generator=generator) * mask.unsqueeze(2)
        embeddings[f.name] = SequenceEmbedding(values.to(device).requires_grad_(requires_grad), mask.to(device))
    return torch.randn(rows, len(s.dense_features), generator=generator).to(device), embeddings


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("dense", [0, 3])
@pytest.mark.parametrize("labels", [("click",), ("click", "buy")])
def test_shapes_and_gradients(make, dense, labels):
    s = schema(labels, dense=dense)
    x, embeddings = inputs(s, requires_grad=True)
    logits = make(s)(x, embeddings)
    assert logits.shape == (5, len(labels))
    assert logits.dtype == torch.float32
    logits.square().sum().backward()
    assert all(e.grad.abs().sum() > 0 for e in embeddings.values())
    assert make(s, outputs=4)(x, embeddings).shape == (5, 4)


@pytest.mark.parametrize("make", MODELS)
def test_dims_may_differ_and_tables_be_shared_or_declared(make):
    s = Schema(
        [
            IdFeature("a", dim=8),
            IdFeature("b", table="a"),
            IdFeature("c", table="wide"),
            IdFeature("d", dim=2, pooling="mean"),
        ],
        dense_features=["x"],
        tables=[Table("wide", 24), Table("a", 8)],
    )
    x, embeddings = inputs(s, requires_grad=True)
    make(s)(x, embeddings).sum().backward()
    assert all(e.grad is not None for e in embeddings.values())


@pytest.mark.parametrize("make", MODELS)
def test_a_sequence_enters_as_the_mean_over_its_ids(make):
    pooled = schema(dims=(8, 8))
    raw = Schema(
        [IdFeature("f0", dim=8), IdFeature("f1", dim=8, pooling=None, max_length=3)], dense_features=["d0", "d1"]
    )
    model = make(raw)
    x, embeddings = inputs(raw, requires_grad=True)
    sequence = embeddings["f1"]
    means = torch.stack([v[m].mean(0) if m.any() else torch.zeros(8) for v, m in zip(*sequence, strict=True)])
    logits = model(x, embeddings)
    torch.testing.assert_close(logits, model(x, {"f0": embeddings["f0"], "f1": means.detach()}))
    logits.sum().backward()
    assert not sequence.values.grad[~sequence.mask].any()
    assert pooled.resolved_tables().keys() == raw.resolved_tables().keys()


def test_ffnn_is_a_perceptron_on_everything_side_by_side():
    s = schema()
    x, embeddings = inputs(s)
    model = FFNN(s, hidden=(), products=[("f2", "f0")])
    (linear,) = model.mlp
    e = list(embeddings.values())
    torch.testing.assert_close(model(x, embeddings), linear(torch.cat([*e, e[2] * e[0], x], 1)))


def test_ffnn_options():
    s = schema()
    widths = [m.out_features for m in FFNN.paper(s, dropout=0.1).mlp if isinstance(m, nn.Linear)]
    assert widths == [4096, 2048, 1024, 512, 256, 1]
    kinds = [type(m) for m in FFNN(s, hidden=(4,), batch_norm=True, dropout=0.5).mlp]
    assert kinds == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout, nn.Linear]


def test_deepfm_formula():
    s = schema(("a", "b"))
    x, embeddings = inputs(s)
    model = DeepFM(s)
    pairs = sum((u * v).sum(1, keepdim=True) for u, v in itertools.combinations(embeddings.values(), 2))
    flat = torch.cat([*embeddings.values(), x], 1)
    torch.testing.assert_close(model(x, embeddings), model.deep(flat) + model.first_order(flat) + pairs)


def test_dlrm_formula():
    s = schema()
    x, embeddings = inputs(s)
    model = DLRM(s)
    bottom = model.bottom(x)
    vectors = [bottom, *embeddings.values()]
    dots = [(vectors[i] * vectors[j]).sum(1, keepdim=True) for i in range(4) for j in range(i)]
    torch.testing.assert_close(model(x, embeddings), model.top(torch.cat([bottom, *dots], 1)))
    assert "lower" not in model.state_dict()


@pytest.mark.parametrize("low_rank", [None, 2])
def test_dcn_formula(low_rank):
    s = schema()
    x, embeddings = inputs(s)
    model = DCNv2(s, cross_layers=2, low_rank=low_rank)
    x0 = torch.cat([*embeddings.values(), x], 1)
    x1 = x0 * model.cross[0](x0) + x0
    x2 = x0 * model.cross[1](x1) + x1
    torch.testing.assert_close(model(x, embeddings), model.deep(x2))


def autocast_step(make, device, dtype, embedding_dtype):
    s = schema(dims=(8, 8, 4))
    model = make(s).to(device)
    x, embeddings = inputs(s, rows=16, device=device)
    embeddings = {k: v.to(embedding_dtype).requires_grad_() for k, v in embeddings.items()}
    exact = model(x, {k: v.float() for k, v in embeddings.items()})
    with torch.autocast(device, dtype):
        logits = model(x, embeddings)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), torch.ones(16, 1, device=device))
    loss.backward()
    torch.testing.assert_close(logits.float(), exact, rtol=0.1, atol=0.1)
    assert all(e.grad.isfinite().all() for e in embeddings.values())


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", [False, True])
def test_autocast_on_cpu(make, dtype, cast):
    autocast_step(make, "cpu", dtype, dtype if cast else torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_on_cuda(make, dtype):
    autocast_step(make, "cuda", dtype, torch.float32)


@pytest.mark.parametrize("make", MODELS)
def test_each_learns_an_interaction(make):
    torch.manual_seed(0)
    s = schema(dims=(4, 4), dense=1)
    model = make(s, hidden=(32,))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(150):
        a, b = torch.randn(256, 4), torch.randn(256, 4)
        loss = nn.functional.binary_cross_entropy_with_logits(
            model(torch.zeros(256, 1), {"f0": a, "f1": b}), ((a * b).sum(1, keepdim=True) > 0).float()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.55:  # Of 0.69 at first.
            break
    assert loss < 0.6


@pytest.mark.parametrize("make", MODELS)
def test_a_schema_without_id_features_or_outputs_is_refused(make):
    with pytest.raises(ConfigError, match="no ID-type feature"):
        make(Schema([], dense_features=["x"]))
    with pytest.raises(ConfigError, match="outputs"):
        make(schema(), outputs=0)
    with pytest.raises(ConfigError, match="width"):
        make(schema(), hidden=(16, 0))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"hidden": 8}, "hidden"),
        ({"hidden": ("a",)}, "hidden"),
        ({"hidden": (8.0,)}, "hidden"),
        ({"hidden": None}, "hidden"),
        ({"outputs": 1.5}, "outputs"),
        ({"outputs": "1"}, "outputs"),
        ({"outputs": True}, "outputs"),
    ],
)
def test_options_of_another_type_are_refused_by_name(make, options, field):
    with pytest.raises(ConfigError, match=f"Invalid.* {field} = ") as raised:
        make(schema(), **options)
    assert raised.value.fields["field"] == field


@pytest.mark.parametrize("make", MODELS)
def test_what_is_no_schema_is_refused(make):
    with pytest.raises(ConfigError, match=r"Invalid schema = .*expected a persia\.Schema"):
        make({"id_features": []})


def test_numbers_of_numpy_are_taken():
    s = schema()
    model = MMoE(s, hidden=np.array([8, 4]), expert_hidden=[np.int64(6)], outputs=np.int64(2))
    assert model(*inputs(s)).shape == (5, 2)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: FFNN(schema(), products=[("f0", "nope")]), "no ID-type feature 'nope'"),
        (lambda: FFNN(schema(dims=(8, 4)), products=[("f0", "f1")]), r"'f0' \(dim 8\) and 'f1' \(dim 4\)"),
        (lambda: FFNN(schema(), dropout=1.0), "dropout"),
        (lambda: FFNN(schema(), dropout="0.1"), "dropout"),
        (lambda: FFNN(schema(), batch_norm="no"), "batch_norm"),
        (lambda: FFNN(schema(), products=["ab"]), "Invalid products"),
        (lambda: FFNN(schema(), products=[("f0",)]), "Invalid products"),
        (lambda: FFNN(schema(), products=[("f0", 1)]), "Invalid products"),
        (lambda: FFNN(schema(), products=3), "Invalid products = 3"),
        (lambda: DeepFM(schema(), dim=0), "dim = 0"),
        (lambda: DeepFM(schema(), dim="8"), "dim = '8'"),
        (lambda: DLRM(schema(), dim=1.5), "dim = 1.5"),
        (lambda: DLRM(schema(), bottom=8), "Invalid bottom = 8"),
        (lambda: DLRM(schema(), bottom=(0,)), "width in bottom = 0"),
        (lambda: DLRM(schema(dims=(8,), dense=0)), "two ID-type features"),
        (lambda: FinalMLP(schema(), hidden=(16, 9)), "heads = 2 does not divide"),
        (lambda: FinalMLP(schema(), hidden2=(9,)), "heads = 2 does not divide"),
        (lambda: FinalMLP(schema(), hidden=()), "heads = 2 does not divide"),
        (lambda: FinalMLP(schema(), heads=0), "heads"),
        (lambda: FinalMLP(schema(), gates=(["nope"], [])), "no ID-type feature 'nope'"),
        (lambda: FinalMLP(schema(), gates=(["f0"],)), "two lists of features"),
        (lambda: FinalMLP(schema(), gates=("f0", "f1")), "Invalid gates = 'f0'"),
        (lambda: FinalMLP(schema(), gates=([0], [])), "Invalid gates"),
        (lambda: FinalMLP(schema(), gates=None), "two lists of features"),
        (lambda: FinalMLP(schema(), gate_hidden=0), "gate_hidden"),
        (lambda: FinalMLP(schema(), hidden2=("a",)), "width in hidden2 = 'a'"),
        (lambda: MaskNet(schema(), kind="both"), "kind = 'both'"),
        (lambda: MaskNet(schema(), blocks=0), "blocks"),
        (lambda: MaskNet(schema(), width=0), "width"),
        (lambda: MaskNet(schema(), reduction=0.0), "reduction"),
        (lambda: MMoE(schema(), experts=0), "experts"),
        (lambda: MMoE(schema(), expert_hidden=()), "expert_hidden"),
        (lambda: MMoE(schema(), expert_hidden=("a",)), "width in expert_hidden = 'a'"),
        (lambda: PLE(schema(), expert_hidden=8), "Invalid expert_hidden = 8"),
        (lambda: PLE(schema(), levels=0), "levels"),
        (lambda: PLE(schema(), experts=0), "experts"),
        (lambda: PLE(schema(), shared_experts=0), "shared_experts"),
        (lambda: PLE(schema(), expert_hidden=()), "expert_hidden"),
        (lambda: DCNv2(schema(), low_rank=0), "low_rank"),
        (lambda: DCNv2(schema(), cross_layers=-1), "cross_layers"),
    ],
)
def test_bad_arguments_are_refused(build, match):
    with pytest.raises(ConfigError, match=match):
        build()
