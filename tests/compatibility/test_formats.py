"""Formats are kept from 0.2.0 on: what each released version wrote is loaded, resumed and served."""

import json
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import persia
from compatibility.formats import STEPS, optimizer, reader, resumed, rows_of, schema, served
from persia.checkpoint import CheckpointReader
from persia.errors import CheckpointError
from persia.nn.models.registry import build
from persia.publish import ModelDescription, publish_checkpoint
from persia.schema import InputRules
from persia.serve import Predictor

ARCHIVES = sorted(Path(__file__).parent.glob("formats-*.zip"), key=str)


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.stem)
def expected(request, tmp_path, monkeypatch):
    """The values of an archive, whose checkpoint and log are in the working directory."""
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return json.loads(Path("expected.json").read_text())


def test_there_is_an_archive_of_the_first_release():
    assert [path.name for path in ARCHIVES][:1] == ["formats-0.2.0.zip"]


def test_rows_of_a_checkpoint_are_what_was_written(expected):
    found = rows_of("checkpoint")
    assert found.keys() == expected["rows"].keys()
    for table, arrays in expected["rows"].items():
        assert arrays["ids"]
        for name, values in arrays.items():
            np.testing.assert_array_equal(found[table][name], values, err_msg=f"{table} {name}")


def test_a_run_goes_on_from_a_checkpoint(expected):
    """Also after a change of the mode, which is in the schedule."""
    found, wanted = resumed("checkpoint"), expected["resumed"]
    assert found["begun"] == {"global_step": STEPS, "position": STEPS}
    for name in ("begun", "global_step", "mode", "rows"):
        assert found[name] == wanted[name]
    values = [[result["log_loss"], result["auc"], *result["parameters"]] for result in (found, wanted)]
    # Processors differ in the last bits of sums of products.
    assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-5)


def test_a_log_is_served(expected):
    assert served("log") == pytest.approx(expected["served"], abs=1e-6)


@pytest.mark.parametrize("published", [False, True])
def test_raw_columns_are_predicted_by_a_log_and_a_published_checkpoint(expected, published):
    """Both say nothing of what schemas declare now, which is nothing, too."""
    log = "log"
    if published:
        log = "published"
        publish_checkpoint("checkpoint", log)
    batch = next(iter(reader()))
    columns = {name: column.values.tolist() for name, column in batch.id_features.items()}
    columns |= {"dense_0": [repr(float(value)) for value in batch.dense[:, 0]]}  # As a file or a request has them.
    with Predictor(log) as predictor:
        assert predictor.input_rules == InputRules()
        assert predictor.schema.binary
        assert not predictor.schema.needs_fit
        wanted = predictor.predict(batch).probabilities
        np.testing.assert_array_equal(predictor.predict(columns).probabilities, wanted)
        if not published:
            assert wanted[:, 0].tolist() == pytest.approx(expected["served"], abs=1e-6)


@pytest.fixture
def rules(expected, monkeypatch):
    """Rules of a reader in the configuration of the checkpoint, as 0.2.0 wrote `fill`, `lists` and `null_values`."""
    config = CheckpointReader("checkpoint").config
    assert config["input_rules"] == {}
    monkeypatch.setattr(CheckpointReader, "config", {**config, "input_rules": RULES})


RULES = {"fill": {"dense_0": 0.25}, "lists": {"id_1": "|"}, "null_values": ["?"]}


def test_rules_of_a_reader_of_before_are_served(rules):
    publish_checkpoint("checkpoint", "published")
    raw = {"id_0": [3, 4], "id_1": ["5|6", "7"], "id_2": ["?", 8], "dense_0": ["0.5", "?"]}
    plain = {"id_0": [3, 4], "id_1": [[5, 6], [7]], "id_2": [None, 8], "dense_0": [0.5, 0.25]}
    with Predictor("published") as predictor:
        assert predictor.input_rules == InputRules(**(RULES | {"null_values": ("?",)}))
        found = predictor.predict(raw).probabilities
        np.testing.assert_array_equal(found, predictor.predict(plain).probabilities)


@pytest.mark.parametrize("declared", [False, True])
def test_a_run_goes_on_from_rules_of_a_reader_of_before(rules, declared):
    """With the same rules of the reader, and with the declarations that now say the same."""
    old = schema()
    ids, dense = list(old.id_features), list(old.dense_features)
    options = {name: RULES[name] for name in ("fill", "lists")}
    if declared:
        ids[1] = msgspec.structs.replace(ids[1], split="|")
        dense, options = [persia.DenseFeature("dense_0", fill=0.25)], {}
    mine = persia.Schema(ids, dense, old.labels, old.tables)
    Path("more.csv").write_text("id_0,id_1,id_2,dense_0,click\n" + "3,5|6,7,,1\n4,7,8,0.5,0\n" * 16)
    torch.manual_seed(5)
    network = build(ModelDescription("ffnn", {"hidden": [4]}), mine)
    trainer = persia.Trainer(
        network,
        mine,
        optimizer=optimizer,
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(progress=False),
    )
    trainer.load("checkpoint")
    assert trainer.global_step == STEPS
    assert trainer.fit(persia.data.csv("more.csv", mine, 8, **options)).steps == 4
    other = persia.Schema([msgspec.structs.replace(ids[1], split=";"), ids[0], ids[2]], dense, old.labels, old.tables)
    with pytest.raises(CheckpointError, match="split ';'"):
        CheckpointReader("checkpoint").check_schema(other)
