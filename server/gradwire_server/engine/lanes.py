"""Lanes: the fixed order in which the gradients of micro-batches are added, on any number of ranks.

Micro-batch ``i`` belongs to lane ``i % count``. The gradients of a lane are added in the order of its micro-batches,
and the lanes in a fixed binary tree. Each rank computes one block of neighbouring lanes, so the lower levels of the
tree are within a rank, where a binary counter holds one sum a level, and the upper ones are between ranks. So the bits
depend neither on the number of ranks, nor on which of them computes what.

Over models that are divided among the ranks, each forward and backward is one of all of them. A rank with fewer
micro-batches than another then repeats one, whose scores and gradient do not count.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from gradwire_server.engine.agreement import Agreement

Key = tuple[str, str]
Gradients = dict[str, Tensor]
Sums = dict[Key, Gradients]
_Place = tuple[str, str, str]
"""A key and the name of a parameter."""
_Layout = dict[_Place, Tensor]
"""What sums consist of, as tensors on the meta device."""
_MESSAGE_NUMBERS = 1 << 24
"""Numbers of gradients that are exchanged at once."""


class Step(NamedTuple):
    """A micro-batch that a process computes. ``repeated``: It does not count, because its own process computes it."""

    number: int
    repeated: bool = False


class Lanes:
    """The lanes of a run, of which this process computes some.

    Args:
        count: Number of lanes, a power of two.
        agreement: This process's agreement with the others; by default it is alone.

    Attributes:
        count: The same.
        own: The lanes of this process. Of fewer lanes than ranks, several ranks compute the same one.
        counts: Whether no process before this one computes the same lanes.
    """

    def __init__(self, count: int = 1, agreement: Agreement | None = None) -> None:
        agreement = agreement or Agreement()
        self.count, self._agreement = count, agreement
        rank, ranks = agreement.rank, agreement.ranks
        first = rank * count // ranks
        self.own = range(first, first + max(1, count // ranks))
        self.counts = rank % max(1, ranks // count) == 0

    def split(self, *, streams: bool) -> tuple[Lanes, Lanes]:
        """The lanes of the parts that a loss is evaluated on, and of the micro-batches of a part.

        Processes share the errors of what they compute different parts of; in lock step those of each part, too,
        because all take part in the next one.

        Args:
            streams: Whether each micro-batch is a part; otherwise the whole batch is one.
        """
        if not streams:
            return Lanes(), self
        return self, Lanes(1, self._agreement) if self.in_step else Lanes()

    def steps(self, number: int) -> list[Step]:
        """Which of so many micro-batches this process computes, lane by lane; in lock step as many as any other."""
        own = [Step(index) for lane in self.own for index in range(lane, number, self.count)]
        if not self.in_step:
            return own
        most = max(self._number_of(first, number) for first in range(0, self.count, len(self.own)))
        return own + [Step(number - 1, repeated=True)] * (most - len(own))

    def _number_of(self, first: int, number: int) -> int:
        """How many micro-batches a process has whose lanes begin with this one."""
        return sum(len(range(lane, number, self.count)) for lane in range(first, first + len(self.own)))

    @property
    def in_step(self) -> bool:
        """Whether each forward and backward is one of all processes."""
        return self._agreement.lock_step

    def together(self, what: str) -> AbstractContextManager[None]:
        """See :meth:`.agreement.Agreement.together`."""
        return self._agreement.together(what)

    def any(self, own: bool) -> bool:
        """Whether it is so in any process."""
        return own if self._whole else self._agreement.greatest(int(own)) > 0

    def any_of(self, own: Sequence[bool]) -> list[bool]:
        """Of each step, in lock step: whether it is so in any process."""
        if self._whole or not self.in_step:
            return list(own)
        return [any(each) for each in zip(*self._agreement.gathered(bytes(own)), strict=True)]

    def in_all(self, own: Sequence[Mapping[Key, Mapping[str, Tensor]]]) -> Sequence[Mapping[Key, Mapping[str, Tensor]]]:
        """A step's gradients for each batch; in lock step with the keys of all processes, of which some have none."""
        if self._whole or not self.in_step:
            return own
        told = map(json.loads, self._agreement.gathered(json.dumps([list(by_key) for by_key in own]).encode()))
        keys = [sorted({(loss, unit) for keys in each for loss, unit in keys}) for each in zip(*told, strict=True)]
        return [{key: by_key.get(key, {}) for key in of_batch} for by_key, of_batch in zip(own, keys, strict=True)]

    def gathered(
        self, own: Mapping[int, Sequence[Mapping[str, Tensor]]], number: int
    ) -> list[Sequence[Mapping[str, Tensor]]]:
        """What was computed of each micro-batch, by whichever process.

        Args:
            own: Number of a micro-batch of this process -> for each batch: score name -> values.
            number: Number of micro-batches.

        Returns:
            The same of all micro-batches, in their order.
        """
        by_micro: dict[int, Sequence[Mapping[str, Tensor]]] = dict(own)
        if not self._whole:
            for told in self._agreement.gathered(_packed(own)):
                by_micro |= {index: parts for index, parts in _unpacked(told).items() if index not in by_micro}
        return [by_micro[index] for index in range(number)]

    def total(self, sums: Sums, device: torch.device, *, of_all: bool = False) -> Sums:
        """Add the sums of all processes, on the device that they are on; takes ownership of the given ones.

        Args:
            of_all: Also of those that compute the same lanes, where the sums of one of them count only.
        """
        if self._whole and not of_all:
            return sums
        rank, ranks = self._agreement.rank, self._agreement.ranks
        layouts = [_layout(told) for told in self._agreement.gathered(_described(sums))]
        distance = 1 if of_all else max(1, ranks // self.count)
        while distance < ranks:
            peer = rank ^ distance
            theirs = self._exchanged(peer, sums, layouts, device)
            sums = added(sums, theirs) if rank < peer else added(theirs, sums)
            layouts = [layouts[each & ~distance] | layouts[each | distance] for each in range(ranks)]
            distance *= 2
        return sums

    @property
    def _whole(self) -> bool:
        return len(self.own) == self.count

    def _exchanged(self, peer: int, sums: Sums, layouts: Sequence[_Layout], device: torch.device) -> Sums:
        """The sums of another process, which gets this one's. All processes exchange the same places at a time."""
        theirs, of_all = layouts[peer], dict(ChainMap(*layouts))
        own = {(*key, name): value for key, by_name in sums.items() for name, value in by_name.items()}
        received_sums: Sums = {}
        for places in _messages(of_all):
            coming = {place: theirs[place] for place in places if place in theirs}
            dtype = of_all[places[0]].dtype
            going = [own[place].flatten() for place in places if place in own]
            received = self._agreement.exchanged(
                peer,
                torch.cat(going).cpu() if going else torch.empty(0, dtype=dtype),
                torch.empty(sum(each.numel() for each in coming.values()), dtype=dtype),
                longest=sum(of_all[place].numel() for place in places),
            )
            parts = received.to(device).split([each.numel() for each in coming.values()])
            for ((loss, unit, name), like), values in zip(coming.items(), parts, strict=True):
                received_sums.setdefault((loss, unit), {})[name] = values.view(like.shape)
        order = dict.fromkeys((loss, unit) for loss, unit, _ in theirs)
        return {key: received_sums[key] for key in order}


class LaneTree:
    """Sums of lanes, added in a binary tree as they come.

    Args:
        first: The first lane.
    """

    def __init__(self, first: int) -> None:
        self._next = first
        self._held: list[tuple[int, Sums]] = []  # the level of each, falling

    def add(self, lane: int, sums: Sums) -> None:
        """Add a lane's sums, behind those of all lanes before it; those between have none. Takes ownership."""
        while self._next < lane:
            self._push({})
        self._push(sums)

    def total(self, end: int) -> Sums:
        """The sum of all lanes before ``end``."""
        while self._next < end:
            self._push({})
        ((_, sums),) = self._held
        return sums

    def _push(self, sums: Sums) -> None:
        level = 0
        while self._held and self._held[-1][0] == level:
            sums = added(self._held.pop()[1], sums)
            level += 1
        self._held.append((level, sums))
        self._next += 1


def added(left: Sums, right: Sums) -> Sums:
    """The sum of both, in the tensors of the left one where it has them."""
    for key, by_name in right.items():
        mine = left.setdefault(key, {})
        both = [name for name in by_name if name in mine]
        if both:
            torch._foreach_add_([mine[name] for name in both], [by_name[name] for name in both])
        mine |= {name: value for name, value in by_name.items() if name not in mine}
    return left


def _described(sums: Sums) -> bytes:
    places = [
        (*key, name, str(value.dtype).removeprefix("torch."), list(value.shape))
        for key, by_name in sums.items()
        for name, value in by_name.items()
    ]
    return json.dumps(places).encode()


def _layout(told: bytes) -> _Layout:
    return {
        (loss, unit, name): torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for loss, unit, name, dtype, shape in json.loads(told)
    }


def _messages(layout: _Layout) -> Iterator[list[_Place]]:
    """Places of one dtype each, in an order that all processes have, and not too many numbers at once."""
    order = sorted(layout, key=lambda place: (str(layout[place].dtype), place))
    while order:
        count, size = 1, layout[order[0]].numel()
        while count < len(order) and layout[order[count]].dtype == layout[order[0]].dtype:
            size += layout[order[count]].numel()
            if size > _MESSAGE_NUMBERS:
                break
            count += 1
        yield order[:count]
        order = order[count:]


def _packed(own: Mapping[int, Sequence[Mapping[str, Tensor]]]) -> bytes:
    """Scores as bytes; each is of one batch."""
    return safetensors.torch.save(
        {f"{index}|{name}": values.cpu().clone() for index, (scores,) in own.items() for name, values in scores.items()}
    )


def _unpacked(told: bytes) -> dict[int, Sequence[dict[str, Tensor]]]:
    by_micro: dict[int, dict[str, Tensor]] = {}
    for path, values in safetensors.torch.load(told).items():
        index, name = path.split("|")
        by_micro.setdefault(int(index), {})[name] = values.clone()  # aligned like a tensor of one's own
    return {index: [scores] for index, scores in by_micro.items()}
