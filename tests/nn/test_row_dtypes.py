"""Tables of 16-bit values from the schema to the model and back: every way rows take, and checkpoints."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia import batching
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.checkpoint import CheckpointReader, CheckpointWriter, ReshardOptions, compact, inspect, reshard
from persia.errors import CheckpointError, ConfigError, DataError, StoreError
from persia.modes import Hybrid, Sync
from persia.nn.staging import CpuStaging, staging_for
from persia.nn.transfer import Transfer, decode, decode_tensors
from persia.optim import Adagrad, Adam, RowwiseAdagrad
from persia.ps import EmbeddingServer, ServerOptions
from persia.ps.sizes import declared_sizes
from persia.replay import Setting, simulate, steady
from persia.replay.virtual import VirtualTraining
from persia.rpc.array_encoding import Decoder, encode
from persia.services import Connection, RowChunk
from persia.types import LookedUp, Packed
from persia.types.half_floats import DTYPES, from_halves, to_halves, words_of
from persia.worker import Worker, WorkerOptions
from support.examples import examples
from support.several_ps import several_servers

SCHEMA = persia.Schema(
    [
        persia.IdFeature("item", dim=5, dtype="bfloat16"),
        persia.IdFeature("history", dim=5, table="item", pooling="mean"),
        persia.IdFeature("user", dim=3),
        persia.IdFeature("tag", dim=4, dtype="float16"),
    ],
    dense_features=["price"],
)
ALL_OF_16_BITS = persia.Schema([f for f in SCHEMA.id_features if f.name != "user"], dense_features=["price"])


def make_batches(count, size=16, seed=0, schema=SCHEMA):
    rng = np.random.default_rng(seed)
    offsets = np.arange(0, 2 * size + 1, 2, dtype=np.int64)
    found = []
    for _ in range(count):
        ids = {f.name: IdColumn(rng.integers(0, 40, size).astype(np.uint64)) for f in schema.id_features}
        ids["history"] = IdColumn(rng.integers(0, 40, 2 * size).astype(np.uint64), offsets)
        labels = (rng.random((size, 1)) < 0.5).astype(np.float32)
        found.append(Batch(ids, rng.random((size, 1), np.float32), labels))
    return found


class Frame:
    """What ZeroMQ would have received."""

    def __init__(self, data):
        self.buffer = data


class Cluster:
    """Several PSs in this process, with or without compression."""

    def __init__(self, servers=1, compression="none"):
        self.count, self.compression = servers, compression

    def connect(self, schema, optimizer, mode, seed):
        tables = schema.resolved_tables()
        self.servers = several_servers(self.count, tables, optimizer, mode, seed)
        return Connection(Worker(schema, self.servers, options=WorkerOptions(self.compression)), self.servers)


def trained(cluster, *, on_host=True, schema=SCHEMA, mode=None, optimizer=None):
    """Trains, and checks that the model has got the rows that PSs store. Returns the rows of all tables by id."""
    torch.manual_seed(0)
    embeddings = persia.nn.EmbeddingCollection(
        schema, optimizer=optimizer or Adagrad(lr=0.1), mode=mode or Sync(), cluster=cluster
    )
    if not on_host:
        embeddings._expander.on_host = False
        embeddings._transfer._on_host = False
    net = torch.nn.Linear(1 + sum(f.dim or 5 for f in schema.id_features), 1)
    for batch in embeddings.prefetch(make_batches(8, schema=schema)):
        assert all(rows.dtype == torch.float32 and rows.is_contiguous() for rows in batch.rows.values())
        for name, rows in batch.rows.items():
            dtype = schema.resolved_tables()[name].dtype
            values = rows.detach().numpy()
            if dtype != "float32":
                np.testing.assert_array_equal(from_halves(to_halves(values, dtype)), values)
        logits = net(torch.cat([*embeddings(batch).values(), batch.dense], 1))
        torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), batch.labels.double()).backward()
    return rows_of(cluster.servers)


def rows_of(servers):
    found = {}
    for server in servers:
        for chunk in server.export_rows():
            values = from_halves(chunk.arrays["embeddings"])
            for id_, row, state in zip(chunk.arrays["ids"], values, chunk.arrays["state"], strict=True):
                found.setdefault(chunk.table, {})[int(id_)] = np.concatenate([row, state])
    return found


def assert_same(one, two, **tolerance):
    assert one.keys() == two.keys()
    for table, rows in one.items():
        assert rows.keys() == two[table].keys()
        for id_, row in rows.items():
            np.testing.assert_allclose(two[table][id_], row, **({"rtol": 0, "atol": 0} | tolerance))


@pytest.mark.parametrize("optimizer", [Adagrad(lr=0.1), Adam(lr=0.01), RowwiseAdagrad(lr=0.1)])
def test_the_number_of_ps_changes_no_bit(optimizer):
    assert_same(trained(Cluster(), optimizer=optimizer), trained(Cluster(3), optimizer=optimizer))


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("schema", [SCHEMA, ALL_OF_16_BITS])
def test_host_and_device_decode_the_same_bits(schema, compression):
    (batch,) = make_batches(1, schema=schema)
    cluster = Cluster(2, compression)
    worker = cluster.connect(schema, Adagrad(lr=0.1), Sync(), 3).worker
    found = worker.lookup(worker.register(batch.id_features))
    assert (found.scales is not None) == (compression == "fp16")
    assert found.rows["item"].nbytes == len(found.rows["item"]) * 12  # 5 values of 2 bytes, and 2 of padding
    assert found.rows["tag"].nbytes == len(found.rows["tag"]) * 8
    if found.scales is not None:
        assert set(found.scales) == ({"user"} if "user" in found.rows else set())
    tables = schema.resolved_tables()
    embeddings = persia.nn.EmbeddingCollection(schema, optimizer=Adagrad(lr=0.1), cluster=cluster)
    staging = embeddings._staging
    (mine, _), (theirs, _) = (Transfer(staging, on_host, tables).rows(batch, found) for on_host in (True, False))
    for name, rows in mine.rows.items():
        assert torch.equal(theirs.rows[name], rows)
        ids = worker.distinct_ids(worker.register(batch.id_features))[name]
        dim = schema.resolved_tables()[name].dim
        assert rows.shape == (len(ids), dim)


def looked_up(compression, schema=SCHEMA):
    (batch,) = make_batches(1, schema=schema)
    worker = Cluster(1, compression).connect(schema, Adagrad(lr=0.1), Sync(), 3).worker
    return batch, worker.lookup(worker.register(batch.id_features))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("schema", [SCHEMA, ALL_OF_16_BITS])
def test_a_gpu_decodes_the_same_bits(schema, compression):
    batch, found = looked_up(compression, schema)
    tables = schema.resolved_tables()
    mine, _ = Transfer(CpuStaging(), True, tables).rows(batch, found)
    theirs, ready = Transfer(staging_for("cuda"), False, tables).rows(batch, found)
    ready()
    for name, rows in mine.rows.items():
        assert theirs.rows[name].device.type == "cuda"
        assert torch.equal(theirs.rows[name].cpu(), rows)


NO_DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [("cpu", True), ("cpu", False), pytest.param("cuda", False, marks=[pytest.mark.gpu, NO_DEVICE])]
"""With whether the core converts rows, else torch on the device."""


@pytest.mark.parametrize(("device", "on_host"), DEVICES)
@pytest.mark.parametrize(("compression", "tolerance"), [("none", 0.0), ("fp16", 0.07)])
def test_a_step_on_a_device_reads_and_updates_rows_of_16_bits(device, on_host, compression, tolerance):
    """Forward: float32 of what is stored. Backward: SGD on it, exact in 8 bits where gradients cross as float32."""
    ids = {"item": [[0], [1], [1], [2]], "history": [[0, 1], [2, 2], [3, 0], [1, 1]]}
    ids |= {"user": [[5], [5], [6], [7]], "tag": [[3], [3], [3], [4]]}
    tables = {"item": "item", "history": "item", "user": "user", "tag": "tag"}
    columns = {
        name: IdColumn(np.ravel(of).astype(np.uint64), np.arange(5, dtype=np.int64) * len(of[0]))
        for name, of in ids.items()
    }
    batch = Batch(columns, np.zeros((4, 1), np.float32), np.zeros((4, 1), np.float32))
    weights = [1.0, 2.0, 4.0, 8.0]
    embeddings = persia.nn.EmbeddingCollection(
        SCHEMA,
        optimizer=persia.optim.SGD(lr=0.25),
        mode=Sync(),
        cluster=Cluster(2, compression),
        options=persia.nn.CollectionOptions(device),
    )
    assert embeddings._expander.on_host == (device == "cpu")
    if not on_host:
        embeddings._expander.on_host = False
        embeddings._transfer._on_host = False
    expected, random = {}, np.random.default_rng(0)
    for name, table in SCHEMA.resolved_tables().items():
        expected[name] = random.integers(-8, 9, (8, table.dim)).astype(np.float32) / 4
        embeddings.set_rows(name, np.arange(8, dtype=np.uint64), expected[name])
    for prepared in embeddings.prefetch([batch]):
        found = embeddings(prepared)
        for name, of in ids.items():
            pooled = np.stack([expected[tables[name]][sample].mean(0) for sample in of])
            assert (found[name].device.type, found[name].dtype) == (device, torch.float32)
            np.testing.assert_allclose(found[name].detach().cpu().numpy(), pooled, rtol=0, atol=tolerance)
        factors = torch.tensor(weights, device=device)[:, None]
        sum((values * factors).sum() for values in found.values()).backward()
    for name, of in ids.items():
        for sample, weight in zip(of, weights, strict=True):
            for id_ in sample:
                expected[tables[name]][id_] -= 0.25 * weight / len(sample)
    for name, rows in expected.items():
        stored = embeddings.rows(name, np.arange(8, dtype=np.uint64)).values
        np.testing.assert_allclose(stored, rows, rtol=0, atol=tolerance)


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("schema", [SCHEMA, ALL_OF_16_BITS])
def test_rows_of_16_bits_cross_in_a_message(schema, compression):
    _, found = looked_up(compression, schema)
    payload, arrays = encode(found, 100)
    frames = [memoryview(array.reshape(-1).view(np.uint8)) for array in arrays]
    crossed = Decoder(LookedUp).decode(payload, [Frame(frame) for frame in frames])
    np.testing.assert_array_equal(crossed.rows.buffer.view(np.uint8), found.rows.buffer.view(np.uint8))
    assert (crossed.rows.widths, crossed.rows.counts) == (found.rows.widths, found.rows.counts)
    assert (crossed.scales is None) == (found.scales is None)
    tables = schema.resolved_tables()
    expected, plain = (decode(one.rows, one.scales, tables=tables) for one in (found, crossed))
    for name, rows in plain.items():
        np.testing.assert_array_equal(rows, expected[name])
        assert rows.shape[1] == tables[name].dim


def changed(found, name, *, width=0, **fields):
    """Rows with a table of another width, or other fields."""
    if width:
        arrays = dict(found.rows)
        arrays[name] = np.zeros((len(arrays[name]), width), found.rows.buffer.dtype)
        fields["rows"] = Packed.of(arrays, found.rows.buffer.dtype.type)
    return found._replace(**fields)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(
    ("compression", "table", "change"),
    [
        ("none", "item", lambda found: changed(found, "item", width=1)),
        ("none", "item", lambda found: changed(found, "item", width=5)),
        ("none", "user", lambda found: changed(found, "user", width=2)),
        ("fp16", "item", lambda found: changed(found, "item", width=3)),
        ("fp16", "user", lambda found: changed(found, "user", width=6)),
        ("none", "item", lambda found: found._replace(rows=Packed(["item"], [2], found.rows.buffer[:2]))),
        ("none", "other", lambda found: found._replace(rows=Packed.of({"other": np.zeros((2, 3), "f4")}, np.float32))),
        ("fp16", "user", lambda found: found._replace(scales=None)),
        ("fp16", "user", lambda found: found._replace(scales=Packed.of({"user": np.ones(1, "f4")}, np.float32))),
        ("none", "user", lambda found: found._replace(scales=Packed.of({"user": np.ones(1, "f4")}, np.float32))),
        ("fp16", "tag", lambda found: found._replace(
            scales=Packed.of({**found.scales, "tag": np.ones(len(found.rows["tag"]), "f4")}, np.float32))),
    ],
)  # fmt: skip
def test_rows_of_another_form_are_refused(compression, table, change, on_host):
    batch, found = looked_up(compression)
    transfer = Transfer(CpuStaging(), on_host, SCHEMA.resolved_tables())
    transfer.rows(batch, found)
    with pytest.raises(DataError, match=f"table {table!r} have an unexpected form") as caught:
        transfer.rows(batch, change(found))
    assert caught.value.fields["table"] == table


def test_scales_in_another_order_are_refused():
    tables = {name: persia.Table(name, 2) for name in "ab"}
    rows, scales = batching.encode_packed(Packed.of(dict.fromkeys("ab", np.ones((3, 2), np.float32)), np.float32))
    batching.check_rows(rows, scales, tables)
    with pytest.raises(DataError, match="order of tables"):
        batching.check_rows(rows, Packed(["b", "a"], scales.counts, scales.buffer), tables)


def test_rows_by_name_are_decoded_too():
    _, found = looked_up("none")
    tables = SCHEMA.resolved_tables()
    expected = decode(found.rows, None, tables=tables)
    for name, rows in decode(dict(found.rows), None, tables=tables).items():
        np.testing.assert_array_equal(rows, expected[name])


TABLES = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 5), st.integers(0, 3)), max_size=7)


@settings(max_examples=examples(200), deadline=None)
@given(TABLES, st.booleans(), st.integers(0, 99))
def test_runs_of_tables_are_converted_as_each_table_by_itself(forms, compressed, seed):
    rng = np.random.default_rng(seed)
    tables, stored, expected = {}, {}, {}
    for number, (dtype, dim, count) in enumerate(forms):
        name = f"t{number}"
        tables[name] = persia.Table(name, dim, dtype=dtype)
        values = rng.normal(size=(count, dim)).astype(np.float32)
        if dtype == "float32":
            stored[name], expected[name] = values, values
            if compressed:
                expected[name] = batching.decode_rows(*batching.encode_rows(values))
        else:
            halves = to_halves(values, dtype)
            expected[name] = from_halves(halves)
            padded = np.zeros((count, 2 * words_of(dtype, dim)), np.uint16)
            padded[:, :dim] = halves.view(np.uint16)
            stored[name] = padded.view(np.float32)
    rows, scales = Packed.of(stored, np.float32) if stored else Packed([], [], np.empty(0, np.float32), []), None
    if compressed:
        rows, scales = batching.encode_packed(rows, tables)
    batching.check_rows(rows, scales, tables)
    found = batching.plain_packed(rows, scales, tables, batching.Scratch())
    assert list(found) == list(expected)
    tensors = decode_tensors(
        {name: torch.from_numpy(array.copy()) for name, array in rows.items()},
        None if scales is None else {name: torch.from_numpy(array.copy()) for name, array in scales.items()},
        tables,
    )
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
        np.testing.assert_array_equal(tensors[name].numpy(), values)


@pytest.mark.parametrize("on_host", [True, False])
def test_compression_leaves_16_bit_rows_as_they_are(on_host):
    """Gradients are compressed, so training differs a little; the rows that models get are those of the store."""
    plain, compressed = trained(Cluster(2), on_host=on_host), trained(Cluster(2, "fp16"), on_host=on_host)
    assert_same(plain, compressed, atol=0.02)


@pytest.mark.parametrize("on_host", [True, False])
def test_copies_on_the_device_serve_rows_of_16_bits(on_host):
    """Gradients of zero change no row, so that all rows that the model gets are those of the store."""
    tables = [msgspec.structs.replace(table, cache_rows=100) for table in SCHEMA.resolved_tables().values()]
    schema, cluster = msgspec.structs.replace(SCHEMA, tables=tables), Cluster(2)
    embeddings = persia.nn.EmbeddingCollection(
        schema, optimizer=Adagrad(lr=0.1), mode=Hybrid(3, warmup=0), cluster=cluster
    )
    embeddings._expander.on_host = on_host
    embeddings._transfer._on_host = on_host
    worker, seen = embeddings.connection.worker, []
    for batch in embeddings.prefetch(make_batches(20)):
        ids = worker.distinct_ids(batch.batch_id)
        seen += [(name, ids[name].copy(), rows.detach().clone()) for name, rows in batch.rows.items()]
        sum((values * 0).sum() for values in embeddings(batch).values()).backward()
    assert embeddings.cached.hits > 0
    stored = rows_of(cluster.servers)
    for name, ids, rows in seen:
        expected = [stored[name][int(id_)][: rows.shape[1]] for id_ in ids]
        np.testing.assert_array_equal(rows.numpy(), np.array(expected))


def test_evaluation_reads_what_training_stores():
    cluster = Cluster(2)
    embeddings = persia.nn.EmbeddingCollection(SCHEMA, optimizer=Adagrad(lr=0.1), mode=Sync(), cluster=cluster)
    (batch,) = make_batches(1)
    for prepared in embeddings.prefetch([batch]):
        sum(value.sum() for value in embeddings(prepared).values()).backward()
    stored = rows_of(cluster.servers)
    worker = embeddings.connection.worker
    found = worker.evaluate(batch.id_features)
    ids = worker.distinct_ids(worker.register(batch.id_features))
    prepared, _ = embeddings._transfer.rows(batch, found)
    for name, rows in prepared.rows.items():
        expected = [stored[name][int(id_)][: rows.shape[1]] for id_ in ids[name]]
        np.testing.assert_array_equal(rows.numpy(), expected)
    read = cluster.servers[0].read_rows("item", ids["item"], False)
    assert read.values.dtype == np.float32


# --- checkpoints --------------------------------------------------------------------------------------------------


def reader(rows=2_000):
    return persia.data.synthetic(rows, id_features=3, ids_per_feature=400, dense_features=1, batch_size=200)


def trainer(dtype, optimizer=None, **options):
    base = reader().schema
    tables = [persia.Table(f"id_{n}", 16, optimizer=optimizer, dtype=dtype) for n in range(2)]
    schema = persia.Schema(base.id_features, base.dense_features, base.labels, tables)
    torch.manual_seed(0)
    return persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(16,)),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=Adagrad(lr=0.1),
        mode=Sync(),
        options=persia.TrainerOptions(**{"progress": False} | options),
    )


@pytest.mark.parametrize("optimizer", [None, Adam(lr=0.01)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, dtype, optimizer):
    whole, first = trainer(dtype, optimizer), trainer(dtype, optimizer)
    expected = whole.fit(reader(), epochs=2)
    first.fit(reader(), epochs=2, max_steps=13)
    first.save(str(tmp_path))
    second = persia.Trainer.resume(
        str(tmp_path), first.model, optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2)
    )
    assert second.declared.schema.resolved_tables()["id_0"].dtype == dtype
    result = second.fit(reader(), epochs=2)
    assert result.history.auc == expected.history.auc
    assert result.history.log_loss == pytest.approx(expected.history.log_loss, rel=1e-12)  # Sums, in parts.
    servers = [t.embeddings.connection.servers for t in (whole, second)]
    assert_same(*map(rows_of, servers))
    found = inspect(tmp_path)
    assert [(t.name, t.dtype) for t in found.tables] == [("id_0", dtype), ("id_1", dtype), ("id_2", "float32")]
    if optimizer is None:  # 32 bytes less of each row of id_0
        assert found.tables[0].bytes == pytest.approx(found.tables[2].bytes - 32 * found.tables[0].rows, rel=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_other_dtypes_are_loaded_to_the_nearest(tmp_path, dtype):
    first = trainer("float32")
    first.fit(reader())
    first.save(str(tmp_path / "float32"))
    second = trainer(dtype)
    second.load(str(tmp_path / "float32"))
    float32, of_16_bits = (rows_of(t.embeddings.connection.servers) for t in (first, second))
    for table, rows in float32.items():
        kind = dtype if table != "id_2" else "float32"
        for id_, row in rows.items():
            np.testing.assert_array_equal(of_16_bits[table][id_][:16], from_halves(to_halves(row[:16], kind)))
            np.testing.assert_array_equal(of_16_bits[table][id_][16:], row[16:])
    second.save(str(tmp_path / dtype))
    third = trainer("float32")
    third.load(str(tmp_path / dtype))
    assert_same(of_16_bits, rows_of(third.embeddings.connection.servers))


def test_increments_resharding_and_compaction_keep_the_dtype(tmp_path):
    saved = tmp_path / "saved"
    first = trainer(
        "bfloat16", checkpoint_dir=str(saved), checkpoint_every_steps=3, checkpoint_increments=2, keep_last=3
    )
    first.fit(reader())
    chain = CheckpointReader(saved)
    assert len(chain.links) > 1
    rows = rows_of(first.embeddings.connection.servers)

    def loaded(directory):
        t = trainer("bfloat16")
        t.load(str(directory))
        return rows_of(t.embeddings.connection.servers)

    assert_same(rows, loaded(saved))
    reshard(saved, tmp_path / "two", ReshardOptions(2))
    wide = ReshardOptions(dtype="float32", state=False)
    reshard(saved, tmp_path / "wide", wide)
    compact(saved)
    for directory, dtype in ((saved, "bfloat16"), (tmp_path / "two", "bfloat16"), (tmp_path / "wide", "float32")):
        assert CheckpointReader(directory).manifest.tables["id_0"].dtype == dtype
        CheckpointReader(directory).verify()
    assert_same(rows, loaded(saved))
    assert_same(rows, loaded(tmp_path / "two"))


def test_values_that_do_not_fit_are_refused():
    server = EmbeddingServer({"t": persia.Table("t", 2, dtype="float16")}, Adagrad(lr=0.1), Sync(), 0, 1)
    arrays = {"ids": np.array([1], np.uint64), "embeddings": np.array([[1, 7e4]], np.float32)}
    zeros = {name: np.zeros(1, np.uint32) for name in ("update_count", "last_step", "stamp")}
    with pytest.raises(StoreError, match="65504"):
        server.import_rows(RowChunk("t", 0, {**arrays, **zeros}))
    with pytest.raises(StoreError, match="65504"):
        server.set_rows(1, "t", arrays["ids"], arrays["embeddings"], None)
    assert not server.read_rows("t", arrays["ids"], False).found.any()
    server.set_rows(2, "t", arrays["ids"], np.array([[1, 65504]], np.float32), None)
    embeddings = persia.nn.EmbeddingCollection(SCHEMA, optimizer=Adagrad(lr=0.1))
    with pytest.raises(DataError, match="65504"):
        embeddings.set_rows("tag", arrays["ids"], np.full((1, 4), 7e4, np.float32))
    embeddings.set_rows("item", arrays["ids"], np.full((1, 5), 7e4, np.float32))
    for table, dim, value, advice in (
        ("tag", 4, 7e4, "bfloat16"),
        ("tag", 4, 3.395e38, "float32"),
        ("item", 5, 3.395e38, "float32"),
    ):
        with pytest.raises(DataError, match=f"dtype = '{advice}'"):
            embeddings.set_rows(table, arrays["ids"], np.full((1, dim), value, np.float32))


def values_of(server, table, ids):
    return server.read_rows(table, np.array(ids, np.uint64), False).values


@pytest.mark.parametrize("value", [1e5, -1e5])
def test_values_that_do_not_fit_are_found_before_loading(tmp_path, value):
    first = trainer("float32")
    first.fit(reader(200))
    (server,) = first.embeddings.connection.servers
    server.set_rows(1, "id_1", np.array([77], np.uint64), np.full((1, 16), value, np.float32), None)
    first.save(str(tmp_path))
    second = trainer("float16")
    mine = second.embeddings.connection.servers
    mine[0].set_rows(1, "id_0", np.array([3], np.uint64), np.full((1, 16), 0.5, np.float32), None)
    before = rows_of(mine)
    with pytest.raises(CheckpointError, match=f"'id_1' has {value:g} in the row of id 77, beyond 65504") as caught:
        second.load_rows(str(tmp_path))
    assert caught.value.fields == {"path": CheckpointReader(tmp_path).path, "table": "id_1", "id": 77}
    assert_same(rows_of(mine), before)
    assert second.load_rows(str(tmp_path), ["id_0"])["id_0"].rows
    third = trainer("float16")
    with pytest.raises(CheckpointError, match="id 77"):
        third.load(str(tmp_path))
    assert not rows_of(third.embeddings.connection.servers)
    third.fit(reader(200))


def test_values_that_a_newer_increment_replaces_need_not_fit(tmp_path):
    base = None
    table = msgspec.structs.replace(reader().schema.resolved_tables()["id_0"], optimizer=Adagrad(lr=0.1))
    for step, value in ((1, 1e5), (2, 1.0)):
        with CheckpointWriter(tmp_path, step) as writer:
            rows = chunk_of(np.array([5], np.uint64), np.full((1, 16), value, np.float32))
            writer.add_rows("id_0", 0, {**rows, "state": np.ones((1, 16), np.float32)})
            schema = persia.Schema([persia.IdFeature("id_0", dim=16)], tables=[table])
            writer.commit(schema=schema, base=base)
        base = CheckpointReader(tmp_path, step).base
    second = trainer("float16")
    assert second.load_rows(str(tmp_path))["id_0"].rows == 1
    assert (values_of(second.embeddings.connection.servers[0], "id_0", [5]) == 1).all()


def test_rounding_while_loading_is_warned_of(tmp_path, caplog):
    first = trainer("float32")
    first.fit(reader(200))
    first.save(str(tmp_path / "float32"))
    second = trainer("bfloat16")
    second.load(str(tmp_path / "float32"))
    (one, two) = (record.getMessage() for record in caplog.records if "rounded" in record.getMessage())
    assert one.startswith("Table 'id_0': values are rounded to the nearest bfloat16; in ")
    assert one.endswith("they are float32.")
    assert two.startswith("Table 'id_1'")
    caplog.clear()
    second.save(str(tmp_path / "bfloat16"))
    for dtype in ("bfloat16", "float32"):  # Exact.
        trainer(dtype).load(str(tmp_path / "bfloat16"))
    assert "rounded" not in caplog.text


@pytest.mark.parametrize(("dtype", "value"), [("float16", 1e6), ("bfloat16", 3.4e38)])
def test_values_beyond_a_dtype_prevent_resharding_to_it(tmp_path, dtype, value):
    first = trainer("float32")
    first.fit(reader(200))
    ids, rows = np.arange(3, dtype=np.uint64), np.zeros((3, 16), np.float32)
    rows[2] = value
    first.embeddings.connection.servers[0].set_rows(1, "id_0", ids, rows, None)
    first.save(str(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match=f"beyond .* largest number of {dtype}") as caught:
        reshard(tmp_path / "saved", tmp_path / "half", ReshardOptions(dtype=dtype))
    assert (caught.value.fields["table"], caught.value.fields["id"]) == ("id_0", 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_that_are_not_finite_are_resharded_in_their_dtype(tmp_path, dtype):
    first = trainer(dtype)
    first.fit(reader(200))
    (server,) = first.embeddings.connection.servers
    rows = np.full((2, 16), 0.5, np.float32)
    rows[0, 3], rows[1, 4] = np.inf, np.nan
    server.import_rows(RowChunk("id_0", 0, chunk_of(np.array(UNUSED, np.uint64), rows)))
    first.save(str(tmp_path / "saved"))
    reshard(tmp_path / "saved", tmp_path / "again", ReshardOptions())
    second = trainer(dtype)
    second.load(str(tmp_path / "again"))
    np.testing.assert_array_equal(values_of(second.embeddings.connection.servers[0], "id_0", UNUSED), rows)


UNUSED = [10**9, 10**9 + 1]
"""Ids of no batch: a state whose logits are not finite is not saved."""


def chunk_of(ids, values):
    zeros = {name: np.zeros(len(ids), np.uint32) for name in ("update_count", "last_step", "stamp")}
    return {"ids": ids, "embeddings": values, **zeros}


# --- the rest -----------------------------------------------------------------------------------------------------


def test_virtual_time_trains_as_the_trainer_does():
    reader_ = persia.data.synthetic(1024, id_features=3, ids_per_feature=200, batch_size=64, dim=4)
    base = reader_.schema
    tables = [persia.Table("id_0", 4, dtype="bfloat16"), persia.Table("id_1", 4, dtype="float16")]
    schema = persia.Schema(base.id_features, base.dense_features, base.labels, tables)
    batches = list(reader_)

    def model():
        torch.manual_seed(3)
        return persia.nn.models.FFNN(schema, hidden=(8,))

    def adam(parameters):
        return torch.optim.Adam(parameters, 1e-2)

    training = VirtualTraining(model(), schema, batches.__getitem__, adam, Adagrad(lr=0.05), seed=5)
    training.run(simulate(Sync(), Setting(steady([1.0]), local_batch=64), len(batches)))
    options = persia.TrainerOptions(seed=5, progress=False)
    real = persia.Trainer(
        model(), schema, optimizer=adam, embedding_optimizer=Adagrad(lr=0.05), mode=Sync(), options=options
    )
    real.fit(batches)
    assert_same(rows_of(training.stores), rows_of(real.embeddings.connection.servers))
    theirs = np.concatenate(list(real.predict(batches[:3])))
    np.testing.assert_allclose(1 / (1 + np.exp(-training.evaluate(batches[:3]))), theirs, rtol=0, atol=1e-6)


def test_capacity_follows_the_dtype():
    sizes = {
        dtype: declared_sizes({"t": persia.Table("t", 16, capacity=1000, dtype=dtype)}, Adam(lr=0.1))[0]
        for dtype in ("float32", "bfloat16", "float16")
    }
    assert [size.row_bytes for size in sizes.values()] == [36 + 192, 36 + 96, 36 + 160]
    assert "2 x dim 16, 2 x 32 of optimizer state" in str(sizes["bfloat16"])
    with pytest.raises(ConfigError, match="2 x dim 16, 4 x 16 of optimizer state"):
        tables = {"t": persia.Table("t", 16, capacity=1 << 44, dtype="bfloat16")}
        EmbeddingServer(tables, Adagrad(lr=0.1), Sync(), 0, 1, ServerOptions())


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: persia.Table("t", 4, dtype="bf16"), "Table('t').dtype"),
        (lambda: persia.IdFeature("f", dim=4, dtype="half"), "IdFeature('f').dtype"),
        (lambda: persia.Table("t", 4, dtype="float16", value_bound=1e-9), "Table('t').value_bound"),
        (
            lambda: persia.Schema(
                [persia.IdFeature("f", table="t", dtype="float16")], tables=[persia.Table("t", 4, dtype="bfloat16")]
            ),
            "IdFeature('f').dtype",
        ),
    ],
)
def test_refused_schemas(make, field):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.fields["field"] == field


def test_features_of_one_table_may_leave_the_dtype_to_another():
    features = [persia.IdFeature("a", dim=4, table="t"), persia.IdFeature("b", table="t", dtype="bfloat16")]
    assert persia.Schema(features).resolved_tables()["t"].dtype == "bfloat16"
