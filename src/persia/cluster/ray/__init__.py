"""All roles as processes that Ray places, restarts and ends. The only package that imports ray.

Ray is used only for control: placement of processes, and the user's own code. Batches, rows and gradients are sent by
`persia.rpc`.
"""
