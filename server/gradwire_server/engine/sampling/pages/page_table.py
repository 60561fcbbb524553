"""The table of pages: allocation, sharing by counted uses, and trees of known pages.

A full page is known in the tree of its weights and of whoever asked, by a digest of all tokens up to its end: equal
beginnings have equal pages, whatever prompt or answer wrote them. A page without uses is free, unless it is known and
there is room. What uses a page uses all before it and releases them after it, so the page that is dropped first, the
least recently used, is a leaf.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from gradwire_server.engine.model.attention.paged import PAGE

SCRATCH = 0
"""Page that is never read: where the tokens of rows that only fill up a batch are written."""


class PageTable:
    """The pages of one store.

    Args:
        limit: Pages in use or known beyond which those without uses are dropped.

    Attributes:
        pages: Number of pages in use or free.
        dropped: Number of known pages that were dropped because there was no room.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit, self.dropped = limit, 0
        self.clear()

    def clear(self) -> None:
        """Forget all pages."""
        self.pages = SCRATCH + 1
        self._free: list[int] = []
        self._uses: dict[int, int] = {}
        self._known: dict[int, tuple[bytes, bytes]] = {}  # tree and digest
        self._trees: dict[bytes, dict[bytes, int]] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # known pages, the least recently used first

    @property
    def keeps(self) -> bool:
        """Whether known pages without uses are kept."""
        return self._limit > 0

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return len(self._uses)

    @property
    def held(self) -> int:
        """Number of pages in use or known, with :data:`SCRATCH`."""
        return self.pages - len(self._free)

    def new(self) -> int:
        """A page with one use."""
        if self._unused and self.held > self._limit:
            self._drop_oldest()
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page = self.pages
            self.pages += 1
        self._uses[page] = 1
        return page

    def use(self, pages: Iterable[int]) -> None:
        """Count one use more of each page."""
        for page in pages:
            self._unused.pop(page, None)
            self._uses[page] = self._uses.get(page, 0) + 1

    def release(self, pages: Iterable[int]) -> None:
        """Count one use less of each page; the end of a row comes first."""
        for page in pages:
            self._uses[page] -= 1
            if self._uses[page]:
                continue
            del self._uses[page]
            if page in self._known:
                self._unused[page] = None
            else:
                heapq.heappush(self._free, page)
        while self._unused and self.held > self._limit + 1:
            self._drop_oldest()

    def known(self, tree: bytes, digests: Sequence[bytes]) -> list[int]:
        """The known pages of the longest beginning."""
        of_tree, pages = self._trees.get(tree, {}), []
        for digest in digests:
            page = of_tree.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def know(self, tree: bytes, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        """Make full pages findable by their digests, except where another page is."""
        of_tree = self._trees.setdefault(tree, {})
        for page, digest in zip(pages, digests, strict=True):
            if digest not in of_tree and page not in self._known:
                of_tree[digest], self._known[page] = page, (tree, digest)

    def forget(self, pages: Iterable[int]) -> None:
        """Make pages findable no longer; those without uses become free."""
        for page in pages:
            tree, digest = self._known.pop(page, (b"", b""))
            if digest:
                of_tree = self._trees[tree]
                del of_tree[digest]
                if not of_tree:
                    del self._trees[tree]
            if page in self._unused:
                del self._unused[page]
                heapq.heappush(self._free, page)

    def forget_weights(self, weights: bytes) -> None:
        """Make all pages findable no longer whose trees' names begin with this one."""
        for tree in [tree for tree in self._trees if tree.startswith(weights)]:
            self.forget(list(self._trees[tree].values()))

    def compact(self) -> list[int]:
        """Renumber so that only the pages in use or known remain; returns the old number of each."""
        old = [SCRATCH, *sorted({*self._uses, *self._unused})]
        new = {page: number for number, page in enumerate(old)}
        uses, known, unused = self._uses, self._known, list(self._unused)
        self.clear()
        self.pages = len(old)
        self._uses = {new[page]: count for page, count in uses.items()}
        self._unused = OrderedDict.fromkeys(new[page] for page in unused)
        for page, (tree, digest) in known.items():
            self.know(tree, [new[page]], [digest])
        return old

    def _drop_oldest(self) -> None:
        self.forget([next(iter(self._unused))])
        self.dropped += 1


def page_digests(tokens: Sequence[int], after: bytes = b"") -> list[bytes]:
    """Digest of each full page of tokens and all before it; ``after`` is that of the page before the first."""
    pages = np.asarray(tokens[: len(tokens) // PAGE * PAGE], np.int32).tobytes()
    digests, size = [], PAGE * np.dtype(np.int32).itemsize
    for start in range(0, len(pages), size):
        after = hashlib.blake2b(after + pages[start : start + size], digest_size=16).digest()
        digests.append(after)
    return digests


@lru_cache(maxsize=32)
def prompt_digests(tokens: tuple[int, ...]) -> Sequence[bytes]:
    """:func:`page_digests` of a prompt, which is asked for while it waits and when it joins."""
    return page_digests(tokens)
