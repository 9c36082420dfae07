"""Benchmarks: `python -m benchmarks --list` names them."""
