"""Combines pushed gradients to steps: the order of pushes, the barrier of a step, and its sums."""
