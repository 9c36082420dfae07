"""`Trainer.evaluate_retrieval` against ranks in NumPy from all scores, for models with towers."""

import numpy as np
import pyarrow as pa
import pytest
import torch

import persia
from persia.batching.id_column import IdColumn
from persia.errors import ConfigError, DataError, DivergedError
from persia.metrics import RetrievalMetrics
from persia.nn.models import NextItem, TwoTower
from persia.testing import Threads
from persia.trainer import retrieval_evaluation

ITEMS, LENGTH = 40, 5
AT = (1, 5, 60)

CHAINS = persia.Schema(
    [
        persia.IdFeature("item", dim=8),
        persia.IdFeature("history", dim=8, table="item", pooling=None, max_length=LENGTH),
    ],
    dense_features=[persia.DenseFeature("ages", size=LENGTH)],
    labels=["chosen"],
)

CLICKS = persia.Schema(
    [
        persia.IdFeature("user", dim=4),
        persia.IdFeature("seen", dim=8, table="item", pooling="mean"),
        persia.IdFeature("item", dim=8),
        persia.IdFeature("tags", dim=4, pooling="sum"),
    ],
    dense_features=["age", "price"],
    labels=["click"],
    sample_weight="weight",
)


def chains(seed, rows=30, items=ITEMS):
    """Item i is followed by 7 i + 1."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LENGTH + 1, rows)
    events = [[int(rng.integers(items))] for _ in range(rows)]
    for history, length in zip(events, lengths, strict=True):
        while len(history) <= length:
            history.append((7 * history[-1] + 1) % items)
    columns = {"item": [h[-1] for h in events], "history": [h[:-1] for h in events], "chosen": rng.integers(0, 2, rows)}
    return persia.Batch.from_columns(CHAINS, columns | {"ages": np.zeros((rows, LENGTH))})


def clicks(seed, rows=30):
    rng = np.random.default_rng(seed)
    item = rng.integers(0, ITEMS, rows)
    columns = {
        "user": rng.integers(0, 20, rows),
        "seen": [rng.integers(0, ITEMS, n).tolist() for n in rng.integers(0, 4, rows)],
        "age": rng.random(rows),
        "click": rng.integers(0, 2, rows),
        "weight": rng.integers(0, 4, rows),
    }
    return persia.Batch.from_columns(CLICKS, columns | features_of(item))


def features_of(item):
    """An item has 0 to 2 tags."""
    return {"item": item, "tags": [list(range(i % 3)) for i in item.tolist()], "price": item / ITEMS}


def catalogue(ids):
    rows = len(ids)
    nothing = {"user": [[]] * rows, "seen": [[]] * rows, "age": np.zeros(rows), "click": np.zeros(rows)}
    return persia.Batch.from_columns(CLICKS, features_of(np.asarray(ids)) | nothing | {"weight": np.ones(rows)})


def trainer(model, schema, cluster=None):
    return persia.Trainer(
        model,
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        mode=persia.modes.Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False),
    )


@pytest.fixture(scope="module")
def next_items():
    torch.manual_seed(0)
    run = trainer(NextItem(CHAINS, backbone="hstu", ages="ages"), CHAINS)
    run.fit([chains(seed) for seed in range(20)])
    return run


@pytest.fixture(scope="module")
def towers():
    torch.manual_seed(0)
    run = trainer(TwoTower(CLICKS, item=["item", "tags", "price"], hidden=(8,), dim=8), CLICKS)
    run.fit([clicks(seed) for seed in range(10)])
    return run


def stored(run):
    ids = np.arange(ITEMS, dtype=np.uint64)
    assert run.embeddings.rows("item", ids).found.all()
    return ids


def items_of(ids):
    nothing = IdColumn(np.empty(0, np.uint64), np.zeros(len(ids) + 1, np.int64))
    dense, labels = np.zeros((len(ids), LENGTH), np.float32), np.zeros((len(ids), 1), np.float32)
    return persia.Batch({"item": IdColumn(ids), "history": nothing}, dense, labels)


def vectors(run, batch, tower):
    run.model.eval()
    run.embeddings.eval()
    with torch.no_grad():
        (prepared,) = run.embeddings.prefetch([batch])
        found = getattr(run.model, tower)(prepared.dense, run.embeddings(prepared)).numpy()
    run.model.train()
    run.embeddings.train()
    return found


def expected(run, batches, ids, items, leave_out=None):
    """Ranks from all scores at once; `items` is a batch of the items with these ids, which ascend."""
    of_items = vectors(run, items, "items").astype(np.float64)
    metrics = RetrievalMetrics(len(ids), AT)
    for batch in batches:
        users = vectors(run, batch, "users").astype(np.float64)
        scores = (users @ of_items.T).astype(np.float32)
        for row in np.flatnonzero(batch.labels[:, 0] > 0):
            chosen = batch.id_features["item"].values[row]
            out = [] if leave_out is None else batch.id_features[leave_out].slice(row, row + 1).values
            scores[row, np.isin(ids, out) & (ids != chosen)] = -np.inf
            best = [p for p in np.argsort(-scores[row], kind="stable") if scores[row, p] > -np.inf][: max(AT)]
            top = [best + [-1] * (max(AT) - len(best))]
            weight = None if batch.weights is None else batch.weights[row : row + 1]
            if chosen not in ids:
                metrics.update([-1], [0], top, weight)
                continue
            of_chosen = scores[row, ids == chosen]
            above, equal = (scores[row] > of_chosen).sum(), (scores[row] == of_chosen).sum() - 1
            metrics.update([above], [equal], top, weight)
    return metrics.result()


def close(found, wanted):
    assert (found.rows, found.items, found.missing) == (wanted.rows, wanted.items, wanted.missing)
    for name in ["mrr", *(f"{name}@{k}" for name in ("hr", "ndcg", "coverage") for k in AT)]:
        assert found.value(name) == pytest.approx(wanted.value(name), rel=1e-6), name


@pytest.mark.parametrize("leave_out", [None, "history"])
@pytest.mark.parametrize("users", [1 << 16, 25])
def test_the_rows_of_a_table_compete(next_items, leave_out, users, monkeypatch):
    """In several groups of users, and in blocks of a few items, as one of many."""
    monkeypatch.setattr(retrieval_evaluation, "USERS", users)
    monkeypatch.setattr(retrieval_evaluation, "CHUNK", 7)
    data = [chains(seed, items=ITEMS + 5) for seed in range(100, 104)]  # Some items have no row.
    ids = stored(next_items)
    wanted = expected(next_items, data, ids, items_of(ids), leave_out)
    options = {} if leave_out is None else {"leave_out": [leave_out]}
    step, rows = next_items.global_step, next_items.embeddings.statistics()["item"]["rows"]
    found = next_items.evaluate_retrieval(iter(data), at=AT, **options)
    close(found, wanted)
    assert found.missing > 0
    assert (next_items.global_step, next_items.embeddings.statistics()["item"]["rows"]) == (step, rows)
    assert next_items.model.training


def test_a_chain_is_retrieved(next_items):
    """The item that follows is found, so the ranks belong to the right samples and items."""
    assert next_items.evaluate_retrieval([chains(99, 200)]).hit_rate[10] > 0.8


@pytest.mark.parametrize("leave_out", [None, "seen"])
def test_items_with_features_compete(towers, leave_out, monkeypatch):
    monkeypatch.setattr(retrieval_evaluation, "CHUNK", 7)
    data = [clicks(seed) for seed in range(100, 104)]
    ids = stored(towers)
    ids = ids[ids % 4 > 0]  # Others miss.
    wanted = expected(towers, data, ids, catalogue(ids), leave_out)
    given = [5000, *np.random.default_rng(0).permutation(ids).tolist()]  # 5000 has no row, so it is no item.
    options = {} if leave_out is None else {"leave_out": [leave_out]}
    found = towers.evaluate_retrieval(
        data, items=[catalogue(given[:9]), catalogue(given[9:])], key="item", at=AT, **options
    )
    close(found, wanted)
    assert found.missing > 0


def test_several_nn_workers_share_the_samples():
    """Each of two has the metrics of all; rows are at two PSs."""
    data = [chains(seed) for seed in range(5)]

    def work(member):
        torch.manual_seed(0)
        run = trainer(NextItem(CHAINS), CHAINS, member)
        run.fit(data)
        wanted = expected(run, data, stored(run), items_of(stored(run)), "history")
        return run.evaluate_retrieval(data, at=AT, leave_out=["history"]), wanted

    (first, wanted), (second, _) = Threads(nn_workers=2, ps=2, timeout=60.0).run(work)
    close(first, wanted)
    assert first == second


def test_unlabelled_samples_all_count(next_items):
    batch = chains(100)
    without = persia.Batch(batch.id_features, batch.dense, np.empty((len(batch), 0), np.float32))
    assert next_items.evaluate_retrieval([without]).rows == len(batch)
    assert next_items.evaluate_retrieval([batch]).rows == np.count_nonzero(batch.labels)


def test_a_model_with_shared_negatives_is_evaluated_on_the_plain_reader():
    plain = chains(0, 60)
    columns = {
        "item": plain.id_features["item"].values,
        "history": [plain.id_features["history"].slice(row, row + 1).values for row in range(60)],
        "ages": list(plain.dense),
        "chosen": plain.labels[:, 0],
    }
    samples = persia.data.arrow(pa.table(columns), CHAINS, 20)
    drawn = persia.data.shared_negatives(samples, ["item"], 10, by="popularity", history=["history"])
    model = NextItem(
        drawn.schema,
        backbone="hstu",
        ages="ages",
        negatives=["negative_item"],
        log_q="log_q",
        history_log_q="history_log_q",
        negatives_log_q="negative_log_q",
    )
    run = trainer(model, drawn.schema)
    run.fit(drawn)
    found = run.evaluate_retrieval(samples, at=AT, leave_out=["history"])
    assert found.rows == np.count_nonzero(plain.labels)
    close(found, run.evaluate_retrieval(drawn, at=AT, leave_out=["history"]))
    without = persia.Batch(plain.id_features, plain.dense[:, :0], plain.labels)
    with pytest.raises(DataError, match="dense"):  # The ages of events are read.
        run.evaluate_retrieval([without])
    only_items = persia.Batch({"item": plain.id_features["item"]}, plain.dense, plain.labels)
    with pytest.raises(DataError, match="lacks feature 'history'"):
        run.evaluate_retrieval([only_items])


def test_bad_arguments_are_refused(next_items, towers):
    with pytest.raises(ConfigError, match="has no towers"):
        trainer(persia.nn.models.FFNN(CLICKS), CLICKS).evaluate_retrieval([clicks(0)])
    with pytest.raises(ConfigError, match=r"The item has the features item, tags; say which one identifies it"):
        towers.evaluate_retrieval([clicks(0)])
    with pytest.raises(ConfigError, match=r"The item has the features item, tags, price, but a row of table 'item'"):
        towers.evaluate_retrieval([clicks(0)], key="item")
    with pytest.raises(ConfigError, match="'user', whose ids are no items; features of table 'item' are seen"):
        towers.evaluate_retrieval([clicks(0)], key="item", items=catalogue([1]), leave_out=["user"])
    with pytest.raises(ConfigError, match="leave_out = 'history' is one text"):
        next_items.evaluate_retrieval([chains(0)], leave_out="history")
    with pytest.raises(ConfigError, match="at = "):
        next_items.evaluate_retrieval([chains(0)], at=())
    with pytest.raises(DataError, match="no sample whose label is above 0"):
        next_items.evaluate_retrieval([])
    with pytest.raises(DataError, match="No item has a row in table 'item'"):
        towers.evaluate_retrieval([clicks(0)], key="item", items=catalogue([5000]))
    with pytest.raises(DataError, match="No item has a row in table 'item'"):
        trainer(NextItem(CHAINS), CHAINS).evaluate_retrieval([chains(0)])


def test_a_diverged_model_is_refused(next_items):
    run = trainer(NextItem(CHAINS), CHAINS)
    run.fit([chains(0)])
    run.embeddings.set_rows("item", np.arange(1, dtype=np.uint64), np.full((1, 8), 3e38, np.float32))
    batch = persia.Batch.from_columns(
        CHAINS, {"item": [1], "history": [[0]], "ages": np.zeros((1, LENGTH)), "chosen": [1]}
    )
    with pytest.raises(DivergedError, match="1 of 1 vectors of users are not finite"):
        run.evaluate_retrieval([batch])
