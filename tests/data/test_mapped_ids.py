"""Features whose ids are those of another one, mapped to fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash

import persia
from persia import HashTo, IdFeature, Quotient, Remainder, Schema, data
from persia.batching.batch import Batch
from persia.errors import CheckpointError, ConfigError, DataError

BIG = 2**64 - 1
SCHEMA = Schema(
    [
        # Before the feature that it maps: the order does not matter.
        IdFeature("q", dim=2, of="item", mapping=Quotient(1_000)),
        IdFeature("item", dim=2),
        IdFeature("r", dim=2, of="item", mapping=Remainder(1_000)),
        IdFeature("a", dim=2, of="item", mapping=HashTo(7, seed=1)),
        IdFeature("b", dim=2, of="both", mapping=HashTo(7, seed=2)),
        IdFeature("user", dim=2),
        IdFeature("both", dim=2, cross=("item", "user")),
        IdFeature("hashed_past", dim=2, of="past", mapping=HashTo(50), pooling=None, max_length=3),
        IdFeature("past", dim=2, pooling=None, max_length=3),
    ]
)
COLUMNS: dict[str, Any] = {
    "item": [0, 123_456, BIG],
    "user": [1, 2, 3],
    "past": [[5, 6], [], [7]],
    "label": [0, 1, 0],
}


def xxh64(number: int, seed: int) -> int:
    return xxhash.xxh64_intdigest(int(number).to_bytes(8, "little"), seed)


def test_ids_are_mapped() -> None:
    found = Batch.from_columns(SCHEMA, COLUMNS).id_features
    assert list(found) == [f.name for f in SCHEMA.id_features]
    assert found["q"].values.tolist() == [0, 123, BIG // 1_000]
    assert found["r"].values.tolist() == [0, 456, BIG % 1_000]
    assert found["a"].values.tolist() == [xxh64(i, 1) % 7 for i in COLUMNS["item"]]
    assert found["b"].values.tolist() == [xxh64(i, 2) % 7 for i in found["both"].values.tolist()]
    assert found["hashed_past"].values.tolist() == [xxh64(i, 0) % 50 for i in (5, 6, 7)]
    assert found["hashed_past"].offsets is not None
    assert found["hashed_past"].offsets.tolist() == [0, 2, 2, 3]


def test_quotient_and_remainder_tell_ids_apart() -> None:
    ids = np.arange(5_000)
    found = Batch.from_columns(
        Schema([f for f in SCHEMA.id_features if f.name in ("item", "q", "r")]), {"item": ids, "label": ids * 0}
    ).id_features
    assert len(set(zip(found["q"].values.tolist(), found["r"].values.tolist(), strict=True))) == 5_000


@pytest.mark.parametrize(
    ("values", "row"),
    [([15.5, 7.0], 0), ([15, -1], 1), (["3", "Oslo"], 1), (["3", "4", "NA"], 2), ([[5], [6, 1.5]], 1)],
)
def test_only_whole_numbers_are_divided(values: list[Any], row: int) -> None:
    schema = Schema([IdFeature("age", dim=2), IdFeature("decade", dim=2, of="age", mapping=Quotient(10))], labels=[])
    with pytest.raises(DataError, match=rf"'age' has .* at row {row}, which is hashed .* 'decade' divides") as raised:
        Batch.from_columns(schema, {"age": values})
    assert raised.value.fields["row"] == row
    for mapping in (HashTo(10), Remainder(10)):  # Of a hash they are as good as of an id.
        hashed = Schema([IdFeature("age", 2), IdFeature("bucket", 2, of="age", mapping=mapping)], labels=[])
        assert Batch.from_columns(hashed, {"age": values}).id_features["bucket"].values.max() < 10
    whole = Batch.from_columns(schema, {"age": [15.0, None, 7.0]})  # A missing value has no id.
    assert whole.id_features["decade"].values.tolist() == [1, 0]


def test_readers_compute_them(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("item,label\n123456,1\n7,0\n")
    schema = Schema([SCHEMA.feature("item"), SCHEMA.feature("q")])
    (batch,) = data.csv(tmp_path / "a.csv", schema, 10)
    assert batch.id_features["q"].values.tolist() == [123, 0]


def test_they_train_and_checkpoints_record_the_mapping(tmp_path: Path) -> None:
    def trainer(buckets: int) -> persia.Trainer:
        schema = Schema([IdFeature("item", dim=2), IdFeature("a", dim=2, of="item", mapping=HashTo(buckets))])
        return persia.Trainer(
            persia.nn.models.FFNN(schema, hidden=(4,)),
            schema,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            embedding_optimizer=persia.optim.SGD(lr=0.1),
            mode=persia.modes.Sync(),
            options=persia.TrainerOptions(progress=False),
        )

    first = trainer(2)
    columns = {"item": np.arange(100), "label": np.zeros(100)}
    first.fit([Batch.from_columns(first.schema, columns)])
    assert {name: table["rows"] for name, table in first.embeddings.statistics().items()} == {"item": 100, "a": 2}
    first.save(tmp_path / "saved")
    trainer(2).load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"'a' has mapping HashTo\(buckets=3"):
        trainer(3).load(tmp_path / "saved")


def test_the_schema_survives_files() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SCHEMA), type=Schema) == msgspec.convert(
        msgspec.to_builtins(SCHEMA), Schema
    )
    assert msgspec.json.decode(msgspec.json.encode(SCHEMA), type=Schema).feature("a").mapping == HashTo(7, seed=1)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: HashTo(0), "HashTo.buckets"),
        (lambda: HashTo(2, seed=-1), "HashTo.seed"),
        (lambda: Quotient(0), "Quotient.by"),
        (lambda: Remainder(0), "Remainder.by"),
        (lambda: IdFeature("a", 2, of="b"), "no mapping; set both"),
        (lambda: IdFeature("a", 2, mapping=Quotient(2)), "no of; set both"),
        (lambda: IdFeature("a", 2, of="b", mapping=3), "mapping"),
        (lambda: IdFeature("a", 2, of="b", mapping=Quotient(2), kind="text"), "leave cross, kind and age_since out"),
        (lambda: Schema([IdFeature("a", 2, of="b", mapping=Quotient(2))]), "no ID-type feature 'b'"),
        (
            lambda: Schema([IdFeature("c", 2, of="q", mapping=Quotient(2)), *SCHEMA.id_features]),
            "names 'q', which maps ids itself",
        ),
        (lambda: Schema([IdFeature("c", 2, cross=("q", "user")), *SCHEMA.id_features]), "cross names 'q'"),
    ],
)
def test_what_does_not_fit_is_refused(build: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        build()
