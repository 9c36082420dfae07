"""Losses of labels, weighted and masked: the losses that `persia.schema` declares, as functions of tensors.

`schema_loss` computes the loss of a schema. Losses of a row return one number per row, losses within groups (`bpr`,
`hinge`, `listwise_softmax`, `jrc`) their mean. All keep the dtype of the logits, and are finite for finite logits,
except where a mean is an exponential (`poisson`, `tweedie`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from persia.checks import check_kind
from persia.errors import DataError
from persia.nn.targets import Targets
from persia.nn.task_weights import UncertaintyWeights
from persia.schema import Label, Schema
from persia.schema import losses as declared

__all__ = [
    "SchemaLoss",
    "UncertaintyWeights",
    "binary_cross_entropy",
    "bpr",
    "entire_space",
    "focal",
    "hinge",
    "huber",
    "jrc",
    "listwise_softmax",
    "ordinal",
    "poisson",
    "schema_loss",
    "softmax",
    "squared",
    "squared_probability",
    "tweedie",
    "weighted_mean",
]

# --- losses of a row ----------------------------------------------------------------------------------------------


def binary_cross_entropy(logits: Tensor, labels: Tensor, positive_weight: float = 1.0) -> Tensor:
    """Returns the binary cross-entropy of the sigmoid, as `torch.nn.BCEWithLogitsLoss`.

    Args:
        logits: `[batch]`.
        labels: `[batch]`, in [0, 1].
        positive_weight: factor on the term of positive labels.
    """
    weight = None if positive_weight == 1 else logits.new_full((), positive_weight)
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none", pos_weight=weight)


def focal(logits: Tensor, labels: Tensor, gamma: float = 2.0, alpha: float | None = None) -> Tensor:
    """Returns the focal loss (Lin et al., ICCV 2017, arXiv 1708.02002, equation 5).

    A label between 0 and 1 is a mixture of the loss of a positive and of a negative one. Powers are computed as
    exponentials of log-sigmoids, so that `gamma` below 1 has a gradient everywhere.

    Args:
        logits: `[batch]`.
        labels: `[batch]`, in [0, 1].
        gamma: exponent of the probability of the other class; 0 is binary cross-entropy.
        alpha: weight of positive labels, 1 - alpha of negative ones; None weighs both 1.
    """
    log_p, log_q = F.logsigmoid(logits), F.logsigmoid(-logits)
    positive, negative = -labels * torch.exp(gamma * log_q) * log_p, -(1 - labels) * torch.exp(gamma * log_p) * log_q
    return positive + negative if alpha is None else alpha * positive + (1 - alpha) * negative


def squared(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the squared error, as `torch.nn.MSELoss`: `[batch]`."""
    return F.mse_loss(logits, labels, reduction="none")


def squared_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the squared error of the sigmoid (Brier, Monthly Weather Review 1950), for binary labels: `[batch]`."""
    return F.mse_loss(torch.sigmoid(logits), labels, reduction="none")


def huber(logits: Tensor, labels: Tensor, delta: float = 1.0) -> Tensor:
    """Returns the Huber loss (Annals of Mathematical Statistics 1964), as `torch.nn.HuberLoss`: `[batch]`."""
    return F.huber_loss(logits, labels, reduction="none", delta=delta)


def poisson(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the Poisson negative log-likelihood of log-rates, as `torch.nn.PoissonNLLLoss`: `[batch]`.

    Terms of the label alone are left out. A logit above 88 overflows float32.
    """
    return F.poisson_nll_loss(logits, labels, log_input=True, reduction="none")


def tweedie(logits: Tensor, labels: Tensor, power: float = 1.5) -> Tensor:
    """Returns half the Tweedie deviance of log-means (Jorgensen, JRSS B 1987): `[batch]`.

    Terms of the label alone are left out, as in XGBoost's `reg:tweedie` and LightGBM's `tweedie`.

    Args:
        logits: logarithms of means, `[batch]`.
        labels: `[batch]`, from 0 on.
        power: of the variance, between 1 (Poisson) and 2 (gamma).
    """
    return torch.exp((2 - power) * logits) / (2 - power) - labels * torch.exp((1 - power) * logits) / (1 - power)


def softmax(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the softmax cross-entropy, as `torch.nn.CrossEntropyLoss`: `[batch]`.

    Args:
        logits: `[batch, classes]`.
        labels: numbers of classes, `[batch]`.
    """
    return F.cross_entropy(logits, labels.long(), reduction="none")


def ordinal(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum of binary cross-entropies of "above class k" (CORAL: Cao et al., 2020, arXiv 1901.07884).

    Each class but the last has its own logit, as in Frank and Hall (ECML 2001).

    Args:
        logits: `[batch, classes - 1]`.
        labels: numbers of classes, `[batch]`.
    """
    above = labels.unsqueeze(1) > torch.arange(logits.shape[1], device=logits.device)
    return F.binary_cross_entropy_with_logits(logits, above.to(logits.dtype), reduction="none").sum(1)


def entire_space(logits: Tensor, through: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy of a product of two probabilities (ESMM: Ma et al., SIGIR 2018, arXiv 1804.07931).

    With a = `through` and b = `logits`: the probability is p = sigmoid(a) sigmoid(b), and 1 - p is sigmoid(-a) +
    sigmoid(a) sigmoid(-b), whose logarithm is computed from log-sigmoids.

    Args:
        logits: of the conversion, given the click: `[batch]`.
        through: logits of the click: `[batch]`.
        labels: whether both happened, `[batch]`.
    """
    log_a = F.logsigmoid(through)
    log_p = log_a + F.logsigmoid(logits)
    log_q = torch.logaddexp(F.logsigmoid(-through), log_a + F.logsigmoid(-logits))
    return -(labels * log_p + (1 - labels) * log_q)


# --- losses within groups -----------------------------------------------------------------------------------------


def bpr(logits: Tensor, labels: Tensor, groups: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns the mean of -log sigmoid(s_i - s_j) over pairs with label i > label j (BPR: Rendle et al., UAI 2009).

    Args:
        logits: scores, `[batch]`.
        labels: `[batch]`.
        groups: integers, `[batch]`; only rows of one group are pairs.
        weights: `[batch]`: a pair has the weight of its row with the greater label, as in TensorFlow Ranking.

    Returns:
        `[]`; 0 if there is no pair.
    """
    better, worse = _pairs(labels, groups)
    losses = -F.logsigmoid(logits[better] - logits[worse])
    return weighted_mean(losses, None if weights is None else weights[better])


def hinge(logits: Tensor, labels: Tensor, groups: Tensor, weights: Tensor | None = None, margin: float = 1.0) -> Tensor:
    """Returns the mean of max(0, margin - (s_i - s_j)) over pairs with label i > label j (Joachims, KDD 2002).

    Arguments and weights are as in `bpr`.
    """
    better, worse = _pairs(labels, groups)
    losses = F.relu(margin - (logits[better] - logits[worse]))
    return weighted_mean(losses, None if weights is None else weights[better])


def listwise_softmax(
    logits: Tensor,
    labels: Tensor,
    groups: Tensor,
    weights: Tensor | None = None,
    known: Tensor | None = None,
    *,
    graded: bool = False,
) -> Tensor:
    """Returns the mean over groups of the cross-entropy between labels and softmax of a group's scores.

    Rows of a group compete by softmax(scores), as in ListNet (Cao et al., ICML 2007, top one). The target is each
    row's share of the labels of its group, as in Bruch et al. (ICTIR 2019); groups without a positive label are left
    out.

    Args:
        logits: scores, `[batch]`.
        labels: `[batch]`, from 0 on, unless `graded`.
        groups: integers, `[batch]`.
        weights: `[batch]`: the term of a row is multiplied by its weight, and a group counts as much as the weights of
            its positive rows, as in TensorFlow Ranking. Rows of weight 0 still compete.
        known: bool `[batch]`: rows that take part; None for all.
        graded: whether targets are softmax(labels), as in ListNet itself, for labels that may be negative.

    Returns:
        `[]`; 0 if there is no group.
    """
    segments = _segments(groups)
    log_p = _log_softmax(logits, segments, known)
    if graded:
        shares = _log_softmax(labels, segments, known).exp()
    else:
        labels = labels if known is None else labels.where(known, 0)
        totals = torch.zeros_like(labels).index_add(0, segments, labels)[segments]
        shares = labels / totals.where(totals > 0, 1)
    if known is not None:
        shares = shares.where(known, 0)
    return weighted_mean(-log_p, shares if weights is None else shares * weights)


def jrc(
    logits: Tensor,
    labels: Tensor,
    groups: Tensor,
    weights: Tensor | None = None,
    known: Tensor | None = None,
    alpha: float = 0.6,
) -> Tensor:
    """Returns the loss of joint ranking and calibration (JRC: Sheng et al., KDD 2023, arXiv 2208.06164).

    alpha times the softmax cross-entropy of both logits of a row, whose softmax is the calibrated probability, plus
    1 - alpha times its generative counterpart: -log of the softmax over the rows of its group, of the logit of its own
    class.

    Args:
        logits: of the negative and the positive class, `[batch, 2]`.
        labels: `[batch]`, in [0, 1].
        groups: integers, `[batch]`: the contexts of the paper.
        weights: of the terms of rows, `[batch]`. Rows of weight 0 still compete.
        known: bool `[batch]`: rows that take part; None for all.
        alpha: share of the calibration term.

    Returns:
        `[]`; the mean over rows.
    """
    segments = _segments(groups)
    classes = torch.stack([1 - labels, labels], 1)
    calibration = -(classes * F.log_softmax(logits, 1)).sum(1)
    log_p = torch.stack([_log_softmax(column, segments, known) for column in logits.unbind(1)], 1)
    ranking = -(classes * log_p).sum(1)
    if known is not None:
        weights = known.to(logits.dtype) if weights is None else weights * known
    return weighted_mean(alpha * calibration + (1 - alpha) * ranking, weights)


# --- parts --------------------------------------------------------------------------------------------------------


def weighted_mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns sum(weights * values) / sum(weights), with gradients of `values`; 0 if the weights are all 0.

    Args:
        values: `[n]`, finite also where the weight is 0.
        weights: `[n]`, from 0 on; None weighs all 1.
    """
    if weights is None:
        return values.mean() if len(values) else values.sum()
    total = weights.sum()
    return (values * weights).sum() / total.where(total > 0, 1)


def _segments(groups: Tensor) -> Tensor:
    """Returns the number of each row's group, int64 `[batch]` from 0 on, without waiting for a device."""
    ordered, order = torch.sort(groups, stable=True)
    numbers = F.pad(ordered[1:] != ordered[:-1], (min(len(groups), 1), 0)).cumsum(0)
    return torch.empty_like(numbers).scatter(0, order, numbers)


def _log_softmax(scores: Tensor, segments: Tensor, known: Tensor | None) -> Tensor:
    """Returns the log-softmax of scores `[batch]` within segments, and 0 for rows that are not known."""
    if known is not None:
        scores = scores.masked_fill(~known, -math.inf)
    highest = torch.full_like(scores, -math.inf).scatter_reduce(0, segments, scores.detach(), "amax")[segments]
    shifted = scores - highest
    if known is not None:
        shifted = shifted.where(known, 0)  # Else NaN, where no row of a segment is known.
    terms = shifted.exp() if known is None else shifted.exp() * known
    sums = torch.zeros_like(terms).index_add(0, segments, terms)[segments]
    return shifted - (sums if known is None else sums.where(known, 1)).log()


def _pairs(labels: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the pairs of rows of a group with different labels, int64 `[pairs]` each, the greater label first.

    Waits for a device: their number is not known before. A row whose label is NaN is in no pair.
    """
    ordered, order = torch.sort(groups, stable=True)
    counts = torch.unique_consecutive(ordered, return_counts=True)[1]
    own = counts.repeat_interleave(counts)  # Rows of each row's group.
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    left = torch.arange(len(groups), device=groups.device).repeat_interleave(own)
    begin = own.cumsum(0) - own  # The first pair of each row.
    right = torch.arange(len(left), device=groups.device) - begin[left] + first[left]
    better, worse = order[left], order[right]
    differ = labels[better] > labels[worse]
    return better[differ], worse[differ]


# --- the loss of a schema -----------------------------------------------------------------------------------------


class SchemaLoss:
    """The loss of a schema's labels: the mean over labels of their losses, each times `Label.weight`.

    The loss of a label is the mean over the rows of the batch that have it, weighted by `Targets.weights`. It is 0,
    with gradients of 0, if no row has it, or all weights are 0. For labels without rules this is
    `torch.nn.functional.binary_cross_entropy_with_logits`.

    Args:
        schema: declares the labels.
    """

    def __init__(self, schema: Schema) -> None:
        check_kind("schema", schema, Schema, "a persia.Schema")
        self.labels = schema.targets
        self.slices = tuple(schema.output_slices.values())
        self._columns = {label.name: number for number, label in enumerate(self.labels)}
        self._losses = tuple(label.effective_loss for label in self.labels)
        plain = declared.BinaryCrossEntropy()
        self._plain = all(loss == plain for loss in self._losses)
        self._weights = None if all(each.weight == 1 for each in self.labels) else [each.weight for each in self.labels]

    def __call__(
        self, logits: Tensor, targets: Targets | Tensor, task_weights: UncertaintyWeights | None = None
    ) -> Tensor:
        """Returns the loss, `[]`.

        Args:
            logits: `[batch, Schema.outputs]`.
            targets: of the batch; or labels `[batch, labels]`, if none is missing.
            task_weights: combines the losses of labels in place of their mean.

        Raises:
            DataError: a loss needs groups, and the batch has none.
        """
        if not isinstance(targets, Targets):
            targets = Targets(targets)
        if self._plain and self._weights is None and task_weights is None and targets.mask is targets.weights is None:
            return F.binary_cross_entropy_with_logits(logits, targets.labels)
        losses = self.by_label(logits, targets)
        if task_weights is not None:
            result: Tensor = task_weights(losses)
            return result
        if self._weights is not None:
            losses = [weight * loss for weight, loss in zip(self._weights, losses, strict=True)]
        return torch.stack(losses).mean()

    def by_label(self, logits: Tensor, targets: Targets) -> list[Tensor]:
        """Returns the losses of the labels, `[]` each, before `Label.weight`. Arguments are as in a call."""
        return [self._loss_of(number, logits, targets) for number in range(len(self.labels))]

    def _loss_of(self, number: int, logits: Tensor, targets: Targets) -> Tensor:
        label, loss = self.labels[number], self._losses[number]
        own, labels = logits[:, self.slices[number]], targets.labels[:, number]
        known = None if targets.mask is None or label.missing == "error" else targets.mask[:, number]
        if label.needs_groups:
            return _loss_within_groups(label, loss, own, labels, known, targets)
        parts = [own]
        if isinstance(loss, declared.EntireSpace):
            through = self._columns[loss.through]
            parts.append(self._log_odds(through, logits).unsqueeze(1))
            if known is not None:
                known = known | self._never(through, targets)
        weights = targets.weights
        if known is not None:
            weights = known.to(labels.dtype) if weights is None else weights * known
        if weights is not None:  # Values of other rows have to be finite, as 0 * inf is NaN.
            counts = (weights > 0).unsqueeze(1)
            parts = [part.where(counts, 0) for part in parts]
        return weighted_mean(_loss_of_rows(label, loss, parts, labels), weights)

    def _log_odds(self, number: int, logits: Tensor) -> Tensor:
        """Returns the log-odds of a binary label, `[batch]`."""
        own, loss = logits[:, self.slices[number]], self._losses[number]
        if isinstance(loss, declared.JRC):
            return own[:, 1] - own[:, 0]
        if not isinstance(loss, declared.EntireSpace):
            return own[:, 0]
        a, b = -self._log_odds(self._columns[loss.through], logits), -own[:, 0]
        return -torch.logaddexp(torch.logaddexp(a, b), a + b)

    def _never(self, number: int, targets: Targets) -> Tensor:
        """Returns the rows whose label is known to be 0, also as what it goes through is; bool `[batch]`."""
        never = targets.labels[:, number] == 0
        if targets.mask is not None:
            never = never & targets.mask[:, number]
        loss = self._losses[number]
        return (
            never | self._never(self._columns[loss.through], targets)
            if isinstance(loss, declared.EntireSpace)
            else never
        )


def schema_loss(
    schema: Schema, logits: Tensor, targets: Targets | Tensor, task_weights: UncertaintyWeights | None = None
) -> Tensor:
    """Returns the loss of a schema's labels, `[]`, as a `SchemaLoss` that is used once."""
    return SchemaLoss(schema)(logits, targets, task_weights)


def _loss_of_rows(label: Label, loss: declared.Loss, logits: list[Tensor], labels: Tensor) -> Tensor:
    """Returns the loss of each row, `[batch]`.

    Args:
        label: the label.
        loss: its loss.
        logits: of the label, `[batch, outputs]`; for `EntireSpace` also of the label that it goes through.
        labels: `[batch]`.
    """
    match loss:
        case declared.CrossEntropy():
            return softmax(logits[0], labels)
        case declared.OrdinalCrossEntropy():
            return ordinal(logits[0], labels)
    score = logits[0].squeeze(1)
    match loss:
        case declared.BinaryCrossEntropy():
            return binary_cross_entropy(score, labels, loss.positive_weight)
        case declared.Focal():
            return focal(score, labels, loss.gamma, loss.alpha)
        case declared.Squared():
            return squared_probability(score, labels) if label.kind == "binary" else squared(score, labels)
        case declared.Huber():
            return huber(score, labels, loss.delta)
        case declared.Poisson():
            return poisson(score, labels)
        case declared.Tweedie():
            return tweedie(score, labels, loss.power)
        case declared.EntireSpace():
            return entire_space(score, logits[1].squeeze(1), labels)
    raise AssertionError(loss)


def _loss_within_groups(
    label: Label, loss: declared.Loss, logits: Tensor, labels: Tensor, known: Tensor | None, targets: Targets
) -> Tensor:
    """Returns the mean loss within groups, `[]`."""
    groups, weights = targets.groups, targets.weights
    if groups is None:
        raise DataError(
            f"The loss of label {label.name!r} compares samples of a group, but the batch has no groups; set "
            "Schema.group, the column of the groups.",
            column=label.name,
        )
    if isinstance(loss, declared.JRC):
        return jrc(logits, labels, groups, weights, known, loss.alpha)
    score = logits.squeeze(1)
    if isinstance(loss, declared.ListwiseSoftmax):
        return listwise_softmax(score, labels, groups, weights, known, graded=label.kind == "regression")
    if known is not None:
        labels = labels.masked_fill(~known, math.nan)  # In no pair.
    if isinstance(loss, declared.Hinge):
        return hinge(score, labels, groups, weights, loss.margin)
    return bpr(score, labels, groups, weights)
