"""Lightning trains a network and its tables, checkpoints hold both. Needs `pip install "persia-recsys[lightning]"`."""

import os
import tempfile
import warnings

import lightning.pytorch as pl
import torch

import persia
from persia.interop.lightning import PersiaCallback, PrefetchLoader, RecommenderModule

ROWS = 20_000 if os.environ.get("PERSIA_EXAMPLE_SMALL") else 500_000
warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Of torch, for Lightning 2.6.


def module(schema: persia.Schema) -> RecommenderModule:
    embeddings = persia.nn.EmbeddingCollection(
        schema, optimizer=persia.optim.Adagrad(lr=0.05), mode=persia.modes.Hybrid(4)
    )
    network = persia.nn.models.DeepFM(schema)
    return RecommenderModule(network, embeddings, optimizer=lambda params: torch.optim.Adam(params, 1e-3))


def main() -> None:
    torch.manual_seed(0)
    train = persia.data.synthetic(ROWS, id_features=4, ids_per_feature=1_000, dense_features=2, batch_size=512)
    test = persia.data.synthetic(ROWS // 4, id_features=4, ids_per_feature=1_000, dense_features=2, batch_size=512)
    model = module(train.schema)
    with tempfile.TemporaryDirectory() as folder:
        best = pl.callbacks.ModelCheckpoint(folder, monitor="val_auc", mode="max")
        options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(max_epochs=2, callbacks=[best, PersiaCallback()], num_sanity_val_steps=0, **options)
        trainer.fit(model, PrefetchLoader(model.embeddings, train), PrefetchLoader(model.embeddings, test))
        print(f"{model.embeddings.global_step} steps, staleness {model.embeddings.staleness}")

        # As a new process would: the network and the rows of the best epoch.
        again = module(train.schema)
        tester = pl.Trainer(callbacks=[best, PersiaCallback()], **options)
        (figures,) = tester.test(again, PrefetchLoader(again.embeddings, test), ckpt_path=best.best_model_path)
        assert abs(figures["test_auc"] - float(best.best_model_score)) < 1e-3
        print(f"test AUC {figures['test_auc']:.4f}")


if __name__ == "__main__":
    main()
