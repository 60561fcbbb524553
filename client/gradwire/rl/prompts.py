"""From an environment's prompts to token ids, such that a later prompt begins with exactly what was sampled before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradwire.rl.generation import Generation, TextCodec, TokenizerCodec
from gradwire.rl.types import IntArray, Message, Prompt

ChatTemplate = Callable[[Sequence[Message]], str]
"""Messages -> the text that the policy continues, the opening of its turn included."""


def plain_chat(messages: Sequence[Message]) -> str:
    """``role: content`` lines, for models with no chat template of their own."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "


def chat_template(codec: TextCodec) -> ChatTemplate:
    """The tokenizer's own template where the user's tokenizer has one, else :func:`plain_chat`."""
    tokenizer = codec.tokenizer if isinstance(codec, TokenizerCodec) else None
    if not getattr(tokenizer, "chat_template", None):
        return plain_chat

    def apply(messages: Sequence[Message]) -> str:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)  # type: ignore[union-attr]
        return str(text)

    return apply


class TokenHistory:
    """Prompts of one episode as token ids.

    A text that was sampled need not encode to the ids that were sampled. So where a prompt's text continues the last
    prompt and response, its ids are theirs and only what is new is encoded; else all is encoded, and the episode is
    trained on as several rows.

    Args:
        codec: text to ids.
        template: for prompts that are conversations.
        context_tokens: a longer prompt loses its beginning; None keeps all.
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
            # A chat template writes its own special tokens.
            ids = (await self._codec.encode([text], add_special_tokens=isinstance(prompt, str)))[0]
            if not len(ids):
                raise ValueError("the environment built an empty prompt; a policy needs at least one token to continue")
        if self._context_tokens is not None:
            ids = ids[-self._context_tokens :]
        self._text, self._ids = text, ids
        return ids

    def wrote(self, generation: Generation) -> None:
        """What the policy continued the last prompt with."""
        self._text = (self._text or "") + generation.text
        self._ids = np.concatenate([self._ids, generation.token_ids])
        self._ended = generation.stop_reason == "eos"
