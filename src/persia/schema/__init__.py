"""Declarations of a model's input and of its embedding tables, as frozen, validated records.

A :class:`Schema` names ID-type features, non-ID-type ("dense") features and labels. Features read embedding
tables; features that name the same table share its rows. All of it can be written in TOML under the same names, and is
stored in every checkpoint.
"""

from persia.schema.dims import dims_by_frequency
from persia.schema.features import IdFeature, IdKind, Pooling, Schema
from persia.schema.input_rules import NO_RULES, InputRules, input_rules_of
from persia.schema.mappings import HashTo, IdMapping, Quotient, Remainder
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
    "INITIAL_ACCUMULATOR",
    "NO_RULES",
    "SGD",
    "Adagrad",
    "Adam",
    "Admission",
    "AdmitAll",
    "AdmitMinFrequency",
    "AdmitProbability",
    "Days",
    "EmbeddingOptimizer",
    "Ftrl",
    "HashTo",
    "IdFeature",
    "IdKind",
    "IdMapping",
    "Initializer",
    "InputRules",
    "Normal",
    "Pooling",
    "Quotient",
    "Remainder",
    "RowwiseAdagrad",
    "RsqrtDim",
    "Schedule",
    "Schema",
    "Steps",
    "Table",
    "Uniform",
    "Zeros",
    "dims_by_frequency",
    "input_rules_of",
]
