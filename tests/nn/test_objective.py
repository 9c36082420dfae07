"""Which loss trains a model: its own, with targets or labels, or that of the schema; and models of any targets."""

import copy
import math

import numpy as np
import pytest
import torch

import persia
from persia import IdFeature, Label, Schema
from persia.batching.id_column import IdColumn
from persia.errors import ConfigError
from persia.nn import ModelOutput, Targets, models
from persia.nn.dense_step import DenseStep, StepOptions
from persia.nn.models.registry import MODELS, build
from persia.nn.objective import Objective
from persia.nn.options import CollectionOptions
from persia.replay import Setting, simulate, steady
from persia.replay.virtual import VirtualTraining
from persia.schema import JRC, EntireSpace, Focal, Tweedie
from persia.types import ModelDescription

EVERY = (
    Label("seconds", "regression", missing="mask"),
    Label("kind", "multiclass", classes=("a", "b", "c"), missing="mask"),
    Label("stars", "ordinal", classes=5),
    Label("visits", "count", weight=0.5),
    Label("price", "regression", loss=Tweedie()),
    Label("ranked", loss=JRC()),
    Label("click"),
    Label("buy", missing="mask", loss=EntireSpace("click")),
)


def schema_of(labels=EVERY, **fields):
    return Schema(
        [IdFeature("user", dim=4), IdFeature("item", dim=4)],
        dense_features=["p"], labels=labels, sample_weight="w", group="session", **fields,
    )  # fmt: skip


def batch_of(schema, rows=24, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.zeros((rows, len(schema.targets)), np.float32)
    for column, label in enumerate(schema.targets):
        most = len(label.class_names) or 2
        labels[:, column] = rng.integers(0, most, rows)
        if label.missing == "mask":
            labels[rng.random(rows) < 0.3, column] = np.nan
    return persia.Batch(
        {f.name: IdColumn(rng.integers(0, 50, rows).astype(np.uint64)) for f in schema.id_features},
        rng.random((rows, 1), np.float32),
        labels,
        weights=rng.random(rows, np.float32),
        groups=rng.integers(0, 5, rows).astype(np.uint64),
    )


def trained(model, schema, batches, **options):
    """The losses of a model that trains on batches, with its embeddings."""
    network = DenseStep(model, lambda p: torch.optim.Adam(p, 0.02), torch.device("cpu"), StepOptions(**options), schema)
    embeddings = persia.nn.EmbeddingCollection(
        schema,
        optimizer=persia.optim.Adagrad(lr=0.1),
        mode=persia.modes.Sync(),
        options=CollectionOptions(accumulation_steps=options.get("accumulation_steps", 1)),
    )
    found = []
    for batch in embeddings.prefetch(batches):
        logits, loss = network.forward_backward(batch, embeddings(batch), all_reduce=True)
        network.apply()
        assert logits.shape == (len(batch), schema.outputs)
        found.append(loss.item())
    return found


NO_HISTORY = sorted(set(MODELS) - {"din", "dien", "sasrec", "hstu", "next_item", "two_tower", "ffnn_paper"})


@pytest.mark.parametrize("kind", NO_HISTORY)
def test_every_model_trains_every_kind_of_target(kind):
    torch.manual_seed(0)
    schema = schema_of()
    losses_ = trained(build(ModelDescription(kind, {}), schema), schema, [batch_of(schema)] * 30)
    assert all(map(math.isfinite, losses_))
    assert losses_[-1] < 0.95 * losses_[0]


@pytest.mark.parametrize("kind", ["mmoe", "ple"])
def test_experts_have_a_tower_for_each_label(kind):
    model = build(ModelDescription(kind, {}), schema_of())
    assert [tower[-1].out_features for tower in model.towers] == [label.outputs for label in EVERY]
    assert len(build(ModelDescription(kind, {"outputs": 3}), schema_of()).towers) == 3


def history_schema(*labels):
    history = IdFeature("history", dim=4, table="item", pooling=None, max_length=3)
    return Schema(
        [IdFeature("user", dim=4), IdFeature("item", dim=4), history],
        labels=labels, dense_features=["p"], sample_weight="w", group="session",
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["din", "dien", "hstu", "sasrec", "next_item", "two_tower"])
def test_models_of_histories_train_with_weights_and_masks(kind):
    torch.manual_seed(0)
    one = kind in ("sasrec", "next_item", "two_tower")
    label = Label("click", missing="mask", loss=None if kind in ("next_item", "two_tower") else Focal())
    schema = history_schema(label) if one else history_schema(label, Label("stars", "ordinal", classes=5))
    options = {"item": ["item"], "hidden": ()} if kind == "two_tower" else {}
    model = build(ModelDescription(kind, options), schema)
    found = trained(model, schema, [batch_of(schema)] * 20)
    assert found[-1] < found[0]


def test_models_of_one_logit_say_which_labels_they_take():
    with pytest.raises(ConfigError, match="1 labels with 3 logits; declare one label, whose kind and loss have one"):
        models.SASRec(history_schema(Label("kind", "multiclass", classes=3)))
    with pytest.raises(ConfigError, match="TwoTower has its own loss, of a binary label; declare 'stars' without"):
        models.TwoTower(schema_of([Label("stars", "regression")]), item=["item"])


def test_two_towers_weigh_samples_and_leave_missing_labels_out():
    torch.manual_seed(0)
    model = models.TwoTower(schema_of(["click"]), item=["item"])
    scores, labels = torch.randn(6, 6), torch.tensor([[1.0], [1], [0], [1], [1], [0]])
    weights, mask = torch.rand(6), torch.tensor([True, True, True, False, True, True])
    by_row = -(labels[:, 0] * torch.log_softmax(scores, 1).diagonal())
    expected = (by_row * weights * mask).sum() / (weights * mask).sum()
    found = model.loss(scores[:, :1], Targets(labels, mask[:, None], weights), scores)
    torch.testing.assert_close(found, expected)


# --- the model's own loss -----------------------------------------------------------------------------------------


class Own(torch.nn.Module):
    def loss(self, logits, targets, extra=None):
        self.got = targets, extra
        return logits.sum()


class OfLabels(torch.nn.Module):
    def loss(self, logits, labels):
        self.got = labels
        return logits.sum()


def test_a_loss_with_a_parameter_targets_gets_all_of_them():
    model, schema = Own(), schema_of([Label("a", missing="mask"), "b"])
    labels = torch.tensor([[math.nan, 1.0], [1.0, 0.0]])
    weights, groups = torch.ones(2), torch.arange(2)
    objective = Objective(model, schema)
    objective(torch.zeros(2, 2), labels, weights, groups)
    targets, extra = model.got
    assert targets.labels.tolist() == [[0, 1], [1, 0]]
    assert targets.mask.tolist() == [[False, True], [True, True]]
    assert targets.weights_of(0).tolist() == [0, 1]
    assert targets.weights is weights
    assert targets.groups is groups
    assert extra is None
    objective(ModelOutput(torch.zeros(2, 2), "more"), labels)
    assert model.got[1] == "more"


def test_a_loss_of_labels_gets_the_labels_themselves():
    model, labels = OfLabels(), torch.rand(2, 1)
    Objective(model, Schema([IdFeature("user", 4)]))(torch.zeros(2, 1), labels)
    assert model.got is labels


@pytest.mark.parametrize(
    ("schema", "unseen"),
    [
        (schema_of(["a"]), "sample_weight = 'w'"),
        (Schema([IdFeature("user", 4)], labels=[Label("a", missing="mask")]), "missing values of 'a'"),
    ],
)
def test_a_loss_of_labels_that_hides_weights_is_refused(schema, unseen):
    with pytest.raises(ConfigError, match=rf"OfLabels\.loss takes labels.*{unseen}; name its second parameter"):
        Objective(OfLabels(), schema)


def test_a_loss_may_be_a_module_or_a_function_in_c():
    for loss in (torch.nn.HuberLoss(), torch._C._nn.mse_loss):
        model = torch.nn.Module()
        model.loss = loss
        _, value = Objective(model, Schema([IdFeature("user", 4)]))(torch.ones(2, 1), torch.zeros(2, 1))
        assert value.mean().item() in (0.5, 1)


# --- learned weights of labels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ffnn", "dien"])
def test_learned_weights_are_trained_and_saved_with_the_model(kind):
    torch.manual_seed(0)
    labels = ("click", Label("stars", "regression"))
    schema = schema_of(labels) if kind == "ffnn" else history_schema(*labels)
    model = build(ModelDescription(kind, {"task_weights": "uncertainty"}), schema)
    assert "task_weights.log_variance" in model.state_dict()
    trained(model, schema, [batch_of(schema)] * 5)
    assert model.task_weights.log_variance.abs().min() > 0.01
    with pytest.raises(ConfigError, match=r"model\.options\.task_weights"):
        build(ModelDescription(kind, {"task_weights": "learned"}), schema)


def test_micro_batches_of_equal_weight_are_one_batch():
    schema = schema_of(["click", Label("stars", "regression")])
    rows = batch_of(schema, 32)
    rows.weights[16:] = rows.weights[:16]  # Else a mean of means is not the mean, as with several NN workers.
    torch.manual_seed(0)
    model = models.FFNN(schema, hidden=(4,))
    twin = copy.deepcopy(model)
    trained(model, schema, [rows])
    trained(twin, schema, [rows.slice(0, 16), rows.slice(16, 32)], accumulation_steps=2)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_virtual_training_gives_losses_weights_and_groups():
    class Seen(models.FFNN):
        def loss(self, logits, targets):
            self.targets = targets
            return logits.sum()

    schema = schema_of(["click"])
    batch, model = batch_of(schema), Seen(schema, hidden=(4,))
    training = VirtualTraining(
        model, schema, lambda _: batch, lambda p: torch.optim.SGD(p, 0.1), persia.optim.SGD(lr=0.1)
    )
    training.run(simulate(persia.modes.Sync(), Setting(steady([1.0]), local_batch=len(batch)), 1))
    assert model.targets.weights.tolist() == batch.weights.tolist()
    assert model.targets.groups.tolist() == batch.groups.tolist()
