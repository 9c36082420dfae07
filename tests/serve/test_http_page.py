"""The page of a server: its lines for a shell give `curl` what they show, whatever features are called."""

import html
import json
import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason='FastAPI is not installed: pip install "persia-recsys[serve]"')

import persia
from persia.serve.http.limits import ServeLimits
from persia.serve.http.openapi import openapi
from persia.serve.http.page import page


def document(example, security):
    examples = {"sample": {"summary": "One sample", "value": example}}
    body = {"content": {"application/json": {"examples": examples, "schema": {}}}}
    predict = {"summary": "", "requestBody": body, "responses": {}, "security": security}
    health = {"summary": "", "responses": {}, "security": security}
    info = {"title": "persia", "description": "", "version": "1"}
    return {"info": info, "paths": {"/predict": {"post": predict}, "/health": {"get": health}}}


def calls(text):
    """What a shell makes of the lines."""
    blocks = re.findall(r"<pre>(curl.*?)</pre>", text, re.DOTALL)
    return [shlex.split(html.unescape(block).replace("\\\n", " ")) for block in blocks]


@given(st.dictionaries(st.text(min_size=1), st.lists(st.integers(), max_size=2)), st.sampled_from([[], [{"key": []}]]))
def test_a_shell_gets_the_example_as_it_is(features, security):
    predict, health = calls(page(document({"features": features}, security), "http://127.0.0.1:8080"))
    assert predict[:2] == ["curl", "http://127.0.0.1:8080/predict"]
    assert predict[-4:-1] == ["-H", "Content-Type: application/json", "-d"]
    assert json.loads(predict[-1]) == {"features": features}
    assert health[1] == "http://127.0.0.1:8080/health"
    for call in (predict, health):
        assert ("Authorization: Bearer KEY" in call) == bool(security)


@pytest.mark.parametrize("host", ["$(reboot)", "x; reboot", "x' ; reboot '", "`reboot`", "<b>"])
def test_a_host_that_a_client_names_is_quoted(host):
    text = page(document({}, []), f"http://{host}")
    assert [call[1] for call in calls(text)] == [f"http://{host}/predict", f"http://{host}/health"]
    assert "<b>" not in text


@pytest.mark.parametrize(
    ("kinds", "shown"),
    [
        (("number",), [[7]]),
        (("text",), [["a"]]),
        (("auto",), [[7], ["a"]]),
        (("auto", "text", "number"), [[7, "a", 7], ["a", "a", 7]]),
    ],
)
def test_an_example_has_ids_of_the_type_that_the_schema_says(kinds, shown):
    """Where it says nothing, the page shows both."""
    schema = persia.Schema([persia.IdFeature(f"f{i}", 4, kind=kind) for i, kind in enumerate(kinds)], labels=["click"])
    text = page(openapi(schema, ServeLimits(), False), "http://127.0.0.1:8080")
    bodies = [json.loads(call[-1]) for call in calls(text) if "-d" in call]
    assert bodies == [{"features": {f"f{i}": [id_] for i, id_ in enumerate(ids)}} for ids in shown]
    for word in ("numbers", "texts"):
        assert (f"for columns that were {word} in training" in text) == (len(shown) > 1)


def test_a_plain_line_is_easy_to_read():
    text = html.unescape(page(document({"features": {"user": [1]}}, []), "http://127.0.0.1:8080"))
    assert "curl http://127.0.0.1:8080/predict -H 'Content-Type: application/json' \\\n  -d '{" in text
