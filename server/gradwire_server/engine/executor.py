"""Executors of a pass's micro-batches: one process, or several that each compute some.

A pass asks its executor for three things, whoever computes: :meth:`Executor.score` computes all micro-batches,
:meth:`Executor.backward` goes back through those of this process, and :meth:`Executor.reduce` adds the gradients of all
processes. :class:`Executor` is one process, :class:`GroupExecutor` one rank among several.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.failures import is_fatal
from gradwire_server.engine.interruption import give_way
from gradwire_server.engine.lanes import Key, Sums, added

Scored = Sequence[Mapping[str, Tensor]]
"""For each batch that goes through the model: score name -> values."""
_Place = tuple[str, str, str]
"""A key and the name of a parameter."""
_Layout = dict[_Place, Tensor]
"""The layout of sums, as tensors on the meta device."""
_MESSAGE_NUMBERS = 1 << 24
"""Numbers of gradients that are exchanged at once."""


class Turn(NamedTuple):
    """A micro-batch that a process computes. ``repeated``: It does not count, because its own process computes it."""

    number: int
    repeated: bool = False


def executor_of(lanes: int, agreement: Agreement | None = None) -> Executor:
    """The executor of a run with so many lanes; without an agreement, or as the only process, of this one alone.

    It gives way to others between two micro-batches.
    """
    if agreement is None or agreement.ranks == 1:
        return Executor(lanes, gives_way=True)
    return GroupExecutor(lanes, agreement, gives_way=True)


class Executor:
    """One process that computes everything, lane by lane.

    Args:
        lanes: Number of lanes, a power of two.
        gives_way: Whether it gives way to others between two micro-batches: only the outer one of two does.

    Attributes:
        own: The lanes of this process. Of fewer lanes than ranks, several ranks compute the same one.
        counts: Whether no process before this one computes the same lanes.
        in_step: Whether each forward and backward is one of all processes, because models are divided among them.
    """

    in_step = False
    counts = True

    def __init__(self, lanes: int = 1, *, gives_way: bool = False) -> None:
        self.lanes, self.own = lanes, range(lanes)
        self._gives_way = gives_way

    def split(self, *, streams: bool) -> tuple[Executor, Executor]:
        """Return the executor of the parts that a loss is evaluated on, and that of a part's micro-batches.

        Processes share the errors of what they compute different parts of; in lock step those of each part, too,
        because all take part in the next one.

        Args:
            streams: Whether each micro-batch is a part; otherwise the whole batch is one.
        """
        return (self, Executor()) if streams else (Executor(), self)

    def turns(self, number: int) -> list[Turn]:
        """This process's turns at so many micro-batches, lane by lane; in lock step as many as any other's."""
        return [Turn(index) for lane in self.own for index in range(lane, number, self.lanes)]

    def score(self, what: str, number: int, compute: Callable[[Turn], Scored]) -> list[Scored]:
        """Compute micro-batches, each in one process; what one of them raises, all raise.

        Args:
            what: Names the work.
            number: Number of micro-batches.
            compute: Computes one; what it gives in a turn that is repeated is lost.

        Returns:
            What was computed of each, in their order.
        """
        computed: dict[int, Scored] = {}

        def compute_one(place: int, turn: Turn) -> None:
            computed[turn.number] = compute(turn)

        self._each(number, compute_one)
        return [computed[index] for index in range(number)]

    def backward(self, number: int, go_back: Callable[[int, Turn], None]) -> None:
        """Go back through the micro-batches of this process, given the place of each among its turns."""
        with self.together("backward"):
            self._each(number, go_back, before_first=False)

    def _each(self, number: int, do: Callable[[int, Turn], None], *, before_first: bool = True) -> None:
        """Do each turn of this process, given its place, and give way before each.

        Args:
            before_first: Also before the first one: not where a forward of several runs is to be gone back through.
        """
        for place, turn in enumerate(self.turns(number)):
            self._pause(before_first or place > 0)
            do(place, turn)

    def _pause(self, may: bool) -> None:
        if may and self._gives_way:
            give_way()

    def reduce(self, sums: Sums, device: torch.device, *, of_all: bool = False) -> Sums:
        """Add the sums of all processes, on the device that they are on; takes ownership of the given ones.

        Args:
            of_all: Also of those that compute the same lanes, where the sums of one of them count only.
        """
        return sums

    def together(self, what: str) -> AbstractContextManager[None]:
        """See :meth:`.agreement.Agreement.together`."""
        return nullcontext()

    def recomputed(self, own: Sequence[bool]) -> tuple[list[bool], bool]:
        """Whether each turn is computed twice, in lock step by all processes; and whether any turn of any is."""
        return list(own), any(own)

    def in_all(self, own: Sequence[Mapping[Key, Mapping[str, Tensor]]]) -> Sequence[Mapping[Key, Mapping[str, Tensor]]]:
        """A turn's gradients for each batch; in lock step with the keys of all processes, of which some have none."""
        return own


class GroupExecutor(Executor):
    """One rank among several, which each compute a block of neighbouring lanes.

    Over models that are divided among the ranks, each forward and backward is one of all of them. A rank with fewer
    micro-batches than another then repeats one, whose scores and gradient do not count.
    """

    def __init__(self, lanes: int, agreement: Agreement, *, gives_way: bool = False) -> None:
        super().__init__(lanes, gives_way=gives_way)
        self._agreement, self.in_step = agreement, agreement.lock_step
        rank, ranks = agreement.rank, agreement.ranks
        first = rank * lanes // ranks
        self.own = range(first, first + max(1, lanes // ranks))
        self.counts = rank % max(1, ranks // lanes) == 0

    def split(self, *, streams: bool) -> tuple[Executor, Executor]:
        if streams and self.in_step:
            return self, GroupExecutor(1, self._agreement)
        return super().split(streams=streams)

    def turns(self, number: int) -> list[Turn]:
        own = super().turns(number)
        if not self.in_step:
            return own
        return own + [Turn(number - 1, repeated=True)] * (self._most(number) - len(own))

    def _most(self, number: int) -> int:
        """The most micro-batches, of so many, that any process has."""
        return max(self._number_of(first, number) for first in range(0, self.lanes, len(self.own)))

    def _number_of(self, first: int, number: int) -> int:
        """Number of micro-batches of the process whose first lane is this one."""
        return sum(len(range(lane, number, self.lanes)) for lane in range(first, first + len(self.own)))

    def score(self, what: str, number: int, compute: Callable[[Turn], Scored]) -> list[Scored]:
        own: dict[int, Scored] = {}

        def compute_one(place: int, turn: Turn) -> None:
            computed = compute(turn)
            if not turn.repeated:
                own[turn.number] = computed

        with self.together(what):
            self._each(number, compute_one)
        by_number = dict(own)
        if not self._whole:
            for told in self._agreement.gathered(_packed(own)):
                by_number |= {index: parts for index, parts in _unpacked(told).items() if index not in by_number}
        return [by_number[index] for index in range(number)]

    def _each(self, number: int, do: Callable[[int, Turn], None], *, before_first: bool = True) -> None:
        own, failure = self.turns(number), None
        for place in range(self._most(number)):  # as often as any other process, also after an error of its own
            self._pause(before_first or place > 0)
            if failure is None and place < len(own):
                try:
                    do(place, own[place])
                except Exception as error:
                    if self.in_step or is_fatal(error):
                        raise
                    failure = error
        if failure is not None:
            raise failure

    def reduce(self, sums: Sums, device: torch.device, *, of_all: bool = False) -> Sums:
        if self._whole and not of_all:
            return sums
        rank, ranks = self._agreement.rank, self._agreement.ranks
        layouts = [_layout(told) for told in self._agreement.gathered(_described(sums))]
        distance = 1 if of_all else max(1, ranks // self.lanes)
        while distance < ranks:
            peer = rank ^ distance
            theirs = self._exchanged(peer, sums, layouts, device)
            sums = added(sums, theirs) if rank < peer else added(theirs, sums)
            layouts = [layouts[each & ~distance] | layouts[each | distance] for each in range(ranks)]
            distance *= 2
        return sums

    def together(self, what: str) -> AbstractContextManager[None]:
        return self._agreement.together(what)

    def recomputed(self, own: Sequence[bool]) -> tuple[list[bool], bool]:
        if self._whole:
            return list(own), any(own)
        if self.in_step:
            own = [any(each) for each in zip(*self._agreement.gathered(bytes(own)), strict=True)]
        return list(own), self._agreement.greatest(int(any(own))) > 0

    def in_all(self, own: Sequence[Mapping[Key, Mapping[str, Tensor]]]) -> Sequence[Mapping[Key, Mapping[str, Tensor]]]:
        if self._whole or not self.in_step:
            return own
        told = map(json.loads, self._agreement.gathered(json.dumps([list(by_key) for by_key in own]).encode()))
        keys = [sorted({(loss, unit) for keys in each for loss, unit in keys}) for each in zip(*told, strict=True)]
        return [{key: by_key.get(key, {}) for key in of_batch} for by_key, of_batch in zip(own, keys, strict=True)]

    @property
    def _whole(self) -> bool:
        return len(self.own) == self.lanes

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


def _packed(own: Mapping[int, Scored]) -> bytes:
    """Scores as bytes; each is of one batch."""
    return safetensors.torch.save(
        {f"{index}|{name}": values.cpu().clone() for index, (scores,) in own.items() for name, values in scores.items()}
    )


def _unpacked(told: bytes) -> dict[int, Scored]:
    by_micro: dict[int, dict[str, Tensor]] = {}
    for path, values in safetensors.torch.load(told).items():
        index, name = path.split("|")
        by_micro.setdefault(int(index), {})[name] = values.clone()  # aligned like a tensor of one's own
    return {index: [scores] for index, scores in by_micro.items()}
