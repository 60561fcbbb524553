"""The number of prompt tokens to compute between two tokens of the samples that somebody reads as they grow.

A batch's step makes a token of every sample, and may compute prompts beside it. While a stream is in progress, prompts
are computed in parts that take ``SHARE`` steps without prompts, of all batches together. How many tokens that is
depends on the model, the machine, the rows in progress and the place in the prompt, so it is measured: each part is as
much longer or shorter than the one before it as that one took less or more time than wanted. Several ranks do not
decide by it, as each has a clock of its own: their parts have one size.
"""

from __future__ import annotations

from collections.abc import Hashable

SHARE = 1.5
"""Steps without prompts that a part of a prompt takes: with the step itself, a stream waits 2.5 of them."""
LEAST = 8
"""Tokens of the smallest part, which is the first. Behind 16,000 a CPU takes as long to attend for one as for them."""
MEASURED_EVERY = 16
"""Steps after which one is made without prompts, to measure it."""


class Pace:
    """The parts of prompts in all batches of a sampler."""

    def __init__(self) -> None:
        self._alone_s: dict[Hashable, float] = {}  # of a step of a batch with rows, without prompts
        self._age: dict[Hashable, int] = {}
        self._streams: set[Hashable] = set()
        self._computing: set[Hashable] = set()
        self._tokens = LEAST

    def most(self, batch: Hashable, *, rows: bool) -> int | None:
        """Most tokens of prompts that a batch may compute in its next step; None for any number.

        Args:
            rows: Whether it has rows in progress.
        """
        if not self._streams:
            return None
        unknown = self._age.get(batch, MEASURED_EVERY) >= MEASURED_EVERY
        return 0 if rows and unknown else self._tokens

    def note(self, batch: Hashable, seconds: float, *, rows: bool, streams: bool, computed: int) -> None:
        """Note a step of a batch.

        Args:
            rows: Whether it had rows in progress.
            streams: Whether one of its rows is read as it grows.
            computed: Tokens of prompts that it computed.
        """
        self.forget(batch, but_time=rows)
        if streams:
            self._streams.add(batch)
        if computed:
            self._computing.add(batch)
            self._age[batch] = self._age.get(batch, MEASURED_EVERY) + 1
            wanted = SHARE * sum(self._alone_s.values()) / len(self._computing)
            took = seconds - self._alone_s.get(batch, 0.0)
            if self._streams and wanted and computed >= self._tokens // 2:
                factor = wanted / max(took, wanted / 2)
                self._tokens = max(LEAST, round(computed * max(0.5, factor)))
        elif rows:
            before = self._alone_s.get(batch, seconds)
            self._alone_s[batch], self._age[batch] = before + 0.5 * (seconds - before), 0

    def forget(self, batch: Hashable, *, but_time: bool = False) -> None:
        """Forget a batch that has ended, or what its last step was."""
        self._streams.discard(batch)
        self._computing.discard(batch)
        if not but_time:
            self._alone_s.pop(batch, None)
            self._age.pop(batch, None)
