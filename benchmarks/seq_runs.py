"""Planted chains, and runs of sequence models on them, for benchmarks/seq.py.

The next item of a history is a function of events before it, except for a tenth of the events, which are any item: so
the best possible answer to a history is known. The function is another one for each seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from persia import Batch, DenseFeature, IdFeature, Schema, Trainer, TrainerOptions
from persia.modes import Sync
from persia.nn import SequenceEmbedding, models
from persia.nn.ranking import RankingModel
from persia.optim import Adagrad

__all__ = ["CHAINS", "MODELS", "Chain", "Size", "chain", "hit_rates"]

ITEMS, DIM = 50, 16
KEPT = 0.9
"""Part of the events that follow the rule."""
PERIOD = 5
DAY = 86_400.0
LONGEST_VISIT = 4
RATES = (Adagrad(lr=0.1), 0.01)
"""Of rows, and of Adam on the network."""
LONG, NEXT_ITEM = 500, 5.0
"""Histories from this length on, and `HSTU(next_item=...)` for them: 32 labels are noise next to 16,000 events."""

Items = NDArray[np.int64]


class Chain(NamedTuple):
    """Histories and what follows them.

    Attributes:
        items: `[rows, length + 1]`: the history, oldest first, and the next item.
        best: `[rows]`: the most likely next item of each history, for one who knows the rule.
        ages: float32 `[rows, length]`: seconds from each event of the history to the next item.
    """

    items: Items
    best: Items
    ages: NDArray[np.float32]


class Size(NamedTuple):
    """Amount of training.

    Attributes:
        epochs: number of passes.
        steps: batches of a pass.
        histories: number of histories of a batch; of histories of up to 10 events, it has twice as many.
        tested: number of histories that are ranked after each pass.
    """

    epochs: int
    steps: int
    histories: int
    tested: int

    def batch_size(self, length: int) -> int:
        """Returns the number of histories of a batch."""
        return self.histories * 2 if length <= 10 else self.histories


def _after(items: Items, rule: Items, kept: NDArray[np.bool_], lag: int) -> Items:
    """Returns items of which each is the rule's for the one `lag` places before it, where it is kept."""
    items = items.copy()
    for place in range(lag, items.shape[1]):
        items[:, place] = np.where(kept[:, place], rule[items[:, place - lag]], items[:, place])
    return items


def _first_order(any_items: Items, rule: Items, kept: NDArray[np.bool_], rng: np.random.Generator) -> Items:
    return _after(any_items, rule, kept, 1)


def _second_order(any_items: Items, rule: Items, kept: NDArray[np.bool_], rng: np.random.Generator) -> Items:
    return _after(any_items, rule, kept, 2)


def _periodic(any_items: Items, rule: Items, kept: NDArray[np.bool_], rng: np.random.Generator) -> Items:
    """Each user has five items, in turn."""
    turns = rng.integers(0, ITEMS, (len(any_items), PERIOD))
    return np.where(kept, turns[:, np.arange(any_items.shape[1]) % PERIOD], any_items)


def _most_frequent(items: Items) -> Items:
    """Returns the most frequent item of each row, the newest of them if several are."""
    counts = (items[:, :, None] == items[:, None, :]).sum(2)
    place = items.shape[1] - 1 - counts[:, ::-1].argmax(1)
    found: Items = items[np.arange(len(items)), place]
    return found


CHAINS: Mapping[str, Callable[[Items, Items, NDArray[np.bool_], np.random.Generator], Items]] = {
    "first": _first_order,
    "second": _second_order,
    "periodic": _periodic,
    "time": _first_order,
}
"""Kinds of chains: the next item depends on the newest event; on the second newest; on the one five events ago; on the
one of a day ago, before the newest 0 to 4, which are of the last minutes and mean nothing."""
MODELS = ("sasrec", "hstu")


def chain(kind: str, rows: int, length: int, rule: Items, rng: np.random.Generator) -> Chain:
    """Returns histories of a kind.

    Args:
        kind: key of `CHAINS`.
        rows: number of histories.
        length: events of each.
        rule: the function from item to item, a permutation.
        rng: draws them.
    """
    shape = (rows, length + 1)
    any_items = rng.integers(0, ITEMS, shape)
    items = CHAINS[kind](any_items, rule, rng.random(shape) < KEPT, rng)
    past = items[:, :-1]
    if kind == "periodic":  # With few turns, an item that breaks the rule may be as frequent as the user's.
        best = _most_frequent(past[:, length % PERIOD :: PERIOD])
    else:
        best = rule[past[:, -2 if kind == "second" else -1]]
    gaps = DAY * rng.uniform(0.9, 1.1, shape)  # From each event to the one after it; the last one is not used.
    if kind == "time":
        visit = rng.integers(0, min(LONGEST_VISIT, length - 1) + 1, rows)[:, None]
        place = np.arange(length + 1)
        new = (place >= length - visit) & (place < length)
        # The next item follows the last day's, as if the visit had not begun.
        items[:, -1:] = np.take_along_axis(items, length - visit, 1)
        best = rule[np.take_along_axis(items, length - 1 - visit, 1)[:, 0]]
        items = np.where(new, any_items, items)
        gaps = np.where(new, rng.uniform(1, 60, shape), gaps)
    ages = gaps[:, -2::-1].cumsum(1)[:, ::-1]
    return Chain(items, best, ages.astype(np.float32))


def schema_of(length: int) -> Schema:
    """Returns the schema of histories of a length."""
    history = IdFeature("history", table="item", pooling=None, max_length=length)
    return Schema([IdFeature("item", dim=DIM), history], dense_features=[DenseFeature("ages", size=length)])


def network(model: str, length: int) -> torch.nn.Module:
    """Returns a network with random values; HSTU reads the ages, SASRec has no input for them."""
    schema = schema_of(length)
    if model == "sasrec":
        return models.SASRec(schema)
    return models.HSTU(schema, ages="ages", hidden=(64, 32), next_item=NEXT_ITEM if length >= LONG else 1.0)


def hit_rates(model: str, kind: str, length: int, seed: int, size: Size) -> list[float]:
    """Trains a model on clicks on the next item and on other items, half of each.

    Args:
        model: one of `MODELS`.
        kind: key of `CHAINS`.
        length: events of each history.
        seed: of the data, the network and rows.
        size: amount of training.

    Returns:
        HR@1 among all items over that of the best answers to the same histories, after each epoch.
    """
    rng = np.random.default_rng((seed, length))
    rule = rng.permutation(ITEMS)
    rows = size.batch_size(length)
    train = [chain(kind, rows, length, rule, rng) for _ in range(size.steps)]
    test = chain(kind, size.tested, length, rule, rng)
    torch.manual_seed(seed)
    schema, net = schema_of(length), network(model, length)
    trainer = Trainer(
        net,
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, RATES[1]),
        embedding_optimizer=RATES[0],
        mode=Sync(),
        options=TrainerOptions(seed=seed, device="cpu", progress=False),
    )
    rates = []
    for _ in range(size.epochs):
        trainer.fit([_clicks(schema, part, rng) for part in train])
        rates.append(_hit_rate(trainer, net, test) / float((test.best == test.items[:, -1]).mean()))
    return rates


def _clicks(schema: Schema, part: Chain, rng: np.random.Generator) -> Batch:
    click = rng.random(len(part.items)) < 0.5
    item = np.where(click, part.items[:, -1], rng.integers(0, ITEMS, len(click)))
    return Batch.from_columns(
        schema, {"item": item, "history": part.items[:, :-1], "ages": part.ages, "label": click.astype(np.float32)}
    )


def _hit_rate(trainer: Trainer, net: torch.nn.Module, test: Chain) -> float:
    """Returns the part of the histories whose next item has the highest logit of all items."""
    assert isinstance(net, RankingModel)
    rows = torch.from_numpy(trainer.embeddings.rows("item", np.arange(ITEMS, dtype=np.uint64)).values)
    hits = 0
    net.eval()
    with torch.no_grad():
        for items, ages in zip(torch.from_numpy(test.items), torch.from_numpy(test.ages), strict=True):
            values = rows[items[:-1]].unsqueeze(0)
            history = {"history": SequenceEmbedding(values, torch.ones(values.shape[:2], dtype=torch.bool))}
            user = net.user_part(ages.unsqueeze(0), history)
            scores = net.score(user, ages.expand(ITEMS, -1), {"item": rows})
            hits += int(scores[:, 0].argmax() == items[-1])
    net.train()
    return hits / len(test.items)
