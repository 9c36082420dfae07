"""Writes `tests/plan/kubernetes_schema.json`, by which the manifests of a plan are validated.

    pip install kubernetes && python tests/support/make_kubernetes_schema.py

The models of Kubernetes' own client for Python are generated from the OpenAPI document of its API. The schema has the
fields of the kinds that manifests use, with their types and which are required, and permits no other field.
"""

import json
from pathlib import Path
from typing import Any

KINDS = {
    "apps/v1": ["Deployment", "StatefulSet"],
    "batch/v1": ["Job"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
    "policy/v1": ["PodDisruptionBudget"],
    "v1": ["PersistentVolumeClaim", "Service", "ServiceAccount"],
}
WRITTEN_BY_THE_SERVER = {
    **{f"V1{name}": "status" for names in KINDS.values() for name in names},
    "V1ObjectMeta": "managedFields",
}
"""A field of each of these that no manifest has."""
TARGET = Path(__file__).parents[1] / "plan" / "kubernetes_schema.json"


def main() -> None:
    """Writes the schema."""
    import kubernetes
    from kubernetes.client import models

    definitions: dict[str, Any] = {}
    kinds = {}
    for version, names in KINDS.items():
        for name in names:
            schema = getattr(models, f"V1{name}").model_json_schema(by_alias=True, mode="serialization")
            for key, part in schema.pop("$defs", {}).items():
                definitions[key] = _closed(key, part)
            definitions[f"V1{name}"] = _closed(f"V1{name}", schema)
            kinds[f"{version}/{name}"] = f"V1{name}"
    comment = f"From kubernetes {kubernetes.__version__} (Apache-2.0) by tests/support/make_kubernetes_schema.py"
    used = _used(definitions, kinds.values())
    document = {"$comment": comment, "kinds": kinds, "$defs": {name: definitions[name] for name in sorted(used)}}
    lines = json.dumps(document, separators=(",", ":")).replace('"V1', '\n"V1').replace('"$defs":{', '"$defs":{')
    TARGET.write_text(lines + "\n", encoding="utf-8")


def _closed(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of an object without titles, descriptions and fields of the server, and closes it."""
    hidden = WRITTEN_BY_THE_SERVER.get(name)
    properties = {key: _plain(value) for key, value in schema.get("properties", {}).items() if key != hidden}
    closed: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if required := [key for key in schema.get("required", []) if key in properties]:
        closed["required"] = required
    return closed


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if "anyOf" in value:  # Absent and null are the same to the API, but manifests have no null.
            options = [option for option in value["anyOf"] if option != {"type": "null"}]
            return _plain(options[0]) if len(options) == 1 else {"anyOf": [_plain(option) for option in options]}
        return {key: _plain(item) for key, item in value.items() if key not in ("title", "description", "default")}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _used(definitions: dict[str, Any], roots: Any) -> set[str]:
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            text = json.dumps(definitions[name])
            waiting += [part.split('"')[0] for part in text.split("#/$defs/")[1:]]
    return found


if __name__ == "__main__":
    main()
