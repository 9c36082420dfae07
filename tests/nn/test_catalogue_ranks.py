"""Ranks among all items, block by block, against a slow reference in NumPy that has all scores."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from persia.nn import catalogue_ranks
from persia.nn.catalogue_ranks import CatalogueRanks

K = 4


def reference(users, items, positions, left_out):
    """Above, equal and best K of each user; all scores at once."""
    scores = (users.astype(np.float64) @ items.astype(np.float64).T).astype(np.float32)
    above, equal, top = [], [], []
    for user, position in enumerate(positions):
        out = {item for u, item in left_out if u == user and item != position}
        competing = [item for item in range(len(items)) if item not in out]
        best = sorted(competing, key=lambda item: (-scores[user, item], item))[:K]
        top.append(best + [-1] * (K - len(best)))
        others = [item for item in competing if item != position]
        above.append(sum(scores[user, i] > scores[user, position] for i in others) if position >= 0 else -1)
        equal.append(sum(scores[user, i] == scores[user, position] for i in others) if position >= 0 else 0)
    return above, equal, top


@st.composite
def cases(draw):
    """Few distinct vectors make many equal scores; of real numbers there are none but of equal vectors."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    count, users, dim = draw(st.integers(1, 40)), draw(st.integers(1, 9)), draw(st.integers(1, 5))
    if draw(st.booleans()):
        items, vectors = rng.integers(-1, 2, (count, dim)), rng.integers(-1, 2, (users, dim))
    else:
        items = rng.normal(size=(max(1, count // 2), dim))[rng.integers(0, max(1, count // 2), count)]
        vectors = rng.normal(size=(users, dim))
    positions = rng.integers(-1, count, users)
    pairs = draw(st.integers(0, 60))
    left_out = np.stack([rng.integers(0, users, pairs), rng.integers(0, count, pairs)])
    cuts = np.unique(rng.integers(0, count + 1, draw(st.integers(0, 6))))
    bounds = list(zip([0, *cuts], [*cuts, count], strict=True))
    rng.shuffle(bounds)
    return vectors.astype(np.float32), items.astype(np.float32), positions, left_out, bounds


@given(cases(), st.integers(1, 50))
def test_blocks_of_any_size_give_the_ranks_of_all_scores(case, at_a_time):
    users, items, positions, left_out, bounds = case
    before, catalogue_ranks.SCORES = catalogue_ranks.SCORES, at_a_time  # A few users at a time.
    try:
        ranks = CatalogueRanks(
            torch.from_numpy(users),
            torch.from_numpy(items[positions]),
            torch.from_numpy(positions),
            torch.from_numpy(left_out),
            K,
        )
        for start, end in bounds:
            ranks.add(int(start), torch.from_numpy(items[start:end]))
        found = [part.tolist() for part in ranks.result()]
    finally:
        catalogue_ranks.SCORES = before
    assert found == [*map(list, reference(users, items, positions, left_out.T.tolist()))]


def test_zeros_of_both_signs_are_equal():
    users = torch.tensor([[1.0], [-1.0]])
    items = torch.tensor([[0.0], [-0.0], [0.0]])
    ranks = CatalogueRanks(users, items[:2], torch.tensor([0, 1]), torch.empty(2, 0, dtype=torch.int64), 2)
    ranks.add(0, items)
    above, equal, top = ranks.result()
    assert above.tolist() == [0, 0]
    assert equal.tolist() == [2, 2]
    assert top.tolist() == [[0, 1], [0, 1]]


def test_ranks_of_very_different_scores_are_exact():
    """In float32, 1e8 + 1 - 1e8 would be 0."""
    users = torch.tensor([[1e8, 1.0, -1e8]])
    items = torch.tensor([[1.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 3.0, 1.0]])
    ranks = CatalogueRanks(users, items[1:2], torch.tensor([1]), torch.empty(2, 0, dtype=torch.int64), 3)
    ranks.add(0, items)
    assert [part.tolist() for part in ranks.result()] == [[1], [0], [[2, 1, 0]]]


def test_the_chosen_item_is_no_other_item_of_its_score():
    """Its vector of another batch may differ in the last bit."""
    items = torch.tensor([[1.0 + 2.0**-23], [1.0], [0.5]])
    ranks = CatalogueRanks(torch.ones(1, 1), items[1:2], torch.tensor([0]), torch.empty(2, 0, dtype=torch.int64), 3)
    ranks.add(0, items)
    assert [part.tolist() for part in ranks.result()] == [[0], [1], [[0, 1, 2]]]
