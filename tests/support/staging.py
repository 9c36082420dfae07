"""The staging of a GPU, without one."""

from __future__ import annotations

from persia.nn.staging import CpuStaging, array_block, block_tensors, nothing_to_do, tensor_block

__all__ = ["BlockStaging", "as_on_a_gpu"]


class BlockStaging(CpuStaging):
    """Copies in blocks, as `CudaStaging` does, to other memory of the host."""

    def __init__(self):
        self.blocks = []

    def to_device(self, arrays, then=None):
        block, parts = array_block(arrays)
        self.blocks.append(block.nbytes)
        tensors = block_tensors(block.clone(), parts)
        return (tensors if then is None else then(tensors)), nothing_to_do

    def to_host(self, tensors):
        block, parts = tensor_block(tensors)
        self.blocks.append(block.nbytes)
        copy = block.clone()
        return lambda: {name: tensor.numpy() for name, tensor in block_tensors(copy, parts).items()}


def as_on_a_gpu(embeddings):
    """Makes a collection pool and copy as it does on a GPU, on tensors of the CPU; returns its staging."""
    staging = BlockStaging()
    embeddings._expander.on_host = embeddings._transfer._on_host = False
    embeddings._staging = embeddings._transfer._staging = staging
    return staging
