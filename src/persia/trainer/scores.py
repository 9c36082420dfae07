"""`TrainingScores`: metrics of the logits of training, of one call of `fit` and of all calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from persia.metrics import AUC, Metrics, merged_metrics
from persia.metrics.counts import LabelCounts, label_metrics, rows_of, terms_of
from persia.metrics.result import headlines, mean
from persia.schema import Label
from persia.types import Floats, Int32Array

__all__ = ["PARTS", "ScoresState", "TrainingScores", "WindowScores"]

ScoresState = dict[str, Any]
"""State of `TrainingScores`: the state of each of `PARTS` by name, `repeats` and `again`."""

PARTS: Final = ("earlier", "progressive", "training")


_Window: TypeAlias = AUC | LabelCounts


class WindowScores(NamedTuple):
    """Metrics of the rows since the last point of the curves.

    Attributes:
        auc: mean over the binary labels that have both classes.
        others: metric to watch of each other label, by "LABEL:METRIC".
    """

    auc: float
    others: Mapping[str, float]


class TrainingScores:
    """Metrics of the training logits on one NN worker. The training thread uses it.

    Args:
        labels: the labels; a string is a binary one.
    """

    def __init__(self, labels: Sequence[str | Label]) -> None:
        self._labels = list(labels)
        self.earlier = Metrics(labels)
        """Progressive metrics of earlier calls; on rank 0 of all NN workers before a resume or a restart."""
        self.progressive = Metrics(labels)
        """Rows of this call that were new to the model: each was scored before it was ever trained."""
        self.training = Metrics(labels)
        """Rows of this call in later passes over the data, which the model has seen."""
        self.repeats = True
        """Whether a later pass has the rows of the first one."""
        self.again = False
        """Whether this call trains data again that were trained before, from their first pass on."""
        self.seen = False
        """Whether the last rows were seen before."""
        self._window: list[_Window] = []
        """Of the rows since the last point of the curves, by label; empty if there are no curves."""

    def begin(self, data: object) -> None:
        """Begins a call of `fit`.

        Args:
            data: its attribute `new_rows_each_epoch` says whether each pass has its own rows.
        """
        self.again = False
        self.earlier = self.history()
        self.progressive, self.training = Metrics(self._labels), Metrics(self._labels)
        self.repeats, self.seen = not getattr(data, "new_rows_each_epoch", False), False
        self._window = []

    def update(
        self,
        logits: Floats,
        labels: Floats,
        day: Int32Array | None,
        epoch: int,
        weights: Floats | None = None,
    ) -> None:
        """Adds a batch of pass `epoch` over the data.

        Args:
            logits: `[batch, outputs]`.
            labels: `[batch, labels]`.
            day: days of its rows `[batch]`, or None.
            epoch: number of the pass.
            weights: `[batch]`; None weighs each row 1.
        """
        seen = self.repeats and (epoch > 0 or self.again)
        if seen != self.seen:  # A window has rows of one kind.
            self.seen = seen
            if self._window:
                self.begin_window()
        self.of_call.update(logits, labels, day, weights)
        targets = self.of_call.targets
        for k, window in enumerate(self._window):
            rows = rows_of(targets, k, logits, labels, weights)
            if isinstance(window, AUC):
                window.add(*rows)
            else:
                window.add(*rows, terms_of(targets[k], *rows))

    @property
    def of_call(self) -> Metrics:
        """The rows of this call that are like the last ones: new to the model, or seen before."""
        return self.training if self.seen else self.progressive

    def begin_window(self) -> None:
        """Begins a window: the rows from now on."""
        self._window = [AUC() if each.kind == "binary" else label_metrics(each, 2) for each in self.progressive.targets]

    def end_window(self) -> WindowScores:
        """Begins another window; returns the metrics of the last one."""
        pairs = list(zip(self.progressive.labels, self._window, strict=True)) if self._window else []
        auc = mean(window.result() for _, window in pairs if isinstance(window, AUC))
        others = headlines({name: window.figures() for name, window in pairs if not isinstance(window, AUC)})
        self.begin_window()
        return WindowScores(auc, others)

    def history(self) -> Metrics:
        """Returns the progressive metrics of all calls, this one included."""
        total = Metrics(self._labels)
        total.merge(self.earlier)
        total.merge(self.progressive)
        return total

    def state_dict(self, gather: Callable[[bytes], list[bytes]]) -> ScoresState:
        """Returns the state of all NN workers, the same on each. Blocks until all have called it."""
        parts = {part: merged_metrics(getattr(self, part), gather).state_dict() for part in PARTS}
        return {**parts, "repeats": self.repeats, "again": self.again}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues the call of a state. Rank 0 loads what all NN workers have counted."""
        for part in PARTS:
            getattr(self, part).load_state_dict(state[part])

    def load_history(self, state: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Loads the progressive metrics of all calls up to a checkpoint, and begins with those."""
        self.earlier.load_state_dict(state)
        self.progressive, self.training = Metrics(self._labels), Metrics(self._labels)
