"""Attention over keys and values in pages: a prompt's pages are stored once for all samples that begin with it.

Legend: ``T`` tokens that the store has room for, ``R`` rows (samples), ``H`` heads, ``K`` heads of keys and values,
``D`` head size. A class of page lists has ``G`` lists of ``N`` pages, each list with the queries of ``C`` rows.

A token attends to the pages that its row shares with others, where the queries of all those rows are one matrix
product (Juravsky et al. 2024, arXiv:2402.05099), and to its row's own pages. The results combine by their log-sum-exps.
Lists of similar size form a class, which is one call, so the number of calls does not grow with the rows. On a CPU a
kernel (:mod:`..layers.cpu_kernels`) attends to all rows' own pages where they are.
"""

from __future__ import annotations

import logging
import math
import mmap
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import torch
from gradwire_losses.batch import sent
from torch import Tensor, nn

from gradwire_server.engine.model.attention.masked import MaskedSegments
from gradwire_server.engine.model.comparison import largest_difference
from gradwire_server.engine.model.layers.cpu_kernels import cpu_kernels, sampling_kernels
from gradwire_server.engine.model.packing import Layout, OrderedKeys, ordered_keys
from gradwire_server.engine.threads import products

logger = logging.getLogger(__name__)

PAGE = 16
"""Tokens of a page."""
MAPPED = 4 << 20
"""Bytes of a CPU's tensor from which on there is room for all at once, or twice as much; as blocks that its allocator
maps (``ENVIRONMENT`` in :mod:`gradwire_server.engine_client.launcher`)."""
KEPT = 64 << 20
"""Bytes that are kept for pages to come, as much as a CPU's allocator keeps. 64 samples of 64 tokens of a model with
4.4 M parameters took 0.98 s in memory that was kept and 1.19 s in new memory, by turns on a virtual machine."""


class PageStore:
    """Keys and values of every layer, ``[K, T, D]`` each; all layers use the same places.

    Args:
        most: Pages to make room for at once on a CPU, whose memory is taken when it is written.

    Attributes:
        pages: Number of pages there is room for.
        used: Number of pages that there had to be room for.
        moves: How often the tensors have moved to other addresses.
    """

    def __init__(self, most: int = 0) -> None:
        self.pages = self.moves = self.used = 0
        self._most = most
        self._layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers; 0 while there are none."""
        return sum(each.nbytes for pair in self._layers.values() for each in pair) // max(1, self.pages)

    def reserve(self, pages: int) -> None:
        """Make room for so many pages; layer by layer, so that no more than one layer is there twice.

        There is more room then, as all is copied, and graphs of kernels are captured anew after each move: twice as
        much up to 1 GiB, then a quarter more; on a CPU a sixteenth until blocks are mapped.
        """
        self.used = max(self.used, pages)
        if pages <= self.pages:
            return
        tensors = [each for pair in self._layers.values() for each in pair]
        spare = self.pages // 16
        if any(each.is_cuda or 2 * each.nbytes >= MAPPED for each in tensors):
            spare = self.pages if self.pages * self.page_bytes < 1 << 30 else self.pages // 4
        self.pages = max(pages, self.pages + spare, *map(self._at_once, tensors[:1]))
        self.moves += 1
        for layer, pair in self._layers.items():
            self._layers[layer] = _resized(pair[0], self.pages), _resized(pair[1], self.pages)

    def write(self, layer: nn.Module, places: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of ``[M]`` places, ``[M, K, D]``; returns the layer's whole ones."""
        if layer not in self._layers:
            if not self._layers:
                self.pages = max(self.pages, self._at_once(keys.transpose(0, 1)))
            self.moves += 1
            self._layers[layer] = _room(keys, self.pages), _room(values, self.pages)
        own = self._layers[layer]
        kernels = sampling_kernels(keys, values)
        for whole, part in zip(own, (keys, values), strict=True):
            if kernels is not None:
                kernels.write(part, places, whole)
            else:
                whole.index_copy_(1, places, part.transpose(0, 1))
        return own

    def copy(self, come_from: Tensor, to: Tensor) -> None:
        """Copy pages, ``[P]`` each, in every layer."""
        for pair in self._layers.values():
            for whole in pair:
                pages = _pages(whole)
                pages.index_copy_(1, sent(to, whole.device), pages.index_select(1, sent(come_from, whole.device)))

    def clear(self, pages: Tensor) -> None:
        """Write zeros into pages ``[P]`` of every layer."""
        for pair in self._layers.values():
            for whole in pair:
                _pages(whole).index_fill_(1, sent(pages, whole.device), 0.0)

    def shrinks(self, pages: int) -> bool:
        """Whether it is worth keeping only so many pages, as all of them move: if most are not needed and take more
        than ``KEPT``."""
        return 2 * pages <= self.used and (self.used - pages) * self.page_bytes > KEPT

    def select(self, pages: Tensor) -> None:
        """Keep only these pages, in this order."""
        count = len(pages)
        self.moves += 1
        for layer, (keys, values) in self._layers.items():
            index = sent(pages, keys.device)
            kept = (_pages(each).index_select(1, index).flatten(1, 2) for each in (keys, values))
            self._layers[layer] = next(kept), next(kept)
        self.pages = self.used = count

    def _at_once(self, like: Tensor) -> int:
        """Pages to make room for at once, of tokens like these ``[K, T, D]``; 0 where that would take memory.

        One more than is needed, as heads a power of two apart would share few places of a cache.
        """
        page_bytes = PAGE * len(like) * like.shape[2] * like.itemsize
        free = like.device.type == "cpu" and self._most * page_bytes >= MAPPED and _taken_when_written()
        return self._most + 1 if free else 0


@dataclass(frozen=True, eq=False)
class PagedPrefill:
    """Tokens that join the store and attend to what their sequences have there.

    Attributes:
        places: ``[M]`` places of the tokens.
        layout: The sequences, if none has earlier tokens in the store; else None.
        segments: The sequences with places in the store as keys; used without a layout.
    """

    store: PageStore
    places: Tensor
    layout: Layout | None
    segments: MaskedSegments
    _sent: dict[torch.device, Tensor] = field(default_factory=dict)

    @cached_property
    def ordered(self) -> OrderedKeys:
        """The sequences for the kernel that takes keys in order; used without a layout."""
        return ordered_keys(self.segments.segments)

    def write(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values ``[M, K, D]``; returns the layer's whole ones, ``[T, K, D]``."""
        if key.device not in self._sent:
            self._sent[key.device] = sent(self.places, key.device)
        keys, values = self.store.write(layer, self._sent[key.device], key, value)
        return keys.transpose(0, 1), values.transpose(0, 1)


@dataclass(frozen=True, eq=False)
class PageLists:
    """Lists of pages of one class.

    Attributes:
        rows: ``[G, C]`` rows whose queries attend to each list; repeated to fill up.
        table: ``[G, N]`` pages.
        lengths: ``[G]`` tokens in each list; None if all pages are full.
        first: First page, if the pages of all lists follow one another in the store, which are then not copied.
    """

    rows: Tensor
    table: Tensor
    lengths: Tensor | None = None
    first: int | None = None
    _masks: dict[torch.dtype, Tensor | None] = field(default_factory=dict)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """The additive mask ``[G, 1, 1, N * PAGE]``, made once; None if all pages are full."""
        if dtype not in self._masks:
            self._masks[dtype] = _mask(self, dtype)
        return self._masks[dtype]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> PageLists:
        """The same with what a function makes of each tensor."""
        lengths = None if self.lengths is None else function(self.lengths)
        return PageLists(function(self.rows), function(self.table), lengths, self.first)

    def taken(self, flat: Tensor) -> Tensor:
        """``[K, T, D] -> [G, K, N * PAGE, D]``: keys or values of each list."""
        pages = _pages(flat)
        if self.first is None:
            pages = pages.index_select(1, self.table.flatten())
        else:
            pages = pages[:, self.first : self.first + self.table.numel()]
        return pages.view(len(flat), len(self.table), -1, flat.shape[2]).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class RowLists:
    """Classes of lists, and the place of each row in them.

    Attributes:
        order: ``[R]`` each row's place among the ``G * C`` of all classes; the place after the last for a row in none.
            None for one class that holds the rows in their order.
    """

    classes: Sequence[PageLists]
    order: Tensor | None
    _sent: dict[torch.device, RowLists] = field(default_factory=dict)

    def on(self, device: torch.device) -> RowLists:
        """The same on a device, copied once."""
        if device not in self._sent:
            self._sent[device] = self.mapped(lambda numbers: sent(numbers, device))
        return self._sent[device]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> RowLists:
        """The same with what a function makes of each tensor."""
        classes = [each.mapped(function) for each in self.classes]
        return RowLists(classes, None if self.order is None else function(self.order))


@dataclass(frozen=True, eq=False)
class PagedDecode:
    """One new token of every row.

    Attributes:
        places: ``[R]`` place of each row's token.
        shared: Pages that rows share.
        own: Pages of each row alone, some of every row's.
    """

    store: PageStore
    places: Tensor
    shared: RowLists
    own: RowLists
    _sent: dict[torch.device, Tensor] = field(default_factory=dict)

    @property
    def firsts(self) -> tuple[int | None, ...]:
        """First pages of lists that are read where they are, which are no tensors."""
        return tuple(each.first for each in (*self.shared.classes, *self.own.classes))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> PagedDecode:
        """The same with what a function makes of each tensor."""
        return PagedDecode(self.store, function(self.places), self.shared.mapped(function), self.own.mapped(function))

    def attend(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        *,
        in_order: bool = False,
    ) -> Tensor:
        """``[R, H, D], [R, K, D], [R, K, D] -> [R, H, D]``; writes the keys and values.

        Args:
            window: Number of newest tokens that a row attends to, where all its pages are its own.
            in_order: Whether to take the kernel in which a row's bits do not depend on what is beside it.
        """
        device = query.device
        if device not in self._sent:
            self._sent[device] = sent(self.places, device)
        keys, values = self.store.write(layer, self._sent[device], key, value)
        out, lse = _over(self.own, query, keys, values, scale, window, in_order=in_order)
        if not self.shared.classes:
            return out
        if window is not None:
            raise NotImplementedError("a window does not begin at the first page that a row has for itself")
        of_shared, lse_of_shared = _over(self.shared, query, keys, values, scale, in_order=in_order)
        weight = torch.sigmoid(lse_of_shared - lse)[..., None]
        return torch.lerp(out.to(weight.dtype), of_shared.to(weight.dtype), weight).to(out.dtype)


def _over(
    lists: RowLists,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None = None,
    *,
    in_order: bool,
) -> tuple[Tensor, Tensor]:
    """``[R, H, D]`` attention of each row over its list, and ``[R, H]`` its log-sum-exp; -inf for a row in none."""
    heads, shared_by = query.shape[1], query.shape[1] // len(keys)
    on_device = lists.on(query.device)
    order = on_device.order
    outputs, sums = [], []
    kernels = sampling_kernels(query)
    ordering = cpu_kernels() if in_order else None
    for of_class in on_device.classes:
        groups, count = of_class.rows.shape
        every = order is None and groups * count == len(query)
        q = query if every else query.index_select(0, of_class.rows.flatten())
        if ordering is not None and count == 1:
            lengths = of_class.lengths
            if lengths is None:
                lengths = torch.full((groups,), of_class.table.shape[1] * PAGE)
            out, lse = ordering.attend_to_pages_in_order(q, keys, values, of_class.table, lengths, PAGE, scale, window)
            outputs.append(out)
            sums.append(lse)
            continue
        if kernels is not None and count == 1 and of_class.lengths is not None:
            out, lse = kernels.attend(q, keys, values, of_class.table, of_class.lengths, scale)
            outputs.append(out)
            sums.append(lse)
            continue
        q = q.view(groups, count, -1, shared_by, query.shape[2])
        q = q.transpose(1, 2).flatten(2, 3)  # [G, K, C * H / K, D]
        k, v = of_class.taken(keys), of_class.taken(values)
        out, lse = _attention(q, k, v, of_class.mask(q.dtype), scale)
        outputs.append(out.unflatten(2, (count, shared_by)).transpose(1, 2).reshape(groups * count, heads, -1))
        sums.append(lse.unflatten(2, (count, shared_by)).transpose(1, 2).reshape(groups * count, heads))
    if order is None:
        return outputs[0], sums[0]
    outputs.append(outputs[0].new_zeros(1, *outputs[0].shape[1:]))
    sums.append(sums[0].new_full((1, heads), -torch.inf))
    return torch.cat(outputs).index_select(0, order), torch.cat(sums).index_select(0, order)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention with an additive mask, ``[G, K, Q, D]``, and its log-sum-exps ``[G, K, Q]``."""
    if q.device.type == "cpu" and q.shape[2] < PAGE:
        return _by_head(q, k, v, mask, scale)
    if q.shape[-1] == v.shape[-1]:
        if q.device.type == "cpu":
            found: tuple[Tensor, Tensor] = _flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
            return found
        if _one_kernel_runs(q.device, q.dtype, q.shape[-1]):
            return _by_one_kernel(q, k, v, mask, scale)
    return _by_products(q, k, v, mask, scale)


def _by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(2, 3)).float() * scale
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(dim=-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


def _by_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The same as :func:`_by_products` without a gradient, where each head's keys and values are one block."""
    lists, heads, queries, _ = q.shape
    scores = q.new_empty(heads, lists, queries, k.shape[2])
    _multiply((q * scale).unbind(1), k.mT.unbind(1), scores)
    if mask is not None:
        scores += mask[:, 0]
    most = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(most).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = v.new_empty(heads, lists, queries, v.shape[3])
    _multiply(weights.unbind(), v.unbind(1), out)
    return out.div_(total).transpose(0, 1), most.add_(total.log_())[..., 0].transpose(0, 1)


def _multiply(left: Sequence[Tensor], right: Sequence[Tensor], heads: Tensor) -> None:
    """Each head's batch of products."""
    with products():
        for of_left, of_right, into in zip(left, right, heads.unbind(), strict=True):
            torch.bmm(of_left, of_right, out=into)


def _by_one_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, scale=scale)
    return out, lse[:, :, : q.shape[2]]  # filled up


@cache
@torch.no_grad()
def _one_kernel_runs(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether torch's memory-efficient attention is right on a GPU."""
    if device.type == "meta":
        return True
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 3, length, head_size) for length in (4, 2 * PAGE, 2 * PAGE)]
    q, k, v = (torch.randn(size, generator=generator).to(device, dtype).transpose(0, 1) for size in sizes)
    rows, table = torch.zeros(3, 1, dtype=torch.int64), torch.tensor([[0, 1]] * 3)
    lists = PageLists(rows, table, torch.tensor([1, PAGE + 3, PAGE])).mapped(lambda numbers: sent(numbers, device))
    mask = _mask(lists, dtype)
    try:
        computed = _by_one_kernel(q, k, v, mask, 0.3)
    except RuntimeError as error:
        logger.info("attention to pages is several kernels on %s in %s: %s", device, dtype, error)
        return False
    apart = [largest_difference(*each) for each in zip(computed, _by_products(q, k, v, mask, 0.3), strict=True)]
    return all(error <= 0.02 * size for error, size in apart)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _pages(flat: Tensor) -> Tensor:
    return flat.view(len(flat), -1, PAGE, flat.shape[2])


def _mask(lists: PageLists, dtype: torch.dtype) -> Tensor | None:
    if lists.lengths is None:
        return None
    places = torch.arange(lists.table.shape[1] * PAGE, device=lists.table.device)
    zeros = torch.zeros(len(lists.rows), len(places), dtype=dtype, device=places.device)
    return zeros.masked_fill_(places >= lists.lengths[:, None], -torch.inf)[:, None, None]


@cache
def _taken_when_written() -> bool:
    """Whether the system gives more addresses than there is memory: Linux counts them as memory in its strict mode."""
    mode = Path("/proc/sys/vm/overcommit_memory")
    strict = mode.exists() and mode.read_text().strip() == "2"
    return not strict and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def _resized(old: Tensor, pages: int) -> Tensor:
    new = _room(old.transpose(0, 1), pages)
    new[:, : old.shape[1]] = old
    return new


def _room(like: Tensor, pages: int) -> Tensor:
    """Pages of zeros for tokens like these ``[M, K, D]``, because what a mask leaves out must be finite."""
    shape = like.shape[1], pages * PAGE, like.shape[2]
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    # The system's zeros are there when they are first used; torch would write them all, and so may an allocator.
    memory = mmap.mmap(-1, math.prod(shape) * like.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype, count=math.prod(shape)).view(shape)
