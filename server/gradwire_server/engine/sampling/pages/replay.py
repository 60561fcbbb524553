"""Forwards of one token of every row, replayed as graphs of kernels.

A token is some dozens of small kernels a layer, and starting one from Python takes longer than running it. Rows and
lists of pages are filled up to few shapes, and each shape is captured as a graph: from then on the host writes the
forward's numbers into the graph's buffer, by one copy, and starts all kernels at once. The first forward of a model is
computed without a graph, so that its kernels are there. A CPU's graph is a recording (:mod:`.recording`).

A graph reads the weights and pages at the addresses that they had, and is dropped when one of them has moved. The first
graph of a model is compared with the forward that it stands for.

``--kernels plain`` leaves graphs out. They are not used either for rows of several policies, whose spans differ from
token to token, and for models that are divided, offloaded, quantised or compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from gradwire_losses.batch import sent
from torch import Tensor

from gradwire_server.engine.model.attention.paged import PagedDecode
from gradwire_server.engine.model.comparison import largest_difference, relative_tolerance
from gradwire_server.engine.model.layers.packed_linear import copies_in_use
from gradwire_server.engine.model.placement import storage_address
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.split_model import SplitModel
from gradwire_server.engine.sampling.pages.recording import Memory, recorded
from gradwire_server.engine.threads import product_threads

logger = logging.getLogger(__name__)

MOST_GRAPHS = 32
"""Graphs of one store of pages; more are begun anew."""

_right: WeakKeyDictionary[SplitModel, bool] = WeakKeyDictionary()
"""Whether the first graph of a model was right."""


_Key = tuple[object, ...]
"""The constants of a graph: threads, first pages, and shapes of its inputs."""


class _Graph(NamedTuple):
    """A captured forward.

    Attributes:
        numbers: Its inputs, one after the other.
        replay: Computes it again and returns the states.
    """

    numbers: Tensor
    replay: Callable[[], Tensor]


class Replays:
    """The graphs of the forwards over one store of pages."""

    def __init__(self) -> None:
        self._graphs: dict[_Key, _Graph] = {}
        self._seen: set[_Key] = set()
        self._read_from: object = None
        self._copies: object = None  # of weights; known by identity, as tensors are not equal or unequal as a whole
        self._pool: Any = None

    @staticmethod
    def may(policies: Sequence[Policy]) -> bool:
        """Whether forwards of rows of these policies are replayed."""
        split_model = policies[0].split_model
        right = split_model.replays and _right.get(split_model, True)
        return right and all(each is policies[0] for each in policies)

    def states(self, policies: Sequence[Policy], ids: Tensor, positions: Tensor, plan: PagedDecode) -> Tensor:
        """States of the rows' tokens, ``[R, H]``; the policies are active, and the rest is on the host."""
        split_model = policies[0].split_model
        if not self.may(policies):
            return split_model.packed_states(ids, positions, plan)
        inputs = [ids, positions]

        def noted(numbers: Tensor) -> Tensor:
            inputs.append(numbers)
            return numbers

        plan.mapped(noted)
        key = product_threads(), plan.firsts, *(each.shape for each in inputs)
        read_from, copies = _read_from(policies[0], plan), copies_in_use()
        if read_from != self._read_from or copies is not self._copies or len(self._graphs) == MOST_GRAPHS:
            self.clear()
            self._read_from, self._copies = read_from, copies
        numbers = sent(torch.cat([each.flatten() for each in inputs]), split_model.device)
        if key in self._graphs:
            self._graphs[key].numbers.copy_(numbers)
        elif not self._capture(key, split_model, inputs, numbers, plan):
            return split_model.packed_states(ids, positions, plan)
        states = self._graphs[key].replay()
        if split_model not in _right:
            expected = split_model.packed_states(ids, positions, plan)
            error, size = largest_difference(states, expected)
            _right[split_model] = error <= relative_tolerance(split_model.dtype) * size
            if not _right[split_model]:
                logger.warning("no graphs for %s: one differs by %.3g", split_model.facts.name, error)
                self.clear()
                return expected
        return states

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()
        self._seen.clear()
        self._pool = None

    def _capture(
        self, key: _Key, split_model: SplitModel, inputs: Sequence[Tensor], numbers: Tensor, plan: PagedDecode
    ) -> bool:
        """Capture a forward; returns whether it was. One that could not be is tried again once it was computed."""
        computed = key in self._seen
        self._seen.add(key)
        self._pool = self._pool or new_pool(split_model.device)
        if not computed and split_model not in _right:
            return False

        def compute() -> Tensor:
            parts = numbers.split([each.numel() for each in inputs])
            views = (part.view(each.shape) for part, each in zip(parts, inputs, strict=True))
            return split_model.packed_states(next(views), next(views), plan.mapped(lambda _: next(views)))

        try:
            replay = captured(compute, self._pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._graphs.clear()
            self._pool = None
            if computed:  # something in the model's forward waits for the device
                logger.info("no graphs for %s: %s", split_model.facts.name, error)
                _right[split_model] = False
            return False
        self._graphs[key] = _Graph(numbers, replay)
        return True


def _read_from(policy: Policy, plan: PagedDecode) -> object:
    """A value that changes when weights or pages move; the base's own weights stay where they were loaded."""
    return plan.store.moves, [storage_address(weight) for weight in policy.trainable_parameters().values()]


def new_pool(device: torch.device) -> Any:
    """A pool of memory that graphs share, as none is replayed before the states of another one were used."""
    return Memory() if device.type == "cpu" else torch.cuda.graph_pool_handle()


def captured(compute: Callable[[], Tensor], pool: Any) -> Callable[[], Tensor]:
    """Capture the kernels of a computation; returns what computes it.

    Raises:
        RuntimeError: It cannot be captured.
    """
    if isinstance(pool, Memory):
        return recorded(compute, pool)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, "thread_local")  # other threads may go on using the device
        try:
            states = compute()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return states

    return replay
