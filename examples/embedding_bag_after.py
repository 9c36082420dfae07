"""The click model of `embedding_bag_before.py` in persia: it continues from the saved state."""

import os

import numpy as np
import torch

import persia

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


SCHEMA = persia.Schema([persia.IdFeature("visited", dim=DIM, pooling="mean")], ["price", "age"], ["click"])


def batches(first, steps):
    """Yields batches of the items' names themselves: any name gets a row when training first sees it."""
    for visited, dense, labels in clicks(first, steps, items=ITEMS + 1_000):  # 1,000 are new.
        columns = {"visited": visited, "price": dense[:, 0], "age": dense[:, 1], "click": labels[:, 0]}
        yield persia.Batch.from_columns(SCHEMA, columns)


def main() -> None:
    torch.manual_seed(0)
    torch.sparse.check_sparse_tensor_invariants.disable()  # Said aloud, or torch warns.
    bag = torch.nn.EmbeddingBag(1 + ITEMS, DIM, mode="mean", sparse=True)
    torch.nn.init.uniform_(bag.weight, -0.01, 0.01)
    net = torch.nn.Sequential(torch.nn.Linear(DIM + 2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    rows = torch.optim.Adagrad(bag.parameters(), lr=0.1, initial_accumulator_value=1e-6)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    states = {"bag": bag, "rows": rows, "net": net, "optimizer": optimizer}
    for name, state in torch.load("runs/embedding_bag.pt").items():
        states[name].load_state_dict(state)
    rule = persia.interop.embedding_optimizer(rows, bag.weight)  # persia.optim.Adagrad(lr=0.1, ...)
    embeddings = persia.nn.EmbeddingCollection(SCHEMA, optimizer=rule)
    persia.interop.import_embedding(embeddings, "visited", bag, optimizer=rows, vocabulary=VOCABULARY)
    del bag, rows, states
    criterion = torch.nn.BCEWithLogitsLoss()

    running = 0.69
    for batch in embeddings.prefetch(batches(STEPS, STEPS)):
        loss = criterion(net(torch.cat([embeddings(batch)["visited"], batch.dense], dim=1)), batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        running += 0.05 * (loss.item() - running)
    print(f"{STEPS} steps, loss {running:.4f}, {embeddings.statistics()['visited']['rows']} rows")


if __name__ == "__main__":
    main()
