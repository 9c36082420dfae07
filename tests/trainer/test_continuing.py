"""Calls of `fit` on the same data, more data, other data: which rows are trained, and how often."""

import logging
import os
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import persia
from persia.coordinator.token_scheduler import TokenScheduler
from persia.errors import ConfigError, DataError
from persia.modes import Gba, Sync
from persia.services import fingerprint_of
from persia.trainer.data_progress import DataProgress, begin_source
from persia.trainer.sources import scheduled

SCHEMA = persia.Schema([persia.IdFeature("row", 4, kind="number")], labels=["click"])
ROWS, BATCH = 40, 4


def write(folder, number, rows=ROWS):
    """Writes a file of rows whose ids are their numbers over all files of 40."""
    ids = np.arange(number * ROWS, number * ROWS + rows)
    Path(folder).mkdir(exist_ok=True)
    pq.write_table(pa.table({"row": ids, "click": ids % 2, "half": ids % 2}), f"{folder}/{number}.parquet")
    return f"{folder}/{number}.parquet"


def reader(paths, batch_size=BATCH, **options):
    return persia.data.parquet(paths, SCHEMA, batch_size, **options)


def model():
    torch.manual_seed(0)
    return persia.nn.models.FFNN(SCHEMA, hidden=(4,))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def trainer(mode=None, cluster=None, **options):
    options = persia.TrainerOptions(**{"progress": False} | options)
    optimizer = {"optimizer": sgd, "embedding_optimizer": persia.optim.Adagrad(lr=0.1)}
    return persia.Trainer(model(), SCHEMA, mode=mode or Sync(), cluster=cluster, options=options, **optimizer)


def resumed(t, folder):
    t.save(folder)
    return persia.Trainer.resume(str(folder), model(), optimizer=sgd)


def passes(t, *files):
    """The number of updates of the rows of each file, which are the same for all rows of it."""
    found = []
    for number in files:
        counts = t.embeddings.rows("row", np.arange(number * ROWS, (number + 1) * ROWS), state=True)
        updates = np.where(counts.found, counts.state.update_count, 0)
        assert len(set(updates.tolist())) == 1, (number, updates)
        found.append(int(updates[0]))
    return found


@pytest.fixture
def days(tmp_path):
    return [write(tmp_path / "days", number) for number in range(3)]


@pytest.fixture(params=[False, True], ids=["one process", "resumed"])
def following(request, tmp_path):
    """The trainer of the next call: the same one, or one that continues from its checkpoint."""
    return lambda t: resumed(t, tmp_path / "checkpoint") if request.param else t


def test_epochs_count_passes_over_the_data(days, following):
    t, ends = trainer(), []
    for epochs in (1, 2, 3):
        t = following(t)
        t.fit(reader(days[0]), epochs=epochs)
        ends.append(t.global_step)
    assert ends == [10, 20, 30]
    assert t.epoch == 3


def test_another_file_is_trained_from_its_first_row(days, following, caplog):
    t = trainer()
    t.fit(reader(days[0]), max_steps=5)
    t = following(t)
    result = t.fit(reader(days[1]))
    assert (result.rows, t.epoch) == (ROWS, 1)
    assert passes(t, 1) == [1]
    (line,) = [record.message for record in caplog.records if "Continuing" in record.message]
    assert line.startswith("Continuing the model on other data: ")
    assert line.endswith("1.parquet, none seen before. The pass before ends incomplete, at batch 5.")


def test_tomorrows_file_after_a_finished_run(days, following, caplog):
    t = trainer()
    t.fit(reader(days[0]))
    t = following(t)
    with caplog.at_level(logging.INFO, "persia.data"):
        assert t.fit(reader(days[1])).steps == 10
    assert "Continuing the model on other data: " in caplog.text
    assert passes(t, 0, 1) == [1, 1]


def test_a_file_that_is_written_again_under_its_name(days, following):
    t = trainer()
    t.fit(reader(days[0]), max_steps=5)
    t = following(t)
    write(Path(days[0]).parent, 0)
    os.utime(days[0], ns=(1, 1))  # On a coarse clock both might have been written at the same time.
    assert t.fit(reader(days[0])).rows == ROWS


@pytest.mark.parametrize("options", [{}, {"shuffle_rows": 16}], ids=str)
@pytest.mark.parametrize("stop", [None, 5])
def test_new_files_are_trained_once_wherever_they_sort(days, following, stop, options):
    t = trainer()
    t.fit(reader(days[1], **options), max_steps=stop)
    t = following(t)
    t.fit(reader(days, **options), max_steps=12)
    t = following(t)
    t.fit(reader(days, **options))
    assert passes(t, 0, 1, 2) == [1, 1, 1]
    assert (t.global_step, t.finished) == (30, True)
    assert t.fit(reader(days, **options), epochs=2).rows == 3 * ROWS


def test_new_files_catch_up_with_the_epochs_of_the_others(days, following):
    t = trainer()
    t.fit(reader(days[0]), epochs=2)
    t = following(t)
    t.fit(reader(days[:2]), epochs=3)
    assert passes(t, 0, 1) == [3, 3]


def test_a_random_split_of_a_growing_directory_is_stable(days, following):
    """A row is drawn by its number over all files, so files that are not read again still count."""
    split = [persia.data.Split(part) for part in ("train", "test")]
    t = trainer()
    t.fit(reader(days[:1], split=split[0]))
    t = following(t)
    t.fit(reader(days, split=split[0]), max_steps=6)
    t = following(t)
    t.fit(reader(days, split=split[0]))
    test = np.concatenate([b.id_features["row"].values for b in reader(days, split=split[1])])
    found = t.embeddings.rows("row", np.arange(3 * ROWS), state=True)
    assert found.found.tolist() == [row not in set(test.tolist()) for row in range(3 * ROWS)]
    assert set(found.state.update_count[found.found].tolist()) == {1}


def test_the_same_of_csv(tmp_path, following):
    def csv(number):
        rows = range(number * ROWS, (number + 1) * ROWS)
        path = tmp_path / f"{number}.csv"
        path.write_text("row,click\n" + "".join(f"{row},{row % 2}\n" for row in rows))
        return str(path)

    split = [persia.data.Split(part) for part in ("train", "test")]
    paths = [csv(0)]
    t = trainer()
    t.fit(persia.data.csv(paths, SCHEMA, BATCH, split=split[0]), max_steps=3)
    t = following(t)
    paths += [csv(1), csv(2)]
    t.fit(persia.data.csv(paths, SCHEMA, BATCH, split=split[0]))
    test = np.concatenate([b.id_features["row"].values for b in persia.data.csv(paths, SCHEMA, split=split[1])])
    found = t.embeddings.rows("row", np.arange(3 * ROWS), state=True)
    assert found.found.tolist() == [row not in set(test.tolist()) for row in range(3 * ROWS)]
    assert set(found.state.update_count[found.found].tolist()) == {1}


def test_a_new_file_without_rows_changes_nothing(days, following, tmp_path):
    t = trainer()
    t.fit(reader(days[:1]))
    t = following(t)
    paths = [days[0], write(tmp_path / "days", 9, rows=0)]
    assert t.fit(reader(paths)).rows == 0
    assert t.finished
    with pytest.raises(DataError, match="is empty"):
        trainer().fit(reader(paths[1:]))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"batch_size": 6}, "batch_size"),
        ({"batch_size": 8}, "batch_size"),
        ({"batch_size": 2}, "batch_size"),
        ({"shuffle_rows": 8}, "shuffle_rows"),
        ({"where": "half == 1"}, "where"),
        ({"split": persia.data.Split("train")}, "split"),
    ],
    ids=str,
)
def test_a_change_that_moves_rows_is_refused_during_a_pass(days, following, changes, name):
    t = trainer()
    t.fit(reader(days), max_steps=5)
    t = following(t)
    with pytest.raises(ConfigError, match=f"{name}.* changed in the middle of a pass, at batch 5 of epoch 0.*"):
        t.fit(reader(days, **changes))
    assert (t.global_step, t.position) == (5, 5)
    t.fit(reader(days))
    assert passes(t, 0, 1, 2) == [1, 1, 1]


def test_restart_data_begins_the_pass_again(days, following):
    t = trainer()
    t.fit(reader(days), max_steps=5)
    t = following(t)
    result = t.fit(reader(days, batch_size=8), restart_data=True)
    assert result.rows == 3 * ROWS
    assert (result.progressive.rows, result.training.rows) == (0, 3 * ROWS), "some were seen"


def test_again_after_a_part_of_the_first_pass_has_seen_rows(days, following):
    t = trainer()
    t.fit(reader(days), max_steps=5)
    t = following(t)
    result = t.fit(reader(days), again=True)
    assert (result.progressive.rows, result.training.rows) == (0, 3 * ROWS), "some were seen"


def test_restart_data_of_other_data_has_new_rows(days, following):
    t = trainer()
    t.fit(reader(days[0]), max_steps=5)
    t = following(t)
    assert t.fit(reader(days[1]), restart_data=True).progressive.rows == ROWS


def test_other_batches_are_fine_at_the_end_of_a_pass(days, following):
    t = trainer()
    t.fit(reader(days))
    t = following(t)
    assert t.fit(reader(days, batch_size=8, shuffle_rows=16)).rows == 0
    assert t.fit(reader(days, batch_size=8, shuffle_rows=16), epochs=2).rows == 3 * ROWS


def test_nothing_left_names_both_ways_on(days, following, caplog):
    t = trainer()
    t.fit(reader(days[0]))
    t = following(t)
    result = t.fit(reader(days[0]))
    assert (result.steps, result.nothing_left in caplog.text) == (0, True)
    assert result.nothing_left.startswith(
        "Nothing was left to train: at step 10, 1 of 1 passes over these data are done."
    )
    for way in ("raise `epochs` (`train.epochs`)", "again=True (`persia train --again`)"):
        assert way in result.nothing_left
    trained_again = t.fit(reader(days[0]), again=True)
    assert trained_again.steps == 10
    assert (trained_again.progressive.rows, trained_again.training.rows) == (0, trained_again.rows), "all were seen"
    new = t.fit(reader(days[1]), again=True)
    assert (new.progressive.rows, new.training.rows) == (new.rows, 0), "none was seen"
    assert t.fit(reader(days[0]), epochs=2).steps == 10


def test_a_shuffled_pass_continues_to_the_bit_though_a_file_came(days, tmp_path):
    """The blocks of the pass under way stay those that it began with."""
    whole = trainer()
    whole.fit(reader(days[1:], shuffle_rows=32))
    first = trainer()
    first.fit(reader(days[1:], shuffle_rows=32), max_steps=19)
    second = resumed(first, tmp_path / "checkpoint")
    second.fit(reader(days, shuffle_rows=32), max_steps=1)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_moved_data_continue(days, tmp_path):
    t = trainer()
    t.fit(reader(days), max_steps=5)
    t = resumed(t, tmp_path / "checkpoint")
    os.rename(tmp_path / "days", tmp_path / "elsewhere")
    assert t.fit(reader(str(tmp_path / "elsewhere"))).rows == 3 * ROWS - 5 * BATCH


class Recognised:
    """A reader of one's own that a later run recognises."""

    def __init__(self, name="numbers"):
        self.name = name

    def batches(self, epoch=0, start=0):
        for number in range(start, 10):
            ids = np.arange(number * BATCH, (number + 1) * BATCH)
            yield persia.Batch.from_columns(SCHEMA, {"row": ids, "click": ids % 2})

    def __iter__(self):
        return self.batches()

    def fingerprint(self):
        return self.name


def test_data_of_ones_own_with_a_fingerprint(following, caplog):
    t = trainer()
    t.fit(Recognised(), max_steps=4)
    t = following(t)
    assert t.fit(Recognised()).rows == 6 * BATCH
    assert not caplog.records
    assert t.fit(Recognised("others")).rows == 10 * BATCH


@pytest.mark.parametrize("kind", [list, iter, lambda data: type("Own", (), {"__iter__": lambda self: iter(data)})()])
def test_data_without_a_fingerprint_continue_as_an_object(kind, tmp_path, caplog):
    batches = list(Recognised())
    one, t = kind(batches), trainer()
    t.fit(one, max_steps=4)
    assert t.fit(one).rows == 6 * BATCH
    assert t.fit(one).nothing_left
    other = kind(batches)
    assert t.fit(other, max_steps=4).steps == 4
    caplog.clear()
    t = resumed(t, tmp_path / "checkpoint")
    assert t.fit(kind(batches)).rows == 10 * BATCH
    assert "from its first batch. Data of your own continue where training stopped if they have a method" in caplog.text


def test_a_list_that_has_grown_is_another_one():
    batches = list(Recognised())
    t = trainer()
    t.fit(batches)
    batches.append(batches[0])
    assert t.fit(batches).rows == 11 * BATCH


def test_equal_lists_are_two(tmp_path):
    batch = next(iter(Recognised()))
    t = trainer()
    assert [t.fit([batch] * 3).rows for _ in range(3)] == [3 * BATCH] * 3


@pytest.mark.parametrize("found", [5, None, persia.data.SourceFingerprint("own", ())])
def test_what_is_no_fingerprint_is_refused(found):
    data = Recognised(found)
    if found is None:
        assert trainer().fit(data).rows == 10 * BATCH
    else:
        with pytest.raises(DataError, match=r"Recognised\.fingerprint\(\) returned"):
            trainer().fit(data)


def test_an_asynchronous_pass_leaves_nothing_to_the_next_data(days):
    """Batches that the token scheduler has handed out of a pass that was left are not of the next one."""
    t = trainer(Gba(2 * BATCH))
    t.fit(reader(days[0]), max_steps=2)
    t.fit(reader(days[1]))
    assert passes(t, 1) == [1]


def test_the_token_scheduler_distinguishes_passes_by_data(days, monkeypatch):
    """Both are the first pass over their data."""
    begin, phases = TokenScheduler.begin, []

    def recorded(self, phase):
        phases.append(phase)
        begin(self, phase)

    monkeypatch.setattr(TokenScheduler, "begin", recorded)
    t = trainer(Gba(2 * BATCH))
    t.fit(reader(days[0]), max_steps=2)
    t.fit(reader(days[0]), max_steps=3)
    t.fit(reader(days[1]))
    same, went_on, other = (phase.epoch for phase in phases)
    assert same == went_on != other


@pytest.mark.parametrize("nn_workers", [2])
def test_nn_workers_that_read_by_themselves_continue_together(days, nn_workers):
    """The decision is that of the first one, whose files the others need not have with the same times."""
    from persia.testing import Threads

    def work(member):
        t = trainer(cluster=member)
        t.fit(reader(days[0]))
        result = t.fit(reader(days[:2]))
        return result.rows, t.epoch, t.fit(reader(days[:2])).steps

    assert Threads(nn_workers).run(work) == [(ROWS, 1, 0)] * nn_workers


def test_again_needs_data_that_can_begin_again():
    class Endless:
        interrupted = False
        batches = begin = offsets = forget = commit = observe = print

    for name in ("again", "restart_data"):
        with pytest.raises(ConfigError, match=f"{name} = True, and train_data is a stream"):
            trainer().fit(Endless(), **{name: True})
        with pytest.raises(ConfigError, match=f"Invalid {name} = 1; expected True or False"):
            trainer().fit([], **{name: 1})


def rows_of(batches):
    return [int(row) for batch in batches for row in batch.id_features["row"].values]


def test_data_loaders_read_the_passes_of_a_run_by_their_numbers(days):
    """Passes of one source that read other files, in shares, after the source was pickled."""
    data = reader(days, shuffle_rows=16)
    progress = begin_source(DataProgress(), 0, fingerprint_of(reader(days[1], shuffle_rows=16))).progress
    assert scheduled(data, begin_source(progress, 0, fingerprint_of(data)).progress) is data
    progress = progress.begin_pass()
    progress = begin_source(progress, 5, fingerprint_of(data)).progress
    source = pickle.loads(pickle.dumps(scheduled(data, progress)))
    alone, others = reader(days[1], shuffle_rows=16), reader([days[0], days[2]], shuffle_rows=16)
    expected = [alone.batches(0), others.batches(0), data.batches(1), data.batches(2)]
    for number, batches in enumerate(map(list, expected)):
        assert rows_of(source.batches(number)) == rows_of(batches)
        assert rows_of(source.batches(number, 3)) == rows_of(batches[3:])
        for share in range(3):
            shard = source.shard(share, 3)
            assert rows_of(shard.batches(number)) == rows_of(batches[share::3])
            assert rows_of(shard.batches(number, 2)) == rows_of(batches[share::3][2:])
