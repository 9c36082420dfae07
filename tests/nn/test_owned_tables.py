"""Training with rows that the device owns: the bits of training without, and of whatever reads rows meanwhile."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_inline import OPTIMIZERS, rows, train

import persia
from persia.cluster import Embedded
from persia.errors import ConfigError, PersiaError, StoreError
from persia.modes import Async, Hybrid, Sync
from persia.nn import CollectionOptions, EmbeddingCollection
from persia.nn.owned_rows import Unwritten
from persia.nn.row_access import RowAccess
from persia.optim import Adagrad, Adam
from persia.ps import EmbeddingServer
from support.examples import examples
from support.pass_samples import Elsewhere, batches, schema
from support.several_ps import Several
from support.staging import as_on_a_gpu


class SeveralNear(Several):
    """Several PSs in this process, as `Embedded` has one."""

    def connect(self, *arguments):
        return super().connect(*arguments)._replace(near=True)


def owning(slots, tags=0, **table):
    """The schema of `pass_samples`, with rows that a device may own."""
    declared = schema(owned_rows=slots, **table)
    tables = [declared.resolved_tables()["item"], persia.Table("tag", dim=3, owned_rows=tags)]
    return persia.Schema(declared.id_features, declared.dense_features, declared.labels, tables)


def raising(error):
    """A function that raises an error."""

    def function(*_, **__):
        raise error

    return function


def assert_same_rows(mine, theirs):
    for table, found in mine.items():
        other = theirs[table]
        for a, b in zip(
            (found.found, found.values, *found.state), (other.found, other.values, *other.state), strict=True
        ):
            np.testing.assert_array_equal(a, b)


@settings(max_examples=examples(20), deadline=None)
@given(st.data())
def test_the_bits_are_those_of_rows_at_parameter_servers(data):
    """Also if rows are read, or batches are evaluated, between steps; and from pass to pass."""
    optimizer, servers = data.draw(st.sampled_from(OPTIMIZERS)), data.draw(st.sampled_from([1, 3]))
    options = {"optimizer": optimizer, "clip_embedding_norm": data.draw(st.sampled_from([None, 0.05]))}
    slots, tags = data.draw(st.sampled_from([1, 7, 500])), data.draw(st.sampled_from([0, 5]))
    bound, seed = data.draw(st.sampled_from([0.0, 0.3])), data.draw(st.integers(0, 99))
    count, reading = data.draw(st.integers(0, 9)), data.draw(st.sets(st.integers(0, 8)))
    plain, owned = schema(value_bound=bound), owning(slots, tags, value_bound=bound)
    runs = []
    for declared in (plain, owned):
        found, step = [], iter(range(100))

        def look(embeddings, found=found, step=step, declared=declared):
            if next(step) not in reading:
                return
            found.append({name: stored.values for name, stored in rows(embeddings).items()})
            embeddings.eval()
            for batch in embeddings.prefetch(batches(2, declared, seed + 1)):
                found.append({name: part.detach().clone() for name, part in batch.rows.items()})
            embeddings.train()

        cluster = SeveralNear(servers)
        embeddings, losses = train(cluster, declared, batches(count, declared, seed), each=look, **options)
        runs.append((embeddings, losses, found))
    (one, losses, found), (two, others, found_too) = runs
    assert losses == others
    for mine, theirs in zip(found, found_too, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    assert_same_rows(rows(two), rows(one))
    assert one.pushed == two.pushed
    assert two.owned.unwritten == Unwritten()
    assert bool(two.owned.misses) == (count > 0)


@pytest.mark.parametrize("options", [{}, {"clip_embedding_norm": 0.05}])
def test_the_bits_are_the_same_where_rows_are_pooled_on_a_device(options):
    """As on a GPU, on tensors of a CPU: rows and gradients cross in blocks, without those that are owned."""
    runs, bytes_copied = [], []
    for declared in (schema(), owning(1000, 5)):
        embeddings = EmbeddingCollection(
            declared, optimizer=Adam(0.1), mode=Sync(), cluster=SeveralNear(2), options=CollectionOptions(**options)
        )
        staging = as_on_a_gpu(embeddings)
        losses = []
        for batch in embeddings.prefetch(batches(6, declared)):
            found = embeddings(batch)
            loss = sum(((part.values if name == "tag" else part) ** 2).sum() for name, part in found.items())
            loss.backward()
            losses.append(loss.item())
        runs.append((losses, embeddings.pushed, rows(embeddings)))
        bytes_copied.append(sum(staging.blocks))
    (losses, pushed, found), (others, pushed_too, found_too) = runs
    assert losses == others
    assert pushed == pushed_too
    assert_same_rows(found_too, found)
    assert bytes_copied[1] < bytes_copied[0]


def test_hits_are_neither_looked_up_nor_pushed(monkeypatch):
    looked_up, pushed = [], []
    lookup, push = EmbeddingServer.lookup, EmbeddingServer.push

    def noted_lookup(server, ids, train, *arguments):
        looked_up.append(len(ids["item"]))
        return lookup(server, ids, train, *arguments)

    def noted_push(server, header, gradients, *arguments):
        pushed.append(len(gradients["item"].ids))
        return push(server, header, gradients, *arguments)

    monkeypatch.setattr(EmbeddingServer, "lookup", noted_lookup)
    monkeypatch.setattr(EmbeddingServer, "push", noted_push)
    declared = owning(100_000)
    one = batches(1, declared)
    embeddings, _ = train(Embedded(threads=1), declared, one * 4)
    assert looked_up[0] > 5
    assert looked_up[1:] == [0, 0, 0]
    assert pushed == [0, 0, 0, 0]
    assert embeddings.owned.hits == 3 * embeddings.owned.misses
    plain, _ = train(Embedded(threads=1), schema(), one * 4)
    assert embeddings.pushed == plain.pushed


def test_refused_gradients_are_counted_and_named(caplog):
    declared = owning(1000)
    embeddings = EmbeddingCollection(declared, optimizer=Adagrad(0.1), mode=Sync(), cluster=Embedded(threads=1))
    for batch in embeddings.prefetch(batches(2, declared)):
        found = embeddings(batch)
        (found["item"].sum() * float("nan") + found["seen"].sum()).backward()
    assert embeddings.pushed.non_finite > 0
    (found_rows,) = embeddings.push_log.non_finite.found()
    assert found_rows.rows == embeddings.pushed.non_finite
    assert "rows of table 'item' stay as they are" in caplog.text


def begun(declared):
    """A collection in a pass, after its first batch was trained, with the loop and the batch."""
    embeddings = EmbeddingCollection(declared, optimizer=Adam(0.1), mode=Sync(), cluster=Embedded(threads=1))
    loop = embeddings.prefetch(batches(4, declared))
    batch = next(loop)
    embeddings(batch)["item"].sum().backward()
    return embeddings, loop, batch


def test_rows_are_written_back_at_the_end_of_a_pass_and_stay():
    embeddings, loop, _ = begun(owning(1000))
    owned = embeddings.owned
    assert owned.rows == owned.misses > 0
    assert owned.unwritten == Unwritten(owned.rows, owned.rows)
    loop.close()
    assert embeddings.owned.rows == owned.rows
    assert embeddings.owned.unwritten == Unwritten()
    found = rows(embeddings)["item"]
    assert found.state.update_count.sum() == owned.rows
    next(embeddings.prefetch(batches(1, embeddings.schema)))
    assert embeddings.owned.hits == owned.misses


def test_rows_that_were_changed_between_passes_are_read_again():
    embeddings, loop, _ = begun(owning(1000))
    loop.close()
    embeddings.set_rows("item", [1, 2], np.full((2, 4), 7.0))
    assert embeddings.owned.rows == 0
    next(embeddings.prefetch(batches(1, embeddings.schema)))
    assert embeddings.owned.rows > 0
    embeddings(batches(1, embeddings.schema)[0])["item"].sum().backward()
    assert embeddings.owned.rows == 0  # It was trained without `prefetch`.


def test_calls_that_change_rows_are_refused_during_a_pass():
    embeddings, loop, _ = begun(owning(1000))
    (server,) = embeddings.connection.servers
    with pytest.raises(PersiaError, match="import_rows changes, moves or publishes rows while a device owns"):
        server.import_rows(next(iter(server.export_rows("item"))))
    loop.close()
    server.import_rows(next(iter(server.export_rows("item"))))


def _evaluated(embeddings, _):
    embeddings.eval()
    return next(embeddings.prefetch(batches(1, embeddings.schema))).rows


def _exported(embeddings, _):
    (server,) = embeddings.connection.servers
    return {chunk.table: chunk.arrays["embeddings"] for chunk in server.export_rows()}


def _snapshot(embeddings, _):
    (server,) = embeddings.connection.servers
    server.begin_snapshot("a", {}, tempfile.gettempdir())
    return {chunk.table: chunk.arrays["embeddings"] for chunk in server.snapshot_rows("a")}


READERS = {
    "rows": lambda embeddings, _: {name: found.values for name, found in rows(embeddings).items()},
    "evaluate": _evaluated,
    "again": lambda embeddings, batch: embeddings.looked_up_again(batch).rows,
    "export": _exported,
    "snapshot": _snapshot,
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_within_a_pass_find_the_updates(reader):
    found = []
    for declared in (schema(), owning(1000)):
        embeddings, _loop, batch = begun(declared)
        embeddings.await_pushes()
        read = READERS[reader](embeddings, batch)["item"]
        found.append(read.detach().numpy().copy() if torch.is_tensor(read) else read)
        assert embeddings.owned.unwritten == Unwritten()
    np.testing.assert_array_equal(*found)


def test_what_cannot_be_written_back_is_lost_and_counted(monkeypatch):
    embeddings, loop, _ = begun(owning(1000))
    unwritten = embeddings.owned.unwritten

    monkeypatch.setattr(RowAccess, "set", raising(StoreError("There is no space.")))
    with pytest.raises(StoreError) as raised:
        loop.close()
    assert f"{unwritten.updates} updates of {unwritten.rows} rows that the device owned are lost" in str(
        raised.value.__notes__
    )
    assert embeddings.owned.lost == unwritten
    assert embeddings.owned.rows == 0


def test_the_error_of_a_loop_is_raised_if_its_rows_cannot_be_written_back(monkeypatch):
    embeddings, loop, _ = begun(owning(1000))
    monkeypatch.setattr(RowAccess, "set", raising(StoreError("There is no space.")))
    with pytest.raises(ZeroDivisionError) as raised:
        loop.throw(ZeroDivisionError())
    (note,) = raised.value.__notes__
    assert "are lost" in note
    assert "There is no space." in note
    assert embeddings.owned.lost.updates > 0


def test_rows_of_an_interrupted_end_are_written_back_before_rows_are_set(monkeypatch):
    """They are not discarded with the others of the device."""
    embeddings, loop, _ = begun(owning(1000))
    with monkeypatch.context() as patch:
        patch.setattr(RowAccess, "set", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            loop.close()
    unwritten = embeddings.owned.unwritten
    assert unwritten.updates > 0
    written = []
    setting = RowAccess.set
    monkeypatch.setattr(RowAccess, "set", lambda *a: written.append(len(a[2])) or setting(*a))
    embeddings.set_rows("item", [1 << 40], np.zeros((1, 4), np.float32))
    assert sum(written) == unwritten.rows + 1
    assert embeddings.owned == embeddings.owned._replace(rows=0, unwritten=Unwritten(), lost=Unwritten())


def test_rows_may_be_set_after_a_pass_that_did_not_begin(monkeypatch):
    embeddings = EmbeddingCollection(owning(9), optimizer=Adagrad(0.1), mode=Sync())
    monkeypatch.setattr("persia.nn.collection.StepPass", raising(RuntimeError("no thread")))
    with pytest.raises(RuntimeError, match="no thread"):
        next(embeddings.prefetch(batches(1, owning(9))))
    embeddings.set_rows("item", [1], np.zeros((1, 4), np.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": Hybrid()}, "needs the mode Sync, not Hybrid"),
        ({"mode": Async()}, "needs the mode Sync, not Async"),
        ({"cluster": Elsewhere()}, "needs all rows in memory of this process"),
        ({"options": CollectionOptions(accumulation_steps=2)}, "needs accumulation_steps = 1, not 2"),
        ({"options": CollectionOptions(one_thread=True)}, "needs one_thread to be left out"),
    ],
)
def test_what_rows_cannot_be_owned_in_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=rf"Table\('item'\).owned_rows = 9 {message}"):
        EmbeddingCollection(owning(9), **{"optimizer": Adagrad(0.1), "mode": Sync(), **arguments})


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"ttl": persia.Steps(5)}, {"trainable": False}, {"cache_rows": 9}]
)
def test_tables_whose_rows_cannot_be_owned_are_refused(change):
    with pytest.raises(ConfigError, match=rf"Table\('item'\).{next(iter(change))} = .* cannot be owned"):
        persia.Table("item", 4, owned_rows=9, **change)


def test_another_mode_is_refused():
    embeddings = EmbeddingCollection(owning(9), optimizer=Adagrad(0.1), mode=Sync())
    with pytest.raises(ConfigError, match="needs the mode Sync"):
        embeddings.change_mode(Hybrid(2))
    assert embeddings.mode == Sync()


def test_more_rows_than_the_device_holds_are_refused(monkeypatch):
    """Each time, also if the rows of another table fit."""
    declared = owning(9, 1 << 30)
    embeddings = EmbeddingCollection(declared, optimizer=Adagrad(0.1), mode=Sync())
    monkeypatch.setattr(type(embeddings._staging), "free_bytes", lambda _: 1 << 20)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"owned_rows = 1073741824 needs [0-9,]+ bytes on the device"):
            next(embeddings.prefetch(batches(1, declared)))


def test_more_rows_than_a_table_has_are_refused():
    with pytest.raises(ConfigError, match="owned_rows = 9 is more than its capacity = 8"):
        persia.Table("item", 4, capacity=8, owned_rows=9)
