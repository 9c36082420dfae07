"""Readers of public data sets: each has a schema, a format, and what its columns become."""
