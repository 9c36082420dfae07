"""NextItem: losses against NumPy loops over single predictions, ranking, what it learns, and bad arguments."""

import math

import numpy as np
import pytest
import torch

from persia import Batch, Trainer, TrainerOptions, data
from persia.errors import ConfigError
from persia.modes import Sync
from persia.nn.item_catalogue import TowerFeatures, item_features, user_features
from persia.nn.models import NextItem
from persia.nn.models.event_layout import layout_of
from persia.nn.pooling import SequenceEmbedding
from persia.nn.ranking import RankingModel
from persia.nn.targets import Targets
from persia.optim import Adagrad
from persia.schema import DenseFeature, IdFeature, Label, Schema
from support.histories import LENGTH, PAIRS, Numbers, events_of, history_schema, made_inputs, sigmoid

DRAWN = 3
NEGATIVES = ("not_items", "not_shops")
BACKBONES = ["sasrec", "hstu", "gru"]


def schema_with(negatives=True, **options):
    extra = [IdFeature(name, table=name[4:-1], pooling=None, max_length=DRAWN) for name in NEGATIVES if negatives]
    schema = history_schema(dense=1, extra=extra, **options)
    dense = ["new", "log_q", DenseFeature("history_log_q", size=LENGTH), DenseFeature("drawn_log_q", size=DRAWN)]
    return Schema(schema.id_features, dense_features=dense, labels=schema.labels)


NEW, LOG_Q = 0, slice(1, 2)
HISTORY_LOG_Q = slice(2, 2 + LENGTH)
DRAWN_LOG_Q = slice(2 + LENGTH, 2 + LENGTH + DRAWN)


def inputs(schema, rows=7):
    """Rows have 0 to 5 events, and 0 to 3 negatives, one of which is the item that followed an event of row 4."""
    dense, embeddings = made_inputs(schema, rows)
    for name, of_events in zip(NEGATIVES, ("items", "shops"), strict=True):
        if name in embeddings:
            values, mask = embeddings[name]
            mask = torch.arange(DRAWN) < (torch.arange(rows) % (DRAWN + 1)).unsqueeze(1)
            values = values.detach() * mask.unsqueeze(2)
            if rows > 4:
                values[3, 1] = embeddings[of_events].values[4, 2].detach()
            embeddings[name] = SequenceEmbedding(values.requires_grad_(), mask)
    return dense, embeddings


def states_of(model, dense, values, mask):
    """States `[batch, length, width]` of the events."""
    layout = layout_of(mask)
    return layout.unflat(model._states(dense, layout.flat(values), layout))


def unit(x, cosine):
    return x / max(np.linalg.norm(x), 1e-12) if cosine else x


def expected_losses(model, dense, embeddings, states, newest_first):
    """The loss of each sample, from states of its events, by loops."""
    numbers = Numbers(model, dense, embeddings)
    cosine, scale = model.temperature is not None, model.temperature or 1.0
    items = np.concatenate([numbers.pooled["item"], numbers.pooled["shop"]], 1)
    if model.negatives is None:
        pool = [(i, item, numbers.dense[i, LOG_Q][0]) for i, item in enumerate(items)]
    else:
        drawn = [events_of(numbers, row, names=NEGATIVES) for row in range(len(dense))]
        pool = [(-1, e, numbers.dense[row, DRAWN_LOG_Q][i]) for row, of in enumerate(drawn) for i, e in enumerate(of)]
    losses = []
    for row in range(len(dense)):
        events = events_of(numbers, row, newest_first)
        log_q = numbers.dense[row, HISTORY_LOG_Q][: len(events)]
        log_q = np.append(log_q[::-1] if newest_first else log_q, numbers.dense[row, LOG_Q])
        follows = [*events, items[row]]
        of_row = []
        for t in range(len(events)):
            if model.targets == "newest" and t + 1 < len(events):
                continue
            if model._new_events is not None and t < len(events) - max(1, numbers.dense[row, NEW]):
                continue
            state, target = unit(states[row][t], cosine), follows[t + 1]
            positive = state @ unit(target, cosine) / scale
            others = [
                (state @ unit(e, cosine) / scale, q) for i, e, q in pool if i != row and not np.array_equal(e, target)
            ]
            if model.kind == "sampled_softmax":
                if model._log_q:
                    positive, others = positive - log_q[t + 1], [(s - q, q) for s, q in others]
                of_row.append(np.log(np.exp(positive) + sum(np.exp(s) for s, _ in others)) - positive)
            else:
                beta = 1.0
                if model.kind == "gbce":
                    a, t_ = min(1.0, len(others) / (model.item_count - 1)), model.calibration
                    beta = a * (t_ * (1 - 1 / a) + 1 / a)
                total = -beta * np.log(sigmoid(positive)) - sum(np.log(1 - sigmoid(s)) for s, _ in others)
                of_row.append(total / (len(others) + 1))
        losses.append(np.mean(of_row) if of_row else 0.0)
    return losses


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"targets": "newest"},
        {"new_events": "new"},
        {"negatives": NEGATIVES},
        {"negatives": NEGATIVES, "targets": "newest", "newest_first": True, "temperature": 0.2},
        {"negatives": NEGATIVES, "loss": "bce", "temperature": 0.5},
        {"negatives": NEGATIVES, "loss": "gbce", "items": 40, "calibration": 0.6},
        {"loss": "gbce", "items": 5, "targets": "newest"},
        {"log_q": "log_q", "targets": "newest"},
        {"log_q": "log_q", "history_log_q": "history_log_q", "newest_first": True},
        {
            "negatives": NEGATIVES,
            "log_q": "log_q",
            "history_log_q": "history_log_q",
            "negatives_log_q": "drawn_log_q",
            "new_events": "new",
        },
    ],
)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_losses_are_those_of_loops_over_predictions(backbone, options):
    torch.manual_seed(0)
    schema = schema_with("negatives" in options)
    model = NextItem(schema, backbone=backbone, history=PAIRS, **options)
    dense, embeddings = inputs(schema)
    dense[:, NEW] = torch.tensor([1.0, 0.0, 1.0, 2.0, 3.0, 9.0, 2.0])
    values, mask = model.input.past(embeddings)
    states = states_of(model, dense, values, mask).detach().double().numpy()
    expected = expected_losses(model, dense, embeddings, states, options.get("newest_first", False))
    output = model(dense, embeddings)
    np.testing.assert_allclose(output.extra.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    labels = torch.tensor([[1.0], [0.0], [1.0], [1.0], [1.0], [1.0], [1.0]])
    weights, known = torch.rand(7) + 0.1, labels.new_ones(7, 1).bool()
    found = model.loss(output.logits, Targets(labels, known, weights), output.extra)
    share = weights * labels[:, 0]
    assert found.item() == pytest.approx((share.numpy() * expected).sum() / weights.sum().item(), rel=1e-4)
    found.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    # Tied rows: those of the history, of the item and of the negatives are all trained.
    names = ["items", "item", *(NEGATIVES[:1] if "negatives" in options else ())]
    for name in names:
        leaf = embeddings[name].values if isinstance(embeddings[name], SequenceEmbedding) else embeddings[name]
        assert leaf.grad.abs().sum() > 0


@pytest.mark.parametrize("backbone", BACKBONES)
def test_padding_and_later_events_change_no_state(backbone):
    torch.manual_seed(0)
    schema = schema_with(negatives=False)
    model = NextItem(schema, backbone=backbone, history=PAIRS).eval()
    values, mask = torch.randn(1, LENGTH, 6), torch.ones(1, LENGTH, dtype=torch.bool)
    whole = states_of(model, torch.zeros(1, schema.dense_width), values, mask)
    if backbone == "sasrec":  # Its positions are counted from the newest event.
        model.backbone.positions.data.zero_()
        whole = states_of(model, torch.zeros(1, schema.dense_width), values, mask)
    few = mask & (torch.arange(LENGTH) < 3)
    states = states_of(model, torch.zeros(1, schema.dense_width), values * few.unsqueeze(2), few)
    torch.testing.assert_close(states[:, :3], whole[:, :3])


@pytest.mark.parametrize("options", [{}, {"temperature": 0.1}])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_vectors_and_ranking_give_the_logits(backbone, options):
    torch.manual_seed(0)
    schema = schema_with(negatives=False)
    model = NextItem(schema, backbone=backbone, history=PAIRS, **options).eval()
    assert isinstance(model, RankingModel)
    dense, embeddings = inputs(schema)
    logits = model(dense, embeddings)
    scores = model.users(dense, embeddings) @ model.items(dense, embeddings).T / options.get("temperature", 1.0)
    torch.testing.assert_close(scores.diagonal().unsqueeze(1), logits)
    row = 4
    of_user = {
        name: SequenceEmbedding(embeddings[name].values[row : row + 1], embeddings[name].mask[row : row + 1])
        for name in ("items", "shops")
    }
    ranked = model.score(model.user_part(dense[row : row + 1], of_user), dense, embeddings)
    torch.testing.assert_close(ranked[:, 0], scores[row])


def test_servers_ask_for_what_vectors_are_computed_from():
    log_q = {"log_q": "log_q", "history_log_q": "history_log_q"}
    model = NextItem(schema_with(negatives=False), history=PAIRS, **log_q)
    assert user_features(model, schema_with()) == TowerFeatures(("items", "shops"), ())
    assert item_features(model, schema_with()) == TowerFeatures(("item", "shop"), ())
    model = NextItem(schema_with(negatives=False), history=PAIRS, backbone="hstu", ages="history_log_q")
    assert user_features(model, schema_with()) == TowerFeatures(("items", "shops"), ("history_log_q",))
    assert not any("columns" in name for name in model.state_dict())


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("loss", ["sampled_softmax", "bce"])
def test_batches_without_negatives_or_events_have_finite_losses(rows, loss):
    schema = schema_with(negatives=False)
    for lengths in ([0] * rows, [2] * rows):
        model = NextItem(schema, loss=loss, history=PAIRS)
        dense, embeddings = made_inputs(schema, rows, lengths=lengths)
        output = model(dense, embeddings)
        assert output.extra.shape == (rows,)
        assert output.extra.isfinite().all()
        if loss == "sampled_softmax" or not lengths or not lengths[0]:
            assert not output.extra.any()  # An item alone has probability 1.


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("loss", ["sampled_softmax", "bce"])
def test_it_learns_a_chain_of_items(backbone, loss):
    torch.manual_seed(0)
    items, rule, rows = 20, torch.randperm(20), 64
    drawn_rows = 2 if loss == "bce" else rows  # Many negatives outweigh the item that followed.
    features = [
        IdFeature("item", dim=16),
        IdFeature("history", table="item", pooling=None, max_length=8),
        IdFeature("others", table="item", pooling=None, max_length=1),
    ]
    model = NextItem(Schema(features), backbone=backbone, loss=loss, negatives=["others"], layers=1)
    table = torch.nn.Embedding(items, 16)
    torch.nn.init.uniform_(table.weight, -0.01, 0.01)
    optimizer = torch.optim.Adam([*model.parameters(), *table.parameters()], 0.02)

    def batch():
        chain = [torch.randint(items, (rows,))]
        for _ in range(8):
            chain.append(rule[chain[-1]])
        history = torch.stack(chain[:-1], 1)
        mask = torch.ones(rows, 8, dtype=torch.bool)
        one = torch.arange(rows).unsqueeze(1) < drawn_rows
        drawn = torch.randint(items, (rows, 1))
        return chain[-1], {
            "item": table(chain[-1]),
            "history": SequenceEmbedding(table(history), mask),
            "others": SequenceEmbedding(table(drawn) * one.unsqueeze(2), one),
        }

    for _ in range(200):
        _, embeddings = batch()
        output = model(torch.zeros(rows, 0), embeddings)
        optimizer.zero_grad()
        model.loss(output.logits, torch.ones(rows, 1), output.extra).backward()
        optimizer.step()
    target, embeddings = batch()
    with torch.no_grad():
        best = (model.eval().users(torch.zeros(rows, 0), embeddings) @ table.weight.T).argmax(1)
    assert (best == target).float().mean() > 0.8


ITEMS = 5
CHANCES = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
"""With which the user chooses each item."""


class Constant(torch.nn.Module):
    """The same state after each event."""

    def __init__(self, state):
        super().__init__()
        self.state = torch.nn.Parameter(state)

    def states(self, events, layout):
        return self.state.expand(len(events), -1)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("drawn", [True, False])
def test_the_correction_makes_the_chances_of_items_the_best_scores(drawn, corrected):
    """The expected gradient is 0 at scores log p, over items that users choose by p and one negative by another q.

    Both expectations are sums over all items. The probabilities q are those of a reader: of a catalog by popularity, or
    of items of a batch, whose negatives are chosen as the items are.
    """
    features = [IdFeature("item", dim=2), IdFeature("history", table="item", pooling=None, max_length=1)]
    known = Schema(features)
    counts = np.array([1, 2, 4, 8, 16]) if drawn else (1_000 * CHANCES).astype(np.int64)
    catalog = data.ItemCatalog({"item": np.arange(ITEMS, dtype=np.uint64)}, counts)
    rows = {"item": np.arange(ITEMS), "history": np.zeros((ITEMS, 1)), "label": np.ones(ITEMS)}
    samples = Batch.from_columns(known, rows)
    options = {"count": 1, "by": "popularity", "power": 0.5} if drawn else {"by": "in_batch"}
    reader = data.shared_negatives(Samples(known), ["item"], catalog=catalog, **options)
    batch = reader.added(samples, reader.generator(0), 0)
    log_q = torch.from_numpy(batch.dense[:, reader.schema.dense_slices["log_q"]][:, 0])
    q = counts**0.5 / (counts**0.5).sum() if drawn else CHANCES
    torch.testing.assert_close(log_q, torch.from_numpy(np.log(q)).float())
    names = {"log_q": "log_q"} | ({"negatives_log_q": "negative_log_q"} if drawn else {})
    model = NextItem(
        reader.schema,
        history=[("history", "item")],
        targets="newest",
        negatives=["negative_item"] if drawn else None,
        **(names if corrected else {}),
    )
    model.backbone = Constant(torch.tensor([1.0, 0.0]))
    # The second number tells items apart, and no state has it.
    table = torch.stack([torch.from_numpy(np.log(CHANCES)).float(), torch.arange(ITEMS) + 1.0], 1).requires_grad_()
    one = torch.ones(2, 1, dtype=torch.bool)
    total = 0.0
    for chosen, of_chosen in enumerate(CHANCES):
        for other, of_other in enumerate(q):
            items = torch.tensor([chosen, other])
            dense = log_q[items].unsqueeze(1)
            embeddings = {"item": table[items], "history": SequenceEmbedding(torch.zeros(2, 1, 2), one)}
            if drawn:  # The second sample has none.
                dense = torch.cat([dense, log_q[items.flip(0)].unsqueeze(1)], 1)
                first = torch.tensor([[True], [False]])
                embeddings["negative_item"] = SequenceEmbedding(table[items.flip(0)].unsqueeze(1), first)
            total = total + of_chosen * of_other * model(dense, embeddings).extra[0]
    total.backward()
    gradient = table.grad[:, 0].abs().max().item()
    assert gradient < 1e-7 if corrected else gradient > 0.01


class Samples:
    """A reader that is not read."""

    def __init__(self, schema):
        self.schema = schema

    def batches(self, epoch=0, start=0):
        raise NotImplementedError

    def __iter__(self):
        return self.batches()


@pytest.mark.parametrize("by", ["uniform", "popularity", "in_batch"])
def test_negatives_of_a_reader_teach_a_chain(by):
    torch.manual_seed(0)
    pa = pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    rule, items = rng.permutation(30), [(30 * rng.random(1_600) ** 2).astype(np.int64)]
    for _ in range(5):
        items.append(np.where(rng.random(1_600) < 0.9, rule[items[-1]], 30 * rng.random(1_600) ** 2).astype(np.int64))
    columns = {"item": items[-1], "history": list(np.stack(items[:-1], 1)), "label": np.ones(1_600)}
    schema = Schema([IdFeature("item", dim=16), IdFeature("history", table="item", pooling=None, max_length=5)])
    samples = data.arrow(pa.table(columns), schema, 64)
    count = None if by == "in_batch" else 40
    reader = data.shared_negatives(samples, ["item"], count, by=by, history=["history"], window=5)
    names = {} if by == "uniform" else {"log_q": "log_q", "history_log_q": "history_log_q"}
    if by != "in_batch":
        names["negatives"] = ["negative_item"]
    if by == "popularity":
        names["negatives_log_q"] = "negative_log_q"
    model = NextItem(reader.schema, history=[("history", "item")], backbone="gru", layers=1, **names)
    trainer = Trainer(
        model,
        reader.schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
        embedding_optimizer=Adagrad(lr=0.1),
        mode=Sync(),
        options=TrainerOptions(device="cpu", progress=False),
    )
    for epoch in range(4):
        trainer.fit(reader.batches(epoch))
    rows = torch.from_numpy(trainer.embeddings.rows("item", np.arange(30, dtype=np.uint64)).values)
    past = torch.arange(30).unsqueeze(1)
    history = {"history": SequenceEmbedding(rows[past], torch.ones(30, 1, dtype=torch.bool))}
    with torch.no_grad():
        best = (model.eval().users(torch.zeros(30, reader.schema.dense_width), history) @ rows.T).argmax(1)
    assert (best.numpy() == rule).mean() > 0.7


def with_label(label):
    schema = history_schema()
    return Schema(schema.id_features, dense_features=schema.dense_features, labels=[label])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"backbone": "rnn"}, "backbone"),
        ({"loss": "softmax"}, "loss"),
        ({"targets": "last"}, "targets"),
        ({"negatives": ["not_items"]}, "negatives has 1 features, but the history 2"),
        ({"negatives": "not_items"}, "Invalid negatives"),
        ({"temperature": 0.0}, "temperature"),
        ({"calibration": 1.5}, "calibration"),
        ({"loss": "gbce"}, "needs items"),
        ({"items": 5}, "takes no items"),
        ({"loss": "gbce", "items": 1}, "items = 1"),
        ({"backbone": "gru", "layers": 0}, "layers"),
        ({"backbone": "gru", "ages": "history_log_q"}, "reads no ages"),
        ({"backbone": "gru", "heads": 2}, "'gru' has no heads; leave heads = 2 out, or use 'sasrec' or 'hstu'"),
        ({"backbone": "gru", "dropout": 0.1}, "'gru' has no dropout; leave dropout = 0.1 out, or use 'sasrec'"),
        ({"backbone": "hstu", "dropout": 0.1}, "'hstu' has no dropout"),
        ({"backbone": "sasrec", "dropout": 1.0}, "dropout = 1.0"),
        ({"backbone": "hstu", "heads": 0}, "heads = 0"),
        ({"log_q": "nope", "targets": "newest"}, "no dense feature"),
        ({"log_q": "history_log_q", "targets": "newest"}, "has 5 values, but needs 1"),
        ({"log_q": "log_q"}, "history_log_q is missing"),
        ({"new_events": "history_log_q"}, "has 5 values, but needs 1"),
        ({"new_events": "new", "targets": "newest"}, "chooses among the targets"),
        ({"log_q": "log_q", "negatives": NEGATIVES, "targets": "newest"}, "negatives_log_q is missing"),
        ({"history_log_q": "history_log_q"}, "log_q is missing"),
        ({"loss": "bce", "log_q": "log_q", "targets": "newest"}, "has no correction"),
    ],
)
def test_bad_arguments_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        NextItem(schema_with(), **{"history": PAIRS} | options)


@pytest.mark.parametrize("label", [Label("stars", "regression"), Label("click", weight=2.0)])
def test_other_labels_are_refused(label):
    with pytest.raises(ConfigError, match="one binary label"):
        NextItem(with_label(label))


def test_the_calibrated_loss_is_bce_without_calibration():
    schema = schema_with()
    dense, embeddings = inputs(schema)
    found = []
    for options in ({"loss": "bce"}, {"loss": "gbce", "items": 100, "calibration": 0.0}):
        torch.manual_seed(0)
        found.append(NextItem(schema, history=PAIRS, negatives=NEGATIVES, **options)(dense, embeddings).extra)
    torch.testing.assert_close(*found)
    assert math.isfinite(found[0].sum().item())
