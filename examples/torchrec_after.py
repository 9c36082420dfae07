"""The click model of `torchrec_before.py` in persia: it continues from the saved state. TorchRec is not needed."""

import os

import numpy as np
import torch

import persia

STEPS = 100 if os.environ.get("PERSIA_EXAMPLE_SMALL") else 1_000
USERS, ITEMS, DIM, BATCH = 2_000, 5_000, 16, 512


def clicks(first, steps):
    """Yields users, visited items with the number of each user, two numbers, and clicks."""
    taste = np.random.default_rng(0).standard_normal(ITEMS)
    for step in range(first, first + steps):
        draw = np.random.default_rng(step + 1)
        users, lengths = draw.integers(0, USERS, BATCH), draw.integers(1, 5, BATCH)
        visited = (ITEMS * draw.random(lengths.sum()) ** 2).astype(np.int64)
        dense = draw.standard_normal((BATCH, 2)).astype(np.float32)
        score = np.add.reduceat(taste[visited], np.cumsum(lengths) - lengths) + dense[:, 0]
        labels = draw.random(BATCH) < 1 / (1 + np.exp(-score))
        yield users, visited, lengths, dense, labels.astype(np.float32)[:, None]


SCHEMA = persia.Schema(
    [persia.IdFeature(name, dim=DIM, pooling="mean") for name in ("user", "visited")], ["price", "age"], ["click"]
)


def batches(first, steps):
    """Yields batches."""
    for users, visited, lengths, dense, labels in clicks(first, steps):
        ids = {"user": users, "visited": (visited, np.cumsum([0, *lengths]))}
        rest = {"price": dense[:, 0], "age": dense[:, 1], "click": labels[:, 0]}
        yield persia.Batch.from_columns(SCHEMA, ids | rest)


def main() -> None:
    torch.manual_seed(0)
    rule = persia.optim.RowwiseAdagrad(lr=0.05, initial_accumulator=0.0, eps=1e-8)
    embeddings = persia.nn.EmbeddingCollection(SCHEMA, optimizer=rule)
    net = torch.nn.Sequential(torch.nn.Linear(2 * DIM + 2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    if os.path.exists("runs/torchrec.pt"):
        persia.interop.torchrec.import_dcp(embeddings, "runs/torchrec")
        saved = torch.load("runs/torchrec.pt")
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    criterion = torch.nn.BCEWithLogitsLoss()

    running = 0.69
    for batch in embeddings.prefetch(batches(STEPS, STEPS)):
        loss = criterion(net(torch.cat([*embeddings(batch).values(), batch.dense], dim=1)), batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running += 0.05 * (loss.item() - running)
    print(f"{STEPS} steps, loss {running:.4f}")


if __name__ == "__main__":
    main()
