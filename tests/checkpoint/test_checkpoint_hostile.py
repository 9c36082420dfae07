"""Bad input: each kind of damage has its own message; whatever the bytes, nothing but CheckpointError comes out."""

from __future__ import annotations

import copy
import json
import os
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from persia.checkpoint import CheckpointReader, CheckpointWriter, inspect, list_checkpoints
from persia.checkpoint.format import decode_manifest, encode_manifest
from persia.checkpoint.tensors import decode
from persia.errors import CheckpointError, MissingExtraError, PersiaError
from persia.schema import SGD, Adam, IdFeature, Schema, Table
from support.checkpoint_samples import OPTIMIZER, SCHEMA, make_rows, write
from support.examples import examples

STEP = "step-000000000012"
PART = f"{STEP}/rows/item/0-0.safetensors"
MANIFEST = f"{STEP}/manifest.json"


def sign(manifest: dict[str, Any]) -> bytes:
    """A manifest with a right checksum, so that what is behind it is reached."""
    manifest.pop("checksum", None)
    body = json.dumps(manifest).encode()[:-1] + b', "checksum"'
    body = body.rpartition(b'"checksum"')[0]
    return body + f'"checksum": "crc32:{zlib.crc32(body):08x}"\n}}\n'.encode()


def edit(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / MANIFEST
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_bytes(sign(manifest))


def use_everything(url: Path) -> None:
    reader = CheckpointReader(url)
    reader.check_schema(SCHEMA, OPTIMIZER)
    for table in reader.manifest.tables:
        list(reader.rows(table))
    reader.tensors("dense")
    reader.state("trainer")
    reader.verify()
    inspect(url)


# --- damage -----------------------------------------------------------------------------------------------------


def test_truncated_part(saved: Path) -> None:
    os.truncate(saved / PART, 100)
    with pytest.raises(CheckpointError, match=r"0-0\.safetensors is truncated: 100 of \d+ bytes.*another checkpoint"):
        next(CheckpointReader(saved).rows("item"))


@pytest.mark.parametrize("position", [0, 3, 8, 60, 400, -1])
def test_flipped_byte(saved: Path, position: int) -> None:
    data = bytearray((saved / PART).read_bytes())
    data[position] ^= 1
    (saved / PART).write_bytes(data)
    reader = CheckpointReader(saved)
    with pytest.raises(CheckpointError, match=r"0-0\.safetensors is damaged"):
        list(reader.rows("item"))
    with pytest.raises(CheckpointError, match=r"0-0\.safetensors is damaged"):
        reader.verify()
    reader.state("trainer")  # the others are whole


def test_missing_parts_are_all_named(saved: Path) -> None:
    (saved / PART).unlink()
    (saved / STEP / "state/trainer.safetensors").unlink()
    reader = CheckpointReader(saved)
    with pytest.raises(CheckpointError, match="is missing"):
        list(reader.rows("item"))
    with pytest.raises(CheckpointError, match=r"(?s)0-0\.safetensors is missing.*trainer\.safetensors is missing"):
        reader.verify()


def test_a_fifo_in_place_of_a_part_does_not_block(saved: Path) -> None:
    (saved / PART).unlink()
    os.mkfifo(saved / PART)
    with pytest.raises(CheckpointError, match="is missing"):
        list(CheckpointReader(saved).rows("item"))


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_truncated_manifest(saved: Path, keep: int) -> None:
    data = (saved / MANIFEST).read_bytes()
    (saved / MANIFEST).write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match="truncated"):
        CheckpointReader(saved)


def test_changed_manifest(saved: Path) -> None:
    data = (saved / MANIFEST).read_bytes()
    (saved / MANIFEST).write_bytes(data.replace(b'"global_step": 12', b'"global_step": 13'))
    with pytest.raises(CheckpointError, match="checksum"):
        CheckpointReader(saved)


@pytest.mark.parametrize("version", [1, 3])
def test_unknown_version(saved: Path, version: int) -> None:
    edit(saved, lambda m: m.update(version=version, something_new=1))
    with pytest.raises(CheckpointError, match=rf"version {version}; .* reads version 2.*Install"):
        CheckpointReader(saved)


def test_too_large_a_manifest_is_not_read(saved: Path) -> None:
    os.truncate(saved / MANIFEST, 1 << 40)
    with pytest.raises(CheckpointError, match="larger than"):
        CheckpointReader(saved)


# --- LATEST -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"../../etc",
        b"../step-000000000012",
        b"step-12",
        b"step-000000000012",
        b"step-000000000012\n\n",
        b"\xff\xfe",
        b"step-" + b"9" * 60,
        "step-٠٠٠٠٠٠٠٠٠٠١٢".encode(),
    ],
    ids=repr,
)
def test_garbage_in_latest(saved: Path, content: bytes) -> None:
    (saved / "LATEST").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"LATEST is damaged.*step="):
        CheckpointReader(saved)
    assert [(e.step, e.latest) for e in list_checkpoints(saved)] == [(12, False)]
    assert CheckpointReader(saved, 12).manifest.global_step == 12
    write(saved, 13)
    assert CheckpointReader(saved).manifest.global_step == 13


def test_latest_names_nothing(saved: Path) -> None:
    (saved / "LATEST").write_text("step-000000000099\n")
    with pytest.raises(CheckpointError, match=r"step-000000000099 holds no complete checkpoint.*steps are 12"):
        CheckpointReader(saved)
    (saved / "LATEST").unlink()
    with pytest.raises(CheckpointError, match=r"no LATEST.*steps are 12"):
        CheckpointReader(saved)


@pytest.mark.parametrize("step", [-1, 13, "12", 1.5, True, None])
def test_no_such_checkpoint(tmp_path: Path, step: Any) -> None:
    with pytest.raises(CheckpointError, match="holds no"):
        CheckpointReader(tmp_path / "nothing", step)


def test_urls_that_lead_nowhere() -> None:
    for url in ("", "nosuch://x", "a\0b"):
        with pytest.raises(CheckpointError):
            CheckpointReader(url)
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match=r"persia-recsys\[s3\]"):
            CheckpointReader("s3://bucket/x")


# --- another model ----------------------------------------------------------------------------------------------


def test_another_schema(saved: Path) -> None:
    reader = CheckpointReader(saved)
    reader.check_schema(SCHEMA, OPTIMIZER)
    reader.check_schema(SCHEMA)
    other = Schema(
        [IdFeature("item", 4), IdFeature("history", 4, table="item"), IdFeature("shop", 2)], ["age"], ["buy"]
    )
    with pytest.raises(CheckpointError) as caught:
        reader.check_schema(other, OPTIMIZER)
    for words in (
        "table 'shop' is not in the checkpoint",
        "table 'user' of the checkpoint is not in the model",
        "'history' has pooling 'sum', in the checkpoint 'mean'",
        "'shop' is not in the checkpoint",
        "'user' is not in the model",
        "dense_features differ in 'age', 'price'",
        "labels differ in 'buy', 'click'",
        "Use the schema",
    ):
        assert words in caught.value.message


def test_another_dim(saved: Path) -> None:
    other = Schema([IdFeature("item", 8), IdFeature("history", 8, table="item", pooling="mean"), IdFeature("user", 2)])
    with pytest.raises(CheckpointError, match="table 'item' has dim 8, in the checkpoint 4"):
        CheckpointReader(saved).check_schema(other)


def test_another_optimizer(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="'item' is trained by Adam, in the checkpoint by Adagrad"):
        CheckpointReader(saved).check_schema(SCHEMA, Adam(0.1))
    plain, momentum = (Schema([IdFeature("a", 4)], tables=[Table("a", 4, SGD(0.1, m))]) for m in (0.0, 0.9))
    with CheckpointWriter(saved, 13) as writer:
        writer.commit(schema=plain)
    CheckpointReader(saved).check_schema(plain)
    with pytest.raises(CheckpointError, match="SGD with momentum, in the checkpoint by SGD"):
        CheckpointReader(saved).check_schema(momentum)


# --- wrong use --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"ids": np.zeros(3, np.int64)},
        {"ids": np.zeros(2, np.uint64)},
        {"embeddings": np.zeros((3, 4), np.float64)},
        {"embeddings": np.zeros(3, np.float32)},
        {"state": np.zeros((4, 4), np.float32)},
        {"more": np.zeros(3)},
    ],
    ids=lambda change: "-".join(f"{k} {v.dtype} {v.shape}" for k, v in change.items()),
)
def test_rows_that_do_not_fit(tmp_path: Path, change: dict[str, np.ndarray]) -> None:
    with CheckpointWriter(tmp_path, 1) as writer:
        with pytest.raises(CheckpointError, match=f"'item'.*{'exactly' if 'more' in change else 'expected'}"):
            writer.add_rows("item", 0, make_rows(3) | change)
        writer.add_rows("item", 0, make_rows(3))
        with pytest.raises(CheckpointError, match="earlier parts"):
            writer.add_rows("item", 0, make_rows(3, dim=5))
        writer.commit(schema=SCHEMA)  # a refused call changes nothing
    assert CheckpointReader(tmp_path).manifest.tables["item"].rows == 3


def test_wrong_calls(tmp_path: Path) -> None:
    for step in (-1, 10**12, 1.0, True):
        with pytest.raises(CheckpointError, match="step"):
            CheckpointWriter(tmp_path, step)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="keep_last"):
        CheckpointWriter(tmp_path, 1, keep_last=0)
    with CheckpointWriter(tmp_path, 1) as writer:
        writer.add_rows("other", 0, make_rows(3))
        writer.add_state("a", 1)
        for call in (
            lambda: writer.add_state("a", 2),
            lambda: writer.add_state("", 2),
            lambda: writer.add_state("\ud800", 2),
            lambda: writer.add_state("x" * 65, 2),
            lambda: writer.add_tensors("t", {"__metadata__": np.zeros(1)}),
            lambda: writer.add_tensors("t", {"a": "text"}),  # type: ignore[dict-item]
            lambda: writer.add_rows("other", -1, make_rows(3)),
            lambda: writer.commit(schema=SCHEMA),
        ):
            with pytest.raises(CheckpointError):
                call()
        schema = Schema([IdFeature("other", 4)])
        for bad in (
            {"a": float("nan")},
            {"a": [{1: 2}]},
            {"a": {"b": 1 << 70}},
            {"a": object()},
            [1],
            {"a": "x" * (5 << 20)},
        ):
            for field in ("config", "extra"):
                with pytest.raises(CheckpointError, match=field):
                    writer.commit(schema=schema, **{field: bad})  # type: ignore[arg-type]
        writer.commit(schema=schema)
    reader = CheckpointReader(tmp_path)
    for call in (lambda: reader.rows("x"), lambda: reader.tensors("x"), lambda: reader.state("x")):
        with pytest.raises(CheckpointError, match="it has"):
            call()


def test_numpy_has_no_bfloat16(tmp_path: Path) -> None:
    import torch

    with CheckpointWriter(tmp_path, 1) as writer:
        writer.add_tensors("t", {"a": torch.zeros(2, dtype=torch.bfloat16)})
        writer.commit(schema=SCHEMA)
    with pytest.raises(CheckpointError, match="BF16"):
        CheckpointReader(tmp_path).tensors("t", "numpy")


# --- hostile ----------------------------------------------------------------------------------------------------


def change_part(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda m: m["parts"][0].update(fields)


@pytest.mark.parametrize(
    "change",
    [
        *(
            change_part(path=path)
            for path in (
                *("../x", "/etc/passwd", "rows/../../x", "a//b", "", "a/./b", "..", "a\\..\\b", "C:/x", "a\nb"),
                *("rows/item/1-0.safetensors", "file:///etc/passwd", "a\n", "s3://b/c", "x" * 600),
            )
        ),
        change_part(bytes=-1),
        change_part(bytes=1 << 62),
        change_part(rows=-1),
        change_part(rows=8),
        change_part(rows=1 << 70),
        change_part(rows=7.5),
        change_part(shard=-1),
        change_part(shard="0"),
        change_part(shard=1),
        change_part(steps=[9, 3]),
        change_part(table="nobody"),
        change_part(kind="pickle"),
        change_part(checksum="md5:00"),
        change_part(checksum=None),
        change_part(extra=1),
        lambda m: m.update(unknown=1),
        lambda m: m.update(format="zip"),
        lambda m: m.update(version="1"),
        lambda m: m.update(global_step=-1),
        lambda m: m.update(span=[3, 1]),
        lambda m: m.update(created="yesterday"),
        lambda m: m.update(schema={}),
        lambda m: m.update(schema=[]),
        lambda m: m.update(schema={"id_features": [{"name": "a", "dim": -1}]}),
        lambda m: m.update(config=[]),
        lambda m: m.update(extra={"x": "y" * (5 << 20)}),
        lambda m: m.update(parts=m["parts"] * 2),
        lambda m: m.pop("parts"),
        lambda m: m["parts"].pop(),
        lambda m: m["parts"].append(m["parts"][-1] | {"path": "other"}),
        lambda m: m["tables"]["item"].update(dim=0),
        lambda m: m["tables"]["item"].update(dim=5),
        lambda m: m["tables"]["item"].update(state_width=3),
        lambda m: m["tables"]["item"].update(state_width=1 << 40),
        lambda m: m["tables"]["item"].update(rows=11),
        lambda m: m["tables"]["item"].update(optimizer={"kind": "adagrad", "lr": -1}),
        lambda m: m["tables"].pop("item"),
    ],
)
def test_hostile_manifest(saved: Path, change: Callable[[dict[str, Any]], None]) -> None:
    edit(saved, change)
    with pytest.raises(CheckpointError):
        use_everything(saved)


def test_signing_in_these_tests_is_right(saved: Path) -> None:
    edit(saved, lambda m: None)
    use_everything(saved)


@pytest.mark.parametrize(
    "text", [b"[" * 10**6, b'{"format":' * 10**5, b'{"format": "persia-checkpoint", "version": 1e400}']
)
def test_deep_and_odd_json(text: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode_manifest(text, "x")


def test_memory_stays_small_for_large_documents(saved: Path) -> None:
    edit(saved, lambda m: m["extra"].update(x=[[]] * 3_000_000))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="extra exceeds"):
        CheckpointReader(saved)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


def test_sparse_part_is_refused_by_its_size_alone(saved: Path) -> None:
    os.truncate(saved / PART, 1 << 36)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="too long"):
        list(CheckpointReader(saved).rows("item"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_fuzzed_manifest_values(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any one value, anywhere in the manifest, replaced by any other."""
    directory = _shared(tmp_path_factory)
    manifest = copy.deepcopy(json.loads(_pristine[MANIFEST]))
    node: Any = manifest
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else list(range(len(node)))))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.integers(0, 4)) == 0:
            break
        node = node[key]
    node[key] = data.draw(json_values)
    (directory / MANIFEST).write_bytes(sign(manifest))
    try:
        with suppress(CheckpointError):
            use_everything(directory)
    finally:
        (directory / MANIFEST).write_bytes(_pristine[MANIFEST])


_pristine: dict[str, bytes] = {}
_places: list[Path] = []


def _shared(factory: pytest.TempPathFactory) -> Path:
    if not _places:
        _places.append(factory.mktemp("fuzz"))
        write(_places[0], 12)
        for path in _places[0].rglob("*"):
            if path.is_file():
                _pristine[str(path.relative_to(_places[0]))] = path.read_bytes()
    return _places[0]


def test_bytes_behind_the_checksum_are_fixed(tmp_path: Path) -> None:
    """No byte of a manifest may change unnoticed, white space behind what the checksum covers included."""
    write(tmp_path, 12)
    manifest = tmp_path / MANIFEST
    content = manifest.read_bytes()
    for damaged in (content + b" ", content[:-1], content[:-2] + b" }\n", content.replace(b'"crc32', b' "crc32')):
        manifest.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"checksum|manifest"):
            use_everything(tmp_path)


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_fuzzed_bytes_of_any_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = _shared(tmp_path_factory)
    name = data.draw(st.sampled_from(sorted(_pristine)))
    content = bytearray(_pristine[name])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    (directory / name).write_bytes(content)
    try:
        if bytes(content) == _pristine[name]:
            return
        with pytest.raises(CheckpointError):  # everything is covered by a checksum, LATEST by its form
            use_everything(directory)
    finally:
        (directory / name).write_bytes(_pristine[name])


@settings(max_examples=examples(300))
@given(st.binary(max_size=200), st.booleans())
def test_fuzzed_safetensors(content: bytes, framed: bool) -> None:
    if framed:
        content = len(content).to_bytes(8, "little") + content
    with suppress(CheckpointError):
        decode(memoryview(bytearray(content)), "x")


@settings(max_examples=examples(300))
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "U8", "BF16", "X"]),
                "shape": st.lists(st.sampled_from([0, 1, 2, 3, -1, 1 << 40, 1 << 48, 1 << 64]), max_size=4)
                | st.just([1] * 40)
                | st.just([0, *[1 << 47] * 3]),
                "data_offsets": st.lists(st.integers(-1, 40), min_size=1, max_size=3),
            }
        ),
    ),
    st.integers(0, 40),
)
def test_fuzzed_headers(header: dict[str, Any], body: int) -> None:
    text = msgspec.json.encode(header)
    data = memoryview(bytearray(len(text).to_bytes(8, "little") + text + bytes(body)))
    with suppress(CheckpointError):
        for view in decode(data, "x").values():
            with suppress(CheckpointError):
                view.torch()
            with suppress(CheckpointError):
                view.numpy()


def test_errors_survive_pickling(saved: Path) -> None:
    import pickle

    os.truncate(saved / PART, 1)
    with pytest.raises(PersiaError) as caught:
        CheckpointReader(saved).verify()
    assert pickle.loads(pickle.dumps(caught.value)).message == caught.value.message


def test_manifests_of_any_content_come_back(saved: Path) -> None:
    manifest = CheckpointReader(saved).manifest
    changed = msgspec.structs.replace(manifest, extra={"checksum": 'x"checksum"', "ü": [1, None, {"a": -0.5}]})
    assert decode_manifest(encode_manifest(changed), "x").extra == changed.extra
