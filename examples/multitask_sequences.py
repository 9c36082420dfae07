"""Two labels, a shared table, an un-pooled sequence with attention, and tables that differ."""

import os

import numpy as np
import torch

import persia

STEPS = 40 if os.environ.get("PERSIA_EXAMPLE_SMALL") else 2_000
BATCH = 512

SCHEMA = persia.Schema(
    id_features=[
        persia.IdFeature("user", dim=8),
        persia.IdFeature("item", dim=16),
        persia.IdFeature("history", table="item", pooling=None, max_length=20),  # The sequence itself, with a mask.
        persia.IdFeature("tags", dim=8, pooling="sqrtn"),
        persia.IdFeature("user_x_tag", dim=8, cross=("user", "device")),
        persia.IdFeature("device", dim=8),
    ],
    dense_features=["price"],
    labels=["click", "purchase"],
    tables=[
        persia.Table("item", dim=16, optimizer=persia.optim.Adam(lr=1e-2), capacity=1_000_000),
        persia.Table("user", dim=8, admission=persia.AdmitMinFrequency(2)),  # No row for users seen once.
    ],
)


class Net(torch.nn.Module):
    """The candidate item attends to the user's history; one logit per task."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, num_heads=2, batch_first=True)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(8 + 16 + 16 + 8 + 8 + 8 + 1, 64), torch.nn.ReLU())
        self.heads = torch.nn.Linear(64, 2)

    def forward(self, dense: torch.Tensor, embeddings: persia.nn.Embeddings) -> torch.Tensor:
        history = embeddings["history"]
        query = embeddings["item"].unsqueeze(1)
        # A padded first place, always visible, keeps samples without history from dividing by zero.
        keys = torch.cat([torch.zeros_like(query), history.values], dim=1)
        hidden = torch.cat([torch.zeros_like(history.mask[:, :1]), ~history.mask], dim=1)
        read, _ = self.attention(query, keys, keys, key_padding_mask=hidden, need_weights=False)
        pooled = [embeddings[name] for name in ("user", "item", "tags", "user_x_tag", "device")]
        return self.heads(self.mlp(torch.cat([*pooled, read.squeeze(1), dense], dim=1)))

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Purchases are rarer and weigh more."""
        weights = torch.tensor([1.0, 3.0], device=logits.device)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, weight=weights)


def batches() -> list[persia.Batch]:
    """Every fourth item and every second user clicks more; ragged columns are plain Python lists."""
    rng = np.random.default_rng(0)
    result = []
    for _ in range(STEPS):
        user, item = rng.integers(0, 500, BATCH), rng.integers(0, 200, BATCH)
        length = rng.integers(0, 25, BATCH)
        history = [(rng.integers(0, 100, n) * 2 + u % 2).tolist() for u, n in zip(user, length, strict=True)]
        click = rng.random(BATCH) < np.where(item % 4 == 0, 0.6, 0.2) + 0.2 * (user % 2)
        columns = {
            "user": user,
            "item": item,
            "history": history,
            "tags": [["new", "sale"] if i % 3 else [] for i in item],  # Texts are hashed.
            "device": ["phone" if u % 5 else "desktop" for u in user],
            "price": rng.random(BATCH),
            "click": click,
            "purchase": click & (rng.random(BATCH) < 0.3),
        }
        result.append(persia.Batch.from_columns(SCHEMA, columns))
    return result


def main() -> None:
    torch.manual_seed(0)
    trainer = persia.Trainer(
        Net(),
        SCHEMA,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 3e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        mode=persia.modes.Sync(),
    )
    result = trainer.fit(batches())
    for label, figures in result.progressive.labels.items():
        print(f"{label}: progressive AUC {figures.auc:.4f}")


if __name__ == "__main__":
    main()
