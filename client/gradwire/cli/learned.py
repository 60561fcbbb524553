"""Rows as a loss sees them: their tokens, and which of them are learned."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.text import Text

import gradwire
from gradwire.cli.text import plain

if TYPE_CHECKING:
    from gradwire.recipes.tokens import RowEncoder


class Learned(NamedTuple):
    """A sequence of tokens.

    Attributes:
        name: Its role in the row: "chosen", "rejected", "good", "bad", or "" for none.
        ids: ``[tokens]``.
        mask: ``[tokens]``, 1 for those that are learned.
    """

    name: str
    ids: Any
    mask: Any


async def learned(tokens: RowEncoder, rows: Sequence[Any], train_on: str = "assistant") -> list[Learned]:
    """Encode rows of one kind as the recipe for them does; of prompts nothing is learned: answers are sampled."""
    from gradwire import data

    if isinstance(rows[0], data.Preference):
        pairs = await tokens.pairs(rows, margins=True)
        sides = ("chosen", "rejected")
        return [Learned(side, pair[f"{side}_input_ids"], pair[f"{side}_loss_mask"]) for pair in pairs for side in sides]
    if isinstance(rows[0], data.Rating):
        rated = await tokens.ratings(rows)
        return [Learned("good" if row["label"] else "bad", row["input_ids"], row["loss_mask"]) for row in rated]
    if isinstance(rows[0], data.Steps):
        return [Learned("", row["input_ids"], row["token_labels"] >= 0) for row in await tokens.steps(rows)]
    if isinstance(rows[0], data.Conversation):
        return [Learned("", row["input_ids"], row["loss_mask"]) for row in await tokens.rows(rows, train_on)]
    return [Learned("prompt", ids, [0] * len(ids)) for ids in await tokens.prompts(rows, room=0)]


async def texts(service: gradwire.ServiceClient, model: str, row: Learned) -> list[tuple[str, bool]]:
    """The text of a sequence in stretches, each with whether it is learned."""
    marked = zip(map(int, row.ids), map(bool, row.mask))
    stretches = [(on, [token for token, _ in part]) for on, part in itertools.groupby(marked, lambda each: each[1])]
    decoded = await service.decode(model, [ids for _, ids in stretches])
    return [("\n".join(map(plain, text.split("\n"))), on) for text, (on, _) in zip(decoded, stretches)]


async def show(out: Console, service: gradwire.ServiceClient, model: str, place: str, rows: Sequence[Learned]) -> None:
    """Print the text of the tokens, the learned ones in green, or between >>> and <<< where there are no colours."""
    for row in rows:
        name = f", {row.name}" if row.name else ""
        out.print(Text(f"{place}{name}: {len(row.ids)} tokens, {int(sum(row.mask))} trained on", "bold"))
        text = Text()
        for shown, on in await texts(service, model, row):
            text.append(shown if out.is_terminal or not on else f">>>{shown}<<<", "green" if on else "dim")
        out.print(text)
