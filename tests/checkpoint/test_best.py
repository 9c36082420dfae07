"""`BEST`: which checkpoint of a directory is the best, whatever happens while it is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from test_checkpoint_faults import Faults, Kill, raising

from persia.checkpoint import CheckpointReader, CheckpointWriter, Score, inspect, list_checkpoints, reshard
from persia.checkpoint.best import BEST, BestCheckpoint, read_best
from persia.checkpoint.resharding import ReshardOptions
from persia.checkpoint.storage import Storage
from persia.errors import CheckpointError
from support.checkpoint_samples import OPTIMIZER, SCHEMA, make_rows

PLACES = ["local", "memory"]


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path.name}/run"


def write(url: str, step: int, value: float | None, metric: str = "auc", better: int = 1, **options: Any) -> None:
    """Leaves what a kill leaves if it is interrupted."""
    writer = CheckpointWriter(url, step, **{"keep_last": 1, "keep_best": True} | options)
    writer.add_rows("item", 0, make_rows(3, seed=step))
    writer.add_state("trainer", step)
    score = None if value is None else Score(metric, value, better * value)
    writer.commit(schema=SCHEMA, optimizer=OPTIMIZER, score=score)


def best(url: str) -> BestCheckpoint | None:
    return read_best(Storage(url))


def steps(url: str) -> list[int]:
    return [entry.step for entry in list_checkpoints(url)]


def test_best_and_latest_are_read_by_name(url: str) -> None:
    for step, value in ((1, 0.6), (2, 0.8), (3, 0.7), (4, None)):
        write(url, step, value)
    assert best(url) == BestCheckpoint(2, "auc", 0.8)
    assert steps(url) == [2, 4]
    assert CheckpointReader(url, "best").state("trainer") == 2
    for latest in (None, "latest"):
        assert CheckpointReader(url, latest).state("trainer") == 4
    found = inspect(url, "best")
    assert (found.global_step, found.score, found.best) == (2, ("auc", 0.8), best(url))
    assert inspect(url).score is None


def test_lower_may_be_better(url: str) -> None:
    for step, value in ((1, 3.0), (2, 2.0), (3, 2.5)):
        write(url, step, value, "price.rmse", -1)
    assert best(url) == BestCheckpoint(2, "price.rmse", 2.0)


def test_another_metric_begins_again(url: str) -> None:
    """Numbers of different metrics are not compared."""
    write(url, 1, 0.9)
    write(url, 2, 5.0, "log_loss", -1)
    assert best(url) == BestCheckpoint(2, "log_loss", 5.0)
    assert steps(url) == [2]


def test_the_best_stays_when_nobody_asks_for_it(url: str) -> None:
    write(url, 1, 0.9)
    for step in (2, 3):
        write(url, step, None, keep_best=False)
    assert steps(url) == [1, 3]
    assert CheckpointReader(url, "best").state("trainer") == 1


def test_checkpoints_from_before_have_scores(url: str) -> None:
    """They have no `BEST`, and `keep_best` of their options is the metric."""
    with CheckpointWriter(url, 1) as writer:
        writer.add_rows("item", 0, make_rows(3))
        writer.commit(
            schema=SCHEMA, config={"options": {"keep_best": "log_loss"}}, optimizer=OPTIMIZER, extra={"score": -0.4}
        )
    write(url, 2, 0.5, "log_loss", -1)
    assert best(url) == BestCheckpoint(1, "log_loss", 0.4)
    assert steps(url) == [1, 2]


def test_without_best_the_error_says_what_writes_it(url: str) -> None:
    write(url, 1, None)
    with pytest.raises(CheckpointError, match=r"no BEST.*keep_best.*steps are 1"):
        CheckpointReader(url, "best")


@pytest.mark.parametrize(
    "content", [b"", b"step-000000000001", b"step-000000000001 0.5 auc", b"step-1 0.5 auc\n", b"../x 0.5 auc\n",
                b"step-000000000001 nan auc\n", b"step-000000000001 x auc\n", b"\xff\xfe\n", b"x" * 5000],
)  # fmt: skip
def test_a_damaged_best_is_an_error_of_its_own(tmp_path: Path, content: bytes) -> None:
    url = str(tmp_path)
    write(url, 1, 0.5)
    (tmp_path / BEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"BEST is damaged.*step="):
        CheckpointReader(url, "best")
    assert CheckpointReader(url).state("trainer") == 1
    assert inspect(url).best is None
    assert [entry.best for entry in list_checkpoints(url)] == [False]
    write(url, 2, 0.4)  # The next one replaces it.
    assert best(url) == BestCheckpoint(1, "auc", 0.5)


@pytest.mark.parametrize("value", [0.9, 0.1], ids=["better", "worse"])
@pytest.mark.parametrize("step", [3, 2], ids=["new step", "same step again"])
def test_a_kill_at_every_call(url: str, monkeypatch: pytest.MonkeyPatch, value: float, step: int) -> None:
    """`BEST` always names a complete checkpoint with that score, and the next checkpoint corrects it."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # The disk does not fail here, and is slow.
    faults = Faults(monkeypatch)
    fs, root = fsspec.core.url_to_fs(url)
    before = f"{root}-before"
    write(f"{url}-before", 1, 0.5)
    write(f"{url}-before", 2, 0.3)
    at, seen = 0, set()
    while True:
        if fs.exists(root):
            fs.rm(root, recursive=True)
        fs.cp(before, root, recursive=True)
        faults.arm(at, raising(Kill()))
        try:
            write(url, step, value)
        except Kill:
            faults.arm(-1, raising(Kill()))
        else:
            break
        named = best(url)
        assert named is not None
        reader = CheckpointReader(url, "best")
        reader.verify()
        assert reader.manifest.global_step == named.step
        assert {named.step, CheckpointReader(url).manifest.global_step} <= {1, 2, step}
        seen.add(named.step)
        write(url, 4, 0.2)
        scores = {entry.step: CheckpointReader(url, entry.step).extra["value"] for entry in list_checkpoints(url)}
        assert best(url) == BestCheckpoint(max(scores, key=scores.__getitem__), "auc", max(scores.values()))
        at += 1
    assert at > 5
    assert seen == ({1, step} if value == 0.9 else {1})


def test_a_copy_elsewhere_has_its_score(tmp_path: Path) -> None:
    write(str(tmp_path / "a"), 1, 0.5)
    reshard(tmp_path / "a", tmp_path / "b", ReshardOptions(1), step="best")
    manifest = json.loads((tmp_path / "b" / "step-000000000001" / "manifest.json").read_text())
    assert manifest["extra"] == {"metric": "auc", "score": 0.5, "value": 0.5}
