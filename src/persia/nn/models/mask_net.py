"""MaskNet: features multiplied by masks that the sample itself computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from persia.checks import check_choice, check_integer, check_number, plain
from persia.nn.models.layers import feature_dims, mlp, output_count, pooled
from persia.nn.pooling import Embeddings
from persia.schema import Schema

__all__ = ["MaskBlock", "MaskNet"]


class MaskNet(nn.Module):
    """Instance-guided masks (Wang, She, Zhang, DLP-KDD 2021, arXiv 2102.07619).

    A mask is computed from all embeddings by a network with a wide hidden layer, and multiplies normalised features; a
    linear layer, layer normalisation and ReLU follow. Blocks on the features lie side by side ("parallel") or each
    on the output of the one before ("serial"). The dense features enter as one more embedding, by a linear layer.
    Un-pooled sequences enter as the mean over their ids.

    Args:
        schema: the input; names features, dimensions, labels.
        kind: arrangement of the blocks.
        blocks: number of blocks.
        width: of a block's output.
        reduction: width of a mask's hidden layer, as a multiple of the width of all embeddings.
        hidden: widths of the layers behind the blocks; the paper has them in the parallel model only.
        dropout: share of these layers that is dropped in training.
        outputs: logits per sample; `Schema.outputs` by default.

    Raises:
        ConfigError: no ID-type feature, an unknown `kind`, or a bad width or number.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        kind: Literal["parallel", "serial"] = "parallel",
        blocks: int = 3,
        width: int = 64,
        reduction: float = 2.0,
        hidden: Sequence[int] = (128,),
        dropout: float = 0.0,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        dims = feature_dims(schema)
        self.features = tuple(dims)
        blocks, width, reduction = plain(blocks), plain(width), plain(reduction)
        check_choice("kind", kind, ("parallel", "serial"))
        check_integer("blocks", blocks, 1)
        check_integer("width", width, 1)
        check_number("reduction", reduction, 0, open_low=True)
        sizes = list(dims.values())
        dense = schema.dense_width
        self.dense = nn.Linear(dense, max(sizes)) if dense else None
        sizes += [max(sizes)] if dense else []
        total = sum(sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in sizes)
        self.serial = kind == "serial"
        middle = max(1, round(reduction * total))
        self.blocks = nn.ModuleList(
            MaskBlock(total, width if self.serial and number else total, middle, width) for number in range(blocks)
        )
        self.deep = mlp(
            width if self.serial else blocks * width, hidden, output_count(schema, outputs), dropout=dropout
        )

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[batch, outputs]` from dense features `[batch, n]` and embeddings."""
        features = [pooled(embeddings[name]) for name in self.features]
        if self.dense is not None:
            features.append(self.dense(dense))
        guide = torch.cat(features, 1)
        x = torch.cat([norm(feature) for norm, feature in zip(self.norms, features, strict=True)], 1)
        if self.serial:
            for block in self.blocks:
                x = block(guide, x)
        else:
            x = torch.cat([block(guide, x) for block in self.blocks], 1)
        logits: Tensor = self.deep(x)
        return logits


class MaskBlock(nn.Module):
    """A mask, its product with the input, a linear layer, layer normalisation and ReLU (section 3.3).

    Args:
        guide: width of what the mask is computed from.
        inputs: width of what it multiplies.
        hidden: width of the mask's hidden layer.
        outputs: width of the output.
    """

    def __init__(self, guide: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.mask = mlp(guide, [hidden], inputs)
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, guide: Tensor, x: Tensor) -> Tensor:
        """Returns `[batch, outputs]` from `[batch, guide]` and `[batch, inputs]`."""
        return torch.relu(self.norm(self.linear(self.mask(guide) * x)))
