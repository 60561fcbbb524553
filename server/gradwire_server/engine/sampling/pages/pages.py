"""Keys and values of samples in pages that rows with a common beginning share.

Legend: ``R`` rows, ``P`` prompts, ``M`` tokens of a forward, ``N`` pages of a row, ``H`` hidden size. A row's sequence
lies in pages of ``PAGE`` tokens. The full pages of its prompt are shared with all rows of that prompt; behind them each
row has pages of its own, which begin with the prompt's last tokens if these do not fill a page. Full pages are known by
their tokens (:mod:`.page_table`): a later prompt that begins alike, such as the next turn of a conversation, uses them.
A long prompt is computed in parts, between which other rows get their tokens.

Forwards take rows packed on one axis, without padding. On a CPU, attention has the sizes that the rows need; elsewhere
rows and lists of pages are filled up to powers of two, so that few shapes occur and a graph of kernels can be replayed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gradwire_losses.batch import sent
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from gradwire_server.engine.agreement import Agreement, Failure
from gradwire_server.engine.model.attention.masked import MaskedSegments, QuerySegment
from gradwire_server.engine.model.attention.packed import rows_in_order
from gradwire_server.engine.model.attention.paged import PAGE, PagedDecode, PagedPrefill, RowLists
from gradwire_server.engine.model.comparison import largest_difference, ordinary_ids, relative_tolerance
from gradwire_server.engine.model.layers.cpu_kernels import sampling_by_kernels
from gradwire_server.engine.model.packing import Packing, lay_out
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.split_model import SplitModel
from gradwire_server.engine.model.vision.row_images import ImagePrompt, images_key, images_of_pieces
from gradwire_server.engine.sampling.pages.key_values import IntArray, Prompt, Room
from gradwire_server.engine.sampling.pages.page_cache import PageCache
from gradwire_server.engine.sampling.pages.page_lists import own_lists, power_of_two, shared_lists
from gradwire_server.engine.sampling.pages.page_table import SCRATCH, page_digests, prompt_digests
from gradwire_server.engine.sampling.pages.replay import Replays
from gradwire_server.engine.sampling.several_policies import activate_each

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 1 << 12
"""Maximum prompt tokens in one forward; a longer prompt is computed in parts."""
CPU_TOKENS = 512
"""Tokens of several prompts in one forward on a CPU: as many states as its caches hold. 64 prompts of 64 tokens take
0.75 of the processor time on SmolLM2-135M."""
ROWS = 8
"""Rows that a CPU fills up to a multiple of, where a forward is replayed; fewer to a power of two."""
SMALL = 5e8
"""Parameters up to which that takes less time than calling the model from Python: some 7 more rows' products."""
FEW = 32
"""Shared pages that a kernel reads for each row. A token of 64 rows of SmolLM2-135M took 0.93 of the time so, eight or
sixteen of them with one prompt of 64 to 512 tokens, but 1.06 with one of 2,000."""


class PagesRoom:
    """Every prompt's full pages once, and for each row one page of its own.

    Args:
        prompts: Prompts whose pages are among them.
    """

    def __init__(self, pages: int, prompts: Iterable[Hashable]) -> None:
        self._pages, self._prompts = pages, set(prompts)

    @property
    def tokens(self) -> int:
        return PAGE * self._pages

    def with_row(self, prompt: Hashable, tokens: int) -> int:
        return PAGE * (self._pages + 1 + (0 if prompt in self._prompts else tokens // PAGE))

    def add(self, prompt: Hashable, tokens: int) -> None:
        self._pages = self.with_row(prompt, tokens) // PAGE
        self._prompts.add(prompt)


@dataclass(eq=False)
class _Prompt:
    """A prompt in the store.

    Attributes:
        tree: Names what its full pages are known in.
        pages: Its pages, of which the full ones are shared by its rows.
        rest: The page of the tokens behind the full ones, or None.
        computed: Number of its tokens that have keys and values.
    """

    policy: Policy
    tree: bytes
    tokens: Prompt
    digests: Sequence[bytes]
    pages: list[int]
    rest: int | None
    computed: int

    @property
    def full(self) -> list[int]:
        return self.pages[: len(self.tokens) // PAGE]


@dataclass(eq=False)
class _Row:
    """A row's pages.

    Attributes:
        known: Digest of the last shared page.
        own: Pages of the row alone.
        tokens: Tokens in these, while what was computed may become known.
        shift: The shift of its prompt's images.
    """

    tree: bytes
    shared: tuple[int, ...]
    known: bytes
    own: list[int]
    tokens: list[int]
    shift: int = 0


class Pages:
    """Rows that join and leave at any time; see the module.

    Args:
        cache: The pages, of this batch and of others.

    Attributes:
        computed_tokens: Prompt tokens that went through the model.
    """

    joins = True

    def __init__(self, cache: PageCache | None = None) -> None:
        self.cache = cache or PageCache()
        self._uses: Counter[int] = Counter()
        self._rows: list[_Row] = []
        self._ahead: _Prompt | None = None
        self._shared: RowLists | None = None
        self._of = np.zeros(0, np.int64)
        self._apart: list[tuple[int, ...]] = []
        self._replays = Replays()
        self._shifts = False
        self.computed_tokens = 0

    def room(self, prompts: Iterable[Hashable]) -> Room:
        ahead = self._ahead.pages if self._ahead is not None else ()
        return PagesRoom(len(self._uses) - sum(self._uses[page] == 1 for page in ahead), prompts)

    def more(self, positions: IntArray) -> int:
        full = np.array([PAGE * (len(row.shared) + len(row.own)) for row in self._rows])
        return PAGE * (len(self._uses) + int((positions == full).sum()))

    def held(self) -> Sequence[float]:
        shared_by = Counter(row.shared for row in self._rows)
        return [PAGE * (len(row.own) + len(row.shared) / shared_by[row.shared]) for row in self._rows]

    def found(self, tree: bytes, prompt: Prompt) -> tuple[int, int]:
        digests = prompt_digests(tuple(prompt))[: (len(prompt) - 1) // PAGE]
        known = self.cache.table.known(tree + images_key(prompt), digests)
        computed = len(known) * PAGE
        if self._ahead is not None and self._is_ahead(tree, prompt):
            computed = self._ahead.computed
        return computed, PAGE * sum(page in self._uses for page in known)

    def warm(self, policy: Policy, tree: bytes, prompt: Prompt, tokens: int) -> None:
        if self._ahead is None or not self._is_ahead(tree, prompt):
            self._drop_ahead()
            self._ahead = self._add(policy, tree, prompt)
        ahead = self._ahead
        stop = ahead.computed + tokens
        self._forward([(ahead, ahead.computed, stop)])
        ahead.computed = stop
        full = stop // PAGE
        self.cache.table.know(ahead.tree, ahead.pages[:full], ahead.digests[:full])

    def prefill(
        self, policies: Sequence[Policy], prompts: Sequence[Prompt], spread: IntArray, trees: Sequence[bytes] = ()
    ) -> Tensor:
        trees = trees or [b""] * len(prompts)
        table = self.cache.table
        added = [
            self._taken_ahead() if self._is_ahead(tree, prompt) else self._add(policy, tree, prompt)
            for policy, prompt, tree in zip(policies, prompts, trees, strict=True)
        ]
        states: dict[int, Tensor] = {}
        most = min(CHUNK_TOKENS, CPU_TOKENS if policies[0].device.type == "cpu" else CHUNK_TOKENS)
        for pieces in _pieces(added, most):
            last = self._forward([(added[number], start, stop) for number, start, stop in pieces])
            for place, (number, _, stop) in enumerate(pieces):
                if stop == len(added[number].tokens):
                    states[number] = last[place]
        copies: list[tuple[int, int]] = []
        for prompt in added:
            table.know(prompt.tree, prompt.full, prompt.digests)
        begun: set[int] = set()
        for number in spread.tolist():
            prompt = added[number]
            self._use(prompt.full)
            own: list[int] = []
            if prompt.rest is not None and number in begun:
                own = [self._new()]
                copies.append((prompt.rest, own[0]))
            elif prompt.rest is not None:  # the first row goes on in the prompt's page
                self._use([prompt.rest])
                own = [prompt.rest]
            begun.add(number)
            full = len(prompt.full)
            rest = list(prompt.tokens[full * PAGE :]) if table.keeps else []
            row = _Row(prompt.tree, tuple(prompt.full), prompt.digests[full - 1] if full else b"", own, rest)
            if isinstance(prompt.tokens, ImagePrompt):
                row.shift = prompt.tokens.shift
                self._shifts |= row.shift != 0
            self._rows.append(row)
        self.cache.store.reserve(table.pages)
        if copies:
            self.cache.store.copy(*torch.tensor(copies).T)
        for prompt in added:
            self._release(reversed(prompt.pages))
        self._shared = None
        together = torch.stack([states[number] for number in range(len(added))])
        return together.index_select(0, sent(torch.from_numpy(spread), together.device))

    def decode(
        self, policies: Sequence[Policy], tokens: IntArray, positions: IntArray, of: IntArray | None = None
    ) -> Tensor:
        """See :class:`.key_values.KeyValues`; with ``of`` ``[T]`` tokens, several of a row behind one another."""
        split_model = policies[0].split_model
        of = np.arange(len(self._rows)) if of is None else of
        rows, fills = [self._rows[row] for row in of.tolist()], fills_up(split_model.device)
        whole = fills or split_model.by_kernels or split_model.in_order
        for row, page in zip(rows, (positions // PAGE).tolist(), strict=True):
            if page == len(row.shared) + len(row.own):
                row.own.append(self._new())
        if self.cache.table.keeps:
            for row, token in zip(rows, tokens.tolist(), strict=True):
                row.tokens.append(token)
        self.cache.store.reserve(self.cache.table.pages)
        if self._shared is None or not np.array_equal(of, self._of):
            alone = np.array(self.alone(split_model))[of].tolist()
            self._apart = [row.shared if of_one else () for row, of_one in zip(rows, alone, strict=True)]
            shared = [() if of_one else row.shared for row, of_one in zip(rows, alone, strict=True)]
            self._shared, self._of = shared_lists(shared, fills), of
        apart = self._apart
        inside = positions - PAGE * np.array([len(row.shared) - len(own) for row, own in zip(rows, apart, strict=True)])
        pages = inside // PAGE
        count, small = len(rows), split_model.facts.num_parameters < SMALL
        if fills or (small and not self._shared.classes and self._replays.may(policies)):
            count = power_of_two(count) if fills or count < ROWS else -(-count // ROWS) * ROWS
        table = np.full((count, int(pages.max()) + 1), SCRATCH, np.int64)
        for number, (row, own) in enumerate(zip(rows, apart, strict=True)):
            table[number, : len(own) + len(row.own)] = (*own, *row.own)
        place = np.zeros(count, np.int64)
        place[: len(rows)] = table[np.arange(len(rows)), pages] * PAGE + inside % PAGE
        lengths, ids, at = (np.zeros(count, np.int64) for _ in range(3))
        lengths[: len(rows)], ids[: len(rows)], at[: len(rows)] = inside, tokens, positions
        if self._shifts:
            at[: len(rows)] += np.array([row.shift for row in rows])
        lists = own_lists(table, lengths + 1, fills, whole)
        plan = PagedDecode(self.cache.store, torch.from_numpy(place), self._shared, lists)
        activate_each(policies, [1] * (len(rows) - 1) + [1 + count - len(rows)])
        states = self._replays.states(policies, torch.from_numpy(ids), torch.from_numpy(at), plan)
        return states[: len(rows)]

    def alone(self, split_model: SplitModel) -> list[bool]:
        """``[R]`` whether a row's shared pages are read with its own, by a call that no other row's are in.

        So are pages that a row has for itself, where lists are whole, and those of a row alone; several would be copied
        for it. A kernel reads few pages once more for each row in less time.
        """
        rows = self._rows
        whole = fills_up(split_model.device) or split_model.by_kernels or split_model.in_order
        shared_by, joined = Counter(row.shared for row in rows), whole or len(rows) == 1
        few = FEW if split_model.by_kernels else 0
        return [
            joined and (split_model.in_order or shared_by[row.shared] == 1 or len(row.shared) <= few) for row in rows
        ]

    def trim(self, lengths: IntArray) -> None:
        """Drop tokens behind these lengths ``[R]``: those of drafts that were not drawn."""
        for row, length in zip(self._rows, lengths.tolist(), strict=True):
            count = -(-length // PAGE) - len(row.shared)
            self._release(reversed(row.own[count:]))
            del row.own[count:], row.tokens[length - len(row.shared) * PAGE :]

    def spoilt(self, rows: IntArray) -> None:
        found = [self._rows[row] for row in rows.tolist()]
        pages = sorted({page for row in found for page in (*row.shared, *row.own)})
        self.cache.table.forget(pages)
        for row in found:
            row.tokens, row.known = [], b""
        # Rows that fill up to few shapes are computed as the last one, and write into the scratch page.
        self.cache.store.clear(torch.tensor([SCRATCH, *pages]))

    def keep(self, rows: IntArray) -> None:
        kept = [self._rows[row] for row in rows.tolist()]
        staying = {id(row) for row in kept}
        for row in self._rows:
            if id(row) not in staying:
                self._leave(row)
        self._rows, self._shared = kept, None

    def end(self, *, spare_memory: bool = False) -> None:
        for row in self._rows if spare_memory else ():
            row.tokens = []  # the last of which may be of a forward that failed
        self.keep(np.zeros(0, np.int64))
        self._drop_ahead()
        self._release(list(self._uses.elements()))  # of a forward that failed
        self._shifts = False
        self._replays.clear()
        if spare_memory:
            self.cache.clear()
        self.cache.shrink()

    def _leave(self, row: _Row) -> None:
        if self.cache.table.keeps and row.tokens and (row.known or not row.shared):
            full = len(row.tokens) // PAGE
            self.cache.table.know(row.tree, row.own[:full], page_digests(row.tokens, row.known))
        self._release(reversed(row.own))
        self._release(reversed(row.shared))

    def _add(self, policy: Policy, tree: bytes, tokens: Prompt) -> _Prompt:
        """Give a prompt its pages; those of a known beginning are computed already."""
        tree += images_key(tokens)
        digests = prompt_digests(tuple(tokens))
        known = self.cache.table.known(tree, digests[: (len(tokens) - 1) // PAGE])
        self._use(known)
        pages = [*known, *(self._new() for _ in range(len(known), -(-len(tokens) // PAGE)))]
        rest = pages[-1] if len(tokens) % PAGE else None
        return _Prompt(policy, tree, tokens, digests, pages, rest, len(known) * PAGE)

    def _is_ahead(self, tree: bytes, prompt: Prompt) -> bool:
        """Whether parts of this prompt have been computed in advance."""
        ahead = self._ahead
        return ahead is not None and ahead.tree == tree and ahead.tokens == prompt

    def _taken_ahead(self) -> _Prompt:
        ahead, self._ahead = self._ahead, None
        assert ahead is not None
        return ahead

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._release(reversed(self._taken_ahead().pages))

    def _new(self) -> int:
        page = self.cache.table.new()
        self._uses[page] += 1
        return page

    def _use(self, pages: Sequence[int]) -> None:
        self._uses.update(pages)
        self.cache.table.use(pages)

    def _release(self, pages: Iterable[int]) -> None:
        """Release pages, the end of a row first."""
        released = list(pages)
        for page in released:
            self._uses[page] -= 1
            if not self._uses[page]:
                del self._uses[page]
        self.cache.table.release(released)

    def _forward(self, pieces: Sequence[tuple[_Prompt, int, int]]) -> Tensor:
        """Compute pieces of prompts, from a token to another; returns the last state of each, ``[P, H]``."""
        self.cache.store.reserve(self.cache.table.pages)
        ids = torch.tensor([token for prompt, start, stop in pieces for token in prompt.tokens[start:stop]])
        lengths = torch.tensor([stop - start for _, start, stop in pieces])
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in pieces])
        keys = [_places(prompt.pages, stop) for prompt, _, stop in pieces]
        places = torch.cat([each[start:] for each, (_, start, _) in zip(keys, pieces, strict=True)])
        ends = lengths.cumsum(0)
        segments = [
            QuerySegment(int(end - length), int(length), each)
            for end, length, each in zip(ends, lengths, keys, strict=True)
        ]
        fresh = not any(start for _, start, _ in pieces)
        layout = lay_out(ids, lengths) if fresh else None
        plan = PagedPrefill(self.cache.store, places, layout, MaskedSegments(segments))
        policies = [prompt.policy for prompt, _, _ in pieces]
        activate_each(policies, lengths.tolist())
        images = images_of_pieces([(prompt.tokens, start, stop) for prompt, start, stop in pieces])
        states = policies[0].split_model.packed_states(ids, positions, plan, images)
        self.computed_tokens += len(ids)
        return states.index_select(0, sent(ends - 1, states.device))


def fills_up(device: torch.device) -> bool:
    """Whether rows and lists are filled up to few shapes on a device."""
    return device.type != "cpu"


def _places(pages: Sequence[int], stop: int) -> Tensor:
    """``[stop]`` places of the first tokens of a list of pages."""
    tokens = torch.arange(stop)
    return torch.tensor(pages)[tokens // PAGE] * PAGE + tokens % PAGE


def _pieces(prompts: Sequence[_Prompt], together: int) -> list[list[tuple[int, int, int]]]:
    """Cut the rest of prompts into forwards of at most ``CHUNK_TOKENS``: prompt number, start and stop of each piece.

    Args:
        together: Maximum tokens of a forward of several prompts.
    """
    forwards: list[list[tuple[int, int, int]]] = []
    used = 0
    for number, prompt in enumerate(prompts):
        start = prompt.computed
        while start < len(prompt.tokens):
            stop = min(len(prompt.tokens), start + CHUNK_TOKENS)
            if not forwards or used + stop - start > together:
                forwards.append([])
                used = 0
            forwards[-1].append((number, start, stop))
            used += stop - start
            start = stop
    return forwards


def _is_plain(layer: Any, *, windows: bool) -> bool:
    """Whether a layer is a plain one, or one with a window; one that shares another's keys, for example, is not."""
    known = (DynamicLayer, DynamicSlidingWindowLayer) if windows else (DynamicLayer,)
    return type(layer) in known and layer.keys is not None and layer.keys.ndim == 4


@torch.no_grad()
def paged_token_bytes(policy: Policy, agreement: Agreement) -> int:
    """Bytes of a token's keys and values in pages; 0 if the model needs a cache of its own.

    Pages fit if the model's own cache has plain keys and values, and pages in its place give the same states.
    """
    trunk, facts = policy.split_model.trunk, policy.facts
    if facts.context_length < 4 or policy.split_model.packing is Packing.PADDED:
        return 0
    count = min(facts.context_length, PAGE + 3)
    ids = ordinary_ids(count, facts.vocab_size)

    def states() -> tuple[Tensor, Tensor, int] | None:
        expected = trunk(input_ids=sent(ids[None], policy.device), use_cache=True)
        cache: Any = expected.past_key_values
        windows = policy.split_model.in_order  # pages keep all tokens, of which that kernel takes a window
        if type(cache) is not DynamicCache or not all(_is_plain(layer, windows=windows) for layer in cache.layers):
            return None
        pages, tokens = Pages(), ids.numpy()
        pages.prefill([policy] * 2, [tokens[:-1].tolist(), tokens[:1].tolist()], np.arange(2))
        decoded = pages.decode([policy] * 2, tokens[[-1, 1]], np.array([count - 1, 1]))
        token_bytes = pages.cache.token_bytes
        return decoded.float(), expected.last_hidden_state[0, [count - 1, 1]].float(), token_bytes

    split_model = policy.split_model
    with sampling_by_kernels(split_model.by_kernels), rows_in_order(split_model.in_order):
        compared = agreement.attempt(states)
    if isinstance(compared, Failure):  # an architecture may do anything with keywords that it does not know
        if compared.out_of_memory:
            raise compared.error
        error = compared.error
        logger.info("%s keeps a cache of its own: %s: %s", facts.name, type(error).__name__, error)
        return 0
    if compared is None:
        return 0
    found, wanted, token_bytes = compared
    difference, size = largest_difference(found, wanted)
    return token_bytes if difference <= relative_tolerance(policy.split_model.dtype) * size else 0
