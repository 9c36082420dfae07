"""Which measures the pages show, and in which words."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        name: of a measure, or a pattern; a pattern has one row, with its smallest and its largest value.
        what: the row's words.
        newest: whether only the newest line counts, on whichever machine.
    """

    name: str
    what: str
    newest: bool = False


class Machine(NamedTuple):
    """A kind of machine.

    Attributes:
        starts: how the field `machine` of its lines begins.
        short: its name in tables.
        name: its name where there is no legend.
    """

    starts: str
    short: str
    name: str


MACHINES = (
    Machine("AMD EPYC", "E", "2 cores of an AMD EPYC"),
    Machine("Intel(R) Xeon", "X", "2 cores of an Intel Xeon"),
    Machine("NVIDIA H100", "H100", "one NVIDIA H100"),
    Machine("NVIDIA H200", "H200", "one NVIDIA H200"),
)

HEADLINE = (
    Row("step.vs_torch", "samples/s of a training step with 26 ID-type features, over plain PyTorch"),
    Row("store.bytes_per_row", "memory of a row beyond its values and optimizer state"),
    Row(
        "capacity.flat.disk_16", "training rate with a billion rows, 95 % on an SSD, over that with a million in memory"
    ),
)

TOPICS = {
    "steps": (
        Row("step.vs_torch", "samples/s against plain PyTorch, 26 features of dim 16"),
        Row("step.vs_torchrec", "against TorchRec with FBGEMM's fused row-wise Adagrad"),
        Row("step.wide", "against TorchRec, dim 64"),
        Row("step.vs_dense_only", "against the network alone, without any rows"),
        Row("globo.rows", "rows/s on globo_ctr from its files, against plain PyTorch"),
        Row("zoo.rate.*", "rows/s of 26 models and data sets, against plain PyTorch", newest=True),
        Row("zoo.auc.*", "AUC of these less plain PyTorch's", newest=True),
    ),
    "store": (
        Row("store.lookup_uniform", "lookups/s against `torch.index_select`, uniform ids"),
        Row("store.lookup_zipf", "the same, Zipf(1.05)"),
        Row("store.lookup_bf16", "bfloat16 rows, against float32 of `index_select`"),
        Row("store.update_adagrad", "updates/s against `index_add_`, which has no optimizer"),
        Row("store.insert", "new rows, two threads"),
        Row("store.bytes_per_row", "memory beyond values and state"),
        Row("store.evict", "lookups in a full table, against one with room"),
        Row("store.ttl", "lookups where half of the rows expired, against none"),
        Row("store.evict_pause_p999.large", "longest waits in a full table of 20 M rows"),
        Row("store.grow_pause_p999", "the same while a table grows"),
        Row("batch.unique", "distinct ids of a batch, against `torch.unique`"),
        Row("peers.tfra.train_1", "lookup and update, against TensorFlow Recommenders Addons, one core"),
    ),
    "gpu": (
        Row("gpu.step_vs_torch", "against plain PyTorch with its tables on the GPU"),
        Row("gpu.step_vs_dense_only", "against the network alone"),
        Row("gpu.dlrm_128_vs_torch", "a DLRM, dim 128, against plain PyTorch"),
        Row("gpu.ffnn_paper_vs_dense_only", "the Persia paper's network, against it alone"),
        Row("gpu.cache_rows", "copies of hot rows on the GPU, against none"),
    ),
    "accuracy": (
        Row("quality.hybrid_auto", "AUC less Sync's, one NN worker"),
        Row("quality.hybrid", "the same, a bound of 4"),
        Row("paper.table2.*.hybrid_auto", "on eight data sets and networks"),
        Row("paper.table2.*.hybrid_4", "the same, a bound of 4"),
        Row("modes.globo_gba", "`Gba` on a stream in time order, slow NN workers"),
        Row("quality.bf16.ffnn", "16-bit rows less float32, four data sets"),
        Row("quality.optimum", "DeepFM below the best possible AUC"),
    ),
    "fresh": (
        Row("fresh.sync_bits", "share of cases in which lookups ahead change a bit of `Sync`"),
        Row("fresh.sync_rate.network", "rate of `Sync`, over lookups that wait: 40 ms of network, 30 ms of lookups"),
        Row("fresh.sync_rate.disk", "the same, a tenth of the rows in memory"),
        Row("fresh.bytes", "bytes of rows in `Hybrid(4)`, over rows that are not refreshed"),
        Row("fresh.ps_cpu", "CPU time of a PS, the same"),
    ),
    "inputs": (
        Row("features.rate.csv", "rows/s of CSV with rules, against none"),
        Row("features.serve_p99", "slowest percent of raw requests, over prepared ones"),
        Row("targets.masked", "1 - AUC, over PyTorch's"),
    ),
    "roles": (
        Row("modes.gba_vs_sync_static", "samples/s of `Gba` over `Sync`, 2 of 8 NN workers 4x slower"),
        Row("modes.vs_bound", "each mode over what is possible; the worst, `HopBw`"),
    ),
    "cluster": (
        Row("cluster.vs_embedded", "one of each role on Ray, against one process"),
        Row("cluster.hybrid_vs_sync", "`Hybrid` over `Sync` that waits, 40 ms of network, 30 ms of lookups"),
        Row("cluster.scaling", "8 NN workers over one, on two cores"),
        Row("traffic.forward", "bytes of rows, against pooled float32"),
        Row("rpc.roundtrip_4kib", "latency against bare TCP"),
        Row("roles.python_s.embedding_ps", "Python of a batch in a PS"),
    ),
    "plans": (
        Row("plan.bytes", "predicted over measured bytes, the worst of all"),
        Row("plan.rate", "predicted over measured samples/s, the worst"),
        Row("plan.seconds.checkpoint", "predicted over measured time of a checkpoint"),
    ),
    "ssd": (
        Row("capacity.flat.disk_16", "training rate, a billion rows, 95 % on an SSD, over a million"),
        Row("ssd.train", "training rate over what the SSD permits"),
        Row("ssd.vs_rocksdb", "lookups and updates/s against RocksDB"),
        Row("ssd.restart_s", "restart with 50 M rows"),
    ),
    "checkpoints": (
        Row("checkpoint.incremental_bytes", "an increment after 1 % of the rows changed"),
        Row("checkpoint.slowdown", "longer steps while one is written"),
    ),
    "recovery": (
        Row("recovery.attach_s", "from a kill to the first answer, 10 M rows"),
        Row("recovery.lost_rows", "rows lost in 200 kills"),
    ),
    "serving": (
        Row("online.freshness_p99", "from a click to a prediction that uses it"),
        Row("online.exactly_once", "clicks lost or trained twice, 240 faults"),
        Row("serve.p99_in_process_ratio", "slowest percent of requests, over the network alone"),
        Row("serve.rank.two_tower", "ranking 500 items, over scoring 500 rows"),
        Row("serve.overload", "accepted requests in time, at 3x the highest rate"),
    ),
    "compressed": (
        Row("apms.bytes", "fewer bytes than float32 all-reduce"),
        Row("apms.step_whole_0g1.n2", "step of DDP over APMSqueeze's, 0.1 Gbit/s"),
        Row("apms.step_whole_1g.n2", "at 1 Gbit/s"),
        Row("apms.step_whole_10g.n2", "at 10 Gbit/s"),
        Row("apms.vs_hooks_loss.fp16", "test loss less DDP's float16 hook"),
    ),
    "threads": (
        Row("threads.program.load_0", "a user's program, against plain PyTorch, idle machine"),
        Row("threads.program.load_1", "the same, one busy process"),
        Row("threads.command.load_1", "`persia train`, one busy process"),
    ),
    "features": (
        Row("features.equal", "rows that differ between files, arrays, topics and requests, 200 schemas"),
        Row("features.rate.csv", "rows/s of CSV with rules, against the same columns without"),
        Row("features.rate.parquet", "the same, Parquet"),
        Row("features.rate.fit_csv", "rows/s of fitting the rules, against reading without"),
        Row("features.rate.fit_parquet", "the same, Parquet"),
        Row("features.serve_p99", "slowest percent of requests with raw columns, over prepared ones"),
        Row("features.adult", "AUC on the files of Adult, by declaration alone"),
        Row("features.vector", "AUC that a pretrained vector adds on new items"),
    ),
    "targets": (
        Row("targets.regression", "RMSE over plain PyTorch's"),
        Row("targets.multiclass", "log-loss of five classes, the same"),
        Row("targets.masked", "1 - AUC of a label that 7 of 8 rows lack, the same"),
        Row("targets.weighted", "RMSE where half of the rows are biased and have little weight, the same"),
        Row("targets.listwise", "1 - NDCG within groups, the same"),
        Row("targets.esmm", "AUC of conversions among all rows: `EntireSpace` less training on clicks"),
    ),
}
"""Tables of docs/performance.md, docs/guide/features.md and docs/guide/targets.md, by the name of their block."""
