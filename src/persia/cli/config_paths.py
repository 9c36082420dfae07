"""Paths of a configuration: relative ones are relative to the directory of its file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["directory_of", "resolve_paths"]

OUTPUTS = ("checkpoint_dir", "log_dir", "record_dir")
"""Fields of `trainer` that are paths."""

READERS = ("data", "eval_data")
"""Sections that read from a `path`."""


def directory_of(config: str) -> Path:
    """Returns the directory of a configuration; the working directory for a pipe or a device."""
    path = Path(config).resolve()
    return path.parent if path.is_file() else Path.cwd()


def resolve_paths(tree: dict[str, Any], directory: Path) -> None:
    """Makes the relative paths in a configuration absolute, in place. URLs and topics stay.

    Args:
        tree: the configuration as plain data, before validation. A field of the wrong type stays as it is.
        directory: directory that relative paths start from.
    """
    trainer = _section(tree, "trainer")
    publish = _section(trainer, "publish")
    trackers = trainer.get("trackers")
    places = [*((trainer, name) for name in OUTPUTS), (publish, "url")]
    places += [(tracker, "directory") for tracker in _records(trackers)]
    for reader in READERS:
        section = _section(tree, reader)
        if section.get("kind") != "kafka":  # Its path is a topic.
            places.append((section, "path"))
    for section, name in places:
        if name in section:
            section[name] = _absolute(section[name], directory)
    values = _section(_section(tree, "sweep"), "values")
    paths = [*(f"trainer.{name}" for name in OUTPUTS), "trainer.publish.url", *(f"{reader}.path" for reader in READERS)]
    for name in paths:
        if isinstance(values.get(name), list):
            values[name] = [_absolute(value, directory) for value in values[name]]


def _records(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, dict) else {}


def _absolute(value: Any, directory: Path) -> Any:
    if not isinstance(value, str) or not value or "://" in value:
        return value
    return os.path.normpath(os.path.join(directory, os.path.expanduser(value)))
