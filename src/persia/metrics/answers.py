"""`Answers`: what the logits of a schema's labels stand for, such as probabilities, values and classes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from persia.schema import Label, Schema
from persia.schema.labels import label as plain_label
from persia.schema.losses import BPR, JRC, EntireSpace, Hinge, ListwiseSoftmax, Poisson, Tweedie
from persia.types import Floats

__all__ = [
    "AnswerColumns",
    "AnswerKind",
    "Answers",
    "answers_of",
    "binary_scores",
    "class_log_probabilities",
    "only_ranks",
    "probabilities_of",
    "ranking_scores",
    "single_values",
    "values_of",
]

AnswerKind: TypeAlias = Literal["probability", "score", "value", "classes"]
Doubles = NDArray[np.float64]


class AnswerColumns(NamedTuple):
    """Description of the answers for one label.

    Attributes:
        label: name of the label.
        kind: "probability"; "score", which only ranks; "value", in the unit of the label; "classes", a probability for
            each.
        unit: unit of values; None if none is declared.
        classes: names of the classes; empty for other kinds.
        columns: the columns of the answers of this label.
    """

    label: str
    kind: AnswerKind
    unit: str | None
    classes: tuple[str, ...]
    columns: slice


class Answers:
    """Converts logits to answers: for each label one column, or one for each of its classes.

    Args:
        labels: the labels, in the order of their logits; a string is a binary label.
        log_odds: False if the logits of binary labels only rank, as those of `TwoTower`, or if answers are to rank:
            probabilities do not keep the order, as all large log-odds become 1.

    Attributes:
        of: description of the answers, in the order of the labels.
        columns: name of each column: "watch_time", or with classes "genre:rock", "genre:jazz".
        name: "probabilities" or "scores" if the answers of all labels are; else "predictions".
    """

    def __init__(self, labels: Sequence[str | Label], *, log_odds: bool = True) -> None:
        self._labels = tuple(plain_label(each) if isinstance(each, str) else each for each in labels)
        self._slices = _slices(self._labels)
        self._plain = all(each.kind == "binary" and not _combines(each) for each in self._labels)
        columns: list[str] = []
        of: list[AnswerColumns] = []
        for each in self._labels:
            kind = _kind(each, log_odds)
            names = each.class_names if kind == "classes" else ()
            place = slice(len(columns), len(columns) + max(1, len(names)))
            columns += [f"{each.name}:{name}" for name in names] or [each.name]
            of.append(AnswerColumns(each.name, kind, each.unit, names, place))
        self.of = tuple(of)
        self.columns = tuple(columns)
        kinds = {answer.kind for answer in of}
        self.name = {frozenset({"probability"}): "probabilities", frozenset({"score"}): "scores"}.get(
            frozenset(kinds), "predictions"
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the labels."""
        return tuple(each.name for each in self._labels)

    def answers(self, logits: Floats) -> Floats:
        """Returns the answers, float32 `[rows, columns]`.

        Args:
            logits: float32 `[rows, Schema.outputs]`.
        """
        if self._plain and self.name != "predictions":  # The columns of logits are those of the answers.
            return probabilities_of(logits) if self.name == "probabilities" else logits
        answers = np.empty((len(logits), len(self.columns)), np.float32)
        for each, answer in zip(self._labels, self.of, strict=True):
            if each.kind == "binary":
                scores = binary_scores(self._labels, each, logits)
                columns = probabilities_of(scores) if answer.kind == "probability" else scores
            elif answer.kind == "classes":
                columns = np.exp(class_log_probabilities(each, logits[:, self._slices[each.name]]))
            else:
                columns = values_of(each, logits[:, self._slices[each.name]][:, 0])
            answers[:, answer.columns] = columns if columns.ndim == 2 else columns[:, None]
        return answers

    def by_label(self, answers: Floats) -> dict[str, Floats]:
        """Returns the answers of each label as views, `[rows]`, or `[rows, classes]`.

        Args:
            answers: `[rows, columns]`.
        """
        return {
            answer.label: answers[:, answer.columns] if answer.classes else answers[:, answer.columns.start]
            for answer in self.of
        }


def answers_of(schema: Schema, *, log_odds: bool = True) -> Answers:
    """Returns the answers of a schema's labels; see `Answers`."""
    return _answers_of(schema.targets, log_odds)


@functools.lru_cache(maxsize=64)
def _answers_of(labels: tuple[Label, ...], log_odds: bool) -> Answers:
    return Answers(labels, log_odds=log_odds)


def probabilities_of(logits: Floats) -> Floats:
    """Returns probabilities, float32, from log-odds, float32, both of any shape.

    They do not keep the order: all log-odds above 17 give 1.
    """
    with np.errstate(over="ignore"):  # exp(-logit) of a large negative logit: the probability is 0.
        return (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)


def only_ranks(label: Label) -> bool:
    """Returns whether the loss of a label compares samples only, so that its logit is a score without a scale."""
    return isinstance(label.effective_loss, (BPR, Hinge, ListwiseSoftmax))


def values_of(label: Label, logits: Floats) -> Floats:
    """Returns the values that logits `[rows]` of a regression or count stand for: themselves, or their exponentials.

    A Poisson or Tweedie loss fits the logarithm of the mean (McCullagh and Nelder, Generalized Linear Models, 1989).
    """
    if not isinstance(label.effective_loss, (Poisson, Tweedie)):
        return logits
    with np.errstate(over="ignore"):  # Infinite, which callers refuse.
        return np.exp(logits)


def binary_scores(labels: tuple[Label, ...], label: Label, logits: Floats) -> Floats:
    """Returns one number per row by which a binary label ranks, float32 `[rows]`: log-odds, unless it only ranks.

    - JRC: the difference of both logits, as the softmax of two logits is the sigmoid of their difference.
    - EntireSpace: the log-odds of the product of probabilities. With p = 1 / (1 + e^-a) and q = 1 / (1 + e^-b) the odds
      of p q are 1 / (e^-a + e^-b + e^-(a + b)).

    Args:
        labels: all labels, in the order of their logits.
        label: one of them, binary.
        logits: float32 `[rows, outputs]`.
    """
    own = logits[:, _slices(labels)[label.name]]
    if isinstance(label.loss, JRC):
        return own[:, 1] - own[:, 0]
    if not isinstance(label.loss, EntireSpace):
        return own[:, 0]
    through = next(each for each in labels if each.name == label.loss.through)
    a, b = -binary_scores(labels, through, logits).astype(np.float64), -own[:, 0].astype(np.float64)
    return (-np.logaddexp(np.logaddexp(a, b), a + b)).astype(np.float32)


def ranking_scores(labels: tuple[Label, ...], label: Label, logits: Floats) -> Floats:
    """Returns one number per row by which a label ranks, float32 `[rows]`: of an ordinal one its expected class number.

    Args:
        labels: all labels, in the order of their logits.
        label: one of them, not multiclass.
        logits: float32 `[rows, outputs]`.
    """
    if label.kind == "binary":
        return binary_scores(labels, label, logits)
    own = logits[:, _slices(labels)[label.name]]
    if label.kind != "ordinal":
        return own[:, 0]  # Exponentials, if values are, keep its order.
    expected = np.exp(class_log_probabilities(label, own)) @ np.arange(len(label.class_names))
    return expected.astype(np.float32)


def single_values(labels: tuple[Label, ...], logits: Floats) -> Floats:
    """Returns one number per row and label, whose distribution shows drift, float32 `[rows, labels]`.

    That is the log-odds or score of a binary label, the value of a regression or count, the expected class number of an
    ordinal label, and the most probable class of a multiclass one.

    Args:
        labels: all labels, in the order of their logits.
        logits: float32 `[rows, outputs]`.
    """
    if all(each.kind == "binary" and not _combines(each) for each in labels):
        return logits
    values = np.empty((len(logits), len(labels)), np.float32)
    for k, each in enumerate(labels):
        if each.kind == "multiclass":
            values[:, k] = logits[:, _slices(labels)[each.name]].argmax(axis=1)
        else:
            scores = ranking_scores(labels, each, logits)
            values[:, k] = values_of(each, scores) if each.kind in ("regression", "count") else scores
    return values


def class_log_probabilities(label: Label, logits: Floats) -> Doubles:
    """Returns the logarithms of class probabilities, float64 `[rows, classes]`.

    The classes of an ordinal label have the probabilities P(y > k - 1) - P(y > k), each the sigmoid of a logit. Where
    these rise with k, which independent logits may, the smallest one so far counts.

    Args:
        label: a multiclass or ordinal label.
        logits: float32 `[rows, outputs]` of this label.
    """
    x = logits.astype(np.float64)
    if label.kind == "multiclass":
        x -= x.max(axis=1, keepdims=True)
        normed: Doubles = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
        return normed
    x = np.minimum.accumulate(x, axis=1)
    infinite = np.full((len(x), 1), np.inf)
    high, low = np.hstack([infinite, x]), np.hstack([x, -infinite])  # Class k lies between both.
    with np.errstate(divide="ignore"):  # A class between two equal logits has no probability.
        # log(sigmoid(a) - sigmoid(b)) = log sigmoid(a) + log sigmoid(-b) + log(1 - e^(b - a)), without cancellation.
        between: Doubles = np.log(-np.expm1(low - high)) - np.logaddexp(0.0, -high) - np.logaddexp(0.0, low)
    return between


@functools.lru_cache(maxsize=64)
def _slices(labels: tuple[Label, ...]) -> dict[str, slice]:
    slices: dict[str, slice] = {}
    start = 0
    for each in labels:
        slices[each.name] = slice(start, start + each.outputs)
        start += each.outputs
    return slices


def _combines(label: Label) -> bool:
    """Returns whether a binary label needs other logits than its own, or several."""
    return isinstance(label.loss, (JRC, EntireSpace))


def _kind(label: Label, log_odds: bool) -> AnswerKind:
    if label.class_names:
        return "classes"
    if only_ranks(label):
        return "score"
    if label.kind != "binary":
        return "value"
    return "probability" if log_odds else "score"
