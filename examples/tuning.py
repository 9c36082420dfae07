"""Tune both learning rates and the dimension of embeddings with Optuna; hopeless trials stop early.

    python examples/tuning.py      # Needs pip install "persia-recsys[optuna]".

The progressive AUC scores each batch before it is trained, so a trial can be judged while it trains, without
held-out data. `persia train CONFIG --sweep` does the same for a configuration.
"""

import os

import optuna
import torch

import persia

SMALL = "PERSIA_EXAMPLE_SMALL" in os.environ
ROWS, TRIALS, STEPS = (25_000, 6, 10) if SMALL else (400_000, 20, 100)


def objective(trial: optuna.Trial) -> float:
    dim = trial.suggest_categorical("dim", [4, 8, 16])
    dense_lr = trial.suggest_float("dense_lr", 1e-4, 1e-2, log=True)
    embedding_lr = trial.suggest_float("embedding_lr", 1e-2, 1.0, log=True)
    train = persia.data.synthetic(ROWS, id_features=6, ids_per_feature=1_000, batch_size=512, dim=dim)
    test = persia.data.synthetic(20_000, id_features=6, ids_per_feature=1_000, batch_size=4096, dim=dim)
    torch.manual_seed(0)
    trainer = persia.Trainer(
        persia.nn.models.DeepFM(train.schema, hidden=(64, 32)),
        train.schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, dense_lr),
        embedding_optimizer=persia.optim.Adagrad(lr=embedding_lr),
        options=persia.TrainerOptions(progress=False),
    )
    while not trainer.finished:
        result = trainer.fit(train, max_steps=STEPS)
        trial.report(result.history.auc, trainer.global_step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return trainer.evaluate(test.batches(epoch=99)).auc


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    study.optimize(objective, n_trials=TRIALS)
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"{TRIALS} trials, {pruned} of them stopped early")
    print(f"best: test AUC {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
