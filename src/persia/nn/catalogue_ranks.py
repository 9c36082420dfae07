"""Ranks of users' chosen items among all items, exact, from blocks of items' vectors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CatalogueRanks", "Ranks"]

SCORES = 1 << 19
"""Maximum number of scores at a time on a CPU, at 16 bytes each: they stay in its cache."""

DEVICE_SCORES = 1 << 22
"""The same on other devices, where many small operations would take longer."""

LOW_WORD = (1 << 32) - 1


class Ranks(NamedTuple):
    """Ranks of chosen items, on the CPU.

    Attributes:
        above: number of items with a higher score than the user's chosen one, int64 `[users]`; -1 without one.
        equal: number of other items with the same score, int64 `[users]`.
        top: positions of the items with the highest scores, highest first, int64 `[users, k]`; of equal scores, smaller
            positions come first. -1 where there are no more items.
    """

    above: Tensor
    equal: Tensor
    top: Tensor


class CatalogueRanks:
    """Counts the items that score above each user's chosen item, block by block, and keeps the best k.

    A score is the dot product of two float32 vectors, summed in float64 and rounded to float32. Blocks of another size
    may sum in another order, which changes the last bits of float64 and so, very rarely, the last bit of a score: an
    item with the same vector as the chosen one may then count as above or below it instead of equal. All items are
    given once, in blocks of any size and in any order. Not thread-safe.

    Cost: `2 * users * items * dim` operations in float64. Memory: `12 * dim + 8 * k + 24` bytes for each user, 8 for
    each left-out pair, `8 * dim` for each item of a block, and 8 MiB of scores, 64 MiB on a GPU. All of it is on the
    device of `users`.

    Args:
        users: vectors of users, float32 `[users, dim]`, finite.
        chosen: vectors of their chosen items, float32 `[users, dim]`; any for users without one.
        positions: positions of these among the items, int64 `[users]`; -1 for users without one.
        left_out: pairs of a user and the position of an item that does not compete for this user, int64 `[2, pairs]`;
            pairs with the chosen item do not count, and pairs may repeat.
        k: number of best items to keep; 0 for none.
    """

    def __init__(self, users: Tensor, chosen: Tensor, positions: Tensor, left_out: Tensor, k: int) -> None:
        device = users.device
        self._users = users.double()
        self._positions = positions.to(device)
        self._chosen = (self._users * chosen.double()).sum(1).float()
        self._above = torch.zeros(len(users), dtype=torch.int64, device=device)
        self._equal = torch.zeros_like(self._above)
        pairs = left_out.to(device)
        pairs = pairs[:, pairs[1] != self._positions[pairs[0]]]
        order = torch.argsort(pairs[1], stable=True)
        self._left_out_users, self._left_out_items = pairs[0][order].contiguous(), pairs[1][order].contiguous()
        self._best = torch.full((len(users), k), _key_of_nothing(), dtype=torch.int64, device=device)

    def add(self, start: int, items: Tensor) -> None:
        """Adds a block of items.

        Args:
            start: position of its first item; positions are less than 2**32.
            items: vectors, float32 `[block, dim]`, finite.
        """
        if not len(items):
            return
        vectors = items.to(self._users.device).double().T
        users = max(1, (SCORES if vectors.device.type == "cpu" else DEVICE_SCORES) // len(items))
        for first in range(0, len(self._users), users):
            self._add(start, vectors, slice(first, first + users))

    def _add(self, start: int, vectors: Tensor, part: slice) -> None:
        """Adds a block of items, given as float64 `[dim, block]`, for some users."""
        block = vectors.shape[1]
        scores = (self._users[part] @ vectors).float() + 0.0  # -0.0 becomes 0.0, whose bits are compared below.
        chosen = self._chosen[part].unsqueeze(1) + 0.0
        places = self._positions[part] - start
        rows = ((places >= 0) & (places < block)).nonzero().squeeze(1)
        scores[rows, places[rows]] = chosen[rows, 0]  # Computed in another batch, it may differ by a bit.
        bounds = torch.tensor([start, start + block], device=scores.device)
        begin, end = torch.searchsorted(self._left_out_items, bounds).tolist()
        users, items = self._left_out_users[begin:end] - part.start, self._left_out_items[begin:end] - start
        here = (users >= 0) & (users < len(scores))
        scores[users[here], items[here]] = -torch.inf
        self._above[part] += torch.count_nonzero(scores > chosen, 1)
        self._equal[part] += torch.count_nonzero(scores == chosen, 1)
        self._equal[part][rows] -= 1
        if self._best.shape[1]:
            self._keep(start, scores, part)

    def _keep(self, start: int, scores: Tensor, part: slice) -> None:
        """Keeps the best items of some users, by score and then by position."""
        best = self._best[part]
        k = best.shape[1]
        better = scores.amax(1) >= _scores_of(best[:, -1])
        rows = better.nonzero().squeeze(1)
        if not len(rows):
            return
        positions = torch.arange(start, start + scores.shape[1], device=scores.device)
        keys = torch.cat([best[rows], _keys(scores[rows], positions)], 1)
        best[rows] = keys.topk(k, 1).values

    def result(self) -> Ranks:
        """Returns the ranks among the items so far, on the CPU."""
        without = self._positions < 0
        above, equal = self._above.masked_fill(without, -1), self._equal.masked_fill(without, 0)
        nothing = _scores_of(self._best) == -torch.inf
        top = (LOW_WORD - (self._best & LOW_WORD)).masked_fill(nothing, -1)
        return Ranks(above.cpu(), equal.cpu(), top.cpu())


def _keys(scores: Tensor, positions: Tensor) -> Tensor:
    """Returns int64 keys in the order of float32 scores; of equal scores, smaller positions have larger keys."""
    bits = scores.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # Negative floats are ordered backwards.
    return (ordered.long() << 32) | (LOW_WORD - positions)


def _scores_of(keys: Tensor) -> Tensor:
    """Returns the scores of keys."""
    ordered = (keys >> 32).int()
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _key_of_nothing() -> int:
    return int(_keys(torch.tensor([-torch.inf]), torch.tensor([LOW_WORD])))
