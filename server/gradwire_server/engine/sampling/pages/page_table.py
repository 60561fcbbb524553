"""Which pages hold what: allocation, sharing by counted uses, and finding the pages of a known beginning.

A full page is known by a digest of all tokens up to its end, so equal beginnings have equal pages, whatever prompt or
answer wrote them. A page without uses is free, unless it is known and within the number to keep.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from gradwire_server.engine.model.attention.paged import PAGE

SCRATCH = 0
"""Page that is never read: where the tokens of rows that only fill up a batch are written."""


class PageTable:
    """The pages of one store.

    Attributes:
        kept: Maximum known pages without uses to keep.
        pages: Number of pages in use or free.
    """

    def __init__(self) -> None:
        self.kept = 0
        self.clear()

    def clear(self) -> None:
        """Forget all pages."""
        self.pages = SCRATCH + 1
        self._free: list[int] = []
        self._uses: dict[int, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # known pages, the least recently used first

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
        """Count one use less of each page."""
        for page in pages:
            self._uses[page] -= 1
            if self._uses[page]:
                continue
            del self._uses[page]
            if page in self._digest_of:
                self._unused[page] = None
            else:
                heapq.heappush(self._free, page)
        while len(self._unused) > self.kept:
            page, _ = self._unused.popitem(last=False)
            self.forget([page])
            heapq.heappush(self._free, page)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The known pages of the longest beginning, each with a use more."""
        pages = []
        for digest in digests:
            if digest not in self._page_of:
                break
            pages.append(self._page_of[digest])
        self.use(pages)
        return pages

    def know(self, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        """Make full pages findable by their digests, except where another page is."""
        for page, digest in zip(pages, digests, strict=True):
            if digest not in self._page_of and page not in self._digest_of:
                self._page_of[digest], self._digest_of[page] = page, digest

    def forget(self, pages: Iterable[int]) -> None:
        """Make pages findable no longer; they are in use, or about to be free."""
        for page in pages:
            digest = self._digest_of.pop(page, None)
            if digest is not None:
                del self._page_of[digest]

    def compact(self) -> list[int]:
        """Renumber so that only the pages in use or known remain; returns the old number of each."""
        old = [SCRATCH, *sorted({*self._uses, *self._unused})]
        new = {page: number for number, page in enumerate(old)}
        uses, digests, unused = self._uses, self._digest_of, list(self._unused)
        self.clear()
        self.pages = len(old)
        self._uses = {new[page]: count for page, count in uses.items()}
        self._unused = OrderedDict.fromkeys(new[page] for page in unused)
        self._digest_of = {new[page]: digest for page, digest in digests.items()}
        self._page_of = {digest: page for page, digest in self._digest_of.items()}
        return old


def page_digests(tokens: Sequence[int], weights: bytes = b"") -> list[bytes]:
    """Digest of each full page of tokens and all before it, computed with the weights and images of this name."""
    whole = np.asarray(tokens[: len(tokens) // PAGE * PAGE], np.int32).reshape(-1, PAGE)
    state, digests = hashlib.blake2b(weights, digest_size=16), []
    for page in whole:
        state.update(page.tobytes())
        digests.append(state.digest())
    return digests
