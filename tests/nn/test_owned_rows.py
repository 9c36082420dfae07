"""Rows that a device owns are trained to the same bits as rows at parameter servers, and are written back by a rule."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import batching
from persia.errors import ConfigError, StoreError
from persia.modes import Sync
from persia.nn.owned_rows import HotRows, OwnershipRule, Unwritten
from persia.nn.row_access import RowAccess
from persia.optim import SGD, Adagrad, Adam, Ftrl, RowwiseAdagrad, Schedule
from persia.schema import AdmitMinFrequency, IdFeature, Schema, Steps, Table
from persia.types import Gradients, Packed, PushHeader
from support.examples import examples
from support.several_ps import several_servers

DIM, IDS = 5, 60
PLAIN = OwnershipRule()
OPTIMIZERS = [
    SGD(0.1),
    Adagrad(0.05, schedule=Schedule(warmup_steps=4), clip_row_norm=0.5),
    RowwiseAdagrad(0.1, weight_decay=0.01),
    Adam(0.01, decoupled_weight_decay=0.1),
    Ftrl(0.1, l1=0.001),
]


class Run:
    """Trains rows of one table in `Sync`, of which a device owns some if it has slots."""

    def __init__(self, optimizer, servers=1, slots=0, rule=PLAIN, bound=0.0, device="cpu"):
        self.device = torch.device(device)
        self.table = Table("t", DIM, optimizer=optimizer, value_bound=bound)
        schema = Schema([IdFeature("t", dim=DIM)], tables=[self.table])
        self.servers = several_servers(servers, schema.resolved_tables(), optimizer, Sync())
        self.access = RowAccess(schema, self.servers)
        self.owned = self.fresh(slots, rule) if slots else None
        self.step = 0

    def fresh(self, slots, rule=PLAIN):
        return HotRows(self.table, self.table.optimizer, self.access, slots, self.device, rule)

    def train(self, ids, noise):
        """Makes one step; gradients depend on the rows, so that an old row shows in all later ones."""
        if self.owned is None:
            pushed, rest = np.ones(len(ids), bool), self.gradients(torch.from_numpy(self.look_up(ids)), noise)
        else:
            plan = self.owned.plan(ids)
            batch = self.owned.assemble(plan, torch.from_numpy(self.look_up(ids[plan.missing])).to(self.device))
            pushed, rest = batch.pushed, self.owned.update(batch, self.gradients(batch.values, noise), self.step)
        owners = batching.owners("t", ids[pushed], self.servers[0].buckets())
        for number, server in enumerate(self.servers):
            own = owners == number
            gradients = {"t": Gradients(ids[pushed][own], rest.cpu().numpy()[own])}
            server.push(PushHeader(1, 0, self.step + 1, self.step, len(ids)), gradients)
        self.step += 1

    def look_up(self, ids):
        rows = np.empty((len(ids), DIM), np.float32)
        owners = batching.owners("t", ids, self.servers[0].buckets())
        for number, server in enumerate(self.servers):
            rows[owners == number] = server.lookup(Packed.of({"t": ids[owners == number]}, np.uint64), True)["t"]
        return rows

    @staticmethod
    def gradients(rows, noise):
        return rows * 3 + torch.from_numpy(noise).to(rows.device)

    def rows(self):
        """Values, state and counts at the parameter servers."""
        read = self.access.read("t", np.arange(IDS, dtype=np.uint64), True)
        return read.found, read.values, *read.state


def batches(seed, steps, *, odd=False):
    """Distinct ids, some of them frequent, with the noise of their gradients."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        ids = np.unique((IDS * random.random(random.integers(0, 30)) ** 2).astype(np.uint64))
        random.shuffle(ids)
        noise = random.normal(size=(len(ids), DIM)).astype(np.float32)
        if odd:
            noise[random.random(noise.shape) < 0.02] = np.nan
        yield ids, noise


def assert_same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_owned_rows_have_the_bits_of_rows_at_parameter_servers(data):
    """Whichever rows are owned, and whenever they are written back."""
    optimizer, servers = data.draw(st.sampled_from(OPTIMIZERS)), data.draw(st.sampled_from([1, 3]))
    rule = OwnershipRule(data.draw(st.sampled_from([0, 1, 4])), data.draw(st.sampled_from([0, 1, 3])))
    bound = data.draw(st.sampled_from([0.0, 0.5]))
    plain = Run(optimizer, servers, bound=bound)
    owning = Run(optimizer, servers, data.draw(st.sampled_from([1, 7, 40, 500])), rule, bound)
    seed, odd = data.draw(st.integers(0, 2**32)), data.draw(st.booleans())
    for ids, noise in batches(seed, data.draw(st.integers(1, 12)), odd=odd):
        for run in (plain, owning):
            run.train(ids, noise)
        if data.draw(st.integers(0, 5)) == 0:
            written = owning.owned.unwritten().rows
            assert owning.owned.write_back() == written
            assert_same(owning.rows(), plain.rows())
    owning.owned.write_back()
    assert owning.owned.unwritten() == Unwritten()
    assert_same(owning.rows(), plain.rows())
    skipped = [sum(s.statistics()["t"]["nonfinite"] for s in run.servers) for run in (plain, owning)]
    assert skipped[0] == skipped[1] + owning.owned.non_finite


def test_hits_cross_nothing():
    """Rows that are owned are neither looked up nor pushed, nor read or set."""
    run = Run(Adam(0.01), slots=1000)
    ids, calls = np.arange(20, dtype=np.uint64), []
    run.train(ids, np.zeros((20, DIM), np.float32))
    for name in ("read", "set"):
        inner = getattr(run.access, name)
        setattr(run.access, name, lambda table, keys, *a, _inner=inner, _name=name: (
            calls.append((_name, len(keys))), _inner(table, keys, *a))[1])  # fmt: skip
    kept = len(run.owned)
    assert kept > 15  # A few share a slot.
    plan = run.owned.plan(ids)
    assert plan.missing.sum() == 20 - kept
    batch = run.owned.assemble(plan, torch.from_numpy(run.look_up(ids[plan.missing])))
    assert batch.pushed.sum() == 20 - kept
    assert run.owned.update(batch, torch.ones(20, DIM), 1).shape == (20 - kept, DIM)
    assert [count for name, count in calls if name == "set"] == []
    assert sum(count for _, count in calls) <= 20 - kept


def test_each_batch_may_take_the_slots():
    """Of several rows for one slot the last gets it, and in the next batch any row may."""
    run = Run(SGD(0.1), slots=1)
    for ids, taken in (([1, 2, 3], [2]), ([4], [0]), ([4, 5], []), ([5, 6], [1])):
        ids = np.array(ids, np.uint64)
        plan = run.owned.plan(ids)
        assert plan.taken.tolist() == taken
        run.owned.assemble(plan, torch.from_numpy(run.look_up(ids[plan.missing])))


def test_a_row_that_is_gone_is_not_owned():
    """Its parameter server has evicted it; the gradient goes there, which counts it."""
    run, ids = Run(SGD(0.1), slots=100), np.array([1, 2], np.uint64)
    run.train(ids, np.ones((2, DIM), np.float32))
    run.owned.discard()
    read = run.access.read

    def without_one(*arguments):
        rows = read(*arguments)
        return rows._replace(found=rows.found & (rows.ids != 1))

    run.access.read = without_one
    plan = run.owned.plan(ids)
    batch = run.owned.assemble(plan, torch.full((2, DIM), 7.0))
    assert batch.pushed.tolist() == [True, False]
    assert batch.values[0].tolist() == [7.0] * DIM
    assert len(run.owned) == 1


def test_what_was_not_written_back_is_lost_with_the_process_and_counted():
    """The rows are those of the last write-back, and training continues from them."""
    rule = OwnershipRule(idle_batches=100, write_back_steps=4)
    plain, owning = Run(Adam(0.01)), Run(Adam(0.01), slots=100_000, rule=rule)
    written = before = None
    for number, (ids, noise) in enumerate(batches(5, 7)):
        for run in (plain, owning):
            run.train(ids, noise)
        if number == 3:
            before = plain.rows()
            assert_same(owning.rows(), before)
        if number == 6:
            written = owning.rows()
    assert before is not None
    assert written is not None
    counts, counts_of_all = before[3], plain.rows()[3]
    new = ~before[0]  # Rows that came later have had no update at the parameter server.
    for mine, theirs in zip(written[1:], before[1:], strict=True):
        np.testing.assert_array_equal(mine[~new], theirs[~new])
    assert not written[3][new].any()
    lost = owning.owned.unwritten()
    assert lost.updates == int(counts_of_all.sum() - counts.sum()) > 0
    assert lost.rows == int((counts_of_all != counts).sum())
    assert owning.owned.discard() == lost
    assert len(owning.owned) == 0
    # The process that follows begins with what was written back.
    owning.owned, again = owning.fresh(50), Run(Adam(0.01))
    found = written[0]
    again.look_up(np.flatnonzero(found).astype(np.uint64))
    read = owning.access.read("t", np.flatnonzero(found).astype(np.uint64), True)
    again.access.set("t", read.ids, read.values, read.state)
    again.step = owning.step
    again.servers[0].switch(Sync(), 1, again.step)
    for ids, noise in batches(6, 4):
        for run in (again, owning):
            run.train(ids, noise)
    owning.owned.write_back()
    assert_same(owning.rows(), again.rows())


def test_a_failed_write_back_loses_nothing():
    """A row keeps its slot while it cannot be written back; the call may be repeated."""
    plain, owning = Run(Adagrad(0.1)), Run(Adagrad(0.1), slots=1)
    first, other = np.array([1], np.uint64), np.array([2], np.uint64)
    noise = np.ones((1, DIM), np.float32)
    for run in (plain, owning):
        run.train(first, noise)
    set_rows = owning.access.set

    def refuse(*_):
        raise StoreError("There is no space.")

    owning.access.set = refuse
    for attempt in (owning.owned.write_back, lambda: owning.owned.plan(other)):
        with pytest.raises(StoreError):
            attempt()
    assert owning.owned.unwritten() == Unwritten(1, 1)
    owning.access.set = set_rows
    for run in (plain, owning):
        run.train(other, noise)
        run.train(first, noise)
    owning.owned.write_back()
    assert_same(owning.rows(), plain.rows())


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"ttl": Steps(5)}, {"admission": AdmitMinFrequency(2)},
                                    {"trainable": False}])  # fmt: skip
def test_tables_whose_rows_cannot_be_owned_are_refused(change):
    table = msgspec.structs.replace(Table("t", DIM), **change)
    access = RowAccess(Schema([IdFeature("t", dim=DIM)]), [])
    with pytest.raises(ConfigError, match=rf"Table\('t'\).{next(iter(change))} = .* cannot be owned"):
        HotRows(table, SGD(0.1), access, 4, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gpu_owns_rows_as_a_cpu_does(optimizer):
    """The index, the order of taking slots, and all numbers: no operation rounds twice there either."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    runs = [Run(optimizer, 2, 20, OwnershipRule(1, 4), device=device) for device in ("cpu", "cuda")]
    for ids, noise in batches(3, 20, odd=True):
        for run in runs:
            run.train(ids, noise)
    assert runs[0].owned.unwritten() == runs[1].owned.unwritten()
    for run in runs:
        run.owned.write_back()
    assert_same(runs[0].rows(), runs[1].rows())
