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
        Row("step.vs_torch.sync", "the same"),
        Row("step.vs_torchrec", "against TorchRec with FBGEMM's fused row-wise Adagrad"),
        Row("step.wide", "against TorchRec, dim 64"),
        Row("step.vs_dense_only", "against the network alone, without any rows"),
        Row("step.vs_dense_only.sync", "the same"),
        Row("globo.rows", "rows/s on globo_ctr from its files, against plain PyTorch"),
        Row("zoo.rate.*", "rows/s of 26 models and data sets, against plain PyTorch", newest=True),
        Row("zoo.auc.*", "AUC of these less plain PyTorch's", newest=True),
    ),
    "beside": (
        Row("beside_1.step.vs_torch", "samples/s against plain PyTorch, 26 features of dim 16"),
        Row("beside_1.step.vs_torch.sync", "the same"),
        Row("beside_1.step.vs_torchrec", "against TorchRec"),
        Row("beside_1.step.vs_torchrec.sync", "the same"),
        Row("beside_1.step.vs_dense_only", "against the network alone"),
        Row("beside_1.step.vs_dense_only.sync", "the same"),
        Row("beside_1.globo.rows", "rows/s on globo_ctr from its files, against plain PyTorch"),
        Row("beside_1.zoo.rate.adult.*", "models on adult, against plain PyTorch", newest=True),
        Row("beside_1.zoo.rate.globo.*", "models on globo_ctr", newest=True),
        Row("beside_1.zoo.rate.sequences.*", "models on generated sequences", newest=True),
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
    "elastic": (
        Row("scale.ps_s", "2 PSs become 4 while a run trains 10 M rows of dim 16, start of processes included"),
        Row("scale.ps_resume", "the same through a checkpoint, over it"),
        Row("scale.ps_rate", "batches/s meanwhile, over before"),
        Row("scale.ps_pause_s", "longest time between two batches meanwhile"),
        Row("scale.ps_lost", "invariants that do not hold after 50 moves and as many kills of every role"),
        Row("scale.moved", "share of the rows that move from 4 to 5 PSs"),
        Row("scale.nn_pause_s", "2 to 4 NN workers and back: longest time between two batches"),
        Row("checkpoint.parallel", "4 PSs with links of 1 Gbit/s, over one process that reads and writes for all"),
        Row("driver.restart_s", "the driver is killed: until the same command trains again"),
        Row("driver.lost_rows", "rows lost or doubled by that"),
        Row("driver.left_regions", "regions and files left behind"),
        Row("hosts.hybrid_vs_sync", "`Hybrid` over `Sync`, three hosts, 1 Gbit/s, 1 ms, keys, 40 ms of network"),
        Row("hosts.scaling", "4 NN workers over 1 on these hosts, all on two cores"),
    ),
    "chains": (
        Row("seq.chain.hstu.*", "HR@1 of `HSTU` divided by that of the best possible answers"),
        Row("seq.chain.sasrec.[!t]*", "the same of `SASRec`, without chains of times, which it does not read"),
        Row("seq.first_epoch.*", "`HSTU` less `SASRec` after the first epoch"),
        Row("seq.time.*", "the same after the last epoch, where the next item follows the event of a day ago"),
    ),
    "failing_network": (
        Row("chaos.hosts.faults", "faults in `Sync`, `Hybrid` and `Gba`, and changes of numbers of processes"),
        Row("chaos.hosts.violations", "invariants that do not hold at the end, such as rows with another value"),
        Row("chaos.hosts", "share of the time in which samples were trained"),
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
    "table2_fresh": (
        Row("paper.table2.globo.ffnn.fresh", "globo_ctr, FFNN"),
        Row("paper.table2.globo.deepfm.fresh", "globo_ctr, DeepFM"),
        Row("paper.table2.taobao.ffnn.fresh", "as Taobao, FFNN"),
        Row("paper.table2.taobao.deepfm.fresh", "as Taobao, DeepFM"),
        Row("paper.table2.avazu.ffnn.fresh", "as Avazu, FFNN"),
        Row("paper.table2.avazu.deepfm.fresh", "as Avazu, DeepFM"),
        Row("paper.table2.criteo.ffnn.fresh", "as Criteo, FFNN"),
        Row("paper.table2.criteo.deepfm.fresh", "as Criteo, DeepFM"),
    ),
    "arrival_table2": (
        Row("paper.arrival.table2.taobao.deepfm.cold", "as Taobao, DeepFM, no warm-up"),
        Row("fresh.replay.taobao.quarter.hybrid_4", "the same, combined"),
        Row("paper.arrival.table2.taobao.deepfm.warm", "on arrival, a warm-up over half of the run"),
        Row("paper.arrival.table2.avazu.deepfm.cold", "as Avazu, DeepFM, no warm-up"),
        Row("fresh.replay.avazu.quarter.hybrid_4", "the same, combined"),
        Row("paper.arrival.table2.avazu.deepfm.warm", "on arrival, a warm-up over half of the run"),
        Row("paper.arrival.table2.criteo.deepfm.cold", "as Criteo, DeepFM, no warm-up"),
        Row("fresh.replay.criteo.quarter.hybrid_4", "the same, combined"),
        Row("paper.arrival.table2.criteo.deepfm.warm", "on arrival, a warm-up over half of the run"),
        Row("paper.arrival.table2.globo.deepfm.cold", "globo_ctr, DeepFM, no warm-up"),
        Row("fresh.replay.globo.quarter.hybrid_4", "the same, combined"),
        Row("paper.arrival.table2.globo.deepfm.warm", "on arrival, a warm-up over half of the run"),
    ),
    "arrival_figure6": (
        Row("paper.arrival.figure6.combined", '`Hybrid("auto")`'),
        Row("paper.arrival.figure6.on_arrival", '`Hybrid("auto", combine=False)`'),
        Row("paper.arrival.figure6.async", "`Async`"),
        Row("paper.arrival.figure6.combined_auc", 'AUC at the end less Sync\'s, `Hybrid("auto")`'),
        Row("paper.arrival.figure6.on_arrival_auc", '`Hybrid("auto", combine=False)`'),
        Row("paper.arrival.figure6.async_auc", "`Async`"),
    ),
    "gba_per_id": (
        Row("paper.gba_per_id.gba.sync_to_gba.first_day", "to Gba, first day"),
        Row("paper.gba_per_id.gba.sync_to_gba.mean", "the same, mean of eight days"),
        Row("paper.gba_per_id.gba.gba_to_sync.first_day", "back to Sync, first day"),
        Row("paper.gba_per_id.gba.gba_to_sync.mean", "the same, mean of eight days"),
        Row("paper.gba_per_id.both.sync_to_gba.first_day", 'to Gba from `Sync("per_id")`, first day'),
        Row("paper.gba_per_id.both.sync_to_gba.mean", "the same, mean of eight days"),
        Row("paper.gba_per_id.both.gba_to_sync.first_day", 'back to `Sync("per_id")`, first day'),
        Row("paper.gba_per_id.both.gba_to_sync.mean", "the same, mean of eight days"),
    ),
    "gba_staleness": (
        Row("paper.gba_staleness.*.gba", "Gba, from the step at which a batch begins (section 4.1)"),
        Row("paper.gba_staleness.*.gba_token", "from the token"),
        Row("paper.gba_staleness.*.gba_token_late", "the same, early gradients count as 0"),
        Row("paper.gba_staleness.*.gba_token_all", "the same, with excluded gradients"),
        Row("paper.gba_staleness.*.hop_bs", "Hop-BS, a step is 400 gradients"),
        Row("paper.gba_staleness.*.bsp", "BSP, a step is 50 gradients"),
    ),
    "gba_auc": (
        Row("paper.gba_auc.strained.sparse", "Gba less Sync, slow state"),
        Row("paper.gba_auc.busy.sparse", "medium state"),
        Row("paper.gba_auc.quiet.sparse", "fast state"),
    ),
    "gba_figure1": (
        Row("paper.gba_figure1.sync", "rate of Sync in its slowest hour, over its fastest"),
        Row("paper.gba_figure1.hybrid", "of `Hybrid(4)`"),
        Row("paper.gba_figure1.gba", "of Gba"),
        Row("paper.gba_figure1.async", "of Async"),
        Row("paper.gba_figure1.async_over_sync", "rate of Async over Sync's, the largest of an hour"),
    ),
    "gba_figure2": (
        Row("paper.gba_figure2.100000_1.05.to_async.first", "Sync to Async with Sync's rates, next 5 %"),
        Row("paper.gba_figure2.100000_1.05.to_async.last", "at the end"),
        Row("paper.gba_figure2.100000_1.05.to_async_tuned.first", "Sync to Async with Async's rates, next 5 %"),
        Row("paper.gba_figure2.100000_1.05.to_async_tuned.last", "at the end"),
        Row("paper.gba_figure2.100000_1.05.to_sync.first", "Async to Sync with Async's rates, next 5 %"),
        Row("paper.gba_figure2.100000_1.05.to_sync.last", "at the end"),
        Row("paper.gba_figure2.100000_1.05.to_sync_tuned.first", "Async to Sync with Sync's rates, next 5 %"),
        Row("paper.gba_figure2.100000_1.05.to_sync_tuned.last", "at the end"),
        Row("paper.gba_figure2.500_1.05.to_async.first", "500 ids, Sync to Async with Sync's rates, next 5 %"),
        Row("paper.gba_figure2.500_1.05.to_async.last", "at the end"),
        Row("paper.gba_figure2.500_1.05.to_async_tuned.first", "500 ids, Sync to Async with Async's rates, next 5 %"),
        Row("paper.gba_figure2.500_1.05.to_async_tuned.last", "at the end"),
        Row("paper.gba_figure2.500_1.05.to_sync.first", "500 ids, Async to Sync with Async's rates, next 5 %"),
        Row("paper.gba_figure2.500_1.05.to_sync.last", "at the end"),
        Row("paper.gba_figure2.500_1.05.to_sync_tuned.first", "500 ids, Async to Sync with Sync's rates, next 5 %"),
        Row("paper.gba_figure2.500_1.05.to_sync_tuned.last", "at the end"),
    ),
    "sequences": (
        Row("seq.next_item.hr", "HR@10 of `NextItem` among all items, less that of plain PyTorch"),
        Row("seq.next_item.rate", "rows/s over plain PyTorch, whose negatives are drawn before"),
        Row("seq.long.rate.sasrec", "histories of 1 to 1,000 events: rows/s without padding over with it"),
        Row("seq.long.rate.hstu", "the same"),
        Row("seq.long.memory.sasrec", "peak memory, the same"),
        Row("seq.long.memory.hstu", "the same"),
        Row("seq.long.full.sasrec", "rows/s of histories of 1,000 events"),
        Row("seq.long.full.hstu", "the same"),
        Row("seq.rank.hstu", "500 candidates for a history of 200: requests/s over 500 whole rows"),
        Row("seq.rank.sasrec", "the same"),
        Row("seq.cold", "HR@20 of items that were never trained, code prefixes over a random order"),
        Row("seq.globo.next_item", "HR@20 of the next click on globo_ctr, hour by hour: `NextItem`"),
        Row("seq.globo.two_tower", "the same: two towers"),
        Row("seq.globo.popularity", "the same: the items clicked most in the hour before"),
    ),
    "clients": (
        Row("ps.clients", "rows/s of 8 clients over a thread that calls the store"),
        Row("ps.clients.vs_one", "8 clients over one"),
        Row("ps.clients.pool_of_one", "the same, a pool of one thread"),
    ),
    "targets": (
        Row("targets.regression", "RMSE over plain PyTorch's"),
        Row("targets.multiclass", "log-loss of five classes, the same"),
        Row("targets.masked", "1 - AUC of a label that 7 of 8 rows lack, the same"),
        Row("targets.weighted", "RMSE where half of the rows are biased and have little weight, the same"),
        Row("targets.listwise", "1 - NDCG within groups, the same"),
        Row("targets.esmm", "AUC of conversions among all rows: `EntireSpace` less training on clicks"),
    ),
    "paper_scaling": (Row("cluster.scaling", "rows/s of 8 NN workers over one, computation emulated, two cores"),),
    "paper_local_all_reduce": (
        *(
            Row(f"paper.local_all_reduce.{data}.{way}_{kind}.{part}", f"{ids}, {words}, {days}")
            for data, ids in (("dense", "500 ids"), ("sparse", "100,000 ids"))
            for way, kind, words in (
                ("to", "combined", "from Sync to it, rows combined"),
                ("from", "combined", "from it to Sync, rows combined"),
                ("to", "on_arrival", "from Sync to it, rows on arrival"),
                ("from", "on_arrival", "from it to Sync, rows on arrival"),
            )
            for part, days in (("first_day", "first day"), ("mean", "mean of eight"))
        ),
    ),
    "paper_switch_models": (
        *(
            Row(f"paper.switch.{model}.{way}_gba.{part}", f"{name}, {words}, {days}")
            for model, name in (("dien", "DIEN"), ("youtube_dnn", "YouTubeDNN"))
            for way, words in (("to", "from Sync to Gba"), ("from", "from Gba to Sync"))
            for part, days in (("first_day", "first day"), ("mean", "mean of three"))
        ),
    ),
    "paper_gba_theorems": (
        Row("paper.gba_theorem1", "largest error of Gba over what Theorem 1 allows"),
        Row("paper.gba_theorem2", "largest error of Sync over what Theorem 2 allows"),
        Row("paper.gba_theorem3.async", "error floor of Sync after Async, over Sync's throughout"),
        Row("paper.gba_theorem4.async", "error floor of Async after Sync, over Sync's"),
        Row("paper.gba_theorem4.gba", "error floor of Gba after Sync, over Sync's"),
    ),
    "paper_apms_theorem": (
        Row("paper.apms_theorem1", "mean of squared gradients over what Theorem 1 allows, the largest"),
        *(
            Row(f"paper.apms_speed_up.{kind}.n{n}", f"one worker over {n} with equal samples, {words}")
            for kind, words in (
                ("printed", "at Corollary 1's rate"),
                ("parallel", "at the rate of parallel SGD"),
                ("uncompressed", "the same without compression"),
            )
            for n in (2, 4, 8, 16)
        ),
    ),
}
"""Tables of the pages, by the name of their block."""
