"""Models on users' histories, on generated clicks whose best possible AUC is known.

Each user's interest drifts from category to category; the newest events tell which it is now. So a model that knows the
order of events does better than one that takes their mean.
"""

import os

import numpy as np
import torch

import persia
from persia.data.generator import expected_auc

SMALL = bool(os.environ.get("PERSIA_EXAMPLE_SMALL"))
STEPS, BATCH = (20, 256) if SMALL else (1_500, 512)
ITEMS, CATEGORIES, LENGTH = 500, 10, 12

SCHEMA = persia.Schema(
    [
        persia.IdFeature("item", dim=16),
        persia.IdFeature("clicked_before", table="item", pooling=None, max_length=LENGTH),
    ],
    labels=["click"],
)
MODELS = {
    "YouTubeDNN": persia.nn.models.YouTubeDNN,
    "DIN": persia.nn.models.DIN,
    "DIEN": persia.nn.models.DIEN,
    "HSTU": persia.nn.models.HSTU,
}


def batches() -> tuple[list[persia.Batch], float]:
    """Returns batches, and the best possible AUC on them."""
    rng = np.random.default_rng(0)
    batches, probabilities = [], []
    for _ in range(STEPS):
        # An interest stays for some events, then another one follows.
        changes = np.cumsum(rng.random((BATCH, LENGTH + 1)) < 0.3, axis=1)
        interest = rng.integers(0, CATEGORIES, (BATCH, LENGTH + 2))[np.arange(BATCH)[:, None], changes]
        events = interest + CATEGORIES * rng.integers(0, ITEMS // CATEGORIES, interest.shape)
        item = np.where(rng.random(BATCH) < 0.5, interest[:, -1], rng.integers(0, CATEGORIES, BATCH))
        item += CATEGORIES * rng.integers(0, ITEMS // CATEGORIES, BATCH)
        # The candidate meets the interest of the newest event.
        probability = np.where(item % CATEGORIES == events[:, -1] % CATEGORIES, 0.7, 0.1).astype(np.float32)
        columns = {"item": item, "clicked_before": events[:, 1:], "click": rng.random(BATCH) < probability}
        batches.append(persia.Batch.from_columns(SCHEMA, columns))
        probabilities.append(probability)
    return batches, expected_auc(np.concatenate(probabilities))


def main() -> None:
    data, best = batches()
    print(f"best possible AUC {best:.4f}")
    for name, make in MODELS.items():
        torch.manual_seed(0)
        trainer = persia.Trainer(
            make(SCHEMA, hidden=(64, 32)),
            SCHEMA,
            optimizer=lambda parameters: torch.optim.Adam(parameters, 3e-3),
            embedding_optimizer=persia.optim.Adagrad(lr=0.1),
            mode=persia.modes.Sync(),
            options=persia.TrainerOptions(progress=False),
        )
        result = trainer.fit(data)
        print(f"{name:12} progressive AUC {result.progressive.auc:.4f}, {result.rows_per_second:,.0f} rows/s")


if __name__ == "__main__":
    main()
