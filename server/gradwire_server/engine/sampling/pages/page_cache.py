"""The pages of one copy of a model, for all its batches: of rows in progress, and known ones for later prompts."""

from __future__ import annotations

import torch

from gradwire_server.engine.model.attention.paged import PAGE, PageStore
from gradwire_server.engine.sampling.pages.page_table import PageTable


class PageCache:
    """Keys and values in pages, and which of them are known.

    Args:
        tokens: Tokens that there is room for: known pages are kept within it. 0 keeps none.
        most: Tokens to make room for at once on a CPU, whose memory is taken when it is written.
    """

    def __init__(self, tokens: int = 0, most: int = 0) -> None:
        self._most = most
        self.store, self.table = PageStore(most // PAGE), PageTable(tokens // PAGE)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that there had to be room for."""
        return self.store.used * self.store.page_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers; 0 while there are none."""
        return self.store.page_bytes // PAGE

    def shrink(self) -> None:
        """Give memory back if most of it holds nothing, once no row is in progress."""
        if not self.table.used and self.store.shrinks(self.table.held):
            self.store.select(torch.tensor(self.table.compact()))

    def clear(self) -> None:
        """Forget all pages and give their memory back, once no row is in progress."""
        if not self.table.used:
            self.table.clear()
            self.store = PageStore(self._most // PAGE)
