"""Every model can be named in a configuration."""

import pytest

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


@pytest.mark.parametrize(("section", "known"), [("model", MODELS), ("optimizer", OPTIMIZERS)])
def test_other_kinds_are_refused(section, known):
    expected = rf"Invalid {section}\.kind = 'none'; expected one of: {', '.join(known)}\."
    with pytest.raises(ConfigError, match=expected):
        convert({"data": {"kind": "synthetic"}, section: {"kind": "none"}}, RunConfig, "a.toml")
