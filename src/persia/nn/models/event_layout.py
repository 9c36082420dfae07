"""Events of a batch one after another: without padding on a CPU, else with the padding that keeps shapes fixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from persia.types import Int64Array

__all__ = ["EventLayout", "LengthGroup", "can_be_jagged", "layout_of", "present_places"]

SLACK_EVENTS, SLACK_SHARE = 8, 0.1
"""Padding that a sample may have in its group: this number, or this share of the longest of the group.

Less makes more groups, and each group costs calls; more makes attention compute padding. See docs/decisions/0038.
"""


class LengthGroup(NamedTuple):
    """Consecutive samples of a layout.

    Attributes:
        samples: number of samples.
        length: places of each sample, events first.
    """

    samples: int
    length: int


class EventLayout:
    """Where the places of a batch are in flat tensors `[places, ...]`, whose groups are views `[samples, length, ...]`.

    Work on single events runs on flat tensors, and attention on groups. All places of a sample are consecutive: its
    events in order, then padding.

    Args:
        mask: bool `[batch, length]`: True for as many events as there are, then False.
        groups: of the samples, in the order of the places.
        order: sample of each one in the groups, int64 `[batch]`; None for the batch's own order.
        index: place in the flattened padded tensor, of each place of the layout, int64; None for all of them.
        starts: first place of each sample of the batch, int64 `[batch]`.

    Attributes:
        mask: see above.
        lengths: events of each sample, int64 `[batch]`.
        groups: see above.
        left: events of the sample from each place on, int64 `[places]`: 1 at the last event, below at padding.
    """

    def __init__(
        self, mask: Tensor, groups: Sequence[LengthGroup], order: Tensor | None, index: Tensor | None, starts: Tensor
    ) -> None:
        self.mask = mask
        self.lengths = mask.sum(1)
        self.groups = groups
        self._back = None if order is None else order.argsort()
        self._index = index
        self._samples = None if index is None else index // mask.shape[1]
        self._starts = starts
        self._whole = False
        """Whether it is known that there is no padding, with the places in the order of the batch."""
        places = torch.arange(mask.numel(), device=mask.device) if index is None else index
        self.left = self.of_samples(self.lengths) - places % mask.shape[1]

    @classmethod
    def padded(cls, mask: Tensor) -> EventLayout:
        """Returns the layout of all places, whose shape does not depend on values."""
        batch, length = mask.shape
        starts = torch.arange(batch, device=mask.device) * length
        return cls(mask, [LengthGroup(batch, length)], None, None, starts)

    @classmethod
    def jagged(cls, mask: Tensor, *, one_group: bool = False) -> EventLayout:
        """Returns the layout of samples in groups of like length, each padded to its longest. Reads the mask's values.

        If one group has all places, it is the layout that `padded` returns: nothing has to be moved.

        Args:
            mask: see above.
            one_group: whether all samples are one group, as for a network that computes event after event.
        """
        width = mask.shape[1]
        lengths = mask.sum(1).numpy()
        order = np.arange(len(lengths)) if one_group else np.argsort(lengths, kind="stable")
        ends = [len(lengths)] if one_group else _ends(lengths[order])
        begins = [0, *ends[:-1]]
        longest = [int(lengths[order[begin:end]].max(initial=1)) for begin, end in zip(begins, ends, strict=True)]
        groups = [LengthGroup(end - begin, own) for begin, end, own in zip(begins, ends, longest, strict=True)]
        if longest == [width]:
            layout = cls.padded(mask)
            layout._whole = bool((lengths == width).all())
            return layout
        places = np.repeat(longest, [group.samples for group in groups])  # Of each sample.
        first = np.cumsum(places) - places
        index = np.arange(places.sum()) + np.repeat(order * width - first, places)
        starts = np.empty_like(first)
        starts[order] = first
        tensors = [torch.from_numpy(part) for part in (order, index, starts)]
        return cls(mask, groups, *tensors)

    def flat(self, padded: Tensor) -> Tensor:
        """Returns `[places, ...]` of `[batch, length, ...]`."""
        flat = padded.flatten(0, 1)
        return flat if self._index is None else flat.index_select(0, self._index)

    def unflat(self, flat: Tensor) -> Tensor:
        """Returns `[batch, length, ...]` of `[places, ...]`; zeros at places that the layout does not have."""
        if self._index is not None:
            zeros = flat.new_zeros(self.mask.numel(), *flat.shape[1:])
            flat = zeros.index_copy(0, self._index, flat)
        padded: Tensor = flat.unflatten(0, self.mask.shape)
        return padded

    def grouped(self, flat: Tensor) -> list[Tensor]:
        """Returns views of each group, `[samples, length, ...]`."""
        if self._index is None:
            return [flat.unflatten(0, self.mask.shape)]
        parts = flat.split([group.samples * group.length for group in self.groups])
        return [part.unflatten(0, group) for part, group in zip(parts, self.groups, strict=True)]

    def joined(self, groups: Sequence[Tensor]) -> Tensor:
        """Returns `[places, ...]` of what `grouped` returns."""
        parts = [group.flatten(0, 1) for group in groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def per_sample(self, groups: Sequence[Tensor]) -> Tensor:
        """Returns `[batch, ...]` in the order of the batch, of a tensor `[samples, ...]` of each group."""
        whole = groups[0] if len(groups) == 1 else torch.cat(list(groups))
        return whole if self._back is None else whole.index_select(0, self._back)

    def of_samples(self, values: Tensor) -> Tensor:
        """Returns what `[batch, ...]` has for each place's sample, `[places, ...]`."""
        if self._samples is not None:
            return values.index_select(0, self._samples)
        return values.unsqueeze(1).expand(-1, self.mask.shape[1], *values.shape[1:]).flatten(0, 1)

    def last(self, flat: Tensor) -> Tensor:
        """Returns the value `[batch, ...]` at each sample's last event; zeros where there is none."""
        if self._whole:
            padded: Tensor = flat.unflatten(0, self.mask.shape)
            return padded[:, -1]
        newest = flat.index_select(0, self._starts + (self.lengths - 1).clamp(min=0))
        return newest * (self.lengths > 0).view(-1, *(1,) * (flat.dim() - 1))

    def following(self, flat: Tensor, after: Tensor) -> Tensor:
        """Returns the value of the event after each, `[places, ...]`, and at the last event `after`, `[batch, ...]`.

        What it has at padding is not defined.
        """
        if self._whole:
            return torch.cat([flat.unflatten(0, self.mask.shape)[:, 1:], after.unsqueeze(1)], 1).flatten(0, 1)
        newest = (self.left == 1).view(-1, *(1,) * (flat.dim() - 1))
        return torch.where(newest, self.of_samples(after), flat.roll(-1, 0))


def layout_of(mask: Tensor, *, one_group: bool = False) -> EventLayout:
    """Returns the fastest layout.

    It is jagged on a CPU, where the lengths of samples are known when the network runs. Elsewhere the host would have
    to wait for the device to learn them, and code that is compiled or exported would fit one batch only.

    Args:
        mask: bool `[batch, length]`: True for as many events as there are, then False.
        one_group: see `EventLayout.jagged`.
    """
    return EventLayout.jagged(mask, one_group=one_group) if can_be_jagged(mask) else EventLayout.padded(mask)


def present_places(mask: Tensor) -> tuple[Tensor | slice, Tensor | None]:
    """Returns the index of the places in a flattened mask that are True, or of all where `layout_of` keeps padding.

    The second result is whether each of them is True, bool `[places]`; None if all are.
    """
    if not can_be_jagged(mask):
        return slice(None), mask.flatten()
    return (slice(None) if mask.all() else mask.flatten().nonzero().squeeze(1)), None


def can_be_jagged(mask: Tensor) -> bool:
    """Returns whether shapes may depend on the values of a mask."""
    return mask.device.type == "cpu" and not torch.compiler.is_compiling()


def _ends(ascending: Int64Array) -> list[int]:
    """Returns where groups of these lengths end, each with samples that need little padding."""
    ends, end = list[int](), len(ascending)
    while end > 0:
        ends.append(end)
        longest = int(ascending[end - 1])
        least = longest - max(SLACK_EVENTS, int(SLACK_SHARE * longest))
        end = int(np.searchsorted(ascending[:end], least, "left"))
    return ends[::-1] or [0]
