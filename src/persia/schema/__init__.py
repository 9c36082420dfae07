"""Declarations of a model's input and of its embedding tables, as frozen, validated records.

A :class:`Schema` names ID-type features, non-ID-type ("dense") features and labels. Features read embedding
tables; features that name the same table share its rows. All of it can be written in TOML under the same names, and is
stored in every checkpoint.
"""

from persia.schema.declared_rules import with_declared_rules
from persia.schema.dense import DenseFeature, DenseStatistics
from persia.schema.derivations import Buckets, TimePart, Tokens
from persia.schema.dims import dims_by_frequency
from persia.schema.features import IdFeature, IdKind, Pooling, Schema
from persia.schema.fitted import FittedValue, fitted_values, with_values_of, without_values
from persia.schema.input_rules import NO_RULES, InputRules, WrittenNumbers, input_rules_of
from persia.schema.labels import Label
from persia.schema.losses import (
    BPR,
    JRC,
    BinaryCrossEntropy,
    CrossEntropy,
    EntireSpace,
    Focal,
    Hinge,
    Huber,
    ListwiseSoftmax,
    Loss,
    OrdinalCrossEntropy,
    Poisson,
    Squared,
    Tweedie,
)
from persia.schema.mappings import CodePrefix, HashTo, IdMapping, Quotient, Remainder
from persia.schema.optimizers import (
    INITIAL_ACCUMULATOR,
    SGD,
    Adagrad,
    Adam,
    EmbeddingOptimizer,
    Ftrl,
    RowwiseAdagrad,
    Schedule,
)
from persia.schema.tables import (
    Admission,
    AdmitAll,
    AdmitMinFrequency,
    AdmitProbability,
    Days,
    Initializer,
    Normal,
    RsqrtDim,
    Steps,
    Table,
    Uniform,
    Zeros,
)

__all__ = [
    "BPR",
    "INITIAL_ACCUMULATOR",
    "JRC",
    "NO_RULES",
    "SGD",
    "Adagrad",
    "Adam",
    "Admission",
    "AdmitAll",
    "AdmitMinFrequency",
    "AdmitProbability",
    "BinaryCrossEntropy",
    "Buckets",
    "CodePrefix",
    "CrossEntropy",
    "Days",
    "DenseFeature",
    "DenseStatistics",
    "EmbeddingOptimizer",
    "EntireSpace",
    "FittedValue",
    "Focal",
    "Ftrl",
    "HashTo",
    "Hinge",
    "Huber",
    "IdFeature",
    "IdKind",
    "IdMapping",
    "Initializer",
    "InputRules",
    "Label",
    "ListwiseSoftmax",
    "Loss",
    "Normal",
    "OrdinalCrossEntropy",
    "Poisson",
    "Pooling",
    "Quotient",
    "Remainder",
    "RowwiseAdagrad",
    "RsqrtDim",
    "Schedule",
    "Schema",
    "Squared",
    "Steps",
    "Table",
    "TimePart",
    "Tokens",
    "Tweedie",
    "Uniform",
    "WrittenNumbers",
    "Zeros",
    "dims_by_frequency",
    "fitted_values",
    "input_rules_of",
    "with_declared_rules",
    "with_values_of",
    "without_values",
]
