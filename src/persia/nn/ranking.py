"""`RankingModel`: models that can score many items for one user, and compute the user's part once."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

import torch

from persia.nn.pooling import Embeddings

__all__ = ["RankingModel"]


@runtime_checkable
class RankingModel(Protocol):
    """A model whose logits for one user and many items share work, which `persia.serve.Predictor.rank` saves.

    `score(user_part(...), ...)` returns the logits that `forward` returns for the items' rows with the user's features
    in each, up to rounding. A model without these methods is ranked by `forward` on such rows.
    """

    @property
    def user_features(self) -> Collection[str]:
        """Names of the ID-type and dense features that `user_part` reads. If the user lacks one, `forward` ranks."""

    @property
    def item_features(self) -> Collection[str]:
        """Names of the ID-type features that `score` reads from the items. If they lack one, `forward` ranks."""

    def user_part(self, dense: torch.Tensor, embeddings: Embeddings) -> Any:
        """Returns what depends on the user only.

        Args:
            dense: of the user, `[1, dense features]`; 0 in columns of the items.
            embeddings: of the user's ID-type features, of one row: at least `user_features`.
        """

    def score(self, user: Any, dense: torch.Tensor, embeddings: Embeddings) -> torch.Tensor:
        """Returns logits `[items, labels]`.

        Args:
            user: what `user_part` has returned.
            dense: `[items, dense features]`, with the user's values in the user's columns.
            embeddings: of all ID-type features that are not the user's.
        """
