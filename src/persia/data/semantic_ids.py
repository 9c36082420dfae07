"""Semantic ids: codes of items by residual k-means over their vectors, so that similar items begin with equal codes."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.batching.id_columns import id_column
from persia.batching.item_codes import CODEBOOKS, ID_COLUMN, ItemCodes, code_column, read_codes
from persia.checkpoint.storage import Storage
from persia.checks import MAX_SEED, check_integer
from persia.data.files import File
from persia.errors import ConfigError, DataError, MissingExtraError
from persia.schema import IdKind
from persia.schema.mappings import MAX_CODES
from persia.types import Floats

__all__ = ["SemanticIds", "item_vectors", "read_semantic_ids", "semantic_ids", "write_semantic_ids"]

PER_CODE = 256
"""Vectors for each code of a level that k-means sees, at most; drawn from all."""
BLOCK = 1 << 24
"""Distances that are computed together."""
MOST_NUMBERS = 12_000_000
"""Numbers of all codebooks, at most: Parquet limits the size of what describes a file."""


@dataclass(frozen=True)
class SemanticIds:
    """Codebooks of residual k-means: a vector is about the sum of one entry of each.

    RQ-KMeans; the codes play the part of the quantised autoencoder's in Rajput et al. (NeurIPS 2023, section 3.1).

    Attributes:
        codebooks: of each level, float32 `[entries, dim]` with at most `codes` entries.
        codes: the most codes of a level.
    """

    codebooks: tuple[Floats, ...]
    codes: int

    def assign(self, vectors: Floats) -> NDArray[np.int32]:
        """Returns the codes of vectors: at each level the entry that is closest to what the levels before leave.

        Args:
            vectors: float32 `[items, dim]`.

        Returns:
            Codes, int32 `[items, levels]`.

        Raises:
            DataError: the vectors have another length than those of the codebooks, or are not finite.
        """
        vectors = _checked(vectors)
        dim = self.codebooks[0].shape[1]
        if vectors.shape[1] != dim:
            raise DataError(
                f"The vectors have length {vectors.shape[1]}, the codebooks {dim}; compute both by one model.", dim=dim
            )
        codes = np.empty((len(vectors), len(self.codebooks)), np.int32)
        left = vectors.copy()
        for level, codebook in enumerate(self.codebooks):
            codes[:, level] = _subtract_nearest(left, codebook)
        return codes

    def explained(self, vectors: Floats, codes: NDArray[np.int32]) -> list[float]:
        """Returns by level which share of the vectors' variance the codes up to it explain, in [0, 1].

        Args:
            vectors: float32 `[items, dim]`.
            codes: their codes, `[items, levels]`.
        """
        left = np.array(vectors, np.float32)
        whole = float(left.var(axis=0, dtype=np.float64).sum())
        shares = []
        for level, codebook in enumerate(self.codebooks):
            left -= codebook[codes[:, level]]
            rest = float(np.square(left, dtype=np.float64).sum()) / len(left)
            shares.append(1.0 if whole == 0 else max(0.0, 1 - rest / whole))
        return shares


def semantic_ids(vectors: Floats, *, levels: int = 3, codes: int = 256, seed: int = 0) -> SemanticIds:
    """Finds codebooks by residual k-means (scikit-learn): each level divides what the levels before leave.

    Takes minutes for millions of vectors; holds a copy of them in memory. k-means sees at most 256 vectors for each
    code. The same vectors and seed give the same codebooks on one machine.

    Args:
        vectors: float32 `[items, dim]`: of texts, images, or rows of a trained table; finite.
        levels: codes of an item, 1 to 16.
        codes: codes of a level; a level with fewer distinct vectors has one for each.
        seed: seed of the first centres, and of the vectors that k-means sees.

    Raises:
        ConfigError: a number is out of range, or the codes do not fit into 63 bits.
        DataError: there is no vector, or one is not finite.
        MissingExtraError: scikit-learn is not installed.
    """
    check_integer("levels", levels, 1, MAX_CODES)
    check_integer("codes", codes, 2, 1 << 24)
    check_integer("seed", seed, 0, MAX_SEED)
    if codes**levels >= 1 << 63:
        raise ConfigError(
            f"{levels} levels of {codes} codes have more combinations than ids; give fewer of one.", field="levels"
        )
    left = _checked(vectors).copy()
    if (numbers := levels * min(codes, len(left)) * left.shape[1]) > MOST_NUMBERS:
        raise ConfigError(
            f"{levels} codebooks of {codes} entries of length {left.shape[1]} have {numbers:,} numbers, and a file of "
            f"codes holds {MOST_NUMBERS:,}; give fewer codes or levels, or shorter vectors (a PCA).",
            field="codes",
        )
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise MissingExtraError('Semantic ids need pip install "persia-recsys[semantic-ids]".') from error
    draw = np.random.default_rng(seed)
    seen = np.sort(draw.permutation(len(left))[: PER_CODE * codes])
    codebooks = []
    for level in range(levels):
        sample = left[seen]
        clusters = min(codes, len(np.unique(sample, axis=0)))
        found = KMeans(clusters, n_init=1, max_iter=50, random_state=(seed + level) % (1 << 32)).fit(sample)
        codebook = np.ascontiguousarray(found.cluster_centers_, np.float32)
        codebooks.append(codebook)
        _subtract_nearest(left, codebook)
    return SemanticIds(tuple(codebooks), codes)


def _subtract_nearest(vectors: Floats, codebook: Floats) -> NDArray[np.int64]:
    """Subtracts from each vector the entry that is closest to it, of equally close ones the first; returns which."""
    nearest = np.empty(len(vectors), np.int64)
    norms = np.square(codebook).sum(axis=1)
    rows = max(1, BLOCK // len(codebook))
    for begin in range(0, len(vectors), rows):
        block = vectors[begin : begin + rows]
        # |v - c|^2 less |v|^2, which is the same for all entries.
        chosen = (norms - 2 * (block @ codebook.T)).argmin(axis=1)
        nearest[begin : begin + rows] = chosen
        block -= codebook[chosen]
    return nearest


def _checked(vectors: Any) -> Floats:
    array = np.ascontiguousarray(vectors, np.float32)
    if array.ndim != 2 or not array.size:
        raise DataError(f"The vectors have shape {list(array.shape)}; give [items, dim], with items.")
    finite = np.isfinite(array).all(axis=1)
    if not finite.all():
        row = int(finite.argmin())
        raise DataError(f"Vector {row} has a value that is not finite; leave the item out, or correct it.", row=row)
    return array


def item_vectors(path: str, *, item: str, vector: str, kind: IdKind = "auto") -> tuple[Any, Floats]:
    """Reads ids and vectors of items from a Parquet file.

    Args:
        path: path or URL.
        item: column of the ids.
        vector: column of lists of numbers, all of one length.
        kind: how values become ids, as `IdFeature.kind` of the feature says.

    Returns:
        Ids, uint64 `[items]`, and vectors, float32 `[items, dim]`.

    Raises:
        DataError: the file cannot be read, a column is missing or has no such values, or an id occurs twice.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with File(path).open() as stream:
        table = pq.read_table(io.BytesIO(stream.read()))
    for name in (item, vector):
        if name not in table.column_names:
            raise DataError(
                f"{path} has no column {name!r}, only {', '.join(map(repr, table.column_names))}; name the columns by "
                "--item and --vector.",
                path=path,
                column=name,
            )
    column = id_column(item, table[item], kind)
    if column.offsets is not None:
        row = int((np.diff(column.offsets) != 1).argmax())
        raise DataError(f"{path}: {item!r} has no id, or several, at row {row}; each vector is of one item.", row=row)
    if len(np.unique(column.values)) < len(column):
        values, counts = np.unique(column.values, return_counts=True)
        raise DataError(
            f"{path}: id {int(values[counts.argmax()])} of {item!r} occurs {int(counts.max())} times; leave one vector "
            "for each item.",
            path=path,
            column=item,
        )
    lists = table[vector].combine_chunks()
    kinds = pa.types
    if not (kinds.is_list(lists.type) or kinds.is_large_list(lists.type) or kinds.is_fixed_size_list(lists.type)):
        raise DataError(f"{path}: {vector!r} holds {lists.type}; give lists of numbers.", path=path, column=vector)
    lengths = np.asarray(lists.value_lengths().fill_null(-1)) if len(lists) else np.zeros(0, np.int64)
    if len(lists) == 0 or (lengths != lengths[0]).any() or lengths[0] < 1 or lists.flatten().null_count:
        row = int((lengths != lengths[0]).argmax()) if len(lists) else 0
        raise DataError(
            f"{path}: {vector!r} has no numbers, or another count of them, at row {row}; all vectors have one length, "
            "without nulls.",
            path=path,
            column=vector,
            row=row,
        )
    flat = np.asarray(lists.flatten().cast(pa.float32(), safe=False))
    return column.values, flat.reshape(len(lists), -1)


def write_semantic_ids(path: str | os.PathLike[str], found: SemanticIds, ids: Any, codes: NDArray[np.int32]) -> None:
    """Writes codes of items, and the codebooks, for `CodePrefix`. Who reads the file has the old or the new one.

    Args:
        path: path or URL of the Parquet file.
        found: the codebooks.
        ids: ids of the items, uint64 `[items]`, all different.
        codes: codes, int32 `[items, levels]`.

    Raises:
        CheckpointError: the file cannot be written.
        ConfigError: the file exists with other codebooks: models may be trained on them.
        DataError: the file exists, and is no such file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    order = np.argsort(ids, kind="stable")
    columns = {ID_COLUMN: pa.array(np.asarray(ids, np.uint64)[order])}
    columns |= {code_column(level + 1): pa.array(codes[order, level]) for level in range(codes.shape[1])}
    digest = hashlib.sha256(b"".join(codebook.tobytes() for codebook in found.codebooks)).hexdigest()
    said: dict[str, Any] = {"levels": codes.shape[1], "codes": found.codes, "digest": digest}
    said["entries"] = [len(codebook) for codebook in found.codebooks]
    metadata = {CODEBOOKS: json.dumps(said).encode()}
    metadata |= {_codebook_key(level): codebook.tobytes() for level, codebook in enumerate(found.codebooks)}
    file = io.BytesIO()
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), file)
    folder, _, name = (os.fspath(path) if "://" in os.fspath(path) else os.path.abspath(path)).rpartition("/")
    storage = Storage(folder or "/")
    if storage.exists(name) and read_codes(os.fspath(path))[0].digest != digest:
        raise ConfigError(
            f"{os.fspath(path)} has other codebooks, on which models may be trained; write to another file, or add "
            "items to this one by `persia semantic-ids --like`.",
            field="path",
        )
    storage.put(name, file.getvalue())


def read_semantic_ids(path: str) -> tuple[SemanticIds, ItemCodes]:
    """Reads codebooks and codes that `write_semantic_ids` wrote.

    Raises:
        DataError: the file cannot be read, or is no such file.
    """
    read, table = read_codes(path)
    metadata = table.schema.metadata
    try:
        entries: Sequence[int] = json.loads(metadata[CODEBOOKS])["entries"]
        codebooks = tuple(
            np.frombuffer(metadata[_codebook_key(level)], np.float32).reshape(count, -1)
            for level, count in enumerate(entries)
        )
        if len(codebooks) != read.codes.shape[1]:
            raise ValueError(f"{len(codebooks)} codebooks for {read.codes.shape[1]} levels")
        if any((read.codes[:, level] >= count).any() for level, count in enumerate(entries)):
            raise ValueError("a code has no entry")
        if not all(np.isfinite(codebook).all() for codebook in codebooks):
            raise ValueError("an entry is not finite")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} has no codebooks ({type(error).__name__}: {error}); write it by `persia semantic-ids`.", path=path
        ) from error
    return SemanticIds(codebooks, read.codes_per_level), read


def _codebook_key(level: int) -> bytes:
    return b"%s.%d" % (CODEBOOKS, level + 1)
