"""Fingerprints of the sources of readers; see `persia.types.SourceFingerprint`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import CodeType
from typing import Any

from persia.data.expressions import Rule
from persia.data.files import File
from persia.data.selection import Selection
from persia.types import SourceFingerprint, SourcePart, distinct_parts

__all__ = ["fingerprint_of_files", "fingerprint_of_frame", "selecting_options"]

_SAMPLED_ROWS = 1_000
"""Rows at each end of a frame whose content is part of its fingerprint."""


def fingerprint_of_files(kind: str, files: Sequence[File], selection: Selection | None) -> SourceFingerprint:
    """Returns the fingerprint of files that are read one after another. Reads the status of local files.

    Args:
        kind: format of the files.
        files: the files, in the order in which they are read.
        selection: selection of rows; None for all.
    """
    numbered = selection is not None and selection.numbered
    parts = distinct_parts(file.part for file in files)
    return SourceFingerprint(kind, parts, selecting_options(selection), numbered=numbered)


def selecting_options(selection: Selection | None) -> dict[str, str]:
    """Returns the options of a selection as texts, by name."""
    options = {}
    if selection is not None and selection.where is not None:
        options["where"] = _rule_text(selection.where.rule)
    if selection is not None and selection.split is not None:
        options["split"] = repr(selection.split)
    return options


def fingerprint_of_frame(name: str, frame: Any) -> SourceFingerprint | None:
    """Returns the fingerprint of a table or frame in memory: its columns, its length, and rows at both ends.

    Args:
        name: name of the kind of frame.
        frame: a pyarrow table or record batch, or a pandas or polars frame.

    Returns:
        None if the frame is of another kind.
    """
    import pyarrow as pa

    slices = getattr(frame, "slice", None) or getattr(getattr(frame, "iloc", None), "__getitem__", None)
    if slices is None or not hasattr(frame, "shape"):
        return None
    rows = int(frame.shape[0])
    digest = hashlib.blake2b(digest_size=8)
    for first in sorted({0, max(0, rows - _SAMPLED_ROWS)}):
        length = min(rows - first, _SAMPLED_ROWS)
        piece = frame.iloc[first : first + length] if hasattr(frame, "iloc") else frame.slice(first, length)
        table = pa.Table.from_batches([piece]) if isinstance(piece, pa.RecordBatch) else pa.table(piece)
        # As Python values: Arrow writes a slice with the bits before it, and cannot copy all types.
        content = str(table.schema.remove_metadata()), table.to_pydict()
        digest.update(repr(content).encode("utf-8", "backslashreplace"))
    return SourceFingerprint(name, (SourcePart(f"{name} of {rows} rows ({digest.hexdigest()})"),))


def _rule_text(rule: Rule) -> str:
    if isinstance(rule, str):
        return rule
    code = getattr(rule, "__code__", None)
    name = getattr(rule, "__qualname__", type(rule).__name__)
    return f"function {name} {hashlib.blake2b(_code(code).encode(), digest_size=8).hexdigest()}"


def _code(code: CodeType | None) -> str:
    """Returns a text that is equal for functions with the same code, in one version of Python."""
    if code is None:
        return ""
    constants = [_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return repr((code.co_code, code.co_names, constants))
