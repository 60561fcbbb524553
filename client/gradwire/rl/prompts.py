"""Encode an environment's prompts so that a later prompt begins with exactly the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradwire.rl.generation import Generation, TextCodec, TokenizerCodec
from gradwire.rl.types import IntArray, Message, Prompt

ChatTemplate = Callable[[Sequence[Message]], str]
"""Messages -> the text that the policy continues, including the opening of its turn."""


def plain_chat(messages: Sequence[Message]) -> str:
    """Format messages as ``role: content`` lines, for models without a chat template."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "


def chat_template(codec: TextCodec) -> ChatTemplate:
    """Return the tokenizer's own chat template if it has one, else :func:`plain_chat`."""
    tokenizer = codec.tokenizer if isinstance(codec, TokenizerCodec) else None
    if not getattr(tokenizer, "chat_template", None):
        return plain_chat

    def apply(messages: Sequence[Message]) -> str:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)  # type: ignore[union-attr]
        return str(text)

    return apply


class TokenHistory:
    """Token ids of the prompts of one episode.

    Re-encoding a sampled text need not give the sampled ids. So if a prompt's text continues the last prompt and
    response, their ids are reused and only the new text is encoded; otherwise the whole prompt is encoded, and the
    episode becomes several training rows.

    Args:
        codec: Converts text to ids.
        template: Formats prompts that are conversations.
        context_tokens: Maximum prompt length; a longer prompt loses its beginning. None keeps all.
    """

    def __init__(self, codec: TextCodec, template: ChatTemplate, *, context_tokens: int | None = None) -> None:
        self._codec = codec
        self._template = template
        self._context_tokens = context_tokens
        self._text: str | None = None
        self._ids: IntArray = np.zeros(0, np.int64)
        self._ended = False

    async def prompt_ids(self, prompt: Prompt) -> IntArray:
        text = prompt if isinstance(prompt, str) else self._template(prompt)
        if self._text is not None and text.startswith(self._text):
            new = text[len(self._text) :]
            if self._ended and self._codec.end_text:
                new = new.removeprefix(self._codec.end_text)
            added = (await self._codec.encode([new], add_special_tokens=False))[0] if new else np.zeros(0, np.int64)
            ids = np.concatenate([self._ids, added])
        else:
            # A chat template already contains the special tokens.
            ids = (await self._codec.encode([text], add_special_tokens=isinstance(prompt, str)))[0]
            if not len(ids):
                raise ValueError("the environment built an empty prompt; a prompt needs at least one token")
        if self._context_tokens is not None:
            ids = ids[-self._context_tokens :]
        self._text, self._ids = text, ids
        return ids

    def wrote(self, generation: Generation) -> None:
        """Record the response to the last prompt."""
        self._text = (self._text or "") + generation.text
        self._ids = np.concatenate([self._ids, generation.token_ids])
        self._ended = generation.stop_reason == "eos"
