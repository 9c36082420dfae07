"""The Trainer: fit, evaluate, save, resume."""

import os
import tempfile

import torch

import persia

ROWS = 40_000 if os.environ.get("PERSIA_EXAMPLE_SMALL") else 2_000_000


def make_model(schema: persia.Schema) -> torch.nn.Module:
    torch.manual_seed(0)
    return persia.nn.models.DeepFM(schema, hidden=(128, 64))


def make_optimizer(parameters):
    return torch.optim.Adam(parameters, 1e-3)


def main() -> None:
    train = persia.data.synthetic(ROWS, id_features=8, ids_per_feature=1_000, batch_size=1024)
    test = persia.data.synthetic(50_000, id_features=8, ids_per_feature=1_000, batch_size=4096).batches(epoch=99)
    trainer = persia.Trainer(
        make_model(train.schema),
        train.schema,
        optimizer=make_optimizer,
        embedding_optimizer=persia.optim.Adagrad(lr=0.05, schedule=persia.Schedule(warmup_steps=100)),
        mode=persia.modes.Hybrid("auto"),
    )
    result = trainer.fit(train, eval_data=test)
    assert result.evaluation is not None
    print(f"{result.rows_per_second:,.0f} rows/s, progressive AUC {result.progressive.auc:.4f}")
    print(f"test AUC {result.evaluation.auc:.4f}, the best possible is {train.best_auc(50_000):.4f}")

    with tempfile.TemporaryDirectory() as directory:
        trainer.save(directory)
        resumed = persia.Trainer.resume(directory, make_model(train.schema), optimizer=make_optimizer)
        resumed.fit(train, epochs=2, max_steps=20)
        print(f"resumed at step {result.global_step}, now at {resumed.global_step}")


if __name__ == "__main__":
    main()
