"""Texts of YAML that are written without PyYAML mean what was written."""

import pytest

from persia.plan.kubernetes.yaml_text import yaml_text

yaml = pytest.importorskip("yaml")

TEXTS = [
    "plain", "/a/b-c.d", "yes", "No", "null", "1", "1.5", "0x1", "1e3", "", " a", "a ", "a b", "a: b", "a:", "a #b",
   "-",     "- a", "--", "{a}", "[a]", "'a", '"a', "a\\b", "é", "*a", "&a", "!a", "%a", "@a", "a\n", "a\nb\n", "a\nb",
   "a\n\nb\n",    "a\n  b\n", "  a\nb\n", "a\tb", "~", "=", "a|b", "2026-01-01", "12:30:45", "\u2028", "\U0001f600",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text):
    for document in ({"key": text}, {text: "value"}, {"list": [text, text]}, {"a": {"b": [{"c": text, "d": [text]}]}}):
        assert yaml.safe_load(yaml_text(document)) == document


def test_nested_values():
    document = {
        "empty": {}, "none": [], "number": -3, "truth": True, "lists": [[1, [2]], [], {}],
        "objects": [{"a": 1, "b": {"c": [1]}}, {"d": [{"e": "f\ng\n"}]}],
    }  # fmt: skip
    assert yaml.safe_load(yaml_text(document)) == document
