"""ONNX files of networks give the results of torch."""

import copy
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("onnx", reason='ONNX is not installed: pip install "persia-recsys[onnx]"')

import onnx
from onnx.reference import ReferenceEvaluator

import persia
from nn.test_models import inputs
from persia.errors import ConfigError, MissingExtraError, PublishError
from persia.nn import models
from persia.nn.models import HSTU, TwoTower
from persia.publish import PublishOptions
from persia.schema import DenseFeature, Schema
from persia.serve.flat_network import InputLayout
from persia.serve.onnx_export import export_onnx
from support.exported_networks import HISTORY, Branching, make


def check(model, path):
    onnx.checker.check_model(path, full_check=True)
    program = onnx.load(path)
    evaluator = ReferenceEvaluator(program)
    for rows in (1, 2, 9):
        x = inputs(HISTORY, rows=rows)
        layout = InputLayout(x[1])
        assert [i.name for i in program.graph.input] == layout.names
        assert layout.names == ["dense", "user", "item", "history", "history.mask"]
        arrays = dict(zip(layout.names, (tensor.numpy() for tensor in layout.flat(*x)), strict=True))
        (found,) = evaluator.run(["logits"], arrays)
        np.testing.assert_allclose(found, model(*x).detach().numpy(), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model in training mode, its state before it was exported, and the file."""
    model = HSTU(HISTORY, hidden=(8,), layers=1).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return model, before, export_onnx(model, HISTORY, tmp_path_factory.mktemp("onnx") / "network.onnx")


def test_the_state_of_the_network_is_not_changed(exported):
    model, before, _ = exported
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_file_gives_the_results_of_torch_for_any_rows(exported):
    model, _, path = exported
    assert list(path.parent.iterdir()) == [path]  # Weights are in it.
    check(copy.deepcopy(model).eval(), path)


def test_times_of_events(tmp_path):
    schema = Schema(HISTORY.id_features, dense_features=[DenseFeature("ages", size=6)], labels=["click"])
    model = HSTU(schema, ages="ages", hidden=(8,), layers=1).eval()
    with torch.no_grad():
        model.encoder.layers[0].times.uniform_()
    path = export_onnx(model, schema, tmp_path / "network.onnx")
    onnx.checker.check_model(path, full_check=True)
    _, embeddings = inputs(schema, rows=4)
    ages = 10 ** (8 * torch.rand(4, 6))
    layout = InputLayout(embeddings)
    arrays = dict(zip(layout.names, (tensor.numpy() for tensor in layout.flat(ages, embeddings)), strict=True))
    (found,) = ReferenceEvaluator(onnx.load(path)).run(["logits"], arrays)
    np.testing.assert_allclose(found, model(ages, embeddings).detach().numpy(), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.__all__)
def test_every_model_can_be_exported_as_onnx(tmp_path, name):
    model = make(name)
    check(model, export_onnx(model, HISTORY, tmp_path / "network.onnx"))


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"Branching cannot be exported as ONNX; check what in its `forward` depends"):
        export_onnx(Branching(), HISTORY, tmp_path / "network.onnx")
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"pip install \"persia-recsys\[onnx\]\""):
        export_onnx(TwoTower(HISTORY, item=["item"]), HISTORY, tmp_path / "network.onnx")


def test_the_command_exports_the_newest_published_network(tmp_path):
    from typer.testing import CliRunner

    from persia.cli.app import app
    from persia.nn.models.registry import build
    from persia.types import ModelDescription

    data = persia.data.synthetic(400, id_features=2, dense_features=1, dim=4, batch_size=100)
    trainer = persia.Trainer(
        build(ModelDescription("ffnn", {"hidden": [4]}), data.schema),
        data.schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(str(tmp_path / "log"))),
    )
    trainer.fit(data)
    target = tmp_path / "network.onnx"
    result = CliRunner().invoke(app, ["export-onnx", str(tmp_path / "log"), str(target)], catch_exceptions=False)
    assert result.output.strip() == f"{target}: the network of step 4"
    x = inputs(data.schema, rows=3)
    layout = InputLayout(x[1])
    arrays = dict(zip(layout.names, (tensor.numpy() for tensor in layout.flat(*x)), strict=True))
    (found,) = ReferenceEvaluator(onnx.load(target)).run(["logits"], arrays)
    np.testing.assert_allclose(found, trainer.model.eval()(*x).detach().numpy(), rtol=0, atol=1e-5)
    with pytest.raises(PublishError, match="There is no network with its description"):
        CliRunner().invoke(app, ["export-onnx", str(tmp_path / "none"), str(target)], catch_exceptions=False)
