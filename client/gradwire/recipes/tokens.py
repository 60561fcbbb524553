"""Rows of tokens from conversations: by the model's chat template, or as plain text for a model without one."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

import gradwire
from gradwire.data import Conversation, DataError, Preference, Prompt, Rating, Steps, learned
from gradwire.data.rows import is_learned
from gradwire.rl.prompts import plain_chat

logger = logging.getLogger("gradwire.recipes")


T = TypeVar("T")
TOLD = 3
"""Skipped rows that are each said."""
NOT_IN_HISTORY = (
    "an earlier message of an answer is not learned: in the history the template writes it otherwise than for the model"
    " that answers"
)


class RowRefusedError(ValueError):
    """A conversation that cannot be encoded.

    Attributes:
        index: Which of those that were given.
        reason: Why.
        overlong: Whether it is only too long.
    """

    def __init__(self, index: int, reason: str, *, overlong: bool = False) -> None:
        super().__init__(reason)
        self.index, self.reason, self.overlong = index, reason, overlong


class RowEncoder:
    """Encodes conversations for one model.

    Args:
        service: The service.
        model: The model.
        max_tokens: Longest row.
        overlong: Treatment of a longer one: ``"cut"`` at its end, ``"cut_start"``, ``"skip"`` or ``"raise"``.
        on_error: ``"raise"`` or ``"skip"``: what :meth:`fitting` does with a row that the template refuses.
        tell: Whether the first skipped rows are logged.

    Attributes:
        cut: Rows that were cut so far.
        skipped: Place of each row that was skipped -> why.
        remarks: How what is learned of rows differs from what they say -> the places of these rows.
    """

    def __init__(
        self,
        service: Any,
        model: gradwire.ModelInfo,
        max_tokens: int,
        overlong: str = "cut",
        on_error: str = "raise",
        tell: bool = True,
    ) -> None:
        self._service, self._model, self._most = service, model, min(max_tokens, model.context_length)
        self._overlong, self._on_error = overlong, on_error
        self._has_template: bool | None = None
        self._writes_ends = True
        self._specials: frozenset[int] = frozenset()
        self._tell = tell
        self._warned: set[str] = set()
        self.cut = 0
        self.skipped: dict[str, str] = {}
        self.remarks: dict[str, dict[str, None]] = {}

    async def fitting(self, rows: Sequence[T], encode: Callable[[Sequence[T]], Awaitable[list[Any]]]) -> list[Any]:
        """Encode those rows of a batch that can be.

        Raises:
            DataError: One cannot be, and is not to be skipped; names its file, line and reason.
        """
        kept = list(rows)
        while kept:
            try:
                return await encode(kept)
            except RowRefusedError as refused:
                place = getattr(kept[refused.index], "place", "") or f"row {refused.index}"
                if (self._overlong if refused.overlong else self._on_error) == "raise":
                    raise DataError(place, refused.reason) from None
                if self._tell and place not in self.skipped and len(self.skipped) < TOLD:
                    logger.warning("skipped: %s: %s", place, refused.reason)
                self.skipped[place] = refused.reason
                del kept[refused.index]
        return []

    def tell_of_rows(self) -> None:
        """Log how many rows were skipped or learned otherwise, if they were not all said."""
        if self._tell and len(self.skipped) > TOLD:
            logger.warning("%d rows were skipped; `gradwire data check` lists them all", len(self.skipped))
        for remark, places in self.remarks.items():
            if self._tell and len(places) > 1:
                logger.warning("%d rows: %s", len(places), remark)

    def _remark(self, remark: str, place: str) -> None:
        if self._tell and remark not in self.remarks:
            logger.warning("%s: %s; such rows are counted at the end", place or "a row", remark)
        self.remarks.setdefault(remark, {})[place] = None

    async def rows(self, conversations: Sequence[Conversation], train_on: str = "assistant") -> list[Any]:
        """Encode conversations into rows with ``input_ids``, ``loss_mask``, and ``weights`` and ``images`` where one
        has any.

        A conversation becomes several rows where its answers stand behind their prompts in no single one.
        """
        return [row for _, row in await self._rows(conversations, train_on)]

    async def _rows(self, conversations: Sequence[Conversation], train_on: str) -> list[tuple[int, Any]]:
        """Rows, each with the index of its conversation."""
        if train_on != "assistant" and any("weight" in message for each in conversations for message in each.messages):
            self._warn_once("train_on is %s: what messages say of being learned is not used", train_on)
        pictured = any(each.images for each in conversations)
        weighted = any(each.weight != 1.0 for each in conversations)
        if pictured:
            await self._check_images(conversations)
        talks = [index for index, each in enumerate(conversations) if not each.text]
        encoded = await self._texts(conversations) if len(talks) < len(conversations) else []
        encoded += await self._talks(conversations, talks, train_on)
        rows = []
        for index, row, num_messages in sorted(encoded, key=lambda each: each[0]):
            each = conversations[index]
            if weighted:
                row["weights"] = np.full(len(row["input_ids"]), each.weight, np.float32)
            self._check_ids(row["input_ids"], index)
            if not pictured:
                rows.append((index, self._short(row, index)))
                continue
            if each.images and len(row["input_ids"]) > self._most:
                reason = f"{len(row['input_ids'])} tokens; max_tokens allows {self._most}, and images are not cut off"
                raise RowRefusedError(index, reason, overlong=True)
            images = list(each.images)[: _num_images(each.messages[:num_messages])]
            rows.append((index, {**self._short(row, index), "images": images}))
        return rows

    def _check_ids(self, ids: Any, index: int) -> None:
        """Check that the model has the tokens.

        Raises:
            RowRefusedError: It has not.
        """
        if len(ids) and (largest := int(np.max(ids))) >= self._model.vocab_size:
            reason = f"its text has the token {largest}, and the model has {self._model.vocab_size}: the tokenizer's "
            raise RowRefusedError(index, f"{reason}added tokens need a model whose embedding has them")

    async def _check_images(self, conversations: Sequence[Conversation]) -> None:
        """Check that the model takes the images of conversations.

        Raises:
            RowRefusedError: It takes none, or one is beside plain texts.
        """
        index = next(index for index, each in enumerate(conversations) if each.images)
        if not self._model.takes_images or not await self._chats():
            raise RowRefusedError(index, f"there are images, and {self._model.name} takes none")
        if any(each.text for each in conversations):
            raise RowRefusedError(index, "there are images, and other rows are plain texts: train them apart")

    async def _texts(self, conversations: Sequence[Conversation]) -> list[tuple[int, Any, int]]:
        """Encode plain texts, those of more than ``max_tokens`` in as many rows as it takes."""
        rows: list[tuple[int, Any, int]] = []
        texts = await self._service.encode(self._model.name, [each.text for each in conversations])
        for index, (each, ids) in enumerate(zip(conversations, texts)):
            whole = [*ids, *self._model.eos_token_ids[:1]] if each.text else []
            for start in range(0, len(whole), self._most):
                part = np.array(whole[start : start + self._most])
                rows.append((index, {"input_ids": part, "loss_mask": np.ones(len(part), np.int64)}, 0))
        return rows

    async def _talks(
        self, conversations: Sequence[Conversation], talks: Sequence[int], train_on: str
    ) -> list[tuple[int, Any, int]]:
        """Encode the conversations with these indices: of each row its conversation's, the row, how many messages."""
        if not talks:
            return []
        if not await self._chats():
            plain = await self._plain([conversations[index].messages for index in talks], train_on)
            return [(index, row, len(conversations[index].messages)) for index, row in zip(talks, plain)]
        rows: list[tuple[int, Any, int]] = []
        for _, part in itertools.groupby(talks, lambda index: _settings(conversations[index])):
            same = list(part)
            some = [conversations[index] for index in same]
            with _refusals(same):
                rendered = await self._service.render_turns(
                    [each.messages for each in some], some[0].tools or None, learned(some, train_on),
                    model=self._model.name, **some[0].template_kwargs,
                )  # fmt: skip
            for turns in rendered:
                index = same[turns.conversation]
                row = turns.row if train_on == "all" or self._writes_ends else self._ended(turns.row)
                rows.append((index, dict(row), turns.num_messages))
                for remark in turns.remarks:
                    self._remark(remark, conversations[index].place)
        return rows

    async def _answers(self, rows: Sequence[Any], answers: Sequence[Sequence[Any]]) -> list[Any]:
        """One row of each prompt with its answer, of which all that the assistant writes in the answer is learned."""
        talks = [
            Conversation(
                (*({**message, "weight": 0} for message in each.prompt), *answer), each.tools, each.template_kwargs,
                place=each.place,
            )
            for each, answer in zip(rows, answers)
        ]  # fmt: skip
        found: dict[int, Any] = {}
        for index, row in await self._rows(talks, "assistant"):
            if index in found:
                self._remark(NOT_IN_HISTORY, talks[index].place)
            found.setdefault(index, row)
        return [found[index] for index in range(len(talks))]

    async def ratings(self, ratings: Sequence[Rating]) -> list[dict[str, Any]]:
        """Encode rated answers into rows for ``kto``; each has the next one's answer, too, to estimate the KL."""
        rows = await self._answers(ratings, [each.completion for each in ratings])
        rated = []
        for index, (row, each) in enumerate(zip(rows, ratings)):
            other = rows[(index + 1) % len(rows)]
            before, after = _start(row), _start(other)
            ids = np.concatenate([row["input_ids"][:before], other["input_ids"][after:]])[: self._most]
            mask = np.concatenate([row["loss_mask"][:before], other["loss_mask"][after:]])[: self._most]
            mismatched = {"kl_input_ids": ids, "kl_loss_mask": mask}
            rated.append({**row, "label": each.label, **(mismatched if len(rows) > 1 else {})})
        return rated

    async def steps(self, answers: Sequence[Steps]) -> list[dict[str, Any]]:
        """Encode answers in steps into rows with ``token_labels``: the last token of a step has its label, 0 or 1."""
        prompts = await self.prompts([Prompt(each.prompt) for each in answers], room=self._most // 2)
        texts = [f"{text}\n" for each in answers for text in each.steps]
        encoded = iter(await self._service.encode(self._model.name, texts, add_special_tokens=False))
        rows = []
        for index, (each, prompt) in enumerate(zip(answers, prompts)):
            ids, labels = list(prompt), [-100] * len(prompt)
            for label, written in zip(each.labels, [next(encoded) for _ in each.steps]):
                ids += written
                labels += [-100] * (len(written) - 1) + [int(label)]
            row = {"input_ids": np.array(ids), "token_labels": np.array(labels), "loss_mask": np.array(labels) >= 0}
            self._check_ids(ids, index)
            short = self._short(row, index)
            rows.append({name: value for name, value in short.items() if name != "loss_mask"})
        return rows

    async def pairs(self, preferences: Sequence[Preference], *, margins: bool = False) -> list[dict[str, Any]]:
        """Encode pairs into rows with the ids of both answers and masks of what is learned of them.

        Args:
            margins: Whether the loss takes margins; rows with one are refused otherwise.
        """
        for index, each in enumerate(preferences):
            if each.margin and not margins:
                raise RowRefusedError(index, "there is a margin, which the recipe reward alone uses; drop the column")
        answers = [*(each.chosen for each in preferences), *(each.rejected for each in preferences)]
        try:
            rows = await self._answers([*preferences, *preferences], answers)
        except RowRefusedError as refused:
            refused.index %= len(preferences)
            raise
        result = []
        for chosen, rejected in zip(rows[: len(preferences)], rows[len(preferences) :]):
            masks = {"chosen_loss_mask": chosen["loss_mask"], "rejected_loss_mask": rejected["loss_mask"]}
            result.append(
                {"chosen_input_ids": chosen["input_ids"], "rejected_input_ids": rejected["input_ids"], **masks}
            )
        return result

    async def prompts(self, conversations: Sequence[Conversation | Prompt], room: int) -> list[Any]:
        """Encode what precedes the first answer, cut at the beginning where it leaves no room for so many tokens."""
        encoded: list[Any] = []
        if await self._chats():
            for _, part in itertools.groupby(range(len(conversations)), lambda index: _settings(conversations[index])):
                same = list(part)
                tools, variables = _of_template(conversations[same[0]])
                with _refusals(same):
                    rows = await self._service.render(
                        [list(conversations[index].prompt) for index in same], tools, None, True,
                        model=self._model.name, **variables,
                    )  # fmt: skip
                encoded += [row["input_ids"] for row in rows]
        else:
            prompts: list[list[Any]] = [list(each.prompt) for each in conversations]
            encoded = await self._service.encode(self._model.name, [plain_chat(each) for each in prompts])
        for index, ids in enumerate(encoded):
            self._check_ids(ids, index)
        most = max(1, self._most - room)
        if any(len(ids) > most for ids in encoded):
            self._warn_once(
                "prompts of more than %d tokens are cut at their beginning, to leave %d for an answer", most, room
            )
        return [np.asarray(ids)[-most:] for ids in encoded]

    async def _chats(self) -> bool:
        if self._has_template is None:
            info = await self._service.tokenizer_info(self._model.name)
            self._has_template = bool(info.chat_template)
            self._specials = frozenset(info.special_token_ids.values()) | {*self._model.eos_token_ids}
            self._writes_ends = "endgeneration" in info.chat_template  # it says itself what is learned
            if not self._has_template:
                logger.warning("%s has no chat template: conversations are written as plain text", self._model.name)
        return self._has_template

    async def _plain(self, conversations: Sequence[Sequence[Any]], train_on: str) -> list[Any]:
        ends = self._model.eos_token_ids[:1]
        conversations = [_to_last_answer(each) for each in conversations]
        if train_on == "assistant" and any(_num_answers(each) > 1 for each in conversations):
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

    def _ended(self, row: Any) -> Any:
        """Learn where an answer ends, of a template as GLM's that writes nothing there but the next message."""
        ends, ids, mask = self._model.eos_token_ids, row["input_ids"], np.array(row["loss_mask"])
        if not ends or not mask.any():
            return row
        follows = np.flatnonzero((mask[1:] == 0) & (mask[:-1] != 0) & ~np.isin(ids[:-1], list(self._specials))) + 1
        mask[follows[np.isin(ids[follows], ends)]] = 1
        if mask[-1] and int(ids[-1]) not in self._specials:
            self._warn_once(
                "the chat template of %s ends no answer: the model's end of text is added to the last one of a row",
                self._model.name,
            )
            ids, mask = np.append(ids, ends[0]), np.append(mask, 1)
        return {**row, "input_ids": ids, "loss_mask": mask}

    def _short(self, row: Any, index: int) -> Any:
        if len(row["input_ids"]) <= self._most:
            return row
        if self._overlong in ("skip", "raise"):
            reason = f"{len(row['input_ids'])} tokens; max_tokens allows {self._most}"
            raise RowRefusedError(index, reason, overlong=True)
        self.cut += 1
        start = self._overlong == "cut_start"
        self._warn_once(f"rows of more than %d tokens are cut at their {'start' if start else 'end'}", self._most)
        kept = slice(-self._most, None) if start else slice(self._most)
        short = {name: value[kept] for name, value in row.items()}
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


@contextmanager
def _refusals(indices: Sequence[int]) -> Iterator[None]:
    """Turn the server's errors about one conversation into :class:`RowRefusedError`.

    Args:
        indices: Indices of the conversations.
    """
    try:
        yield
    except gradwire.InvalidRequestError as error:
        if error.row is None:
            raise
        reason = re.sub(r"^conversation \d+(: |, )?", "", str(error))
        raise RowRefusedError(indices[error.row], reason) from error


def _of_template(row: Any) -> tuple[Any, Any]:
    """The tools and the variables that a row has for the template."""
    return getattr(row, "tools", None) or None, getattr(row, "template_kwargs", {})


def _settings(row: Any) -> str:
    return repr(_of_template(row))


def _num_images(messages: Sequence[Any]) -> int:
    parts = [part for each in messages if isinstance(each["content"], list) for part in each["content"]]
    return sum(part["type"] == "image" for part in parts)


def _start(row: Any) -> int:
    """The first token that is learned, where the answer begins."""
    learned = np.flatnonzero(row["loss_mask"])
    return int(learned[0]) if len(learned) else len(row["input_ids"])


def _num_answers(messages: Sequence[Any]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _to_last_answer(messages: Sequence[Any]) -> Sequence[Any]:
    last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: last + 1]
