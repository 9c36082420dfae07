"""Incremental checkpoints: what they mean, how a chain breaks, what stays, and what becomes one full checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.checkpoint import CheckpointReader, CheckpointWriter, Score, compact, inspect, list_checkpoints
from persia.checkpoint.format import _signed
from persia.checkpoint.storage import Storage
from persia.errors import CheckpointError
from support.checkpoint_samples import OPTIMIZER, SCHEMA
from support.examples import examples


def rows_of(model: dict[int, float]) -> dict[str, np.ndarray]:
    count = len(model)
    values = np.array(list(model.values()), np.float32)
    return {
        "ids": np.array(list(model), np.uint64),
        "embeddings": np.repeat(values[:, None], 4, axis=1),
        "state": np.ones((count, 4), np.float32),
        "update_count": np.ones(count, np.uint32),
        "last_step": np.full(count, 7, np.uint32),
        "stamp": np.arange(count, dtype=np.uint32),
    }


def write_link(url, step, changed, removed=(), base=None, **options):
    commit = {name: options.pop(name) for name in ("score", "content") if name in options}
    with CheckpointWriter(url, step, **options) as writer:
        writer.add_rows("item", 0, rows_of(changed))
        if base is not None:
            writer.add_removed("item", 0, np.array(list(removed), np.uint64))
        writer.add_state("trainer", step)
        writer.commit(schema=SCHEMA, optimizer=OPTIMIZER, base=base, **commit)
    return CheckpointReader(url, step).base


def read(reader: CheckpointReader) -> dict[int, float]:
    found: dict[int, float] = {}
    for _, arrays in reader.rows("item"):
        for id_, row in zip(arrays["ids"].tolist(), arrays["embeddings"], strict=True):
            assert id_ not in found
            found[id_] = float(row[0])
    return found


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    base = write_link(tmp_path, 1, {1: 1.0, 2: 2.0, 3: 3.0})
    base = write_link(tmp_path, 2, {3: 3.5, 4: 4.0}, removed=[1, 4], base=base)
    write_link(tmp_path, 3, {1: 1.5}, removed=[2, 99], base=base)
    return tmp_path


def edit(step: Path, change) -> None:
    path = step / "manifest.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_bytes(_signed(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"))


def test_each_link_adds_to_the_one_before(chain: Path) -> None:
    assert read(CheckpointReader(chain, 1)) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert read(CheckpointReader(chain, 2)) == {2: 2.0, 3: 3.5, 4: 4.0}
    reader = CheckpointReader(chain)
    assert read(reader) == {1: 1.5, 3: 3.5, 4: 4.0}
    assert reader.state("trainer") == 3
    assert inspect(chain).adds_to == (2, 1)
    assert reader.verify() > CheckpointReader(chain, 1).verify()
    own = CheckpointReader(chain / "step-000000000003")  # The step's own directory knows its neighbours.
    assert read(own) == read(reader)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.tuples(st.dictionaries(st.integers(0, 20), st.integers(0, 9).map(float)), st.sets(st.integers(0, 20))),
        min_size=1,
        max_size=5,
    )
)
def test_any_chain_means_what_a_dict_would(tmp_path_factory, links) -> None:
    url = tmp_path_factory.mktemp("chain")
    model: dict[int, float] = {}
    base = None
    for step, (changed, removed) in enumerate(links, 1):
        if base is not None:
            model = {id_: value for id_, value in model.items() if id_ not in removed}
        model.update(changed)
        base = write_link(url, step, changed, removed, base)
    assert read(CheckpointReader(url)) == model
    compact(url)
    compacted = CheckpointReader(url)
    assert compacted.manifest.base is None
    assert read(compacted) == model


def test_what_others_add_to_may_be_compacted(chain: Path) -> None:
    before = read(CheckpointReader(chain))
    compact(chain, 2)
    assert CheckpointReader(chain, 2).manifest.base is None
    shutil.rmtree(chain / "step-000000000001")
    assert read(CheckpointReader(chain)) == before
    assert CheckpointReader(chain, 2).state("trainer") == 2


def test_a_missing_link_is_named(chain: Path) -> None:
    (chain / "step-000000000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"adds to .*step-000000000001, which cannot be read"):
        CheckpointReader(chain)
    with pytest.raises(CheckpointError, match="step-000000000001"):
        CheckpointReader(chain, 2)


def test_a_replaced_link_is_found_out(chain: Path) -> None:
    write_link(chain, 1, {1: 1.0, 2: 2.0, 3: 3.0})
    with pytest.raises(CheckpointError, match="replaced since"):
        CheckpointReader(chain, 3)


def test_a_damaged_link_is_found_out(chain: Path) -> None:
    part = next((chain / "step-000000000001").rglob("rows/**/*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1] + b"\x7f")
    reader = CheckpointReader(chain)
    with pytest.raises(CheckpointError, match=re.escape(str(part))):
        reader.verify()
    with pytest.raises(CheckpointError, match=re.escape(str(part))):
        read(reader)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(base={"step": 3, "content": "0" * 32}), "later step"),
        (lambda m: m.update(base={"step": 9, "content": "0" * 32}), "later step"),
        (lambda m: m.update(base={"step": 1, "content": "0" * 32}), "replaced"),
        (lambda m: m.update(base={"step": 1, "content": "../../etc"}), "not a valid manifest"),
        (lambda m: m.update(base={"step": -1, "content": "0" * 32}), "not a valid manifest"),
        (lambda m: m.update(base={"step": 1, "content": "0" * 32, "x": 1}), "not a valid manifest"),
        (lambda m: m.update(base=2), "not a valid manifest"),
        (lambda m: m.update(base=None), "removes rows from nothing"),
        (lambda m: m.update(content=""), "not a valid manifest"),
        (lambda m: m["tables"]["item"].update(dim=5), "table 'item' has another dim"),
        (lambda m: m["tables"]["item"].update(dtype="int8"), "not a valid manifest"),
        (lambda m: m["parts"][1].update(table="nobody"), "removes rows from nothing"),
    ],
)
def test_hostile_links(chain: Path, change, message: str) -> None:
    edit(chain / "step-000000000003", change)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(chain)


def test_removed_ids_must_be_what_the_manifest_says(chain: Path) -> None:
    edit(chain / "step-000000000003", lambda m: m["parts"][1].update(ids=5))
    with pytest.raises(CheckpointError, match="does not hold 5 ids"):
        CheckpointReader(chain).verify()


def test_what_kept_ones_add_to_is_kept(tmp_path: Path) -> None:
    base = write_link(tmp_path, 1, {1: 1.0}, keep_last=1)
    base = write_link(tmp_path, 2, {2: 2.0}, base=base, keep_last=1)
    base = write_link(tmp_path, 3, {3: 3.0}, base=base, keep_last=1)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [1, 2, 3]
    write_link(tmp_path, 4, {4: 4.0}, keep_last=1)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [4]


def test_the_best_is_kept(tmp_path: Path) -> None:
    """The first of two equal ones, as `patience` counts the second as no improvement."""
    for step, value in enumerate([0.5, 0.9, None, 0.7, 0.9, 0.1, 0.2], 1):
        score = None if value is None else Score("auc", value, value)
        write_link(tmp_path, step, {1: 1.0}, score=score, keep_last=2, keep_best=True)
    assert [(entry.step, entry.best) for entry in list_checkpoints(tmp_path)] == [(2, True), (6, False), (7, False)]


def test_a_link_cannot_add_to_itself(tmp_path: Path) -> None:
    base = write_link(tmp_path, 5, {1: 1.0})
    with pytest.raises(CheckpointError, match="later step"):
        write_link(tmp_path, 5, {1: 1.0}, base=base)
    assert read(CheckpointReader(tmp_path)) == {1: 1.0}


def test_nothing_is_removed_while_bases_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A store that does not let itself be read just now, or never: the full checkpoint is all that the others have."""
    base = write_link(tmp_path, 1, {1: 1.0}, keep_last=1)
    base = write_link(tmp_path, 2, {2: 2.0}, base=base, keep_last=1)

    def fails(storage: Storage, path: str, start: int, count: int) -> bytes:
        raise CheckpointError(f"{path}: SlowDown")

    with CheckpointWriter(tmp_path, 3, keep_last=1) as writer, monkeypatch.context() as context:
        writer.add_rows("item", 0, rows_of({3: 3.0}))
        context.setattr(Storage, "head", fails)
        writer.commit(schema=SCHEMA, optimizer=OPTIMIZER, base=base)
    base = CheckpointReader(tmp_path, 3).base
    assert "Cannot remove older checkpoints: step-000000000003/manifest.json: SlowDown" in caplog.text
    assert read(CheckpointReader(tmp_path)) == {1: 1.0, 2: 2.0, 3: 3.0}
    # One that is damaged, and belongs to what is kept.
    (tmp_path / "step-000000000002" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="step-000000000002, which cannot be read"):
        write_link(tmp_path, 4, {4: 4.0}, base=base, keep_last=1)
    assert "step 2, which step 4 builds on, is damaged" in caplog.text
    assert (tmp_path / "step-000000000001").exists()
    # Once nobody needs it any more it is in nobody's way.
    write_link(tmp_path, 5, {5: 5.0}, keep_last=1)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [5]
