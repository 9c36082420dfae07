"""`embedding_l2`: a term of the loss that keeps the embeddings of a batch small."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from persia.errors import ConfigError
from persia.nn.pooling import Embeddings, SequenceEmbedding

__all__ = ["embedding_l2"]


def embedding_l2(embeddings: Embeddings, weights: float | Mapping[str, float]) -> torch.Tensor:
    """Returns the weighted squares of the embeddings that a model got, as a mean over the samples: float32 `[]`.

    Add it to the loss. It acts on what a feature gives the model, after pooling, once for each sample; of a sequence,
    on the embedding of each id. `weight_decay` of a table's optimizer acts on each distinct row of a batch once.

    Args:
        embeddings: by feature, as the model gets them.
        weights: factor of all features, or by feature those that count.

    Raises:
        ConfigError: `weights` has an unknown feature, or there is none.
    """
    factors = weights if isinstance(weights, Mapping) else dict.fromkeys(embeddings, weights)
    terms: list[torch.Tensor] = []
    for name, factor in factors.items():
        if name not in embeddings:
            raise ConfigError(
                f"There is no feature {name!r}; the model gets {', '.join(embeddings)}.", field=f"weights[{name!r}]"
            )
        output = embeddings[name]
        # Places of a sequence without an id are zeros.
        values = output.values if isinstance(output, SequenceEmbedding) else output
        terms.append(factor * values.float().square().sum() / len(values))
    if not terms:
        raise ConfigError("There are no features to regularise; give a factor, or one by feature.", field="weights")
    return torch.stack(terms).sum()
