"""Labels of every kind against the known optimum of generated data, next to the same network in plain PyTorch.

    python -m benchmarks 'targets.*' [--preset smoke|laptop|full] [--json FILE]

Each sample has a user and an item, whose hidden numbers decide its labels; the best possible predictions are therefore
known. `persia.nn.losses` trains a network of persia, `torch.nn`'s own losses the same network on `nn.Embedding`, from
the same first values, with the same optimizers and batches. Scores are computed by numpy on held-out samples.

targets.regression, targets.multiclass, targets.masked, targets.weighted, targets.listwise
                   Error of persia over that of PyTorch, with both and the optimum in the details: RMSE; log-loss;
                   1 - AUC of a label that 7 of 8 rows lack; RMSE of a label that is biased in rows of little weight;
                   1 - NDCG within groups.
targets.esmm       AUC over all samples of whether there is a click and a conversion, where clicks depend on what
                   conversions depend on: of the probability that `EntireSpace` trains, minus that of a conversion that
                   is trained on clicks only. The details also have the latter times the probability of a click.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import runner
from persia import Batch, IdColumn, IdFeature, Label, Schema
from persia.modes import Sync
from persia.nn import CollectionOptions, EmbeddingCollection
from persia.nn.dense_step import DenseStep, StepOptions
from persia.nn.models import FFNN
from persia.optim import SGD
from persia.schema import EntireSpace, ListwiseSoftmax

ROWS = {"smoke": 4_096, "laptop": 400_000, "full": 1_600_000}
SEEDS = {"smoke": 1, "laptop": 3, "full": 5}
USERS, ITEMS, DIM, BATCH, GROUP = 400, 200, 8, 512, 16
ROW_RATE, DENSE_RATE = 20.0, 3e-3
"""Learning rates: the rows of a batch have gradients of a mean over its samples."""

Numbers = NDArray[np.float64]


class Data(NamedTuple):
    """Generated samples.

    Attributes:
        ids: users and items, `[rows, 2]`.
        labels: `[rows, labels]`; NaN where one is missing.
        weights: `[rows]`, or None.
        groups: `[rows]`, or None.
        best: logits of the best predictions, `[rows, outputs]`.
        truth: labels as they are without what is missing or biased, `[rows]`.
    """

    ids: NDArray[np.int64]
    labels: Numbers
    weights: Numbers | None
    groups: NDArray[np.int64] | None
    best: Numbers
    truth: Numbers


class Task(NamedTuple):
    """What is trained, and how it is scored.

    Attributes:
        labels: of the schema.
        generate: makes data from a random generator and a number of rows.
        loss: of plain PyTorch, from logits, labels, weights and groups of a batch.
        error: of logits on data; less is better.
        unit: of the error.
    """

    labels: Sequence[str | Label]
    generate: Callable[[np.random.Generator, int], Data]
    loss: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    error: Callable[[Numbers, Data], float]
    unit: str


# --- data with a known optimum ------------------------------------------------------------------------------------


def drawn(random: np.random.Generator, rows: int, outputs: int = 1) -> tuple[NDArray[np.int64], Numbers]:
    """Returns users and items, `[rows, 2]`, and a hidden sum of what they have, `[rows, outputs]`."""
    users, items = random.integers(0, USERS, rows), random.integers(0, ITEMS, rows)
    fixed = np.random.default_rng(0)  # The same for training and held-out samples.
    of_user, of_item = fixed.normal(size=(USERS, outputs)), fixed.normal(size=(ITEMS, outputs))
    return np.stack([users, items], 1), of_user[users] + of_item[items]


def regression(random: np.random.Generator, rows: int) -> Data:
    """Sums with normal noise."""
    ids, score = drawn(random, rows)
    truth = score[:, 0] + random.normal(size=rows)
    return Data(ids, truth[:, None], None, None, score, truth)


def multiclass(random: np.random.Generator, rows: int) -> Data:
    """Classes that are drawn from the softmax of the sums."""
    ids, score = drawn(random, rows, 5)
    truth = (score + random.gumbel(size=score.shape)).argmax(1).astype(float)
    return Data(ids, truth[:, None], None, None, score, truth)


def masked(random: np.random.Generator, rows: int) -> Data:
    """Two binary labels, of which the second is known in 1 of 8 rows."""
    ids, score = drawn(random, rows, 2)
    labels = (random.random(score.shape) < sigmoid(score)).astype(float)
    known = np.where(random.random(rows) < 1 / 8, labels[:, 1], math.nan)
    return Data(ids, np.stack([labels[:, 0], known], 1), None, None, score, labels[:, 1])


def weighted(random: np.random.Generator, rows: int) -> Data:
    """A binary choice of the weight of each row: half of them are too high by 3, and weigh 0.01."""
    ids, score = drawn(random, rows)
    truth = score[:, 0] + random.normal(size=rows)
    biased = random.random(rows) < 0.5
    weights = np.where(biased, 0.01, random.uniform(0.5, 1.5, rows))
    return Data(ids, (truth + 3 * biased)[:, None], weights, None, score, truth)


def listwise(random: np.random.Generator, rows: int) -> Data:
    """Groups of one user, who chooses one of the items by the softmax of the sums."""
    groups = np.arange(rows) // GROUP
    ids, _ = drawn(random, rows)
    ids[:, 0] = ids[(groups * GROUP), 0]
    fixed = np.random.default_rng(0)
    fixed.normal(size=USERS)
    score = 2 * fixed.normal(size=ITEMS)[ids[:, 1]]
    noisy = (score + random.gumbel(size=rows)).reshape(-1, GROUP)
    truth = (noisy == noisy.max(1, keepdims=True)).astype(float).reshape(-1)
    return Data(ids, truth[:, None], None, groups, score[:, None], truth)


def conversions(random: np.random.Generator, rows: int) -> Data:
    """Clicks and conversions; a conversion is known if there is a click, and likelier where clicks are."""
    ids, score = drawn(random, rows, 2)
    click, convert = score[:, 0] - 3, 0.7 * score[:, 1] + 0.7 * score[:, 0] - 1
    clicked, bought = (random.random(rows) < sigmoid(x) for x in (click, convert))
    labels = np.stack([clicked.astype(float), np.where(clicked, bought, math.nan)], 1)
    best = np.stack([click, convert], 1)
    return Data(ids, labels, None, None, best, (clicked & bought).astype(float))


# --- scores -------------------------------------------------------------------------------------------------------


def sigmoid(x: Numbers) -> Numbers:
    """Returns probabilities from log-odds."""
    return 1 / (1 + np.exp(-x))


def rmse(logits: Numbers, data: Data) -> float:
    """Returns the root of the mean squared error."""
    return float(np.sqrt(np.mean((logits[:, 0] - data.truth) ** 2)))


def log_loss(logits: Numbers, data: Data) -> float:
    """Returns the mean of -log of the probability of the class that it is."""
    logits = logits - logits.max(1, keepdims=True)
    own = logits[np.arange(len(logits)), data.truth.astype(int)]
    return float(np.mean(np.log(np.exp(logits).sum(1)) - own))


def auc(scores: Numbers, labels: Numbers) -> float:
    """Returns the area under the ROC curve."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    positives = int(labels.sum())
    wins = float(ranks[labels > 0].sum()) - positives * (positives + 1) / 2
    return wins / (positives * (len(labels) - positives))


def auc_error(logits: Numbers, data: Data) -> float:
    """Returns 1 - AUC of the second label."""
    return 1 - auc(logits[:, 1], data.truth)


def ndcg_error(logits: Numbers, data: Data) -> float:
    """Returns 1 - NDCG of groups with one positive row each."""
    scores, chosen = logits[:, 0].reshape(-1, GROUP), data.truth.reshape(-1, GROUP) > 0
    rank = (scores > scores[chosen][:, None]).sum(1)
    return 1 - float(np.mean(1 / np.log2(2 + rank)))


TASKS = {
    "regression": Task([Label("y", "regression")], regression, lambda x, y, *_: F.mse_loss(x, y), rmse, "norm"),
    "multiclass": Task(
        [Label("y", "multiclass", classes=5)],
        multiclass,
        lambda x, y, *_: F.cross_entropy(x, y[:, 0].long()),
        log_loss,
        "loss",
    ),
    "masked": Task(
        ["a", Label("b", missing="mask")],
        masked,
        lambda x, y, *_: (
            sum(
                F.binary_cross_entropy_with_logits(x[known, k], y[known, k])
                for k, known in enumerate(y.isnan().logical_not().unbind(1))
            )
            / 2
        ),
        auc_error,
        "AUC",
    ),
    "weighted": Task(
        [Label("y", "regression")],
        weighted,
        lambda x, y, w, _: (w * (x - y)[:, 0] ** 2).sum() / w.sum(),
        rmse,
        "norm",
    ),
    "listwise": Task(
        [Label("y", loss=ListwiseSoftmax())],
        listwise,
        lambda x, y, *_: F.cross_entropy(x.view(-1, GROUP), y.view(-1, GROUP)),
        ndcg_error,
        "norm",
    ),
}


def schema_of(labels: Sequence[str | Label]) -> Schema:
    """Returns users and items with these labels, weights and groups."""
    features = [IdFeature("user", dim=DIM), IdFeature("item", dim=DIM)]
    return Schema(features, labels=labels, sample_weight="weight", group="group")


# --- training -----------------------------------------------------------------------------------------------------


def batches_of(data: Data) -> list[Batch]:
    """Returns the samples in batches of persia."""
    return [
        Batch(
            {name: IdColumn(data.ids[i : i + BATCH, k].astype(np.uint64)) for k, name in enumerate(("user", "item"))},
            np.zeros((len(data.ids[i : i + BATCH]), 0), np.float32),
            data.labels[i : i + BATCH].astype(np.float32),
            weights=None if data.weights is None else data.weights[i : i + BATCH].astype(np.float32),
            groups=None if data.groups is None else data.groups[i : i + BATCH].astype(np.uint64),
        )
        for i in range(0, len(data.ids), BATCH)
    ]


def network_of(schema: Schema) -> FFNN:
    """Returns the network that both sides train."""
    torch.manual_seed(0)
    return FFNN(schema, hidden=(64,))


def dense_optimizer(parameters: object) -> torch.optim.Optimizer:
    """Returns the optimizer of the network."""
    return torch.optim.Adam(parameters, DENSE_RATE)  # type: ignore[arg-type]


def first_rows(count: int, seed: int) -> NDArray[np.float32]:
    """Returns the first values of a table."""
    return np.random.default_rng(seed).normal(0, 0.1, (count, DIM)).astype(np.float32)


def with_persia(labels: Sequence[str | Label], train: Data, test: Data, seed: int) -> Numbers:
    """Trains persia, and returns its logits of held-out samples."""
    schema = schema_of(labels)
    network = DenseStep(network_of(schema), dense_optimizer, torch.device("cpu"), StepOptions(), schema)
    embeddings = EmbeddingCollection(
        schema, optimizer=SGD(lr=ROW_RATE), mode=Sync(), options=CollectionOptions(seed=seed)
    )
    for name, count in (("user", USERS), ("item", ITEMS)):
        embeddings.set_rows(name, np.arange(count, dtype=np.uint64), first_rows(count, seed))
    for batch in embeddings.prefetch(batches_of(train)):
        network.forward_backward(batch, embeddings(batch), all_reduce=True)
        network.apply()
    network.model.eval()
    embeddings.eval()
    logits = [network.logits(batch, embeddings(batch)).numpy() for batch in embeddings.prefetch(batches_of(test))]
    return np.concatenate(logits).astype(np.float64)


def with_torch(task: Task, train: Data, test: Data, seed: int) -> Numbers:
    """Trains the same network on `nn.Embedding`, and returns its logits of held-out samples."""
    network = network_of(schema_of(task.labels))
    tables = {
        name: nn.Embedding.from_pretrained(torch.from_numpy(first_rows(count, seed)), freeze=False)
        for name, count in (("user", USERS), ("item", ITEMS))
    }
    optimizers = [dense_optimizer(network.parameters()), torch.optim.SGD([t.weight for t in tables.values()], ROW_RATE)]
    nothing = torch.zeros(BATCH, 0)

    def logits_of(ids: Tensor) -> Tensor:
        embedded = {name: table(ids[:, k]) for k, (name, table) in enumerate(tables.items())}
        logits: Tensor = network(nothing[: len(ids)], embedded)
        return logits

    ids, labels = torch.from_numpy(train.ids), torch.from_numpy(train.labels).float()
    weights = None if train.weights is None else torch.from_numpy(train.weights).float()
    groups = None if train.groups is None else torch.from_numpy(train.groups)
    for i in range(0, len(ids), BATCH):
        part = slice(i, i + BATCH)
        own_weights, own_groups = (None if x is None else x[part] for x in (weights, groups))
        task.loss(logits_of(ids[part]), labels[part], own_weights, own_groups).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        logits = [logits_of(each) for each in torch.from_numpy(test.ids).split(BATCH)]
    return torch.cat(logits).double().numpy()


def against_torch(preset: str, *, name: str) -> runner.Measure:
    """Error of persia over that of PyTorch."""
    task = TASKS[name]
    ours, theirs, best = [], [], []
    for seed in range(SEEDS[preset]):
        random = np.random.default_rng(seed + 1)
        train, test = task.generate(random, ROWS[preset]), task.generate(random, ROWS[preset] // 4)
        ours.append(task.error(with_persia(task.labels, train, test, seed), test))
        theirs.append(task.error(with_torch(task, train, test, seed), test))
        best.append(task.error(test.best, test))
    mean = statistics.mean
    return runner.Measure(
        f"targets.{name}", mean(ours) / mean(theirs), "ratio", at_most=None if preset == "smoke" else 1.01,
        details={
            "of": f"{task.error.__name__} of persia over PyTorch", "ours": mean(ours), "torch": mean(theirs),
            "optimum": mean(best), "above_optimum": mean(ours) / mean(best) - 1, "seeds": SEEDS[preset],
        },
    )  # fmt: skip


for _name in TASKS:
    runner.measures(f"targets.{_name}")(functools.partial(against_torch, name=_name))


@runner.measures("targets.esmm")
def esmm(preset: str) -> Iterator[runner.Measure]:
    """AUC of conversions among all samples: trained in the entire space, minus trained on clicks."""
    kinds: dict[str, list[str | Label]] = {
        "esmm": ["click", Label("buy", missing="mask", loss=EntireSpace("click"))],
        "clicks": ["click", Label("buy", missing="mask")],
    }
    found: dict[str, list[float]] = {"esmm": [], "clicks": [], "clicks_product": [], "optimum": []}
    for seed in range(SEEDS[preset]):
        random = np.random.default_rng(seed + 1)
        train, test = conversions(random, ROWS[preset]), conversions(random, ROWS[preset] // 4)
        scores = {kind: with_persia(labels, train, test, seed) for kind, labels in kinds.items()}
        products = {kind: np.log(sigmoid(logits)).sum(1) for kind, logits in {**scores, "optimum": test.best}.items()}
        for kind in ("esmm", "optimum"):
            found[kind].append(auc(products[kind], test.truth))
        found["clicks"].append(auc(scores["clicks"][:, 1], test.truth))
        found["clicks_product"].append(auc(products["clicks"], test.truth))
    gains = [a - b for a, b in zip(found["esmm"], found["clicks"], strict=True)]
    yield runner.Measure(
        "targets.esmm", statistics.mean(gains), "AUC", at_least=None if preset == "smoke" else 0.0,
        details={name: statistics.mean(values) for name, values in found.items()} | {"seeds": SEEDS[preset]},
    )  # fmt: skip
