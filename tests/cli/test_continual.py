"""Continual training: the recipe in this process, and the command once as a user types it."""

import itertools
import json
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from persia.cli.continual import Recipe, parse_days, table
from persia.cli.run_config import RunConfig
from persia.config import convert
from persia.data import Span, days, synthetic
from persia.errors import CheckpointError, ConfigError
from persia.modes import Gba, Sync

CONFIG = {
    "data": {
        "kind": "synthetic",
        "batch_size": 50,
        "options": {"rows": 1200, "days": 4, "drift": 0.1, "id_features": 3, "ids_per_feature": 50, "dim": 4},
    },
    "mode": {"kind": "sync"},
    "model": {"kind": "deepfm", "options": {"hidden": [8]}},
    "trainer": {"progress": False},
}
SCHEMA = {"id_features": [{"name": f"id_{i}", "dim": 4} for i in range(3)], "labels": ["click"]}


def config(output, **changes):
    tree = CONFIG | changes
    tree["trainer"] = CONFIG["trainer"] | {"checkpoint_dir": str(output)} | changes.get("trainer", {})
    return convert(tree, RunConfig, "test")


class Run:
    """A command's worth: a fresh trainer and the recipe."""

    def __init__(self, output, **changes):
        self.output = output
        self.config = config(output, **changes)
        self.recipe = Recipe(self.config, str(output))
        self.trainer = self.config.build_trainer(self.config.reader().schema)

    def train(self, first, last, inherit=None, **options):
        list(self.recipe.run(self.trainer, range(first, last + 1), inherit, **options))
        return self

    def days(self):
        return [record.day for record in self.recipe.records]

    def figures(self):
        """What does not depend on the clock."""
        return [
            (r.day, r.mode, r.step, r.global_step, r.progressive_auc, r.test_day, r.auc) for r in self.recipe.records
        ]

    def parameters(self):
        return torch.cat([p.detach().reshape(-1) for p in self.trainer.model.parameters()])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns runs of the days from 0 on. Tests share them, so they change none."""
    runs = {}

    def run(last, **changes):
        key = last, json.dumps(changes)
        if key not in runs:
            runs[key] = Run(tmp_path_factory.mktemp("trained"), **changes).train(0, last)
        return runs[key]

    return run


def test_each_day_is_trained_once_and_tested_before(tmp_path, trained):
    run = trained(2)
    by_hand = Run(tmp_path / "other")
    spans = days(by_hand.config.reader(), 50, 0, 3)
    for record in run.recipe.records:
        trained = by_hand.trainer.fit(spans[record.day])
        tested = by_hand.trainer.evaluate(spans[record.day + 1])
        assert record.test_day == record.day + 1
        assert record.rows == 300
        assert record.global_step == 6 * (record.day + 1)
        assert record.progressive_auc == pytest.approx(trained.progressive.auc_per_day[record.day])
        assert record.auc == pytest.approx(tested.auc)
        assert record.log_loss == pytest.approx(tested.log_loss)
    assert run.days() == [0, 1, 2]
    torch.testing.assert_close(run.parameters(), by_hand.parameters())
    assert len(table(run.recipe.records).rows) == 3


def test_the_last_day_there_is_has_no_test(tmp_path):
    last = Run(tmp_path).train(2, 9).recipe.records[-1]
    assert (last.day, last.test_day, last.auc) == (3, None, None)
    assert last.progressive_auc is not None


def test_days_are_added_and_none_is_repeated(tmp_path, trained):
    whole = trained(3)
    shutil.copytree(trained(0).output, tmp_path / "parts")
    Run(tmp_path / "parts").train(0, 2)
    again = Run(tmp_path / "parts").train(0, 2)
    assert again.days() == [0, 1, 2]
    parts = Run(tmp_path / "parts").train(3, 3)
    assert parts.figures() == whole.figures()
    torch.testing.assert_close(parts.parameters(), whole.parameters())


class CutError(Exception):
    pass


@pytest.mark.parametrize("place", ["training", "after a checkpoint", "testing"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_what_was_cut_goes_on(tmp_path, monkeypatch, trained, place, epochs):
    changes = {"train": {"epochs": epochs}}
    whole = trained(2, **changes)
    shutil.copytree(trained(0, **changes).output, tmp_path / "cut")
    if place == "after a checkpoint":
        changes["trainer"] = {"checkpoint_every_steps": 4}
    cut = Run(tmp_path / "cut", **changes)
    if place == "testing":
        monkeypatch.setattr(cut.trainer, "evaluate", fail)
    else:
        monkeypatch.setattr(Span, "batches", torn(Span.batches, whole.recipe.records[1].first_row))
    with pytest.raises(CutError):
        cut.train(1, 2)
    monkeypatch.undo()
    rest = Run(tmp_path / "cut", **changes).train(1, 2)
    assert rest.figures() == whole.figures()
    torch.testing.assert_close(rest.parameters(), whole.parameters())


def test_an_interrupted_day_is_begun_again_with_other_batches(tmp_path, monkeypatch, trained):
    first = trained(1).recipe.records[1].first_row
    shutil.copytree(trained(0).output, tmp_path / "cut")
    monkeypatch.setattr(Span, "batches", torn(Span.batches, first))
    with pytest.raises(CutError):
        Run(tmp_path / "cut", trainer={"checkpoint_every_steps": 4}).train(1, 1)
    monkeypatch.undo()
    changes = {"data": CONFIG["data"] | {"batch_size": 60}}
    with pytest.raises(ConfigError, match=r"batch_size.*`--restart-data` of persia train and continual"):
        Run(tmp_path / "cut", **changes).train(1, 1)
    before = Run(tmp_path / "cut", **changes)
    before.trainer.load(tmp_path / "cut")
    rest = Run(tmp_path / "cut", **changes).train(1, 1, restart_data=True)
    steps = rest.recipe.records[1].global_step - before.trainer.global_step
    assert steps == -(-rest.recipe.records[1].rows // 60)


def fail(*arguments):
    raise CutError("cut")


def torn(batches, first):
    """The day that begins with row `first` breaks off before its last batch."""

    def some(span, epoch=0, start=0):
        found = list(batches(span, epoch, start))
        if span.first == first:
            yield from itertools.islice(found, len(found) - 1)
            raise CutError("cut")
        yield from found

    return some


def test_a_day_may_have_a_mode_of_its_own(tmp_path):
    gba = {"kind": "gba", "global_batch_size": 100}
    run = Run(tmp_path, continual={"modes": {"1": gba, "2": {"kind": "sync"}}}).train(0, 2)
    assert [record.mode for record in run.recipe.records] == [Sync(), Gba(100), Sync()]
    assert [record.global_step for record in run.recipe.records] == [6, 9, 15]
    assert [switch.step for switch in run.trainer.switches] == [6, 9]
    again = Run(tmp_path)
    assert again.recipe.records == run.recipe.records


def test_another_run_is_inherited(tmp_path, trained):
    base = Run(tmp_path / "base")
    base.trainer.fit(days(base.config.reader(), 50, 0, 0)[0])
    heir = Run(tmp_path / "heir").train(1, 2, inherit=str(tmp_path / "base"))
    assert heir.recipe.records[0].step == 6
    whole = trained(2)
    torch.testing.assert_close(heir.parameters(), whole.parameters())
    with pytest.raises(CheckpointError, match="--inherit"):
        Recipe(config(tmp_path / "base"), str(tmp_path / "base"))


def test_a_day_of_the_inherited_run_is_trained_again(tmp_path, trained):
    run = Run(tmp_path).train(1, 1, inherit=trained(1).output)
    (record,) = run.recipe.records
    assert record.global_step - record.step == 6


def test_an_earlier_step_of_another_run_is_inherited(tmp_path, trained):
    whole = trained(1)
    heir = Run(tmp_path).train(1, 1, inherit=str(whole.output), step=6)
    assert (heir.recipe.records[0].step, heir.trainer.global_step) == (6, 12)
    torch.testing.assert_close(heir.parameters(), whole.parameters())
    again = Run(tmp_path).train(2, 2, inherit=str(whole.output), step=6)
    assert again.recipe.records[-1].step == 12  # The days of this directory come first.


def test_the_switch_to_more_nn_workers_and_back(tmp_path):
    """Sync, Gba with a third of the batch and the same global batch, Sync: from checkpoint to checkpoint."""
    data = day_files(tmp_path / "data.parquet")
    small = {"data": {**data, "batch_size": 20}, "mode": {"kind": "gba", "global_batch_size": 60}, "schema": SCHEMA}
    large = {"data": {**data, "batch_size": 60}, "mode": {"kind": "sync"}, "schema": SCHEMA}
    whole = Run(tmp_path / "whole", **large).train(0, 3)
    parts = [
        Run(tmp_path / "sync", **large).train(0, 0),
        Run(tmp_path / "gba", **small).train(1, 2, inherit=str(tmp_path / "sync")),
        Run(tmp_path / "back", **large).train(3, 3, inherit=str(tmp_path / "gba")),
    ]
    records = [record for part in parts for record in part.recipe.records]
    assert [record.mode for record in records] == [Sync(), Gba(60), Gba(60), Sync()]
    for mine, theirs in zip(records, whole.recipe.records, strict=True):
        assert (mine.day, mine.first_row, mine.step, mine.global_step) == (
            theirs.day, theirs.first_row, theirs.step, theirs.global_step,
        )  # fmt: skip
        assert mine.progressive_auc == pytest.approx(theirs.progressive_auc, abs=1e-5)
        assert mine.auc == pytest.approx(theirs.auc, abs=1e-5)
    torch.testing.assert_close(parts[-1].parameters(), whole.parameters(), rtol=0, atol=1e-5)
    counts = {int(state["step"]) for state in parts[-1].trainer.step.optimizer.state.values()}
    assert counts == {whole.trainer.global_step} == {4 * 5}
    assert [part.trainer.state.local_batch for part in parts] == [60, 20, 60]


def test_an_inherited_batch_size_does_not_stay(tmp_path):
    """A switch at the start is checked against the batches to come."""
    data = day_files(tmp_path / "data.parquet")
    Run(tmp_path / "base", data={**data, "batch_size": 50}, schema=SCHEMA).train(0, 0)
    gba = {"kind": "gba", "global_batch_size": 60}
    heir = Run(tmp_path / "heir", data={**data, "batch_size": 20}, mode=gba, schema=SCHEMA)
    heir.train(1, 1, inherit=str(tmp_path / "base"))
    assert (heir.recipe.records[0].step, heir.trainer.global_step) == (6, 6 + 5)


def day_files(path):
    """Writes 5 days of 300 rows; returns a data section. A synthetic reader would draw other rows by batch size."""
    clicks = synthetic(1500, days=5, drift=0.1, id_features=3, ids_per_feature=50, dim=4, batch_size=1500)
    (batch,) = clicks
    columns = {name: column.values.astype(np.int64) for name, column in batch.id_features.items()}
    pq.write_table(pa.table({**columns, "click": batch.labels[:, 0], "day": batch.day}), path)
    return {"kind": "parquet", "path": str(path), "options": {"day": "day"}}


@pytest.mark.parametrize("text", ["", "3", "a..b", "3..1", "-1..2", "1..", "1.5..2"])
def test_days_are_two_whole_numbers(text):
    with pytest.raises(ConfigError, match=r"0\.\.6"):
        parse_days(text)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"trainer": {"mode_schedule": [[3, {"kind": "sync"}]]}}, "trainer.mode_schedule"),
        ({"data": CONFIG["data"] | {"options": {"shuffle_rows": 10}}}, "data.options.shuffle_rows"),
        ({"data": CONFIG["data"] | {"options": {"tokens_per_batch": 10}}}, "data.options.tokens_per_batch"),
        ({"continual": {"modes": {"tuesday": {"kind": "sync"}}}}, "continual.modes.tuesday"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, field):
    with pytest.raises(ConfigError, match=field):
        Recipe(config(tmp_path, **changes), str(tmp_path))


def test_days_that_cannot_be_trained_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no rows of the days 7 to 8"):
        Run(tmp_path).train(7, 8)
    Run(tmp_path).train(1, 1)
    with pytest.raises(ConfigError, match="trained to day 1, and days 0 to 0 come before"):
        Run(tmp_path).train(0, 0)
    cut = Run(tmp_path)
    monkeypatch.setattr(cut.trainer, "evaluate", fail)
    with pytest.raises(CutError):
        cut.train(2, 2)
    with pytest.raises(ConfigError, match="in the middle of day 2"):
        Run(tmp_path).train(3, 3)
    (tmp_path / "continual.json").write_text("[{]")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Run(tmp_path)


@pytest.mark.processes
def test_the_command(tmp_path):
    toml = tmp_path / "run.toml"
    options = CONFIG["data"]["options"]
    lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    toml.write_text(
        '[data]\nkind = "synthetic"\nbatch_size = 50\n[data.options]\n'
        + "\n".join(lines)
        + '\n[mode]\nkind = "sync"\n[trainer]\nprogress = false\n'
    )
    found = tmp_path / "table.json"
    command = [
        sys.executable,
        "-m",
        "persia",
        "continual",
        str(toml),
        "--days",
        "0..1",
        "--output",
        str(tmp_path / "out"),
    ]
    command += ["--json", str(found), "--set", 'continual.modes.1={kind="gba", global_batch_size=100}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continual training" in done.stdout
    records = json.loads(found.read_text())
    assert [(r["day"], r["mode"]["kind"], r["test_day"]) for r in records] == [(0, "sync", 1), (1, "gba", 2)]
    assert all(0.4 < r["auc"] < 1 for r in records)
