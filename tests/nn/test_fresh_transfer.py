"""Refreshed rows on the way to the network: with the native core and in the form of a GPU they have the same bits."""

import numpy as np
import pytest
import torch
from test_transfer import make_batches

import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.errors import DataError
from persia.modes import Sync
from persia.nn.staging import CpuStaging
from persia.nn.transfer import Transfer
from persia.optim import SGD
from persia.schema import Table
from persia.types import Contribution, FreshRows, Packed, PushHeader
from persia.worker import Worker, WorkerOptions
from support.several_ps import several_servers


def schema(dtype):
    features = [
        persia.IdFeature("item", table="item"),
        persia.IdFeature("history", table="item", pooling="mean"),
        persia.IdFeature("user", table="user"),
    ]
    tables = [Table("item", 8, dtype=dtype), Table("user", 5, dtype=dtype)]
    return persia.Schema(features, tables=tables, dense_features=["price"])


def a_batch():
    """Samples of `make_batches`, with users."""
    (batch,) = make_batches(1)
    columns = {**batch.id_features, "user": IdColumn(np.arange(12, dtype=np.uint64))}
    return Batch(columns, batch.dense, batch.labels)


class Case:
    """A batch that was looked up ahead, twice: for the native core, and for a device."""

    def __init__(self, dtype, compression):
        self.schema = schema(dtype)
        tables = self.schema.resolved_tables()
        self.worker = Worker(
            self.schema,
            several_servers(2, tables, SGD(lr=1.0), Sync()),
            options=WorkerOptions(compression),
        )
        self.batch = a_batch()
        self.batch_id = self.worker.register(self.batch.id_features)
        self.transfers = [Transfer(CpuStaging(), on_host, tables) for on_host in (True, False)]
        self.prepared = [t.rows(self.batch, self.worker.lookup_ahead(self.batch_id))[0] for t in self.transfers]

    def push(self):
        """Changes a part of the rows."""
        few = {name: IdColumn(np.arange(12, dtype=np.uint64) % 4) for name in ("item", "history", "user")}
        other = self.worker.register(few)
        self.worker.lookup(other)
        ids, dims = self.worker.distinct_ids(other), {"item": 8, "user": 5}
        random = np.random.default_rng(0)
        gradients = {name: random.normal(size=(len(own), dims[name])).astype(np.float32) for name, own in ids.items()}
        self.worker.push(PushHeader(1, 0, 1, 0, 4), [Contribution(other, gradients)])

    def whole(self):
        """Returns the rows of a lookup now."""
        prepared, _ = self.transfers[0].rows(self.batch, self.worker.lookup_ahead(self.batch_id))
        return prepared.rows


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_refreshed_rows_have_the_bits_of_a_lookup(dtype, compression):
    case = Case(dtype, compression)
    before = [{name: rows.detach().clone() for name, rows in prepared.rows.items()} for prepared in case.prepared]
    case.push()
    for prepared, transfer, old in zip(case.prepared, case.transfers, before, strict=True):
        fresh = case.worker.refresh(case.batch_id, prepared.seen)
        assert 0 < sum(fresh.places.counts) < sum(len(rows) for rows in prepared.rows.values())
        replace = transfer.fresh_rows(prepared, fresh)
        assert all(torch.equal(rows, old[name]) for name, rows in prepared.rows.items())  # Not before the call.
        replace()
        prepared.finish_refresh()
        for name, rows in case.whole().items():
            assert torch.equal(prepared.rows[name], rows)
            assert not torch.equal(old[name], rows)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_were_left_out_are_zeros_until_the_refresh(dtype, compression, on_host):
    case = Case(dtype, compression)
    case.push()
    before, transfer = case.whole(), case.transfers[not on_host]
    few = {name: IdColumn(np.arange(12, dtype=np.uint64) % 4) for name in ("item", "history", "user")}
    case.worker.lookup_ahead(case.worker.register(few))
    prepared, _ = transfer.rows(case.batch, case.worker.lookup_ahead(case.batch_id, recent=1))
    left_out = {name: torch.from_numpy(flags) for name, flags in prepared.left_out.items()}
    for name, rows in prepared.rows.items():
        assert 0 < left_out[name].sum() == (rows == 0).all(1).sum() < len(rows)
        assert torch.equal(rows[~left_out[name]], before[name][~left_out[name]])
    fresh = case.worker.refresh(case.batch_id, prepared.seen, prepared.left_out)
    transfer.fresh_rows(prepared, fresh)()
    prepared.finish_refresh()
    for name, rows in case.whole().items():
        assert torch.equal(prepared.rows[name], rows)


@pytest.mark.parametrize("on_host", [True, False])
def test_a_lookup_that_does_not_say_what_it_leaves_out(on_host):
    case = Case("float32", "none")
    found = case.worker.lookup_ahead(case.batch_id)
    none = Packed(found.rows.names, found.rows.counts, np.ones(sum(found.rows.counts), np.bool_))
    with pytest.raises(DataError, match="left out"):
        case.transfers[not on_host].rows(case.batch, found._replace(left_out=none))


@pytest.mark.parametrize("on_host", [True, False])
def test_leaves_that_wait_for_a_gradient_are_refreshed(on_host):
    """They stay leaves, with the values of the refresh in the backward pass."""
    case = Case("float32", "none")
    prepared, transfer = case.prepared[not on_host], case.transfers[not on_host]
    taken = []
    prepared.await_gradient(case.batch_id, lambda batch: taken.append(batch.take_gradients(None)))
    leaves = dict(prepared.rows)
    case.push()
    transfer.fresh_rows(prepared, case.worker.refresh(case.batch_id, prepared.seen))()
    prepared.finish_refresh()
    assert all(prepared.rows[name] is leaf and leaf.is_leaf for name, leaf in leaves.items())
    sum(0.5 * rows.square().sum() for rows in prepared.rows.values()).backward()
    for name, rows in case.whole().items():
        assert torch.equal(taken[0][name], rows)


@pytest.mark.parametrize("on_host", [True, False])
def test_nothing_to_refresh(on_host):
    case = Case("float32", "fp16")
    prepared, transfer = case.prepared[not on_host], case.transfers[not on_host]
    old = {name: rows.clone() for name, rows in prepared.rows.items()}
    fresh = case.worker.refresh(case.batch_id, prepared.seen)
    assert sum(fresh.places.counts) == 0
    transfer.fresh_rows(prepared, fresh)()
    assert all(torch.equal(rows, old[name]) for name, rows in prepared.rows.items())


@pytest.mark.parametrize("on_host", [True, False])
def test_rows_in_a_message_are_copied(on_host):
    """Those of a lookup that came in a message cannot be written; a refresh must not fail, or write to it."""
    case = Case("float32", "none")
    found = case.worker.lookup_ahead(case.batch_id)
    found.rows.buffer.flags.writeable = False
    sent = found.rows.buffer.copy()
    transfer = case.transfers[not on_host]
    prepared, _ = transfer.rows(case.batch, found)
    case.push()
    transfer.fresh_rows(prepared, case.worker.refresh(case.batch_id, prepared.seen))()
    for name, rows in case.whole().items():
        assert torch.equal(prepared.rows[name], rows)
    np.testing.assert_array_equal(found.rows.buffer, sent)


@pytest.mark.parametrize("on_host", [True, False])
def test_rows_of_another_form_are_refused(on_host):
    case = Case("float32", "none")
    prepared, transfer = case.prepared[not on_host], case.transfers[not on_host]
    places = Packed.of({name: np.zeros(1, np.uint32) for name in ("item", "user")}, np.uint32)
    wrong = Packed.of({name: np.zeros((1, 3), np.float32) for name in ("item", "user")}, np.float32)
    with pytest.raises(DataError):
        transfer.fresh_rows(prepared, FreshRows(places, wrong, prepared.seen))


@pytest.mark.parametrize("on_host", [True, False])
def test_places_beyond_the_rows_are_refused_and_nothing_changes(on_host):
    case = Case("float32", "none")
    prepared, transfer = case.prepared[not on_host], case.transfers[not on_host]
    before = {name: rows.detach().clone() for name, rows in prepared.rows.items()}
    names, counts = list(before), [len(rows) for rows in before.values()]
    places = Packed(names, [1, 0], np.array(counts[:1], np.uint32))
    widths = [rows.shape[1] for rows in before.values()]
    fresh = FreshRows(places, Packed(names, [1, 0], np.ones(widths[0], np.float32), widths), [])
    with pytest.raises(DataError, match="beyond"):
        transfer.fresh_rows(prepared, fresh)()
    for name, rows in prepared.rows.items():
        torch.testing.assert_close(rows, before[name], rtol=0, atol=0)
