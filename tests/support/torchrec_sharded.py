"""Trains an `EmbeddingBagCollection` in two processes, row-wise sharded, and saves it with DCP: `... DIRECTORY`.

Rank 0 also saves the whole weights and accumulators, as `DIRECTORY.pt`.
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROWS, DIM = 10, 4


def train(rank, directory, port):
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    torch.manual_seed(0)
    tables = [
        torchrec.EmbeddingBagConfig(name="shop", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["a", "b"]),
        torchrec.EmbeddingBagConfig(name="user", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["c"]),
    ]
    ebc = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    )
    plan = construct_module_sharding_plan(
        ebc,
        {"shop": row_wise(compute_kernel="fused"), "user": table_wise(rank=1, compute_kernel="fused")},
        sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        torch.nn.ModuleDict({"ebc": ebc}),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"ebc": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )
    ids = torch.arange(6) + rank
    features = torchrec.KeyedJaggedTensor(["a", "b", "c"], ids, lengths=torch.ones(6, dtype=torch.int64))
    model.module["ebc"](features).values().square().sum().backward()

    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    dist.checkpoint.save(state, checkpoint_id=directory)
    shards = [
        {key: [(s.metadata.shard_offsets, s.tensor) for s in t.local_shards()] for key, t in part.items()}
        for part in (state["model"], *state["optimizer"]["state"].values())
    ]
    everything = [None, None]
    dist.all_gather_object(everything, shards)
    if rank == 0:
        torch.save(everything, f"{directory}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.distributed.checkpoint

    mp.spawn(train, (sys.argv[1], sys.argv[2]), nprocs=2)
