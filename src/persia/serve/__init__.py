"""Serves predictions of a model whose rows follow the log of changes."""
