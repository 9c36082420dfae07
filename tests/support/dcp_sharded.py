"""Saves tensors that are sharded over two processes with `torch.distributed.checkpoint`: `... DIRECTORY`."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def save(rank, directory):
    dist.init_process_group("gloo", init_method=f"file://{directory}.store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(44.0).reshape(11, 4), mesh, [Shard(0)])
    momentum = distribute_tensor(torch.arange(11.0), mesh, [Shard(0)])
    state = {
        "model": {"embedding_bags.shop.weight": weight},
        "optimizer": {"state": {"embedding_bags.shop.weight": {"shop.momentum1": momentum}}},
    }
    dist.checkpoint.save(state, checkpoint_id=directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(save, (os.path.abspath(sys.argv[1]),), nprocs=2)
