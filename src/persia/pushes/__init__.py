"""How pushed gradients become steps: their order, the barrier of a step, and the sums of a step."""
