"""The log of `serve.update_pause_p999`: what is written is visible only once it is shown, and complete then."""

import numpy as np
import pytest
from benchmarks.serve_predict import network_of
from benchmarks.serve_updates import FEATURES, SCHEMA, Log, Scale, batches_of
from benchmarks.store import ids_of

from persia.serve import Predictor, ServeOptions


@pytest.fixture
def predictor(tmp_path):
    log = Log(tmp_path / "log", Scale(rows=200, increments=2, seconds=0.02, poll_seconds=3600.0))
    with Predictor(str(tmp_path / "log"), network_of, ServeOptions(poll_seconds=3600.0)) as found:
        yield log, found


def test_increments_are_visible_once_they_are_shown(predictor):
    log, served = predictor
    rows = len(served.current().rows)
    assert rows == FEATURES * 200
    log.write()
    log.write()
    served.refresh()
    assert (served.state().updates, served.state().row_steps) == (2, {0: 0})
    before = served.predict(batches_of(200)[0])
    with log.growing():
        pass
    served.refresh()
    state = served.state()
    assert (state.row_steps, state.network_step, state.problem) == ({0: 2}, 2, "")
    assert state.rows == rows  # As many are new as are removed.
    after = served.predict(batches_of(200)[0])
    assert (before.probabilities != after.probabilities).all()


def test_removed_rows_are_the_oldest(predictor):
    log, served = predictor
    first = SCHEMA.id_features[0].name
    log.write()
    log.show()
    served.refresh()
    found, _ = served.embeddings(first, ids_of(np.arange(400)))
    gone = log.changed // 10
    assert found.tolist() == [False] * gone + [True] * 200 + [False] * (200 - gone)
