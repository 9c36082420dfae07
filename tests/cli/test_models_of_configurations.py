"""Every model can be named in a configuration."""

import sys

import pytest

from persia.cli.imports import add_folder
from persia.cli.run_config import MODELS, OPTIMIZERS, ModelConfig, RunConfig
from persia.config import convert
from persia.errors import ConfigError
from persia.nn import models
from persia.schema import IdFeature, Schema

SCHEMA = Schema([IdFeature("item", dim=4), IdFeature("before", table="item", pooling=None, max_length=3)])


def test_kinds_are_the_models():
    assert {getattr(make, "__self__", make).__name__ for make in MODELS.values()} == set(models.__all__)


@pytest.mark.parametrize("kind", MODELS)
def test_each_is_built_from_a_configuration(kind):
    options = {"item": ["item"]} if kind == "two_tower" else {}
    model = convert({"kind": kind, "options": options}, ModelConfig, "model").build(SCHEMA)
    assert type(model).__name__ in models.__all__


def test_histories_are_named_in_options():
    options = {"history": [["before", "item"]], "newest_first": True}
    model = ModelConfig("dien", options).build(SCHEMA)
    assert model.input.pairs == (("before", "item"),)
    with pytest.raises(ConfigError, match=r"Unknown option model\.options\.newest_last"):
        ModelConfig("dien", {"newest_last": True}).build(SCHEMA)


@pytest.mark.parametrize(("section", "known"), [("optimizer", OPTIMIZERS)])
def test_other_kinds_are_refused(section, known):
    expected = rf"Invalid {section}\.kind = 'none'; expected one of: {', '.join(known)}\."
    with pytest.raises(ConfigError, match=expected):
        convert({"data": {"kind": "synthetic"}, section: {"kind": "none"}}, RunConfig, "a.toml")


MODEL = """
from torch import nn


class Net(nn.Module):
    def __init__(self, schema, width=3):
        super().__init__()
        self.width = width
"""


def test_a_user_class_is_looked_up_next_to_the_configuration(tmp_path, monkeypatch):
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "my_net.py").write_text(MODEL)
    (tmp_path / "my_net.py").write_text("wrong = 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    add_folder("beside/run.toml")
    try:
        assert ModelConfig("my_net:Net").build(SCHEMA).width == 3
        assert ModelConfig("my_net:Net", {"width": 5}).build(SCHEMA).width == 5
        with pytest.raises(ConfigError, match=r"Unknown option model\.options\.depth; expected one of: schema, width"):
            ModelConfig("my_net:Net", {"depth": 5}).build(SCHEMA)
        with pytest.raises(ConfigError, match=r"my_net has no 'Other'; name a class of the module"):
            ModelConfig("my_net:Other").build(SCHEMA)
        with pytest.raises(ConfigError, match="Cannot import 'absent_net'"):
            ModelConfig("absent_net:Net").build(SCHEMA)
    finally:
        sys.modules.pop("my_net", None)


@pytest.mark.parametrize("kind", ["ffn", "my_net:", ":Net", ""])
def test_an_invalid_kind_names_the_models(kind):
    with pytest.raises(ConfigError, match=r"Invalid model\.kind = .*: ffnn, .*; or a class of your own"):
        ModelConfig(kind)
