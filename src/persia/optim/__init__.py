"""Embedding optimizers: declarations; the rules are in the native store and in `persia.store.reference_optim`."""

from persia.schema import SGD, Adagrad, Adam, EmbeddingOptimizer, Ftrl, RowwiseAdagrad, Schedule

__all__ = ["SGD", "Adagrad", "Adam", "EmbeddingOptimizer", "Ftrl", "RowwiseAdagrad", "Schedule"]
