"""Declarations of losses, by label; `persia.nn.losses` computes them."""

from __future__ import annotations

import math

from persia.checks import check_kind
from persia.schema.checks import TaggedRecord

__all__ = [
    "BPR",
    "JRC",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "EntireSpace",
    "Focal",
    "Hinge",
    "Huber",
    "ListwiseSoftmax",
    "Loss",
    "OrdinalCrossEntropy",
    "Poisson",
    "Squared",
    "Tweedie",
]


class BinaryCrossEntropy(TaggedRecord, frozen=True, tag="bce"):
    """Binary cross-entropy of the sigmoid, as `torch.nn.BCEWithLogitsLoss`: the default of binary labels.

    Args:
        positive_weight: factor on the term of positive labels. Other than 1, it shifts probabilities.
    """

    positive_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("positive_weight", 0, math.inf, open_low=True)


class Focal(TaggedRecord, frozen=True, tag="focal"):
    """Focal loss (Lin et al., ICCV 2017, arXiv 1708.02002, equation 5): -alpha_t (1 - p_t)^gamma log p_t.

    Args:
        gamma: exponent; 0 is binary cross-entropy.
        alpha: weight of positive labels, 1 - alpha that of negative ones; None weighs both 1.
    """

    gamma: float = 2.0
    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("gamma", 0, math.inf)
        if self.alpha is not None:
            self._number("alpha", 0, 1)


class Squared(TaggedRecord, frozen=True, tag="squared"):
    """Squared error: the default of regression."""


class Huber(TaggedRecord, frozen=True, tag="huber"):
    """Huber loss, as `torch.nn.HuberLoss`: squared up to `delta`, linear beyond.

    Args:
        delta: error at which the loss becomes linear.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("delta", 0, math.inf, open_low=True)


class Poisson(TaggedRecord, frozen=True, tag="poisson"):
    """Poisson negative log-likelihood of a log-rate, as `torch.nn.PoissonNLLLoss`: the default of counts."""


class Tweedie(TaggedRecord, frozen=True, tag="tweedie"):
    """Tweedie deviance of a log-mean (Jorgensen, 1987), for amounts of which many are zero.

    Args:
        power: of the variance, between 1 (Poisson) and 2 (gamma).
    """

    power: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("power", 1, 2, open_low=True, open_high=True)


class CrossEntropy(TaggedRecord, frozen=True, tag="softmax"):
    """Softmax cross-entropy over classes, as `torch.nn.CrossEntropyLoss`: the default of "multiclass"."""


class OrdinalCrossEntropy(TaggedRecord, frozen=True, tag="ordinal"):
    """Binary cross-entropies of "above class k" (Frank and Hall, ECML 2001; CORAL, arXiv 1901.07884): for "ordinal"."""


class BPR(TaggedRecord, frozen=True, tag="bpr"):
    """Bayesian personalised ranking (Rendle et al., UAI 2009): log-sigmoid of pairs within a group."""


class Hinge(TaggedRecord, frozen=True, tag="hinge"):
    """Pairwise hinge within a group: max(0, margin - difference of scores).

    Args:
        margin: difference from which on a pair costs nothing.
    """

    margin: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("margin", 0, math.inf, open_low=True)


class ListwiseSoftmax(TaggedRecord, frozen=True, tag="listwise"):
    """Softmax cross-entropy over the rows of a group (ListNet, Cao et al., ICML 2007, top one)."""


class JRC(TaggedRecord, frozen=True, tag="jrc"):
    """Joint optimisation of ranking and calibration (Sheng et al., KDD 2023, arXiv 2208.06164), with two logits.

    Args:
        alpha: share of the calibration term; the ranking term within groups has 1 - alpha.
    """

    alpha: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("alpha", 0, 1)


class EntireSpace(TaggedRecord, frozen=True, tag="entire_space"):
    """Entire-space loss of a conversion (ESMM: Ma et al., SIGIR 2018, arXiv 1804.07931).

    The probability of this label is that of `through` times that of this label given `through`, which the model's
    logit stands for; the loss is over all rows, so that no selection biases it.

    Args:
        through: label that has to be positive first, such as the click.
    """

    through: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind("EntireSpace.through", self.through, str, "the name of a label")


Loss = (
    BinaryCrossEntropy
    | Focal
    | Squared
    | Huber
    | Poisson
    | Tweedie
    | CrossEntropy
    | OrdinalCrossEntropy
    | BPR
    | Hinge
    | ListwiseSoftmax
    | JRC
    | EntireSpace
)
