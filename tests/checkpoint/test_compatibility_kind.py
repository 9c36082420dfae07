"""The meaning of the ids of a feature is part of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from persia.checkpoint.reader import CheckpointReader
from persia.checkpoint.writer import CheckpointWriter
from persia.errors import CheckpointError
from persia.schema import Adagrad, IdFeature, Schema


def schema(kind: Any) -> Schema:
    return Schema([IdFeature("user", dim=2, kind=kind), IdFeature("both", dim=2, cross=("user", "site")), SITE])


SITE = IdFeature("site", dim=2)


def write(path: Path, kind: Any) -> CheckpointReader:
    with CheckpointWriter(path, 1) as writer:
        writer.commit(schema=schema(kind), optimizer=Adagrad(lr=0.1))
    return CheckpointReader(path)


def test_another_kind_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = write(tmp_path, "text")
    reader.check_schema(schema("text"))
    with pytest.raises(CheckpointError, match="ID-type feature 'user' has kind 'auto', in the checkpoint 'text'"):
        reader.check_schema(schema("auto"))
    assert not caplog.records


HISTORY = IdFeature("times", dim=2, pooling=None, max_length=3)


@pytest.mark.parametrize(
    ("saved", "mine", "message"),
    [
        ({}, {"age_since": "now"}, "'times' has age_since 'now', in the checkpoint None"),
        ({"age_since": "now"}, {}, "'times' has age_since None, in the checkpoint 'now'"),
        ({}, {"keep": "last"}, "'times' has keep 'last', in the checkpoint 'first'"),
        (
            {"pooling": "mean"},
            {"pooling": "mean", "keep": "last"},
            "'times' has keep 'last', in the checkpoint 'first'",
        ),
    ],
)
def test_ids_of_another_meaning_are_refused(
    tmp_path: Path, saved: dict[str, Any], mine: dict[str, Any], message: str
) -> None:
    def history(options: dict[str, Any]) -> Schema:
        return Schema([msgspec.structs.replace(HISTORY, **options)])

    with CheckpointWriter(tmp_path, 1) as writer:
        writer.commit(schema=history(saved), optimizer=Adagrad(lr=0.1))
    reader = CheckpointReader(tmp_path)
    reader.check_schema(history(saved))
    with pytest.raises(CheckpointError, match=message):
        reader.check_schema(history(mine))


def test_which_ids_are_kept_counts_only_where_there_is_a_limit(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1) as writer:
        writer.commit(schema=Schema([IdFeature("tags", dim=2, keep="last"), SITE]), optimizer=Adagrad(lr=0.1))
    for feature in (IdFeature("tags", dim=2), IdFeature("tags", dim=2, max_length=9)):
        CheckpointReader(tmp_path).check_schema(Schema([feature, SITE]))
