"""Drafts of a sample's next tokens: what stood behind the same tokens before, in its prompt or in itself.

A draft is computed together with the token before it, and a drafted token is kept where the sample's own draw gives it
(Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding; Leviathan et al. 2023, arXiv:2211.17192). What is
drawn is thus the same with and without drafts, and a draft can only cost time: each sample watches how often its
context would have said its next token, also while nothing is drafted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

GRAM = 3
"""Tokens that are looked up together."""
LENGTHS = (1, 3, 7, 15)
"""Tokens of a draft; with the token before it a power of two, which forwards are filled up to."""
FEWEST_TOKENS = 8
"""Tokens that a sample may still have, from which on drafts are worth an index of its prompt."""
WEIGHT = 1 / 8
"""Weight of a sample's latest token in the share of its tokens that its context has foretold."""
FORWARD_TOKENS = 16
"""Tokens whose computation takes as long as what a forward takes for any number of them. One row of SmolLM2-135M took
56 ms of a core of a Xeon, with 7 more tokens 68, with 15 more 98."""
LEAST_GAIN = 0.5
"""Tokens that a draft has to bring beyond those of its places: a forward with one is of another shape, which took 26 ms
more. So a sample whose context says less than half of its tokens makes no drafts, as those of prose."""

Occurrences = dict[tuple[int, ...], list[int]]
"""The places behind each :data:`GRAM` tokens of a text, in their order."""


def occurrences(tokens: Sequence[int]) -> Occurrences:
    """Find the places behind each run of :data:`GRAM` tokens."""
    found: Occurrences = {}
    if len(tokens) <= GRAM:
        return found
    grams = zip(*(tokens[first : len(tokens) - GRAM + first] for first in range(GRAM)), strict=True)
    for place, gram in enumerate(grams, GRAM):
        found.setdefault(gram, []).append(place)
    return found


class Drafts:
    """The drafts of one sample.

    Args:
        prompt: The tokens before the sample.
        of_prompt: Their :func:`occurrences`, which samples of one prompt share.
        tokens: Tokens that the sample has already.

    Attributes:
        share: Estimated probability that the next token is the one that the context says.
        num_drafted, num_accepted: Drafted tokens that were computed, and those of them that were drawn.
    """

    def __init__(self, prompt: Sequence[int], of_prompt: Occurrences, tokens: Iterable[int] = ()) -> None:
        self._prompt, self._of_prompt = prompt, of_prompt
        self._sample: list[int] = []
        self._of_sample: dict[tuple[int, ...], int] = {}  # the latest place
        self._newest = tuple(prompt[-GRAM:])
        self._at, self._alike, self._missed = 0, 0, GRAM
        self.share = 0.5
        self.num_drafted = self.num_accepted = 0
        self._look_up()
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Add the sample's next token."""
        if self._missed < GRAM:
            right = self._token(self._at) == token
            if self._alike:
                self.share += WEIGHT * (right - self.share)
            self._alike, self._missed = (self._alike + 1, 0) if right else (0, self._missed + 1)
            self._at += 1  # behind one other token, the text may go on as before
        if len(self._newest) == GRAM:
            self._of_sample[self._newest] = len(self._prompt) + len(self._sample)
        self._sample.append(token)
        self._newest = (*self._newest, token)[-GRAM:]
        if not self._alike:
            self._look_up()

    def draft(self, least: float, most: int) -> list[int]:
        """At most so many tokens that may be next; none if the context says nothing, or if it is not worth it.

        Args:
            least: Tokens that a place of a forward has to bring.
        """
        if not self._alike or most < 1:
            return []
        worth, count, expected, length = LEAST_GAIN, 0, 0.0, 0
        for candidate in LENGTHS:
            while length < candidate:
                length += 1
                expected += self.share**length
            if expected - least * candidate > worth:
                worth, count = expected - least * candidate, candidate
        count = min(count, most)
        found = self._span(self._at, self._at + count)
        while len(found) < count:  # the text repeats itself
            found += found[: count - len(found)]
        return found

    def _look_up(self) -> None:
        """Find the newest tokens in the context: behind the place that the sample is alike up to, else the latest."""
        of_prompt = self._of_prompt.get(self._newest, [])
        behind = bisect_left(of_prompt, self._at)
        latest = self._of_sample.get(self._newest, of_prompt[-1] if of_prompt else None)
        place = of_prompt[behind] if behind < len(of_prompt) else latest
        if place is not None:
            self._at, self._alike, self._missed = place, GRAM, 0

    def _token(self, place: int) -> int:
        count = len(self._prompt)
        return self._prompt[place] if place < count else self._sample[place - count]

    def _span(self, start: int, stop: int) -> list[int]:
        count = len(self._prompt)
        return [*self._prompt[start:stop], *self._sample[max(0, start - count) : max(0, stop - count)]]
