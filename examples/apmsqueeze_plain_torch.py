"""APMSqueeze in a plain PyTorch program: several processes, gloo, nothing else of persia."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from persia.optim import APMSqueeze, APMSqueezeOptions

WORKERS, STEPS = (2, 30) if os.environ.get("PERSIA_EXAMPLE_SMALL") else (4, 600)


def work(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORKERS)
    torch.manual_seed(0)
    target = torch.randn(64, 1)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))  # Not wrapped in DistributedDataParallel.
    optimizer = APMSqueeze(model.parameters(), lr=1e-3, options=APMSqueezeOptions(warmup=STEPS // 4))
    torch.manual_seed(rank)  # Other samples on each worker.
    for step in range(1, STEPS + 1):
        x = torch.randn(32, 64)
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), (x @ target > 0).float())
        loss.backward()
        optimizer.step()  # Averages over all workers, by itself.
        optimizer.zero_grad()
        if rank == 0 and step % (STEPS // 6) == 0:
            seen = optimizer.statistics()
            print(f"step {step:4}  loss {loss.item():.3f}  {seen['phase']:10}  {seen['bytes_last_step']:,} bytes sent")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(work, args=(f"{directory}/meeting",), nprocs=WORKERS)
