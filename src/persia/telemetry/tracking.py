"""Trackers of a run: TensorBoard, MLflow, and Weights & Biases."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from persia.errors import ConfigError, MissingExtraError
from persia.schema.checks import TaggedRecord
from persia.telemetry.logs import get_logger

__all__ = ["BackgroundTracker", "MLflow", "TensorBoardTracker", "Tracker", "Wandb"]

LOG = get_logger("persia.tracking")

BEGIN_SECONDS = 60.0
"""Time to open a run."""

END_SECONDS = 30.0
"""Time to write a point at the end of a call of `fit`."""

MAX_WAITING = 1_000
"""Points that can wait for a tracker; later ones are lost."""


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
        uri: tracking server or database, such as "http://host:5000" or "sqlite:///mlflow.db"; None for the value of
            MLFLOW_TRACKING_URI. Checkpoints record it, so pass passwords in the environment.
        experiment: name of the experiment, which is created if it does not exist.
        name: name of the run; None for a random one.
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
        name: name of the run; None for a random one.
        directory: where wandb writes; None for the working directory.
    """

    project: str | None = None
    name: str | None = None
    directory: str | None = None

    def tracker(self) -> Tracker:
        """Makes the tracker; imports and opens nothing."""
        return _WandbTracker(self)


class BackgroundTracker:
    """Calls a tracker in a thread, so that training does not wait for a slow or unreachable server.

    MLflow's client, for example, retries a request for minutes before it gives up. The thread runs from `begin` to the
    end of `end`, and does not keep the process alive.

    Args:
        tracker: the tracker; its errors become warnings once it has opened the run.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._name = type(tracker).__name__.strip("_")
        self._calls: _Calls = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._opened = False
        self._lost = 0

    def begin(self, parameters: Mapping[str, str]) -> None:
        """See `Tracker`. The first call blocks until the run is open.

        Raises:
            ConfigError: the tracker cannot open the run, or did not answer in time.
            MissingExtraError: its package is not installed.
        """
        self._calls = SimpleQueue()
        previous = self._thread  # May still make calls that the last `end` did not wait for.
        self._thread = threading.Thread(
            target=_run, args=(self._calls, previous), name=f"persia-{self._name}", daemon=True
        )
        self._thread.start()
        opened = self._call(partial(self._tracker.begin, parameters))
        if self._opened:
            opened.add_done_callback(self._warn)
            return
        try:
            error = opened.exception(BEGIN_SECONDS)
        except TimeoutError:
            error = ConfigError(
                f"{self._name} has not opened a run within {BEGIN_SECONDS:g} s; correct its address, or remove it "
                "from trackers.",
                field="trackers",
            )
        if error is not None:
            self._calls.put(None)
            raise error
        self._opened = True

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Tracker`. Does not block."""
        if self._calls.qsize() >= MAX_WAITING:
            self._lost += 1
            return
        self._call(partial(self._tracker.log, values, step)).add_done_callback(self._warn)

    def end(self, failed: bool) -> None:
        """See `Tracker`. Blocks until the tracker has taken all points, or has taken none for a while."""
        ended = self._call(partial(self._tracker.end, failed))
        ended.add_done_callback(self._warn)
        self._calls.put(None)
        if self._lost:
            LOG.warning("%s took metrics too slowly; points lost: %d.", self._name, self._lost)
            self._lost = 0
        waiting = self._calls.qsize()
        while not wait([ended], END_SECONDS).done:
            before, waiting = waiting, self._calls.qsize()
            if waiting == before:
                LOG.warning(
                    "%s has not taken the last metrics within %g s; they are lost if this process ends now.",
                    self._name, END_SECONDS,
                )  # fmt: skip
                return

    def _call(self, call: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        self._calls.put((call, done))
        return done

    def _warn(self, done: Future[None]) -> None:
        """Warns of an error: an unreachable server must not end the training."""
        if (error := done.exception()) is not None:
            LOG.warning("%s: metrics were lost (%s).", self._name, error)


_Calls = SimpleQueue[tuple[Callable[[], None], Future[None]] | None]
"""Calls to make, with the futures of their results; None ends the queue."""


def _run(calls: _Calls, previous: threading.Thread | None) -> None:
    if previous is not None:
        previous.join()
    while (item := calls.get()) is not None:
        call, done = item
        try:
            call()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)


class TensorBoardTracker:
    """Writes events for TensorBoard (needs the extra `tensorboard`).

    Args:
        directory: folder of the event files.
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
                'log_dir needs TensorBoard: pip install "persia-recsys[tensorboard]", or leave log_dir out.',
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
    """Records a run through MLflow's client, which keeps no global state in the process."""

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
                'A tracker of the kind mlflow needs MLflow: pip install "persia-recsys[mlflow]", or leave it out of '
                "trackers.",
                extra="mlflow",
            ) from error
        name = self._config.experiment
        try:
            client = MlflowClient(self._config.uri)
            existing = client.get_experiment_by_name(name)
            experiment = existing.experiment_id if existing is not None else client.create_experiment(name)
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
    """Records a run through a wandb object; a later `begin` resumes it by its id."""

    def __init__(self, config: Wandb) -> None:
        self._config = config
        self._run: Any = None

    def begin(self, parameters: Mapping[str, str]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError(
                'A tracker of the kind wandb needs wandb: pip install "persia-recsys[wandb]", or leave it out of '
                "trackers.",
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
