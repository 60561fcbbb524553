"""Responses in parts: what is longer than an iteration goes on in the next, with newer weights (partial rollouts)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from gradwire.rl.generation import Generation, SamplingParams, TextCodec
from gradwire.rl.types import IntArray

Ask = Callable[[IntArray, SamplingParams], Awaitable[Generation]]


async def in_parts(ask: Ask, codec: TextCodec, prompt: IntArray, params: SamplingParams, size: int) -> Generation:
    """Generate a response by requests of up to ``size`` tokens, each of which continues the last.

    Each part is of one version of the weights: the policy of that version reads the prompt and the parts before, and
    its log-probabilities are those of the new tokens given all of it.
    """
    parts: list[Generation] = []
    left, ids = params.max_tokens, np.asarray(prompt, np.int64)
    while True:
        asked = min(size, left)
        parts.append(await ask(ids, replace(params, max_tokens=asked)))
        written = len(parts[-1].token_ids)
        left -= written
        if len(parts) > 1 and (stopped := await _stopped(parts, codec, params.stop)) is not None:
            return stopped
        if parts[-1].stop_reason != "length" or written < asked or not left:
            return _joined(parts, await _text(parts, codec))
        ids = np.concatenate([ids, parts[-1].token_ids])


async def _stopped(parts: Sequence[Generation], codec: TextCodec, stops: Sequence[str]) -> Generation | None:
    """The response up to a stop string that lies in two parts; None if there is none."""
    text = await _text(parts, codec) if stops else ""
    if not any(stop in text for stop in stops):
        return None
    whole = _joined(parts, "")
    first = len(whole.token_ids) - len(parts[-1].token_ids) + 1
    texts = await codec.decode([whole.token_ids[:end] for end in range(first, len(whole.token_ids) + 1)])
    for end, text in enumerate(texts, first):
        if places := [at for stop in stops if (at := text.find(stop)) >= 0]:
            versions = None if whole.token_versions is None else whole.token_versions[:end]
            return Generation(
                text[: min(places)], whole.token_ids[:end], whole.logprobs[:end], "stop", whole.version, versions
            )
    return None


async def _text(parts: Sequence[Generation], codec: TextCodec) -> str:
    text = "".join(part.text for part in parts)
    if len(parts) == 1 or "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    ids = np.concatenate([part.token_ids for part in parts])  # a character lies in two parts
    return (await codec.decode([ids[:-1] if parts[-1].stop_reason == "eos" else ids]))[0]


def _joined(parts: Sequence[Generation], text: str) -> Generation:
    if len(parts) == 1:
        return parts[0]
    return Generation(
        text,
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        parts[-1].stop_reason,
        parts[0].version,
        np.concatenate([np.full(len(part.token_ids), part.version) for part in parts]),
    )
