"""Copies of served rows on a device: a request gets the rows that it would get without them, and reads fewer."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import persia
from persia.errors import ConfigError
from persia.nn.row_cache import CacheCounts
from persia.nn.staging import CpuStaging
from persia.serve import ServeOptions, view_updater
from persia.serve.device_rows import DeviceRows, missing_bounds
from persia.serve.row_sources import LocalRows, ServerRows
from persia.store.served import ServedTable
from persia.types import BucketMap, Packed
from support.written_log import SCHEMA


class OtherMemory(CpuStaging):
    """Has the tensors in the memory of the host, and says that they are elsewhere."""

    on_host = False


@pytest.fixture
def elsewhere(monkeypatch):
    """Predictors go the way of a device, on tensors of the CPU."""
    monkeypatch.setattr(view_updater, "staging_for", lambda _: OtherMemory())


def batch_of(items):
    columns = {name: np.array(items, np.uint64) for name in ("item", "user")}
    return persia.Batch.from_columns(SCHEMA, columns, require_labels=False)


def steps_of(predictor, items):
    """By item the step of its row, less that of the network."""
    return predictor.predict(batch_of(items)).scores[:, 0].tolist()


@pytest.mark.usefixtures("elsewhere")
def test_rows_that_requests_have_used_are_not_read_again(log, serve):
    predictor = serve(log, device_rows=1000)
    assert predictor.cached == CacheCounts()
    assert steps_of(predictor, [1, 2, 3, 2]) == [0.0] * 4
    assert predictor.cached == CacheCounts(0, 6)  # Three distinct ids of each table.
    assert steps_of(predictor, [2, 3, 4]) == [0.0] * 3
    assert predictor.cached == CacheCounts(4, 8)
    assert steps_of(predictor, [100, 1]) == [-3.0, 0.0]  # One has no row: zeros, less the step.


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("slots", [1, 5, 1000])
def test_a_request_never_sees_rows_that_are_older_than_the_network(log, serve, slots):
    """After increments, snapshots of one PS or all, removed rows, and another epoch."""
    predictor, items = serve(log, device_rows=slots), list(range(64))
    log.publish(5)
    predictor.refresh()
    for _ in range(2):
        assert steps_of(predictor, items) == [0.0] * 64
    log.rows(0, 7, whole=True)
    predictor.refresh()
    assert {*steps_of(predictor, items)} <= {0.0, 2.0}
    log.rows(1, 7)
    log.network(7)
    predictor.refresh()
    for _ in range(2):
        assert steps_of(predictor, items) == [0.0] * 64
    log.rows(0, 8, removed=items)
    log.rows(1, 8, removed=items)
    predictor.refresh()
    assert steps_of(predictor, items) == [-7.0] * 64
    log.begin(2)  # Training has gone back.
    predictor.refresh()
    for _ in range(2):
        assert steps_of(predictor, items) == [0.0] * 64
    assert bool(predictor.cached.hits)


@pytest.mark.usefixtures("elsewhere")
def test_copies_that_do_not_fit_are_refused(log, serve, monkeypatch):
    monkeypatch.setattr(OtherMemory, "free_bytes", lambda _: 2400)
    serve(log, device_rows=100)  # 100 rows of 4 + 2 numbers.
    with pytest.raises(ConfigError, match=r"device_rows = 101 needs 2,424 bytes .* Set it to 100 or less"):
        serve(log, device_rows=101)
    with pytest.raises(ConfigError, match=r"makes 2,147,483,648 copies of rows of one dim"):
        DeviceRows({"a": 1, "b": 1}, 1 << 30, 1 << 60, torch.device("cpu"))


def test_a_host_needs_no_copies(log, serve):
    predictor = serve(log, device_rows=1000)
    assert steps_of(predictor, [1]) == steps_of(predictor, [1]) == [0.0]
    assert predictor.cached == CacheCounts()


def test_row_servers_do_not_report_changes():
    with pytest.raises(ConfigError, match="device_rows = 5 needs the rows in this process"):
        ServeOptions(rows=("tcp://127.0.0.1:1",), device_rows=5)


# --- the copies alone -------------------------------------------------------------------------------------------------

IDS = Packed.of({"a": np.arange(3, dtype=np.uint64)}, np.uint64)


def source():
    return LocalRows([ServerRows({"a": ServedTable(1)}, 0, 0.0)], BucketMap.even(1))


def test_a_request_does_not_wait_for_another():
    copies, rows = DeviceRows({"a": 1}, 8, 1 << 20, torch.device("cpu")), source()
    copies.begin(rows)
    seen = []

    def other():
        with copies.planned(IDS, rows) as plan:
            seen.append(plan)

    with copies.planned(IDS, rows) as plan:
        assert plan is not None
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(20)
        assert seen == [None]
    other()
    assert seen[1] is not None


def test_a_request_that_reads_other_rows_has_no_copies():
    """Of an earlier view, while the copies are those of the next one already."""
    copies = DeviceRows({"a": 1}, 8, 1 << 20, torch.device("cpu"))
    old, new = source(), source()
    copies.begin(old)
    copies.begin(new)
    with copies.planned(IDS, old) as plan:
        assert plan is None


def test_a_failed_request_leaves_no_copies():
    """Its rows have taken slots, and never came."""
    copies, rows = DeviceRows({"a": 1}, 8, 1 << 20, torch.device("cpu")), source()
    copies.begin(rows)
    with pytest.raises(OSError, match="gone"), copies.planned(IDS, rows):
        raise OSError("gone")
    with copies.planned(IDS, rows) as plan:
        assert plan.wanted.buffer.all()


def test_bounds_of_missing_rows():
    bounds = np.array([[0, 2, 3], [0, 0, 0], [0, 0, 3]])
    wanted = np.array([True, False, True, False, True, True])
    assert missing_bounds([3, 0, 3], bounds, wanted).tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 2]]


@pytest.mark.gpu
def test_on_a_gpu_copies_serve_the_same_rows(log, serve):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    predictor, items = serve(log, device="cuda", device_rows=1000), list(range(64))
    for step in (5, 6):
        log.publish(step)
        predictor.refresh()
        for _ in range(3):
            assert steps_of(predictor, items) == [0.0] * 64
    assert predictor.cached.hits >= 128
