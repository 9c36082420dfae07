"""What logits stand for, by kind of label, against the definitions, row by row."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.metrics import Answers
from persia.metrics.answers import binary_scores, class_log_probabilities, probabilities_of, single_values
from persia.schema import Label
from persia.schema.losses import BPR, JRC, EntireSpace, Focal, Hinge, Huber, ListwiseSoftmax, Poisson, Squared, Tweedie
from support.examples import examples

LOGITS = st.floats(-30, 30, width=32)

LABELS = (
    "click",
    Label("watch", "regression", unit="s"),
    Label("genre", "multiclass", classes=("rock", "jazz", "folk")),
    Label("stars", "ordinal", classes=4),
    Label("visits", "count", unit="per day"),
    Label("buy", loss=EntireSpace("click")),
    Label("like", loss=JRC()),
    Label("order", loss=BPR()),
)
WIDTH = 1 + 1 + 3 + 3 + 1 + 1 + 2 + 1


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def twin(row):
    """The definitions."""
    click, watch, rock, jazz, folk, a, b, c, visits, buy, no, yes, order = row
    classes = [math.exp(x - max(rock, jazz, folk)) for x in (rock, jazz, folk)]
    above = [1.0, sigmoid(a), sigmoid(min(a, b)), sigmoid(min(a, b, c)), 0.0]
    return [
        sigmoid(click),
        watch,
        *(x / sum(classes) for x in classes),
        *(above[k] - above[k + 1] for k in range(4)),
        math.exp(visits),
        sigmoid(click) * sigmoid(buy),
        math.exp(yes) / (math.exp(no) + math.exp(yes)),
        order,
    ]


@settings(max_examples=examples(200))
@given(st.lists(st.lists(LOGITS, min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=4))
def test_answers_are_those_of_the_definitions(rows):
    answers = Answers(LABELS)
    found = answers.answers(np.array(rows, np.float32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [twin(row) for row in rows], rtol=2e-5, atol=1e-6)


def test_each_answer_knows_label_kind_unit_and_classes():
    answers = Answers(LABELS)
    assert answers.columns == (
        "click", "watch", "genre:rock", "genre:jazz", "genre:folk", "stars:0", "stars:1", "stars:2", "stars:3",
        "visits", "buy", "like", "order",
    )  # fmt: skip
    assert [(each.label, each.kind, each.unit, each.classes) for each in answers.of] == [
        ("click", "probability", None, ()),
        ("watch", "value", "s", ()),
        ("genre", "classes", None, ("rock", "jazz", "folk")),
        ("stars", "classes", None, ("0", "1", "2", "3")),
        ("visits", "value", "per day", ()),
        ("buy", "probability", None, ()),
        ("like", "probability", None, ()),
        ("order", "score", None, ()),
    ]
    by_label = answers.by_label(answers.answers(np.zeros((2, WIDTH), np.float32)))
    assert by_label["genre"].shape == (2, 3)
    assert by_label["visits"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("loss", "kind", "answer"),
    [
        (Focal(), "binary", sigmoid(2)),
        (Hinge(), "binary", 2),
        (ListwiseSoftmax(), "binary", 2),
        (ListwiseSoftmax(), "regression", 2),
        (Squared(), "regression", 2),
        (Huber(), "count", 2),
        (Squared(), "count", 2),
        (Poisson(), "regression", math.exp(2)),
        (Tweedie(), "regression", math.exp(2)),
        (Tweedie(), "count", math.exp(2)),
    ],
)
def test_the_loss_says_what_a_logit_is(loss, kind, answer):
    found = Answers([Label("y", kind, loss=loss)]).answers(np.array([[2.0]], np.float32))
    assert found.tolist() == [[pytest.approx(answer)]]


def test_plain_labels_answer_as_before_bit_by_bit():
    logits = np.random.default_rng(0).normal(0, 9, (500, 2)).astype(np.float32)
    for labels in (["a", "b"], ["a", Label("b", missing="mask", loss=Focal())]):
        answers = Answers(labels)
        assert (answers.name, answers.columns) == ("probabilities", ("a", "b"))
        assert (answers.answers(logits) == probabilities_of(logits)).all()
        ranks = Answers(labels, log_odds=False)
        assert (ranks.name, ranks.answers(logits) is logits) == ("scores", True)


def test_answers_of_one_kind_have_its_name():
    logits = np.array([[0, 1, 2]], np.float32)
    answers = Answers(["click", Label("like", loss=JRC())])
    assert answers.name == "probabilities"
    assert answers.answers(logits).tolist() == [[0.5, pytest.approx(sigmoid(1))]]
    ranks = Answers(["click", Label("like", loss=JRC())], log_odds=False)
    assert ranks.name == "scores"
    assert ranks.answers(logits).tolist() == [[0, 1]]
    assert Answers(["click", Label("watch", "regression")]).name == "predictions"


def test_entire_space_goes_through_several_labels():
    labels = (Label("buy", loss=EntireSpace("cart")), Label("cart", loss=EntireSpace("click")), Label("click"))
    logits = np.array([[1.0, 2.0, 3.0]], np.float32)
    found = Answers(labels).answers(logits)[0]
    assert found == pytest.approx([sigmoid(1) * sigmoid(2) * sigmoid(3), sigmoid(2) * sigmoid(3), sigmoid(3)])
    # Far below zero the product vanishes, and its log-odds do not.
    assert binary_scores(labels, labels[0], np.full((1, 3), -60, np.float32)).tolist() == [pytest.approx(-180)]


def test_probabilities_of_classes_are_stable_for_huge_logits():
    genre, stars = Label("genre", "multiclass", classes=3), Label("stars", "ordinal", classes=3)
    found = class_log_probabilities(genre, np.array([[1e4, 0, -1e4]], np.float32))
    assert found.tolist() == [[0, -1e4, -2e4]]
    found = class_log_probabilities(stars, np.array([[200, -200], [-200, 200], [700, 690]], np.float32))
    np.testing.assert_allclose(np.exp(found[:2]), [[0, 1, 0], [1, 0, 0]], atol=1e-80)
    assert found[2].tolist() == pytest.approx([-700, -690 + math.log1p(-math.exp(-10)), 0], rel=1e-12, abs=1e-12)


def test_drift_has_one_number_for_each_label():
    logits = np.random.default_rng(0).normal(size=(50, WIDTH)).astype(np.float32)
    labels = tuple(Label(each) if isinstance(each, str) else each for each in LABELS)
    found, answers = single_values(labels, logits), Answers(LABELS).answers(logits)
    np.testing.assert_array_equal(found[:, 0], logits[:, 0])
    np.testing.assert_array_equal(found[:, 1], answers[:, 1])
    np.testing.assert_array_equal(found[:, 2], answers[:, 2:5].argmax(axis=1))
    np.testing.assert_allclose(found[:, 3], answers[:, 5:9] @ np.arange(4), rtol=1e-5)
    np.testing.assert_array_equal(found[:, 4], answers[:, 9])
    np.testing.assert_array_equal(found[:, 7], logits[:, -1])
    plain = logits[:, :2]
    assert single_values((Label("a"), Label("b")), plain) is plain
