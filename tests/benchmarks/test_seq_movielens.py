"""The benchmark on MovieLens, with small files in the formats of GroupLens."""

import numpy as np
import pytest
from benchmarks.seq_movielens import RELEASES, Amount, ratings, samples, schema_of

from benchmarks import runner, seq_movielens

USERS, EVENTS, FILMS = 30, 12, 20


def write(folder, name):
    """Writes ratings in any order; each user's films follow each other in number. Returns the films of each user."""
    release = RELEASES[name]
    (folder / release.folder).mkdir()
    begin = np.random.default_rng(0).integers(0, FILMS, USERS)
    films = 10 * ((begin[:, None] + np.arange(EVENTS)) % FILMS) + 3
    rows = [(user + 1, films[user, k], 1 + k % 5, 978_300_000 + 60 * k) for user in range(USERS) for k in range(EVENTS)]
    order = np.random.default_rng(1).permutation(len(rows))
    dots = release.file.endswith(".dat")
    lines = [("::" if dots else ",").join(map(str, rows[place])) for place in order]
    header = [] if dots else ["userId,movieId,rating,timestamp"]
    (folder / release.folder / release.file).write_text("\n".join([*header, *lines, ""]))
    return films


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSIA_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", RELEASES)
def test_samples_of_each_user_are_the_newest_ratings(folder, name):
    films = write(folder, name)
    events, schema = ratings(RELEASES[name], None), schema_of(RELEASES[name], "hstu")
    assert len(events) == USERS * EVENTS
    for test, last in ((False, EVENTS - 2), (True, EVENTS - 1)):
        (batch,) = samples(events, schema, test=test)
        history = batch.id_features["history"].values.reshape(USERS, last)
        rows = np.column_stack([history, batch.id_features["movie"].values])
        np.testing.assert_array_equal(np.unique(rows, axis=0), np.unique(films[:, : last + 1], axis=0))
        np.testing.assert_array_equal(batch.dense[:, :last], [60.0 * np.arange(last, 0, -1)] * USERS)
        assert not batch.dense[:, last:].any()
        assert (batch.labels == 1).all()
    assert len(ratings(RELEASES[name], 7)) == 7 * EVENTS


@pytest.mark.parametrize("backbone", seq_movielens.BACKBONES)
def test_figures_are_beside_the_published_ones(folder, monkeypatch, backbone):
    write(folder, "ml_1m")
    monkeypatch.setitem(seq_movielens.AMOUNTS, ("ml_1m", "smoke"), Amount(60, (0,)))
    monkeypatch.setattr(seq_movielens, "LENGTH", EVENTS)
    monkeypatch.setattr(seq_movielens, "RATE", 1e-2)
    monkeypatch.setattr(seq_movielens, "NEGATIVES", USERS)
    monkeypatch.setattr(seq_movielens, "TOP", 1)
    names = [f"seq.movielens.ml_1m.{backbone}.{metric}" for metric in ("hr", "ndcg")]
    hr, ndcg = runner.run(names, "smoke")
    assert [hr.name, ndcg.name] == names
    assert hr.value == ndcg.value > 0.5  # At k = 1 they are the same.
    assert hr.details["published"] == seq_movielens.PUBLISHED["ml_1m", backbone]["hr"]
    assert (hr.details["users"], hr.details["films"], hr.details["missing"]) == (USERS, FILMS, 0)


def test_absent_data_and_large_data_are_skipped(folder, capsys):
    assert list(runner.run(["seq.movielens.*"], "smoke")) == []
    assert "ml-1m is not here" in capsys.readouterr().err
    write(folder, "ml_20m")
    assert list(runner.run(["seq.movielens.ml_20m.*"], "laptop")) == []
    assert "ml-20m is large; use --preset full" in capsys.readouterr().err
