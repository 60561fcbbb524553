"""The work for each token of a sample besides drawing it: text, stop strings, a grammar, streaming."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.sampling.drawing.grammar import GuidedText
from gradwire_server.engine.sampling.growing.growing_text import GrowingText
from gradwire_server.engine.sampling.samplers.sampler import TopTokens


class Handed:
    """The streamed part of a sample, and the tokens that wait to be streamed.

    Args:
        row: The sample's place in its request.

    Attributes:
        waiting: Whether there is something to take.
    """

    def __init__(self, row: int) -> None:
        self.waiting = False
        self._row = row
        self._delta = training_pb2.SampleDelta(row=row)
        self._text = ""

    def add(self, token: int, logprob: float, top: TopTokens | None, shown: str) -> None:
        """Add a token; ``shown`` is the sample's text so far."""
        self.waiting = True
        self._delta.token_ids.append(token)
        self._delta.logprobs.append(logprob)
        self._delta.texts.append("")
        if top is not None:
            self._delta.top_token_ids.extend(top[0].tolist())
            self._delta.top_logprobs.extend(top[1].tolist())
        self._show(shown)

    def end(self, text: str, stop_reason: str) -> None:
        """End the sample, given its whole text."""
        self._show(text)
        self._delta.stop_reason, self.waiting = stop_reason, True

    def take(self) -> training_pb2.SampleDelta:
        """Take what waits."""
        delta, self._delta, self.waiting = self._delta, training_pb2.SampleDelta(row=self._row), False
        return delta

    def _show(self, text: str) -> None:
        if self._delta.texts and text.startswith(self._text):
            self._delta.texts[-1] += text[len(self._text) :]
            self._text = text


class GrowingSample:
    """One sample in progress.

    Args:
        text: The text, if it is needed before the sample ends.
        grammar: Restricts the tokens, or None.
        handed: Takes the tokens of a streamed sample, or None.
    """

    def __init__(
        self,
        text: GrowingText | None,
        grammar: GuidedText | None,
        handed: Handed | None,
    ) -> None:
        self._text, self._grammar, self._handed = text, grammar, handed
        self._top: list[TopTokens] = []

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """``[V]`` which tokens may come next; None for all."""
        return self._grammar.allowed() if self._grammar is not None else None

    def add(self, token: int, logprob: float, top: TopTokens | None, *, ends: bool) -> str | None:
        """Add a token, and return the text before the first stop string if the token completes one, else None.

        Args:
            top: ``[k]`` the most probable tokens in its place.
            ends: Whether the token ends the sample, so that it is not part of the text.
        """
        if top is not None:
            self._top.append(top)
        if self._grammar is not None:
            self._grammar.add(token)
        if self._text is not None and not ends:
            self._text.add(token)
        if self._handed is not None:
            self._handed.add(token, logprob, top, self._text.shown if self._text is not None else "")
        return self._text.shown if self._text is not None and self._text.end is not None else None

    @property
    def top(self) -> TopTokens | None:
        """``[tokens, k]`` the most probable tokens in each place; None if they were not given."""
        if not self._top:
            return None
        return np.stack([ids for ids, _ in self._top]), np.stack([logprobs for _, logprobs in self._top])
