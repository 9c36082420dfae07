"""Outputs of a run are created and tried before the first step."""

import os

import pytest
import torch

import persia
from persia.checkpoint.storage import Storage
from persia.errors import CheckpointError, ConfigError
from persia.publish.topic.client import TopicClient
from persia.trainer.fit_checks import check_outputs
from persia.types import PublishOptions


class Clicks:
    """Data that count how often they are read."""

    def __init__(self):
        self.data = persia.data.synthetic(200, id_features=2, ids_per_feature=20, dim=4, batch_size=100)
        self.read = 0

    def __iter__(self):
        self.read += 1
        return iter(self.data)


def trainer(clicks, **options):
    schema = clicks.data.schema
    return persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(4,)),
        schema,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        mode=persia.modes.Sync(),
        options=persia.TrainerOptions(progress=False, **options),
    )


def options_of(name, place):
    return {"publish": PublishOptions(place)} if name == "publish.url" else {name: place}


@pytest.mark.parametrize("name", ["checkpoint_dir", "log_dir", "record_dir", "publish.url"])
def test_an_unwritable_output_is_found_before_the_first_step(name, tmp_path):
    (tmp_path / "file").write_text("mine")
    place = str(tmp_path / "file" / "runs")
    clicks = Clicks()
    run = trainer(clicks, **options_of(name, place))
    with pytest.raises(ConfigError, match=f"{name} = '{place}' cannot be written, so nothing was trained") as caught:
        run.fit(clicks)
    assert caught.value.fields == {"field": name, "path": place}
    assert (run.global_step, clicks.read) == (0, 0)
    assert (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["checkpoint_dir", "log_dir", "record_dir", "publish.url"])
def test_an_output_is_created_and_the_attempt_leaves_nothing(name, tmp_path):
    place = tmp_path / "new" / "runs"
    check_outputs(persia.TrainerOptions(**options_of(name, str(place))))
    assert list(place.iterdir()) == []
    (place / "mine").touch()
    check_outputs(persia.TrainerOptions(**options_of(name, str(place))))
    assert [path.name for path in place.iterdir()] == ["mine"]


def test_passwords_of_urls_are_not_shown(monkeypatch):
    def refused(storage):
        raise CheckpointError("Cannot write: access denied.")

    monkeypatch.setattr(Storage, "probe", refused)
    with pytest.raises(ConfigError) as caught:
        check_outputs(persia.TrainerOptions(checkpoint_dir="memory://me:secret@there/runs"))
    assert "secret" not in str(caught.value)
    assert "access denied" in str(caught.value)


def test_a_topic_is_written_to(monkeypatch):
    """A client that may read and not write is found, too."""
    pytest.importorskip("confluent_kafka")
    written = []
    monkeypatch.setattr(TopicClient, "bounds", lambda client, partition: (0, 0))
    monkeypatch.setattr(TopicClient, "write", lambda client, *message: written.append(message))
    check_outputs(persia.TrainerOptions(publish=PublishOptions("kafka://127.0.0.1:9/changes")))
    assert len(written) == 1


def test_a_run_that_was_refused_trains_once_the_place_is_there(tmp_path):
    (tmp_path / "file").touch()
    clicks = Clicks()
    run = trainer(clicks, checkpoint_dir=str(tmp_path / "file" / "runs"))
    with pytest.raises(ConfigError):
        run.fit(clicks)
    (tmp_path / "file").unlink()
    assert run.fit(clicks).steps == 2
