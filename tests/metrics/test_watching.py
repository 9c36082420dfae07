"""The metric that decides which state of a run is the best: its name, its value, and which values are better."""

from types import SimpleNamespace

import numpy as np
import pytest

from persia import IdFeature, Label, Schema
from persia.errors import ConfigError
from persia.metrics import GroupedFigures, Metrics, MetricsResult, RetrievalFigures, figure, watched_metric
from persia.schema import BPR, ListwiseSoftmax

ID = [IdFeature("item", dim=4)]


def schema(*labels, group=None):
    return Schema(ID, labels=list(labels), group=group)


def result(labels, grouped=None):
    return MetricsResult(9, 0.5, 0.5, 1.0, 1.0, labels, grouped=grouped or {})


def test_figures_of_real_metrics():
    random = np.random.default_rng(0)
    metrics = Metrics(["click", "buy"])
    metrics.update(random.normal(size=(500, 2)), random.integers(0, 2, (500, 2)))
    found = metrics.result()
    for name in ("auc", "log_loss", "normalized_entropy", "calibration"):
        assert figure(found, name) == getattr(found, name)
        assert figure(found, f"buy:{name}") == getattr(found.labels["buy"], name) != figure(found, f"click:{name}")
    assert np.isnan(figure(found, "rmse"))


def test_means_are_over_the_labels_that_have_the_metric():
    found = result(
        {"click": SimpleNamespace(auc=0.7), "a.b": SimpleNamespace(rmse=2.0), "c": SimpleNamespace(rmse=4.0)}
    )
    assert figure(found, "rmse") == 3.0
    assert figure(found, "a.b:rmse") == 2.0
    assert figure(found, "auc") == 0.7
    assert np.isnan(figure(found, "click:rmse"))


def test_figures_within_groups():
    found = result(
        {"click": SimpleNamespace(auc=0.7)}, {"click": GroupedFigures(3, 3, 0.6, {5: 0.1}, {5: 0.2, 10: 0.3})}
    )
    assert [figure(found, name) for name in ("gauc", "ndcg@5", "ndcg", "recall@5", "click:ndcg@5")] == [
        0.6, 0.2, 0.3, 0.1, 0.2,
    ]  # fmt: skip
    assert np.isnan(figure(found, "recall@7"))


def test_figures_of_retrieval():
    figures = RetrievalFigures(9, 100, 0, {5: 0.1, 10: 0.2}, {5: 0.05, 10: 0.07}, 0.06, {5: 0.3, 10: 0.4})
    found = MetricsResult.of_retrieval(figures)
    names = ("retrieval_hr@5", "retrieval_hr", "retrieval_ndcg@5", "retrieval_mrr")
    assert [figure(found, name) for name in names] == [0.1, 0.2, 0.05, 0.06]
    watched = [watched_metric(schema("click"), name) for name in names]
    assert [each.title for each in watched] == [
        "HR@5 of retrieval", "HR@10 of retrieval", "NDCG@5 of retrieval", "MRR of retrieval",
    ]  # fmt: skip
    assert all(each.retrieval and not each.grouped for each in watched)
    assert all(np.isnan(figure(result({"click": SimpleNamespace(auc=0.7)}), name)) for name in names)
    for name in ("retrieval_mrr@5", "click:retrieval_hr@5", "retrieval_coverage@5"):
        with pytest.raises(ConfigError, match=r"expected one of: auc, .* retrieval_hr, retrieval_ndcg, retrieval_mrr"):
            watched_metric(schema("click"), name)


@pytest.mark.parametrize(
    ("name", "worse", "better"),
    [
        ("auc", 0.6, 0.7),
        ("log_loss", 0.6, 0.5),
        ("rmse", 3.0, 2.0),
        ("calibration", 1.2, 0.9),
        ("calibration", 0.7, 1.1),
        ("retrieval_hr@20", 0.1, 0.2),
        ("retrieval_mrr", 0.1, 0.2),
    ],
)
def test_which_value_is_better(name, worse, better):
    watched = watched_metric(schema("click", Label("price", kind="regression")), name)
    assert watched.score(better) > watched.score(worse)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("click", "auc"),
        (Label("price", kind="regression"), "rmse"),
        (Label("views", kind="count"), "rmse"),
        (Label("brand", kind="multiclass", classes=3), "log_loss"),
        (Label("stars", kind="ordinal", classes=5), "log_loss"),
    ],
)
def test_the_default_is_of_the_first_label(label, name):
    assert watched_metric(schema(label, Label("other", kind="regression"))).metric == name


def test_unknown_names_list_what_the_labels_have():
    both = schema("click", Label("price", kind="regression"))
    for name in ("accuracy", "price:auc", "nobody:auc"):
        with pytest.raises(ConfigError, match=r"click has auc, log_loss, .*; price has rmse, mae, mean_ratio") as found:
            watched_metric(both, name)
        assert found.value.fields["field"] == "keep_best"
    with pytest.raises(ConfigError, match=r"ndcg@k and recall@k need Schema\(group"):
        watched_metric(both, "ndcg@5")
    assert watched_metric(schema("click", group="session"), "ndcg@5").at == 5
    for name in ("loss", "auc@5", "ndcg@0", "", "click:"):
        with pytest.raises(ConfigError, match="expected one of: auc, log_loss"):
            watched_metric(both, name)


def test_metrics_that_a_label_never_has_are_refused():
    genre = Label("genre", kind="multiclass", classes=3)
    schema = Schema([IdFeature("user", dim=2)], labels=[genre], group="session")
    for name in ("gauc", "top_5_accuracy"):
        with pytest.raises(ConfigError, match=r"genre has log_loss, accuracy\."):
            watched_metric(schema, name)
    ranked = Label("click", loss=BPR())
    schema = Schema([IdFeature("user", dim=2)], labels=[ranked], group="session")
    assert watched_metric(schema).metric == "auc"
    with pytest.raises(ConfigError, match="click has auc, gauc, ndcg, recall"):
        watched_metric(schema, "log_loss")
    graded = Label("grade", kind="regression", loss=ListwiseSoftmax())
    schema = Schema([IdFeature("user", dim=2)], labels=[graded], group="session")
    assert watched_metric(schema).metric == "ndcg"
    with pytest.raises(ConfigError, match=r"grade has ndcg\."):
        watched_metric(schema, "gauc")


def test_groups_may_be_others_than_those_of_the_schema():
    assert watched_metric(schema("click"), "gauc", group="user").grouped
