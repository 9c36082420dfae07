"""Whatever a log contains, a predictor serves on, with what it had or with what is right, and runs no code of it."""

from __future__ import annotations

import pickle
import shutil
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from persia.publish.format import EPOCH_FILE, MODEL_FILE, epoch_name
from persia.serve import Predictor, ServeOptions
from support.examples import examples
from support.written_log import IDS, Steps, WrittenLog, batch

FEW = settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner))
KEYS = ["format", "version", "run", "epoch", "stream", "sequence", "kind", "step", "time", "dtype", "tables", "parts"]


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.fixture
def written(tmp_path):
    """A log, and a function that serves a copy of it: harmed, then whole again."""
    log = WrittenLog(tmp_path / "log")
    log.begin(3)

    def check(harm):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "log", tmp_path / "copy")
        copy = WrittenLog(tmp_path / "copy")
        copy.epoch, copy.streams, copy.networks = log.epoch, [], None
        predictor = Predictor(copy.url, Steps, ServeOptions(poll_seconds=3600.0))
        predictor.start(timeout=0.0)
        try:
            harm(copy)
            for _ in range(2):
                predictor.refresh()
                prediction = predictor.predict(batch())
                assert prediction.probabilities.shape == (64, 1)
                assert (prediction.epoch, prediction.step) in ((0, 3), (0, 4), (1, 4))
            copy.begin(9)
            predictor.refresh()
            assert predictor.predict(batch()).step == 9
            assert (predictor.embeddings("item", IDS)[1] == 9).all()
        finally:
            predictor.close()

    return check


def next_entry(copy):
    """Writes another increment and network."""
    stream, network = copy.writer("rows-0"), copy.writer("network")
    stream.sequence = network.sequence = 0
    copy.streams, copy.networks = [stream], network
    copy.rows(0, 4)
    copy.network(4)


def change(path, change_fields):
    data = msgspec.json.decode(Path(path).read_bytes())
    change_fields(data)
    Path(path).write_bytes(msgspec.json.encode(data))


@FEW
@given(st.sampled_from(["rows-0/0000000001-increment.json", "network/0000000001-network.json"]), st.data())
def test_fields_of_manifests(written, name, data):
    field, value = data.draw(st.sampled_from([*KEYS, "more"])), data.draw(JSON)

    def harm(copy):
        next_entry(copy)
        change(f"{copy.url}/{epoch_name(0)}/{name}", lambda fields: fields.update({field: value}))

    written(harm)


@FEW
@given(st.sampled_from([EPOCH_FILE, MODEL_FILE]), st.data())
def test_fields_of_a_new_epoch(written, name, data):
    keys = ["format", "version", "epoch", "run", "buckets", "schema", "precision", "model"]
    field, value = data.draw(st.sampled_from(keys)), data.draw(JSON)
    if field == "buckets":
        value = data.draw(st.just(value) | st.fixed_dictionaries(dict.fromkeys(["version", "servers", "runs"], JSON)))
    model = data.draw(st.none() | st.fixed_dictionaries({"kind": st.text(max_size=8), "options": JSON}))

    def harm(copy):
        copy.begin(4)
        change(
            f"{copy.url}/{epoch_name(1)}/{name}",
            lambda fields: fields.update({field: value} if field != "model" else {field: model}),
        )

    written(harm)


TENSORS = st.dictionaries(
    st.sampled_from(["0.ids", "0.values", "0.removed", "0.scales", "1.ids", "1.values", "5.ids", "step", "x"]),
    st.tuples(st.sampled_from(["<f4", "<f2", "<u8", "<i8", "<u4", "|i1"]), st.lists(st.integers(0, 4), max_size=3)),
    max_size=4,
)


@FEW
@given(TENSORS, st.booleans(), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=3))
def test_parts_that_do_not_fit(written, tensors, of_network, tables):
    arrays = {name: np.ones(shape, dtype) for name, (dtype, shape) in tensors.items()}

    def harm(copy):
        writer = copy.writer("network" if of_network else "rows-0")
        writer.sequence = 0
        writer.add_part(arrays)
        names = [msgspec.json.decode(b'"item"'), "user", "item", "more"]
        records = [{"name": names[n], "dim": dim + 1, "rows": dim, "removed": 0} for n, dim in tables]
        writer.commit("network" if of_network else "increment", 4, time.monotonic(), records)

    written(harm)


@FEW
@given(st.binary(max_size=60), st.integers(0, 4))
def test_bytes(written, data, which):
    names = [f"rows-0/{n}" for n in ("0000000001-increment.json", "0000000001.00000.safetensors")]
    names += [f"network/{n}" for n in ("0000000001-network.json", "0000000001.00000.safetensors")]

    def harm(copy):
        next_entry(copy)
        content = pickle.dumps(Bomb()) if which == 4 else data
        for name in names if which == 4 else names[which : which + 1]:
            Path(f"{copy.url}/{epoch_name(0)}/{name}").write_bytes(content)

    written(harm)
