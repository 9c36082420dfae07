"""Recovery points on storage, without a cluster: what another driver makes of the calls of `fit` of a dead one."""

import contextlib

import msgspec
import pytest
import torch

import persia
from persia.checkpoint.packing import pack
from persia.checkpoint.tensors import encode
from persia.errors import ConfigError, PersiaError, RoleDiedError
from persia.services import Attempt
from persia.trainer.driver import Driver
from persia.trainer.progress import TrainedRows
from persia.trainer.run_state import captured
from persia.trainer.stored_calls import StoredCalls

NOTHING = TrainedRows(0, 0.0)


class Points:
    """Recovery points in memory; `left` is what the driver before has kept last."""

    place = "/runs/one"

    def __init__(self, left=None):
        self.left = left
        self.kept = None
        self.owner = None
        self.taken = False

    def claim(self, owner):
        if self.owner not in (None, owner):
            raise ConfigError("another one")
        self.owner = owner

    def take(self):
        self.taken = True

    def keep(self, point):
        self.kept = b"".join(point)

    def of_next_driver(self):
        return Points(memoryview(bytearray(self.kept)))


def reader(rows=400):
    return persia.data.synthetic(rows, id_features=2, ids_per_feature=50, dense_features=1, batch_size=40)


def trainer(hidden=8):
    torch.manual_seed(0)
    schema = reader().schema
    return persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(hidden,), dropout=0.2),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        mode=persia.modes.Sync(),
        options=persia.TrainerOptions(progress=False),
    )


def state_of(trained):
    return captured(trained.step, trained.state, NOTHING)


def same(one, other):
    assert one.model == other.model
    first, second = (b"".join(encode(pack(of.training))) for of in (one, other))
    assert first == second
    assert (one.finished, one.scores.keys()) == (other.finished, other.scores.keys())


def test_the_state_comes_back_to_the_bit():
    trained, points = trainer(), Points()
    kept = StoredCalls(points, ["click"])
    assert kept.left is None
    assert kept.begin(trained.step, trained.state) is None
    trained.fit(reader(), max_steps=7)
    kept.keep(0, state_of(trained), TrainedRows(280, 1.5))
    other = trainer()
    following = StoredCalls(points.of_next_driver(), ["click"])
    following.restore(other.step, other.state)
    assert other.global_step == 7
    assert other.position == 7
    same(state_of(other), state_of(trained))
    point = following.begin(other.step, other.state)
    assert (point.calls, point.running, point.first_step) == (1, True, 0)
    assert point.state.trained == TrainedRows(280, 1.5)
    assert following.left is None
    assert other.metrics.result() == trained.metrics.result()


class Cluster:
    """A cluster on which no NN worker comes up, or whose data loaders get no data; one that trains if `sends`."""

    def __init__(self, sends=None, dies=0):
        self.sends = sends
        self.dies = dies

    def feed(self, *arguments):
        pass

    def fitting(self):
        return contextlib.nullcontext()

    def attempt(self, work, halting, keep):
        if self.dies:
            self.dies -= 1
            death = RoleDiedError("NN worker 0 has died.", role="nn_worker", rank=0)
            return Attempt({}, [death], None)
        if self.sends is not None:
            keep(self.sends)
        raise PersiaError("no NN worker")


@pytest.mark.parametrize("dies", [0, 2])
def test_a_driver_that_fails_before_anything_works_leaves_the_run(dies):
    """Not even the same state is stored again: that takes the run over, so that the end removes its rows."""
    trained, points = trainer(), Points()
    kept = StoredCalls(points, ["click"])
    kept.begin(trained.step, trained.state)
    trained.fit(reader(), max_steps=4)
    kept.keep(0, state_of(trained), TrainedRows(160, 1.0))

    def goes_on(cluster, left):
        other = trainer()
        calls = StoredCalls(left, ["click"])
        following = Driver(cluster, trainer, other.step, other.state, [], other.declared, calls)
        with pytest.raises(PersiaError, match="no NN worker"):
            following.fit(reader(), None, {"epochs": 1, "max_steps": 7}, lambda: False)

    left = points.of_next_driver()
    goes_on(Cluster(dies=dies), left)
    assert left.kept is None
    left = points.of_next_driver()
    goes_on(Cluster(sends=state_of(trained), dies=dies), left)
    assert StoredCalls(left.of_next_driver(), ["click"]).left.state.trained == TrainedRows(160, 1.0)
    new = Points()
    goes_on(Cluster(), new)
    assert new.kept is not None  # From its beginning a new run has a recovery point.


def test_calls_that_have_ended_return_their_numbers_and_the_last_one_goes_on():
    trained, points = trainer(), Points()
    kept = StoredCalls(points, ["click"])
    results = []
    for _ in range(2):
        first = trained.global_step
        assert kept.begin(trained.step, trained.state) is None
        assert kept.ended(trained.step, trained.state) is None
        results.append(trained.fit(reader(), max_steps=3))
        kept.end(first, state_of(trained), results[-1])
    kept.begin(trained.step, trained.state)
    trained.fit(reader(), max_steps=2)
    kept.keep(6, state_of(trained), TrainedRows(80, 0.1))
    other = trainer()
    following = StoredCalls(points.of_next_driver(), ["click"])
    for result in results:
        other.state.scores.begin(reader())
        assert following.begin(other.step, other.state) is None
        again = following.ended(other.step, other.state)
        assert (again.steps, again.rows, again.global_step) == (result.steps, result.rows, result.global_step)
        assert again.seconds == result.seconds
        assert again.history.rows == 8 * 40
        assert again.evaluation is None
        assert following.left is not None
    assert following.begin(other.step, other.state).first_step == 6
    assert following.begin(other.step, other.state) is None
    assert following.ended(other.step, other.state) is None  # A call of its own.


def test_a_driver_that_dies_between_two_calls_begins_the_next_one():
    trained, points = trainer(), Points()
    kept = StoredCalls(points, ["click"])
    kept.begin(trained.step, trained.state)
    result = trained.fit(reader(), max_steps=5)
    kept.end(0, state_of(trained), result)
    other = trainer()
    left = points.of_next_driver()
    following = StoredCalls(left, ["click"])
    assert following.begin(other.step, other.state) is None
    assert not left.taken  # Until then, a program that fails leaves the run to another one.
    again = following.ended(other.step, other.state)
    assert again.progressive == result.progressive
    assert again.history == result.history
    assert following.left is None
    assert left.taken
    assert other.global_step == 5
    assert following.begin(other.step, other.state) is None
    assert following.ended(other.step, other.state) is None


def test_a_call_that_failed_has_no_numbers():
    trained, points = trainer(), Points()
    kept = StoredCalls(points, ["click"])
    kept.begin(trained.step, trained.state)  # It fails, and the program catches the error.
    kept.begin(trained.step, trained.state)
    kept.end(0, state_of(trained), trained.fit(reader(), max_steps=1))
    other = trainer()
    following = StoredCalls(points.of_next_driver(), ["click"])
    assert following.begin(other.step, other.state) is None
    assert following.ended(other.step, other.state).steps == 0
    assert following.begin(other.step, other.state) is None
    assert following.ended(other.step, other.state).steps == 1


def test_reports_of_asynchronous_modes_come_back():
    trained, points = trainer(), Points()
    kept = StoredCalls(points, ["click"])
    kept.begin(trained.step, trained.state)
    report = persia.types.TokenReport(batches=3, rows=90)
    result = msgspec.structs.replace(trained.fit(reader(), max_steps=1), asynchronous=report)
    kept.end(0, state_of(trained), result)
    following = StoredCalls(points.of_next_driver(), ["click"])
    following.begin(trained.step, trained.state)
    assert following.ended(trained.step, trained.state).asynchronous == report


def test_data_without_a_fingerprint_are_those_of_the_call_that_goes_on():
    data = list(reader().batches())
    trained = trainer()
    trained.fit(data, max_steps=4)
    other = trainer()
    other.state.load_state_dict(trained.state.state_dict(), trains_in_other_processes=True)
    copied = list(data)
    other.state.adopt_source(copied, stream=False)
    other.state.begin_source(copied, stream=False)
    assert other.position == 4
    other.state.begin_source(list(data), stream=False)  # Of another call.
    assert other.position == 0


def test_another_network_is_refused():
    trained, points = trainer(), Points()
    kept = StoredCalls(points, ["click"])
    kept.begin(trained.step, trained.state)
    kept.keep(0, state_of(trained), NOTHING)
    other = trainer(hidden=16)
    with pytest.raises(PersiaError, match=r"/runs/one does not fit the network .*Run the same program"):
        StoredCalls(points.of_next_driver(), ["click"]).restore(other.step, other.state)


@pytest.mark.parametrize("damage", ["format", "torn", "missing"])
def test_what_cannot_be_read_is_named(damage):
    whole = b"".join(encode(pack({"format": 2} if damage == "format" else {"format": 1})))
    left = memoryview(bytearray(whole[: len(whole) // 2] if damage == "torn" else whole))
    with pytest.raises(PersiaError, match="recovery point in /runs/one cannot be read"):
        StoredCalls(Points(left), ["click"])


def test_a_second_trainer_is_refused():
    one, points = trainer(), Points()
    StoredCalls(points, ["click"]).begin(one.step, one.state)
    with pytest.raises(ConfigError):
        StoredCalls(points, ["click"]).begin(one.step, one.state)
