"""The next film on MovieLens, leave-one-out, beside published figures.

    python -m benchmarks 'seq.movielens.*' [--preset smoke|laptop|full] [--json FILE]

seq.movielens.DATA.BACKBONE.hr      HR@10 of each user's newest rating among all films, after the last epoch; mean over
                                    seeds. `published` is the figure below.
seq.movielens.DATA.BACKBONE.ndcg    NDCG@10 of the same runs.

DATA is `ml_1m`, the file ratings.dat of GroupLens's ml-1m, or `ml_20m`, ratings.csv of ml-20m, in the folders ml-1m and
ml-20m of PERSIA_DATA; ml_20m runs with `--preset full` only. BACKBONE is one of `NextItem`, `sasrec` or `hstu`.

The figures of `PUBLISHED` are in the tables of the README of facebookresearch/generative-recommenders, the code of
"Actions Speak Louder than Words" (HSTU, arXiv 2402.17152), as of April 2024. Their rows "SASRec" have a sampled softmax
in place of SASRec's loss, and their rows "HSTU" the same configuration. We do what their configurations and code say:
every rating is an event, whatever it is; a user's newest event is the test data, and the model trains on all before it,
at each position; histories have the newest 200; films of the history do not compete; 2 layers of 50 units for ml-1m and
4 layers of 256 units with 4 heads for ml-20m; cosines over a temperature of 0.05; a rate of 0.001; batches of 128
users. `full` trains their 101 epochs, `laptop` fewer.

Here it differs: films compete that occur in the training data, there all that are listed; a batch shares its
`NEGATIVES` uniform negatives, where they sample 128; their HSTU has a dropout of 0.2, ours has none; events of equal
time are in the order of the file.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch

from benchmarks import runner
from benchmarks.public_data import is_here
from persia import DenseFeature, IdFeature, Schema, Trainer, TrainerOptions, data
from persia.metrics import RetrievalFigures
from persia.modes import Sync
from persia.nn.models import NextItem
from persia.nn.models.next_item import Backbone
from persia.optim import Adam

TOP, LENGTH, BATCH, NEGATIVES, PER_SAMPLE = 10, 200, 128, 512, 4
RATE, TEMPERATURE, DROPOUT = 1e-3, 0.05, 0.2
BACKBONES: tuple[Backbone, ...] = ("sasrec", "hstu")
USERS_OF_SMOKE: Final = 128
"""A batch of them has room for its negatives."""


class Release(NamedTuple):
    """A release of MovieLens, and the network for it.

    Attributes:
        folder: in PERSIA_DATA.
        file: in the folder.
        dim: of rows and layers.
        layers: number of layers.
        heads: of the attention.
    """

    folder: str
    file: str
    dim: int
    layers: int
    heads: int


class Amount(NamedTuple):
    """Amount of training; None if a preset leaves a release out.

    Attributes:
        epochs: number of passes.
        seeds: of network, rows and draws.
        users: users with the smallest ids; None for all.
    """

    epochs: int
    seeds: tuple[int, ...]
    users: int | None = None


RELEASES = {
    "ml_1m": Release("ml-1m", "ratings.dat", dim=50, layers=2, heads=1),
    "ml_20m": Release("ml-20m", "ratings.csv", dim=256, layers=4, heads=4),
}
AMOUNTS: dict[tuple[str, str], Amount] = {
    ("ml_1m", "smoke"): Amount(1, (0,), USERS_OF_SMOKE),
    ("ml_20m", "smoke"): Amount(1, (0,), USERS_OF_SMOKE),
    ("ml_1m", "laptop"): Amount(20, (0,)),
    ("ml_1m", "full"): Amount(101, (0, 1, 2, 3, 4)),
    ("ml_20m", "full"): Amount(101, (0,)),
}
PUBLISHED = {
    ("ml_1m", "sasrec"): {"hr": 0.2853, "ndcg": 0.1603},
    ("ml_1m", "hstu"): {"hr": 0.3097, "ndcg": 0.1720},
    ("ml_20m", "sasrec"): {"hr": 0.2889, "ndcg": 0.1621},
    ("ml_20m", "hstu"): {"hr": 0.3273, "ndcg": 0.1895},
}
PUBLISHED_LARGE = {"ml_1m": {"hr": 0.3294, "ndcg": 0.1893}, "ml_20m": {"hr": 0.3556, "ndcg": 0.2098}}
"""Of their "HSTU-large", for comparison."""


def ratings(release: Release, users: int | None) -> Any:
    """Returns the events, a table of `user`, `movie` and `second`.

    Args:
        release: its folder is in PERSIA_DATA.
        users: how many users, those with the smallest ids; None for all.
    """
    import pyarrow.compute as pc
    from pyarrow import csv

    folder = data.find(release.folder)
    assert folder is not None
    dots = release.file.endswith(".dat")  # Fields are separated by "::", which reads as an empty field between two.
    names = ["user", "_", "movie", "__", "rating", "___", "second"] if dots else ["user", "movie", "rating", "second"]
    read = csv.ReadOptions(column_names=names, skip_rows=0 if dots else 1)
    columns = csv.ConvertOptions(include_columns=["user", "movie", "second"])
    table = csv.read_csv(folder / release.file, read, csv.ParseOptions(delimiter=":" if dots else ","), columns)
    if users is None:
        return table
    last = pc.unique(table["user"]).sort()[:users][-1]
    return table.filter(pc.less_equal(table["user"], last))


def schema_of(release: Release, backbone: Backbone) -> Schema:
    """Returns the schema of samples; HSTU reads the ages of events, too."""
    history = IdFeature("history", table="movie", pooling=None, max_length=LENGTH, keep="last")
    ages = [DenseFeature("ages", size=LENGTH)] if backbone == "hstu" else []
    return Schema([IdFeature("movie", dim=release.dim), history], dense_features=ages, labels=["rated"])


def samples(events: Any, schema: Schema, *, test: bool) -> data.StreamReader:
    """Returns a sample per user: the newest event for the test, and the one before it, with its history, to train."""
    options: data.ReaderOptions = {"labels": {"rated": "movie is not None"}}
    return data.event_log(
        events,
        schema,
        BATCH,
        owner="user",
        time="second",
        ages="ages" if schema.dense_features else None,
        min_history=1,
        leave_one_out="test" if test else "validation",
        shuffle_rows=0 if test else len(events),
        **options,
    )


def trained(name: str, backbone: Backbone, amount: Amount, seed: int) -> RetrievalFigures:
    """Trains on the events before each user's newest one, and ranks that one."""
    release = RELEASES[name]
    events, schema = ratings(release, amount.users), schema_of(release, backbone)
    train = samples(events, schema, test=False)
    catalog = data.item_catalog(train, ["movie"], history=["history"])
    reader = data.shared_negatives(
        train, ["movie"], NEGATIVES, catalog=catalog, history=["history"], per_sample=PER_SAMPLE, seed=seed
    )
    torch.manual_seed(seed)
    model = NextItem(
        reader.schema,
        backbone=backbone,
        history=[("history", "movie")],
        negatives=["negative_movie"],
        temperature=TEMPERATURE,
        layers=release.layers,
        heads=release.heads,
        ages="ages" if backbone == "hstu" else None,
        dropout=DROPOUT if backbone == "sasrec" else None,
    )
    trainer = Trainer(
        model,
        reader.schema,
        optimizer=functools.partial(torch.optim.Adam, lr=RATE),
        embedding_optimizer=Adam(lr=RATE),
        mode=Sync(),
        options=TrainerOptions(progress=False, seed=seed),
    )
    trainer.fit(reader, epochs=amount.epochs)
    return trainer.evaluate_retrieval(samples(events, schema, test=True), at=(TOP,), leave_out=["history"])


def _register(name: str, backbone: Backbone) -> None:
    where = f"seq.movielens.{name}.{backbone}"

    @runner.measures(f"{where}.hr", f"{where}.ndcg")
    def measured(preset: str) -> Iterator[runner.Measure]:
        """HR@10 and NDCG@10 of the newest rating of each user."""
        release, amount = RELEASES[name], AMOUNTS.get((name, preset))
        if not is_here(release.folder):
            return
        if amount is None:
            print(f"{where} is skipped: {release.folder} is large; use --preset full.", file=sys.stderr)
            return
        found = [trained(name, backbone, amount, seed) for seed in amount.seeds]
        for metric, values in (
            ("hr", [each.hit_rate[TOP] for each in found]),
            ("ndcg", [each.ndcg[TOP] for each in found]),
        ):
            details = {
                "published": PUBLISHED[name, backbone][metric],
                "published_large": PUBLISHED_LARGE[name][metric] if backbone == "hstu" else None,
                "per_seed": values,
                "epochs": amount.epochs,
                "users": found[0].rows,
                "films": found[0].items,
                "missing": found[0].missing,
            }
            yield runner.Measure(f"{where}.{metric}", statistics.fmean(values), "fraction", details=details)


for _name in RELEASES:
    for _backbone in BACKBONES:
        _register(_name, _backbone)
