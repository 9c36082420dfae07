"""All roles as processes that Ray places, restarts and ends. The only package that imports ray.

Ray carries control only: who runs where, and the user's own code. Batches, rows and gradients travel by `persia.rpc`.
"""
