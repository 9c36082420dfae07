"""Trackers of a run: TensorBoard, MLflow, and Weights & Biases."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

from persia.errors import ConfigError, MissingExtraError
from persia.schema.checks import TaggedRecord

__all__ = ["MLflow", "TensorBoardTracker", "Tracker", "Wandb"]


class Tracker(Protocol):
    """Receives the metrics of a run. `Trainer.fit` begins and ends it, once for each call."""

    def begin(self, parameters: Mapping[str, str]) -> None:
        """Opens the run, or the same run again; `parameters` describe it."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Records values, such as `train/auc`, at a global step."""

    def end(self, failed: bool) -> None:
        """Writes all that was recorded, and marks the run as finished or failed."""


class MLflow(TaggedRecord, frozen=True, tag="mlflow"):
    """Tracks a run with MLflow (needs the extra `mlflow`).

    Args:
        uri: tracking server or database, such as "http://host:5000" or "sqlite:///mlflow.db"; None for that of
            MLFLOW_TRACKING_URI. Checkpoints record it, so leave passwords to the environment.
        experiment: name of the experiment, which is created if there is none.
        name: name of the run; MLflow draws one by default.
    """

    uri: str | None = None
    experiment: str = "Default"
    name: str | None = None

    def tracker(self) -> Tracker:
        """Makes the tracker; imports and opens nothing."""
        return _MLflowTracker(self)


class Wandb(TaggedRecord, frozen=True, tag="wandb"):
    """Tracks a run with Weights & Biases (needs the extra `wandb`).

    `wandb login`, or WANDB_API_KEY in the environment of each host, gives access. WANDB_MODE=offline writes files only.

    Args:
        project: name of the project; None for wandb's own default.
        name: name of the run; wandb draws one by default.
        directory: where wandb writes; None for the working directory.
    """

    project: str | None = None
    name: str | None = None
    directory: str | None = None

    def tracker(self) -> Tracker:
        """Makes the tracker; imports and opens nothing."""
        return _WandbTracker(self)


class TensorBoardTracker:
    """Writes events for TensorBoard (needs the extra `tensorboard`).

    Args:
        directory: where they go.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._writer: Any = None

    def begin(self, parameters: Mapping[str, str]) -> None:
        """See `Tracker`. Parameters are not written.

        Raises:
            MissingExtraError: TensorBoard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(
                'log_dir needs TensorBoard: pip install "persia[tensorboard]", or leave log_dir out.',
                extra="tensorboard",
            ) from error
        writer: Any = SummaryWriter
        self._writer = writer(self._directory)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self, failed: bool) -> None:
        """See `Tracker`."""
        self._writer.close()


class _MLflowTracker:
    """Records a run through MLflow's client, which has no state of the process."""

    def __init__(self, config: MLflow) -> None:
        self._config = config
        self._client: Any = None
        self._run = ""

    def begin(self, parameters: Mapping[str, str]) -> None:
        if self._client is not None:
            self._client.update_run(self._run, status="RUNNING")
            return
        try:
            from mlflow.entities import Param
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise MissingExtraError(
                'A tracker of the kind mlflow needs MLflow: pip install "persia[mlflow]", or leave it out of trackers.',
                extra="mlflow",
            ) from error
        name = self._config.experiment
        try:
            client = MlflowClient(self._config.uri)
            found = client.get_experiment_by_name(name)
            experiment = found.experiment_id if found is not None else client.create_experiment(name)
            self._run = client.create_run(experiment, run_name=self._config.name).info.run_id
            client.log_batch(self._run, params=[Param(key, value[:500]) for key, value in parameters.items()])
        except MlflowException as error:
            raise ConfigError(
                f"MLflow cannot open a run in the experiment {name!r} of {self._config.uri or 'its default store'}: "
                f"{error}. Correct uri and experiment of the tracker.",
                field="trackers",
            ) from error
        self._client = client

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        known = [Metric(name, value, now, step) for name, value in values.items() if math.isfinite(value)]
        self._client.log_batch(self._run, metrics=known)

    def end(self, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


class _WandbTracker:
    """Records a run through an object of wandb; a later `begin` resumes it by its id."""

    def __init__(self, config: Wandb) -> None:
        self._config = config
        self._run: Any = None

    def begin(self, parameters: Mapping[str, str]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError(
                'A tracker of the kind wandb needs wandb: pip install "persia[wandb]", or leave it out of trackers.',
                extra="wandb",
            ) from error
        config = self._config
        try:
            self._run = wandb.init(
                project=config.project,
                name=config.name,
                dir=config.directory,
                config=dict(parameters),
                id=self._run.id if self._run is not None else None,
                resume="allow",
                reinit="create_new",
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"wandb cannot open a run: {error}. Run `wandb login`, or set WANDB_MODE=offline.", field="trackers"
            ) from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def end(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
