"""Wrong constructor arguments, data that are no batches, and models that return other shapes: errors that name them."""

import pathlib

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import persia
from persia.cluster import Embedded
from persia.errors import ConfigError, DataError
from persia.modes import Async, Auto, Gba, Sync
from persia.nn import CollectionOptions, EmbeddingCollection
from persia.optim import Adagrad
from persia.testing import Threads
from persia.types import RegisteredBatch

SCHEMA = persia.Schema([persia.IdFeature("a", dim=4)], labels=["click", "buy"])
PARAMETER = torch.nn.Parameter(torch.zeros(1))
FED = RegisteredBatch(1, np.zeros((4, 0), np.float32), np.zeros((4, 2), np.float32), None)


class Net(torch.nn.Module):
    """A model whose logits `shape` changes."""

    def __init__(self, shape=lambda logits: logits):
        super().__init__()
        self.head = torch.nn.Linear(4, 2)
        self.shape = shape

    def forward(self, dense, embeddings):
        return self.shape(self.head(embeddings["a"]))


class OwnLoss(Net):
    def loss(self, logits, labels):
        return logits.square().mean()


class OwnMode:
    """A mode that is not derived from those of persia: it satisfies the Protocol, and asks `Sync`."""

    def __init__(self):
        for name in dir(Sync()):
            if not name.startswith("_"):
                setattr(self, name, getattr(Sync(), name))


class OwnCluster:
    """A cluster that is not derived from those of persia."""

    def __init__(self):
        self._cluster = Embedded()

    def connect(self, schema, optimizer, mode, seed):
        return self._cluster.connect(schema, optimizer, mode, seed)


def make_trainer(**arguments):
    arguments = {
        "model": Net(),
        "schema": SCHEMA,
        "optimizer": lambda params: torch.optim.Adam(params, 1e-2),
        "embedding_optimizer": Adagrad(0.1),
        "mode": Sync(),
        "options": persia.TrainerOptions(progress=False),
    } | arguments
    return persia.Trainer(arguments.pop("model"), arguments.pop("schema"), **arguments)


def make_collection(**arguments):
    arguments = {"schema": SCHEMA, "optimizer": Adagrad(0.1), "mode": Sync()} | arguments
    return EmbeddingCollection(arguments.pop("schema"), **arguments)


def columns(rows=4):
    return {"a": np.arange(rows), "click": np.zeros(rows), "buy": np.ones(rows)}


def batch():
    return persia.Batch.from_columns(SCHEMA, columns())


SHARED = [
    ("schema", None, "schema = None; expected a persia.Schema"),
    ("schema", {"a": 4}, "schema = <dict>"),
    ("mode", "sync", r"mode = 'sync'; expected one of persia.modes, such as persia.modes.Sync\(\)"),
    ("mode", "", "mode = ''"),
    ("mode", Sync, "mode = the class persia.modes.sync.Sync; expected"),
    ("cluster", Embedded, "cluster = the class persia.cluster.embedded.Embedded; expected one of persia.cluster"),
    ("cluster", "ray", "cluster = 'ray'"),
]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *SHARED,
        ("model", Net, r"model = the class .*Net; expected a torch.nn.Module"),
        ("model", lambda dense, embeddings: dense, "model = <function>"),
        (
            "optimizer",
            torch.optim.Adam([PARAMETER]),
            r"optimizer = <torch.optim.adam.Adam>; .*lambda",
        ),
        ("optimizer", "adam", "optimizer = 'adam'"),
        ("embedding_optimizer", torch.optim.Adagrad([PARAMETER]), r"= <torch.optim.adagrad.Adagrad>; .*persia.optim"),
        ("embedding_optimizer", "adagrad", "embedding_optimizer = 'adagrad'; expected one of persia.optim"),
        ("embedding_optimizer", Adagrad, "embedding_optimizer = the class persia.schema.optimizers.Adagrad"),
        ("embedding_optimizer", None, "embedding_optimizer = None"),
        ("options", {}, r"options = <dict>; expected TrainerOptions\(...\)"),
        ("options", CollectionOptions(), "options = <persia.nn.options.CollectionOptions>"),
    ],
)
def test_a_trainer_names_a_wrong_argument(name, value, message):
    with pytest.raises(ConfigError, match=message) as raised:
        make_trainer(**{name: value})
    assert raised.value.fields == {"field": name}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *SHARED,
        ("mode", Auto(Gba(32)), r"mode = <persia.modes.auto.Auto>; expected one of persia.modes"),
        ("optimizer", lambda params: torch.optim.Adam(params), "optimizer = <function>; expected one of persia.optim"),
        ("optimizer", None, "optimizer = None"),
        ("grad_scaler", True, "grad_scaler = True; expected a torch.amp.GradScaler"),
        ("options", persia.TrainerOptions(), r"expected CollectionOptions\(...\)"),
    ],
)
def test_a_collection_names_a_wrong_argument(name, value, message):
    with pytest.raises(ConfigError, match=message) as raised:
        make_collection(**{name: value})
    assert raised.value.fields == {"field": name}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("wrong", [columns(), batch().id_features, torch.zeros(4), None, [batch()], FED, persia.Batch])
def test_a_collection_is_called_with_a_batch(wrong, training):
    collection = make_collection().train(training)
    with pytest.raises(
        ConfigError, match=r"batch = .*; expected a batch that `prefetch` yields, or .*from_columns"
    ) as raised:
        collection(wrong)
    assert raised.value.fields == {"field": "batch"}
    assert collection(batch())["a"].shape == (4, 4)


def test_own_modes_and_clusters_are_accepted():
    assert make_trainer(cluster=OwnCluster()).fit([batch()]).rows == 4
    assert make_trainer(mode=OwnMode()).mode.dense() is Sync().dense()
    assert make_trainer(optimizer=torch.optim.Adam).fit([batch()]).rows == 4
    make_trainer(mode=Auto(Gba(32)))
    make_collection(cluster=OwnCluster(), grad_scaler=torch.amp.GradScaler("cpu"))


WHOLE = [
    pd.DataFrame(columns()),
    pa.table(columns()),
    columns(),
    "data/*.parquet",
    pathlib.Path("data"),
    5,
]
ITEMS = [pd.DataFrame(columns()), columns(), (torch.zeros(4), torch.zeros(4)), [torch.zeros(4)], "a", None]


@pytest.mark.parametrize("data", WHOLE, ids=lambda data: type(data).__name__)
def test_data_that_are_no_iterable_of_batches_are_refused(data):
    trainer = make_trainer()
    kind = f"is a {type(data).__name__}; expected a reader, or an iterable of persia.Batch.*from_columns.*parquet"
    with pytest.raises(DataError, match=f"train_data {kind}"):
        trainer.fit(data)
    with pytest.raises(DataError, match=f"eval_data {kind}"):
        trainer.fit([batch()], data)
    with pytest.raises(DataError, match=f"data {kind}"):
        trainer.evaluate(data)
    with pytest.raises(DataError, match=f"data {kind}"):
        next(trainer.predict(data))
    with pytest.raises(DataError, match=f"loader {kind}"):
        next(iter(make_collection().prefetch(data)))
    assert trainer.global_step == 0


def test_a_single_batch_is_refused():
    with pytest.raises(DataError, match=r"train_data is a single persia.Batch; give a list: \[batch\]"):
        make_trainer().fit(batch())


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: type(item).__name__)
@pytest.mark.parametrize("mode", [Sync(), Async()], ids=lambda mode: type(mode).__name__)
def test_items_that_are_no_batches_are_refused(item, mode):
    trainer = make_trainer(mode=mode)
    found = "None" if item is None else f"a {type(item).__name__}"
    kind = f"The data yielded {found} at position 1 .*; expected persia.Batch.*from_columns.*parquet"
    with pytest.raises(DataError, match=kind) as raised:
        trainer.fit([batch(), item, batch()])
    assert raised.value.fields == {"batch": 1}
    assert mode != Sync() or trainer.global_step == 1  # The batch before it is trained.
    with pytest.raises(DataError, match=kind):
        trainer.evaluate([batch(), item, batch()])
    with pytest.raises(DataError, match=kind):
        list(trainer.predict([batch(), item, batch()]))


def test_items_of_torch_data_loaders_and_prefetch_are_refused():
    tuples = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8), torch.zeros(8)), batch_size=4)
    with pytest.raises(DataError, match="The data yielded a list"):
        make_trainer().fit(tuples)
    with pytest.raises(DataError, match="The data yielded a dict at position 0"):
        list(make_collection().prefetch([columns()]))


@pytest.mark.parametrize("training", [True, False])
def test_prefetch_names_the_position_of_none(training):
    collection, drawn = make_collection().train(training), 0
    with pytest.raises(DataError, match=r"The data yielded None at position 2 .*; expected persia.Batch"):
        for _ in collection.prefetch([batch(), batch(), None, batch()]):
            drawn += 1
    assert drawn == 2


def test_positions_count_from_the_start_of_the_pass():
    items = [batch(), batch(), batch(), None, batch()]
    trainer = make_trainer()
    assert trainer.fit(items, max_steps=2).rows == 8
    with pytest.raises(DataError, match="The data yielded None at position 3"):
        trainer.fit(items)


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_positions_count_the_items_of_all_nn_workers(method, monkeypatch):
    monkeypatch.setattr("persia.nn.pass_threads.PUSH_GRACE", 0.1)  # For pushes that wait for the one that fails.
    items = [batch(), batch(), batch(), None, batch(), batch()]
    with pytest.raises(DataError, match="The data yielded None at position 3"):
        Threads(nn_workers=2, timeout=60.0).run(lambda member: getattr(make_trainer(cluster=member), method)(items))


def test_evaluation_refuses_batches_of_data_loaders():
    with pytest.raises(DataError, match="Batches of data loaders are for training"):
        make_trainer().evaluate([FED])


WRONG_SHAPES = {
    "one label": (lambda logits: logits[:, 0], r"logits of shape \[4\]"),
    "one column": (lambda logits: logits[:, :1], r"logits of shape \[4, 1\]"),
    "transposed": (lambda logits: logits.T, r"logits of shape \[2, 4\]"),
    "a tuple": (lambda logits: (logits, logits), "a tuple"),
}


@pytest.mark.parametrize("wrong", WRONG_SHAPES)
@pytest.mark.parametrize("model", [Net, OwnLoss])
@pytest.mark.parametrize("mode", [Sync(), Async()], ids=lambda mode: type(mode).__name__)
def test_a_model_must_return_logits_by_batch_and_label(wrong, model, mode):
    shape, found = WRONG_SHAPES[wrong]
    trainer = make_trainer(model=model(shape), mode=mode)
    message = (
        rf"The model returned {found}; expected \[batch, outputs\] = \[4, 2\]. Return one column per label, here 2"
    )
    with pytest.raises(ConfigError, match=message) as raised:
        trainer.fit([batch()])
    assert raised.value.fields == {"field": "model"}
    with pytest.raises(ConfigError, match=message):
        trainer.evaluate([batch()])
    with pytest.raises(ConfigError, match=message):
        list(trainer.predict([batch()]))


def test_predictions_of_unlabelled_data_have_rows_and_columns():
    unlabelled = persia.Batch.from_columns(SCHEMA, {"a": np.arange(4)}, require_labels=False)
    assert next(make_trainer().predict([unlabelled])).shape == (4, 2)
    with pytest.raises(
        ConfigError, match=r"returned logits of shape \[4\]; expected \[batch, outputs\] = \[4, outputs\]"
    ):
        next(make_trainer(model=Net(lambda logits: logits[:, 0])).predict([unlabelled]))


@pytest.mark.parametrize("wrong", ["sync", Sync, Auto(Gba(8), Sync()), None])
def test_a_switch_to_what_is_no_mode_is_refused(wrong):
    message = r"^Invalid mode(_schedule)? = .*; expected one of persia\.modes"
    with pytest.raises(ConfigError, match=message):
        make_trainer().switch(wrong)
    with pytest.raises(ConfigError, match=message):
        make_trainer(options=persia.TrainerOptions(progress=False, mode_schedule=[(5, wrong)]))
