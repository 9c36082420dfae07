"""Plain peers that the benchmarks compare persia with."""
