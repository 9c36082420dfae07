"""Your own training loop: `EmbeddingCollection` in place of `nn.EmbeddingBag`."""

import os

import torch

import persia

ROWS = 50_000 if os.environ.get("PERSIA_EXAMPLE_SMALL") else 1_000_000


def main() -> None:
    torch.manual_seed(0)
    reader = persia.data.synthetic(ROWS, id_features=4, ids_per_feature=1_000, dense_features=2, batch_size=512)
    embeddings = persia.nn.EmbeddingCollection(
        reader.schema, optimizer=persia.optim.Adagrad(lr=0.05), mode=persia.modes.Hybrid(4)
    )
    net = torch.nn.Sequential(torch.nn.Linear(4 * 16 + 2, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    criterion = torch.nn.BCEWithLogitsLoss()

    running = 0.0
    for step, batch in enumerate(embeddings.prefetch(reader)):  # Lookups run ahead of the step.
        features = torch.cat([*embeddings(batch).values(), batch.dense], dim=1)
        loss = criterion(net(features), batch.labels)
        loss.backward()  # Passes the gradients of the rows on.
        optimizer.step()
        optimizer.zero_grad()
        running += 0.01 * (loss.item() - running) if step else loss.item()
    print(f"{step + 1} steps, loss {running:.4f}, staleness {embeddings.staleness}, {embeddings.pushed}")
    print({table: counters["rows"] for table, counters in embeddings.statistics().items()})


if __name__ == "__main__":
    main()
