"""The OpenAPI document of a server, which describes the features of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persia import __version__
from persia.metrics import answers_of
from persia.schema import NO_RULES
from persia.serve.http.codecs.codec import ARROW, JSON, MSGPACK
from persia.serve.schema_parts import columns_of

if TYPE_CHECKING:
    from persia.metrics import Answers
    from persia.nn.item_catalogue import TowerFeatures
    from persia.schema import DenseFeature, IdFeature, InputRules, Schema
    from persia.serve.http.limits import ServeLimits

__all__ = ["openapi"]

_ERRORS = {
    "400": "The body is not valid JSON, msgpack or Arrow, or a header has another form.",
    "403": "The Host header names another host, while the server answers this host only.",
    "406": "No form of the answer is in the Accept header.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The Content-Type is not supported.",
    "422": "The content does not fit the model; the message names the feature, the row and the remedy.",
    "500": "The server failed; its log has the details.",
    "503": "The server is overloaded, or not ready: see the header Retry-After.",
}


def openapi(
    schema: Schema,
    limits: ServeLimits,
    secured: bool,
    users: TowerFeatures | None = None,
    rules: InputRules = NO_RULES,
) -> dict[str, Any]:
    """Returns the document.

    Args:
        schema: schema of the model.
        limits: limits of requests.
        secured: whether keys are needed.
        users: features of users, for a server that retrieves items; else None.
        rules: rules for missing values and lists.
    """
    read = [f for f in schema.id_features if not f.computed]
    dense = {each.name: _column(_number(each, rules), limits) for each in schema.dense}
    ids = {name: column for name, column in _raw(read, limits, rules).items() if name not in dense}
    samples = _samples(ids, dense, list(ids), list(dense))
    part = {**_samples(ids, dense, [], []), "description": "A part of the features; the other part has the others."}
    record = _object({**{n: c["items"] for n, c in ids.items()}, **{n: c["items"] for n, c in dense.items()}}, [])
    records = {"type": "array", "items": record, "minItems": 1, "maxItems": limits.max_rows}
    numbers: dict[str, Any] = {"type": "array", "items": {"type": "number"}}
    versions = {"step": {"type": "integer"}, "epoch": {"type": "integer"}}
    of_labels = _object(dict.fromkeys(schema.label_names, numbers), list(schema.label_names))
    probabilities, scores = (
        _object({name: of_labels, **versions}, [name, *versions]) for name in ("probabilities", "scores")
    )
    predictions = {"oneOf": [probabilities, scores]}  # Scores of a model whose logits are no log-odds.
    ranking = scores
    if answers_of(schema).name == "predictions":
        predictions = _object(
            {"predictions": _labels(answers_of(schema), numbers), **versions}, ["predictions", *versions]
        )
        ranks = answers_of(schema, log_odds=False)
        if ranks.name == "predictions":
            ranking = _object({"predictions": _labels(ranks, numbers), **versions}, ["predictions", *versions])
    embeddings = _object(
        {
            "table": {"type": "string"},
            "found": {"type": "array", "items": {"type": "boolean"}},
            "rows": {"type": "array", "items": numbers},
            **versions,
        },
        ["table", "found", "rows", *versions],
    )
    one_each = {"anyOf": [_ID, {"type": "array", "items": _ID, "minItems": 1, "maxItems": 1}]}
    embeddings_request = _object(
        {"table": {"enum": list(schema.resolved_tables())}, "ids": {**_column(one_each, limits), "minItems": 0}},
        ["table", "ids"],
    )
    examples = _examples(read, schema)
    user_and_items = _object({"user": part, "items": part}, ["user", "items"])
    paths = {
        "/predict": _post(
            "predict", "Predict samples", {"oneOf": [samples, records]}, predictions, secured, examples, arrow=True
        ),
        "/rank": _post("rank", "Rank many items for one user", user_and_items, ranking, secured),
        "/embeddings": _post(
            "embeddings", "Rows of a table by id; zeros for ids without a row", embeddings_request, embeddings, secured
        ),
        **({} if users is None else {"/retrieve": _retrieve(schema, limits, secured, users, ids, dense)}),
        "/health": {
            "get": {
                "summary": "State of the server",
                "operationId": "health",
                "responses": {
                    "200": _content("Ready.", _HEALTH),
                    "403": _content(_ERRORS["403"], _ERROR),
                    "503": _content("Not ready yet, or shutting down.", _HEALTH),
                },
            }
        },
        "/live": {
            "get": {
                "summary": "Whether the server answers at all, also while it is not ready",
                "operationId": "live",
                "responses": {
                    "200": _content("It answers.", _object({"status": {"enum": ["live"]}}, ["status"])),
                    "403": _content(_ERRORS["403"], _ERROR),
                },
            }
        },
        "/metrics": {
            "get": {
                "summary": "Metrics for Prometheus",
                "operationId": "metrics",
                "responses": {
                    "200": {"description": "Metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}},
                    "403": _content(_ERRORS["403"], _ERROR),
                    **({"401": _content("The key is missing or wrong.", _ERROR)} if secured else {}),
                },
                **({"security": [{"key": []}]} if secured else {}),
            }
        },
    }
    schemes = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if secured else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "persia",
            "version": __version__,
            "description": "Predictions of a model whose rows follow its training. JSON, msgpack or Arrow.",
        },
        "paths": paths,
        "components": schemes,
    }


def _retrieve(
    schema: Schema,
    limits: ServeLimits,
    secured: bool,
    users: TowerFeatures,
    ids: dict[str, Any],
    dense: dict[str, Any],
) -> dict[str, Any]:
    columns = columns_of(schema, users.ids)
    names = [name for name in ids if name in columns]
    samples = _samples(
        {name: ids[name] for name in names}, {name: dense[name] for name in users.dense}, names, list(users.dense)
    )
    count = {"type": "integer", "minimum": 1, "maximum": limits.max_k, "default": 10}
    body = _object({"users": samples, "k": count}, ["users"])
    lists = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
    scores = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
    answer = _object({"ids": lists, "scores": scores, "step": {"type": "integer"}}, ["ids", "scores", "step"])
    return _post("retrieve", "Find the nearest items of users", body, answer, secured)


_ID: dict[str, Any] = {
    "type": ["number", "string", "boolean"],
    "description": "As in the training data: a number such as 7, or a text. The text '7' is the same id as the number.",
}
_TEXT: dict[str, Any] = {"type": ["number", "string"]}
_WHOLE: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "string", "pattern": "^[0-9]{1,19}$"},
        {"type": "boolean"},
    ]
}
_NUMBER: dict[str, Any] = {
    "anyOf": [
        {"type": "number"},
        {"type": "string", "pattern": r"^-?[0-9]{1,19}(\.[0-9]{1,19})?$"},
        {"type": "boolean"},
    ]
}
"""Numbers may be texts; booleans are 1 and 0, as in training."""
_ERROR: dict[str, Any] = {
    "type": "object",
    "properties": {"error": {"type": "string"}, "message": {"type": "string"}, "fields": {"type": "object"}},
    "required": ["error", "message", "fields"],
}
_HEALTH: dict[str, Any] = {
    "type": "object",
    "properties": {"status": {"enum": ["ready", "loading", "stopping"]}},
    "required": ["status"],
}


def _labels(answers: Answers, numbers: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of answers of several kinds.

    A model whose logits are no log-odds has scores in place of probabilities.
    """
    labels = {}
    for each in answers.of:
        kinds = ["probability", "score"] if each.kind == "probability" else [each.kind]
        fields: dict[str, Any] = {"kind": {"enum": kinds}}
        values = numbers
        if each.unit is not None:
            fields["unit"] = {"const": each.unit}
        if each.classes:
            fields["classes"] = {"const": list(each.classes)}
            count = len(each.classes)
            values = {"type": "array", "items": {**numbers, "minItems": count, "maxItems": count}}
        labels[each.label] = {
            **_object({**fields, "values": values}, [*fields, "values"]),
            "description": _MEANINGS[each.kind],
        }
    return _object(labels, list(labels))


_MEANINGS = {
    "probability": "Probability of the label.",
    "score": "Score, which ranks.",
    "value": "Predicted value.",
    "classes": "Probability of each class.",
}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _column(items: dict[str, Any], limits: ServeLimits) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": limits.max_rows}


def _ids(feature: IdFeature, limits: ServeLimits, rules: InputRules) -> dict[str, Any]:
    if feature.bucketize is not None:
        numbers = [*_NUMBER["anyOf"], *_written(feature.column, rules)]
        return _column({"anyOf": [*numbers, {"enum": [None, "", *rules.null_values]}]}, limits)
    if feature.time is not None:
        forms: list[dict[str, Any]] = [{"type": ["integer", "string", "null"], "description": "A time."}]
        return _column({"anyOf": forms}, limits)
    one = (
        _TEXT
        if feature.tokens is not None
        else _WHOLE
        if feature.kind == "number" or feature.age_since
        else _TEXT
        if feature.kind == "text"
        else _ID
    )
    several = {"type": "array", "items": {"anyOf": [one, {"type": "null", "description": "No id, as in training."}]}}
    others: list[dict[str, Any]] = [{"enum": list(rules.null_values)}] if rules.null_values else []
    separator = feature.split or rules.lists.get(feature.name)
    if separator is not None:
        others.append({"type": "string", "description": f"Several, separated by {separator!r}."})
    return _column({"anyOf": [one, {"type": "null"}, several, *others]}, limits)


def _weights(feature: IdFeature, limits: ServeLimits) -> dict[str, Any]:
    """Returns the schema of the weights of a feature's ids."""
    separated = feature.split is not None
    texts = [{"type": "string", "description": f"Several, separated by {feature.split!r}."}] if separated else []
    forms = [*_NUMBER["anyOf"], {"type": "null"}, {"type": "array", "items": _NUMBER}, *texts]
    return _column({"anyOf": forms, "description": f"One for each id of {feature.name!r}."}, limits)


def _raw(read: list[IdFeature], limits: ServeLimits, rules: InputRules) -> dict[str, Any]:
    """Returns the schemas of the columns that ID-type features are made from, by name, in their order."""
    columns: dict[str, Any] = {}
    for feature in read:
        columns.setdefault(feature.column, _ids(feature, limits, rules))
        if feature.age_since is not None:
            columns.setdefault(feature.age_since, _column(_WHOLE, limits))
        if feature.weights is not None:
            columns.setdefault(feature.weights, _weights(feature, limits))
    return columns


def _number(feature: DenseFeature, rules: InputRules) -> dict[str, Any]:
    """Returns the schema of a value of a dense feature. The value may be missing if a rule fills it in."""
    name, size = feature.name, feature.values
    forms = [*_NUMBER["anyOf"], *_written(name, rules)]
    if feature.size != 1:
        text = {"type": "string", "description": f"{size} numbers, such as '[1, 2]'."}
        forms = [{"type": "array", "items": _NUMBER, "minItems": size, "maxItems": size}, text]
    elif feature.fill is None and name not in rules.fill and name not in rules.numbers:
        return _NUMBER
    if feature.fill is not None or name in rules.fill:
        by = f"{rules.fill[name]:g}" if name in rules.fill else f"{feature.fill}"
        forms.append({"enum": [None, "", *rules.null_values], "description": f"Missing: {by} in its place."})
    return {"anyOf": forms}


def _written(name: str, rules: InputRules) -> list[dict[str, Any]]:
    """Returns the form of a number that is written as in the training data, with an example."""
    written = rules.numbers.get(name)
    if written is None:
        return []
    number = f"1{written.thousands}234{written.decimal}5"
    text = f"{number} {written.unit}" if written.unit == "%" else f"{written.unit}{number}"
    return [{"type": "string", "description": f"A number as in the training data, such as {text!r}."}]


def _samples(ids: dict[str, Any], dense: dict[str, Any], features: list[str], numbers: list[str]) -> dict[str, Any]:
    return _object(
        {"features": _object(ids, features), "dense": _object(dense, numbers)},
        ["features", *(["dense"] if numbers else [])],
    )


def _examples(read: list[IdFeature], schema: Schema) -> dict[str, Any]:
    """Returns examples by name: two where features take both numbers and texts, as the schema has no column types."""
    numbers, texts = [7, 8], ["a", "b"]
    if not any(_takes_both(f) for f in read):
        return {"sample": {"summary": "One sample", "value": _example(read, schema, numbers)}}
    of_numbers, of_texts = _example(read, schema, numbers), _example(read, schema, texts)
    return {
        "numbers": {"summary": "One sample, for columns that were numbers in training", "value": of_numbers},
        "texts": {"summary": "One sample, for columns that were texts in training", "value": of_texts},
    }


def _example(read: list[IdFeature], schema: Schema, auto: list[Any]) -> dict[str, Any]:
    """Returns a sample whose features of kind "auto" have these ids."""
    features: dict[str, Any] = {}
    for feature in read:
        ids = ["a", "b"] if feature.kind == "text" else auto if _takes_both(feature) else [7, 8]
        if feature.column == feature.name:
            features[feature.name] = [ids] if feature.pooling is None else ids[:1]
        else:
            made = "some words" if feature.tokens else "2024-05-01 12:30:00" if feature.time else 0.5
            features.setdefault(feature.column, [made])
    features.update({f.age_since: [9] for f in read if f.age_since is not None})
    features.update({f.weights: [1.0] for f in read if f.weights is not None})
    dense = {each.name: [0.5 if each.size == 1 else [0.5] * each.values] for each in schema.dense}
    features = {name: column for name, column in features.items() if name not in dense}
    return {"features": features, **({"dense": dense} if dense else {})}


def _takes_both(feature: IdFeature) -> bool:
    return feature.kind == "auto" and feature.age_since is None and feature.column == feature.name


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": schema}}}


def _post(
    name: str,
    summary: str,
    body: dict[str, Any],
    answer: dict[str, Any],
    secured: bool,
    examples: dict[str, Any] | None = None,
    arrow: bool = False,
) -> dict[str, Any]:
    binary = {"schema": {"type": "string", "format": "binary"}}
    others = {MSGPACK: binary, **({ARROW: binary} if arrow else {})}
    content = {JSON: {"schema": body, **({"examples": examples} if examples else {})}, **others}
    answers = {JSON: {"schema": answer}, MSGPACK: binary, ARROW: binary}
    errors = {**_ERRORS, **({"401": "The key is missing or wrong."} if secured else {})}
    deadline = {
        "name": "Persia-Deadline-Ms",
        "in": "header",
        "description": "Milliseconds within which the request is to be answered; shortens the limit of the server.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    }
    return {
        "post": {
            "summary": summary,
            "operationId": name,
            "parameters": [deadline],
            "requestBody": {"required": True, "content": content},
            "responses": {
                "200": {
                    "description": "The answer, with the step and epoch that it was computed with.",
                    "content": answers,
                },
                **{status: _content(text, _ERROR) for status, text in sorted(errors.items())},
            },
            **({"security": [{"key": []}]} if secured else {}),
        }
    }
