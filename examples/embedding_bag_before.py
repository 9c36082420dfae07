"""A click model with `nn.EmbeddingBag`, in plain PyTorch; `embedding_bag_after.py` continues it in persia."""

import os

import numpy as np
import torch

STEPS = 100 if os.environ.get("PERSIA_EXAMPLE_SMALL") else 1_000
ITEMS, DIM, BATCH = 5_000, 16, 512


def clicks(first, steps, items=ITEMS):
    """Yields the names of visited items, 3 for each sample, two numbers, and clicks."""
    taste = np.random.default_rng(0).standard_normal(2 * ITEMS)
    for step in range(first, first + steps):
        draw = np.random.default_rng(step + 1)
        visited = (items * draw.random((BATCH, 3)) ** 2).astype(int)
        dense = draw.standard_normal((BATCH, 2)).astype(np.float32)
        labels = draw.random(BATCH) < 1 / (1 + np.exp(-taste[visited].sum(1) - dense[:, 0]))
        yield [[f"item-{item}" for item in row] for row in visited], dense, labels.astype(np.float32)[:, None]


VOCABULARY = {f"item-{item}": 1 + item for item in range(ITEMS)}  # Row 0 is of all others.


def batches(first, steps):
    """Yields rows of the embedding, dense features and labels."""
    for visited, dense, labels in clicks(first, steps):
        rows = [[VOCABULARY.get(item, 0) for item in row] for row in visited]
        yield torch.tensor(rows), torch.from_numpy(dense), torch.from_numpy(labels)


def main() -> None:
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # Said aloud, or torch warns.
    bag = torch.nn.EmbeddingBag(1 + ITEMS, DIM, mode="mean", sparse=True)
    torch.nn.init.uniform_(bag.weight, -0.01, 0.01)
    net = torch.nn.Sequential(torch.nn.Linear(DIM + 2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    rows = torch.optim.Adagrad(bag.parameters(), lr=0.1, initial_accumulator_value=1e-6)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    criterion = torch.nn.BCEWithLogitsLoss()

    running = 0.69
    for visited, dense, labels in batches(0, STEPS):
        loss = criterion(net(torch.cat([bag(visited), dense], dim=1)), labels)
        loss.backward()
        rows.step()
        optimizer.step()
        rows.zero_grad()
        optimizer.zero_grad()
        running += 0.05 * (loss.item() - running)
    print(f"{STEPS} steps, loss {running:.4f}, {len(bag.weight)} rows")

    os.makedirs("runs", exist_ok=True)
    states = {"bag": bag, "rows": rows, "net": net, "optimizer": optimizer}
    torch.save({name: each.state_dict() for name, each in states.items()}, "runs/embedding_bag.pt")


if __name__ == "__main__":
    main()
