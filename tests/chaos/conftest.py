import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "cluster"))

from cluster_samples import ray_here

__all__ = ["ray_here"]
