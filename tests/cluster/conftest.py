from cluster_samples import ray_here

__all__ = ["ray_here"]
