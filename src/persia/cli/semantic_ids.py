"""The command `persia semantic-ids`."""

from __future__ import annotations

from typing import Annotated

import typer

from persia.printable import say

__all__ = ["semantic_ids"]


def semantic_ids(
    vectors: Annotated[
        str,
        typer.Argument(help="Parquet file with an id and a vector for each item, a path or URL.", metavar="VECTORS"),
    ],
    output: Annotated[str, typer.Option(help="Parquet file to write, a path or URL.", metavar="FILE")],
    item: Annotated[str, typer.Option(help="Column with the ids.", metavar="COLUMN")] = "item",
    vector: Annotated[
        str, typer.Option(help="Column with the vectors, lists of numbers of one length.", metavar="COLUMN")
    ] = "vector",
    kind: Annotated[
        str, typer.Option(help='How values become ids: "auto", "number" or "text", as the feature says.')
    ] = "auto",
    levels: Annotated[int | None, typer.Option(help="Codes of an item; 3 by default.", min=1, max=16)] = None,
    codes: Annotated[int | None, typer.Option(help="Codes of a level; 256 by default.", min=2)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of k-means; 0 by default.", min=0)] = None,
    like: Annotated[
        str | None,
        typer.Option(
            help="File of an earlier call: its codebooks are used, and its items are kept, so that new items can be "
            "added while a model is trained and served.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Give items codes by their vectors, so that similar items share rows.

    Vectors come from texts, images, or a trained table (`persia export`). Residual k-means gives each item LEVELS
    codes: the first divides items coarsely, each further one more finely. A feature whose mapping is `CodePrefix` has
    one row for all items with equal first codes; a new item begins with what these have learnt.
    """
    from typing import cast, get_args

    import numpy as np

    from persia.checks import check_choice
    from persia.data.semantic_ids import item_vectors, read_semantic_ids, write_semantic_ids
    from persia.data.semantic_ids import semantic_ids as find
    from persia.errors import ConfigError
    from persia.schema import IdKind

    check_choice("--kind", kind, get_args(IdKind))
    given = {name: value for name, value in (("levels", levels), ("codes", codes), ("seed", seed)) if value is not None}
    if like is not None and given:
        raise ConfigError(
            f"--like takes the codebooks of {like}; leave out {', '.join(given)}.", field=next(iter(given))
        )
    ids, values = item_vectors(vectors, item=item, vector=vector, kind=cast(IdKind, kind))
    kept = None
    if like is None:
        found = find(values, **given)
    else:
        found, kept = read_semantic_ids(like)
    assigned = found.assign(values)
    for level, share in enumerate(found.explained(values, assigned), start=1):
        distinct, items = np.unique(assigned[:, :level], axis=0, return_counts=True)
        say(
            f"{level} code{'s' if level > 1 else ''}: {100 * share:.1f} % of the variance, {len(distinct):,} prefixes, "
            f"at most {items.max():,} items in one"
        )
    if kept is not None:
        others = ~np.isin(kept.ids, ids)
        ids = np.concatenate([ids, kept.ids[others]])
        assigned = np.concatenate([assigned, kept.codes[others]])
    write_semantic_ids(output, found, ids, assigned)
    say(
        f"{output}: {len(ids):,} items. Use it: "
        f'IdFeature("{item}_1", 16, of="{item}", mapping=CodePrefix("{output}", 1))'
    )
