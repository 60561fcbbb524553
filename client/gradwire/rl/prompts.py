"""Encode an environment's prompts so that a later prompt begins with exactly the sampled tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from gradwire_proto.chat import TemplateError
from gradwire_proto.recognition import Answers

from gradwire.errors import InvalidArgumentError
from gradwire.rl.generation import ChatCodec, Generation, TextCodec
from gradwire.rl.types import IntArray, Message, Prompt, UserText

logger = logging.getLogger("gradwire.rl")
_WARNED: set[str] = set()

ChatTemplate = Callable[[Sequence[Message]], str]
"""Messages -> the text that the policy continues, including the opening of its turn."""


def plain_chat(messages: Sequence[Message]) -> str:
    """Format messages as ``role: content`` lines, for models without a chat template."""
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "


def _warn_of_plain_chat(codec: TextCodec) -> None:
    name = codec.name if isinstance(codec, ChatCodec) else type(codec).__name__
    if name not in _WARNED:
        _WARNED.add(name)
        logger.warning(
            "%s has no chat template: conversations are written as lines of `role: content`. An instruct model's own "
            "tokenizer has one; for a base model, give RolloutManager(template=...)",
            name,
        )


_SHOWN: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()
_INSTEAD = {
    "system": "the system message stands at the beginning of the first user's turn",
    "tool": "results of tools are users' turns, in <tool_response> and </tool_response>",
}


async def _is_shown(codec: ChatCodec, role: str) -> bool:
    """Whether the model's template writes what messages of this role say, rather than refuse them or leave it out.

    Each codec is asked once; what is done instead is logged.
    """
    known = _SHOWN.setdefault(codec, {})
    if role in known:
        return known[role]
    user, answer = {"role": "user", "content": "How much?"}, {"role": "assistant", "content": "Let me see."}
    before, after = ([], [user]) if role == "system" else ([user, answer], [])
    try:
        probes = [[*before, {"role": role, "content": text}, *after] for text in ("4", "five")]
        rows = [await codec.render(probe, add_generation_prompt=True) for probe in probes]
        shown = rows[0] is None or not np.array_equal(rows[0], rows[1])  # type: ignore[arg-type]
    except (TemplateError, InvalidArgumentError):
        shown = False
    if not shown and role not in known:
        logger.warning("the chat template of %s has no role %r: %s", codec.name, role, _INSTEAD[role])
    return known.setdefault(role, shown)


async def _as_shown(codec: ChatCodec, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with those of roles that the template does not write said by the user."""
    missing = {role for role in _INSTEAD if any(message["role"] == role for message in messages)}
    missing = {role for role in missing if not await _is_shown(codec, role)}
    result: list[Mapping[str, Any]] = []
    opening = ""
    for message in messages:
        role, content = message["role"], message["content"]
        if role in missing and role == "system":
            opening += f"{content}\n\n"
            continue
        if role in missing:
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if result and result[-1]["role"] == "user":
                content = f"{result.pop()['content']}\n{content}"
        elif role == "user":
            content, opening = opening + content, ""
        result.append(
            message if (role, content) == (message["role"], message["content"]) else {"role": role, "content": content}
        )
    return [*result, {"role": "user", "content": opening.strip()}] if opening else result


class TokenHistory:
    """Token ids of the prompts of one episode.

    Re-encoding a sampled text need not give the sampled ids. So the sampled ids are kept wherever their text is: in a
    conversation formatted by the model's chat template, even if that drops earlier reasoning, and in a text that
    continues the last prompt and response. An answer is recognized in a conversation as in a session of the server
    (:mod:`gradwire_proto.recognition`): without regard to blanks, and by what it answered if its text was said twice.
    If a prompt begins with everything before it, the episode is one training row; otherwise another row begins.

    Args:
        codec: Converts text and conversations to ids.
        template: Formats conversations instead of the model's own chat template.
        context_tokens: Maximum prompt length; a longer prompt loses its beginning. None keeps all.

    Attributes:
        keeps: Whether sampled tokens stay in the prompt also where the model's chat template drops reasoning, so that
            a conversation that is appended to is one training row.
    """

    def __init__(
        self, codec: TextCodec, template: ChatTemplate | None = None, *, context_tokens: int | None = None
    ) -> None:
        self._codec = codec
        self._template = template
        self._context_tokens = context_tokens
        self.keeps = False
        self._text: str | None = None
        self._ids: IntArray = np.zeros(0, np.int64)
        self._ended = False
        self._answers = Answers()
        self._asked = b""

    async def prompt_ids(self, prompt: Prompt) -> IntArray:
        asked = None
        if isinstance(prompt, UserText) and self._template is None:
            asked = await self._by_model([{"role": "user", "content": str(prompt)}])
        if asked is not None:
            ids = asked
        elif isinstance(prompt, str):
            ids = await self._encoded(prompt, add_special_tokens=True)
        elif self._template is not None:
            ids = await self._encoded(self._template(prompt), add_special_tokens=False)
        else:
            ids = await self._rendered(prompt)
        if not len(ids):
            raise ValueError("the environment built an empty prompt; a prompt needs at least one token")
        if self._context_tokens is not None:
            ids = ids[-self._context_tokens :]
        self._ids = ids
        return ids

    async def _rendered(self, messages: Sequence[Message]) -> IntArray:
        """Format by the model's own template, or as plain text if it has none."""
        ids = await self._by_model(messages)
        if ids is not None:
            return ids
        _warn_of_plain_chat(self._codec)
        return await self._encoded(plain_chat(messages), add_special_tokens=False)

    async def _by_model(self, messages: Sequence[Message]) -> IntArray | None:
        """Format by the model's own template; None if it has none."""
        if not isinstance(self._codec, ChatCodec):
            return None
        written = await _as_shown(self._codec, self._with_samples(messages))
        kept = {"keep_sampled": True} if self.keeps else {}
        ids = await self._codec.render(written, add_generation_prompt=True, **kept)
        self._text = self._text if ids is None else None
        return ids

    def _with_samples(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Add their tokens to the messages that were sampled in this episode."""
        asked = self._answers.read(b"", messages, {})
        self._asked = asked.chain[-1]
        result = [dict(message) for message in messages]
        for index, number in asked.seen.items():
            result[index]["token_ids"] = list(self._answers.token_ids(number))
        return result

    async def _encoded(self, text: str, *, add_special_tokens: bool) -> IntArray:
        if self._text is not None and text.startswith(self._text):
            new = text[len(self._text) :]
            if self._ended and self._codec.end_text:
                new = new.removeprefix(self._codec.end_text)
            added = (await self._codec.encode([new], add_special_tokens=False))[0] if new else np.zeros(0, np.int64)
            ids = np.concatenate([self._ids, added])
        else:
            ids = (await self._codec.encode([text], add_special_tokens=add_special_tokens))[0]
        self._text = text
        return ids

    def wrote(self, generation: Generation, stop: Iterable[str] = ()) -> None:
        """Record the response to the last prompt.

        Args:
            stop: The strings before which it may have ended; an environment may put them back.
        """
        stops = stop if generation.stop_reason == "stop" else ()
        message = {"role": "assistant", "content": generation.text}
        self._answers.add(message, generation.token_ids.tolist(), self._asked, stops)
        self._text = None if self._text is None else self._text + generation.text
        self._ids = np.concatenate([self._ids, generation.token_ids])
        self._ended = generation.stop_reason == "eos"
