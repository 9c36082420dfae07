"""The page that describes a server's interface: one HTML file without scripts, which loads nothing."""

from __future__ import annotations

import html
import json
import shlex
from typing import Any

__all__ = ["PAGE_HEADERS", "page"]

PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
}

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color-scheme: light dark }
pre { overflow-x: auto; padding: .75rem; border: 1px solid #8884; border-radius: 4px }
h2 code { font-size: 1.1rem } table { border-collapse: collapse }
td { padding: .2rem .8rem .2rem 0; vertical-align: top }
"""


def page(document: dict[str, Any], url: str) -> str:
    """Returns the page of an OpenAPI document.

    Args:
        document: document of `openapi`.
        url: address of the server, for examples.
    """
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>persia</title>",
        f"<style>{_STYLE}</style><h1>{html.escape(info['title'])}</h1>",
        f"<p>{html.escape(info['description'])} Version {html.escape(info['version'])}. ",
        "<a href=openapi.json>openapi.json</a> has the same for programs.</p>",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(path, method, operation, url))
    return "".join(parts)


def _operation(path: str, method: str, operation: dict[str, Any], url: str) -> str:
    parts = [f"<h2><code>{method.upper()} {path}</code></h2><p>{html.escape(operation['summary'])}</p>"]
    call = ["curl", url + path, *(("-H", "Authorization: Bearer KEY") if operation.get("security") else ())]
    content = operation.get("requestBody", {}).get("content", {})
    json_body = content.get("application/json", {})
    for example in json_body.get("examples", {}).values():
        line = shlex.join([*call, "-H", "Content-Type: application/json"])
        data = shlex.join(["-d", json.dumps(example["value"])])
        parts.append(f"<p>{html.escape(example['summary'])}:</p>")
        parts.append(f"<pre>{html.escape(line)} \\\n  {html.escape(data)}</pre>")
    if not content:
        parts.append(f"<pre>{html.escape(shlex.join(call))}</pre>")
    if json_body:
        parts.append(f"<details><summary>Body</summary><pre>{_dump(json_body['schema'])}</pre></details>")
    for parameter in operation.get("parameters", ()):
        parts.append(f"<p>Header <code>{parameter['name']}</code>: {html.escape(parameter['description'])}</p>")
    rows = [
        f"<tr><td>{status}<td>{html.escape(answer['description'])}" for status, answer in operation["responses"].items()
    ]
    parts.append(f"<table>{''.join(rows)}</table>")
    answer = operation["responses"].get("200", {}).get("content", {}).get("application/json", {})
    if answer:
        parts.append(f"<details><summary>Answer</summary><pre>{_dump(answer['schema'])}</pre></details>")
    return "".join(parts)


def _dump(schema: Any) -> str:
    return html.escape(json.dumps(schema, indent=1))
