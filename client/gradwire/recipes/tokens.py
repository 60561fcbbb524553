"""Rows of tokens from conversations: by the model's chat template, or as plain text for a model without one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

import gradwire
from gradwire.data import Conversation, Preference, learned
from gradwire.data.layouts import is_learned
from gradwire.rl.prompts import plain_chat

logger = logging.getLogger("gradwire.recipes")


class Tokens:
    """Encodes conversations for one model.

    Args:
        service: The service.
        model: The model.
        max_tokens: Longest row; a longer one is cut at its end.

    Attributes:
        cut: Rows that were cut so far.
    """

    def __init__(self, service: Any, model: gradwire.ModelInfo, max_tokens: int) -> None:
        self._service, self._model, self._most = service, model, min(max_tokens, model.context_length)
        self._has_template: bool | None = None
        self._warned: set[str] = set()
        self.cut = 0

    async def rows(self, conversations: Sequence[Conversation], train_on: str = "assistant") -> list[Any]:
        """Encode conversations into rows with ``input_ids``, ``loss_mask`` and, where one has a weight, ``weights``."""
        if train_on != "assistant" and any("weight" in message for each in conversations for message in each.messages):
            self._warn_once("train_on is %s: what messages say of being learned is not used", train_on)
        if await self._chats():
            rows = await self._rendered(conversations, train_on)
        else:
            rows = await self._plain([each.messages for each in conversations], train_on)
        if any(each.weight != 1.0 for each in conversations):
            for row, each in zip(rows, conversations):
                row["weights"] = np.full(len(row["input_ids"]), each.weight, np.float32)
        return [self._short(row) for row in rows]

    async def _rendered(self, conversations: Sequence[Conversation], train_on: str) -> list[Any]:
        chosen = learned(conversations, train_on)
        if not any(each.tools or each.template_kwargs for each in conversations):
            messages = [each.messages for each in conversations]
            return list(await self._service.render(messages, train_on=chosen, model=self._model.name))
        return [
            await self._service.render(
                each.messages, tools=each.tools or None, train_on=chosen, model=self._model.name,
                **each.template_kwargs,
            )
            for each in conversations
        ]  # fmt: skip

    async def pairs(self, preferences: Sequence[Preference]) -> list[dict[str, Any]]:
        """Encode pairs into rows with the ids of both answers and the length of their common prompt."""
        both = [Conversation((*each.prompt, *each.chosen)) for each in preferences]
        both += [Conversation((*each.prompt, *each.rejected)) for each in preferences]
        rows = await self.rows(both, "last")
        result = []
        for chosen, rejected in zip(rows[: len(preferences)], rows[len(preferences) :]):
            masks = {"chosen_loss_mask": chosen["loss_mask"], "rejected_loss_mask": rejected["loss_mask"]}
            result.append(
                {"chosen_input_ids": chosen["input_ids"], "rejected_input_ids": rejected["input_ids"], **masks}
            )
        return result

    async def prompts(self, conversations: Sequence[Conversation], room: int) -> list[Any]:
        """Encode what precedes the first answer, cut at the beginning where it leaves no room for so many tokens."""
        messages: list[list[Any]] = [list(each.prompt) for each in conversations]
        if await self._chats():
            rows = await self._service.render(
                messages, train_on=None, add_generation_prompt=True, model=self._model.name
            )
            found = [row["input_ids"] for row in rows]
        else:
            found = await self._service.encode(self._model.name, [plain_chat(each) for each in messages])
        most = max(1, self._most - room)
        if any(len(ids) > most for ids in found):
            self._warn_once(
                "prompts of more than %d tokens are cut at their beginning, to leave %d for an answer", most, room
            )
        return [np.asarray(ids)[-most:] for ids in found]

    async def _chats(self) -> bool:
        if self._has_template is None:
            self._has_template = bool((await self._service.tokenizer_info(self._model.name)).chat_template)
            if not self._has_template:
                logger.warning("%s has no chat template: conversations are written as plain text", self._model.name)
        return self._has_template

    async def _plain(self, conversations: Sequence[Sequence[Any]], train_on: str) -> list[Any]:
        ends = self._model.eos_token_ids[:1]
        conversations = [_to_last_answer(each) for each in conversations]
        if train_on == "assistant" and any(_answers(each) > 1 for each in conversations):
            self._warn_once("without a chat template only the last answer of a conversation is trained on")
        befores = await self._service.encode(self._model.name, [plain_chat(each[:-1]) for each in conversations])
        answers = await self._service.encode(
            self._model.name, [str(each[-1]["content"]) for each in conversations], add_special_tokens=False
        )
        return [
            {
                "input_ids": np.array([*before, *answer, *ends]),
                "loss_mask": np.array(
                    [int(train_on == "all")] * len(before)
                    + [int(train_on != "assistant" or is_learned(each[-1]))] * (len(answer) + len(ends))
                ),
            }
            for before, answer, each in zip(befores, answers, conversations)
        ]

    def _short(self, row: Any) -> Any:
        if len(row["input_ids"]) <= self._most:
            return row
        self.cut += 1
        self._warn_once("rows of more than %d tokens are cut at their end", self._most)
        short = {name: value[: self._most] for name, value in row.items()}
        if np.any(row["loss_mask"]) and not np.any(short["loss_mask"]):
            self._warn_once(
                "the cut leaves nothing to train on of some rows: their answers begin behind token %d; raise"
                " max_tokens, or leave these rows out",
                self._most,
            )
        return short

    def _warn_once(self, message: str, *args: Any) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *args)


def _answers(messages: Sequence[Any]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _to_last_answer(messages: Sequence[Any]) -> Sequence[Any]:
    last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: last + 1]
