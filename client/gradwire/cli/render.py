"""``gradwire render``: show conversations as a model gets them, with what is trained on."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

import gradwire
from gradwire.cli.data import model_of, pair
from gradwire.cli.service import Access, told, with_access
from gradwire.cli.text import plain, warnings_to_stderr

if TYPE_CHECKING:
    from gradwire.data import Conversation


@with_access
def render(
    access: Access,
    file: Annotated[str, typer.Argument(help="A .jsonl or .csv file of conversations, or of prompts and completions.")],
    model: Annotated[str, typer.Option(help="A model of the server; may be left out if it has only one.")] = "",
    train_on: Annotated[
        Literal["assistant", "last", "all"], typer.Option(help="Which of the assistant's messages, or every token.")
    ] = "assistant",
    mapping: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=COLUMN", help="Column of a field, where it is not recognised; may be repeated."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of conversations to show.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print an object with input_ids and loss_mask a line.")
    ] = False,
) -> None:
    """Show conversations as a training by `sft` gets them: the model's tokens, those that are trained on in green.

    Where the output has no colours, what is trained on stands between >>> and <<<.
    """
    from gradwire import data  # numpy and more: not for the other commands

    try:
        named = dict(pair(each) for each in mapping or ())
        conversations = list(data.conversations(file, mapping=named, limit=rows))
        with warnings_to_stderr("gradwire render"), told(access):
            asyncio.run(_show(access, model, train_on, conversations, as_json))
    except (ValueError, OSError, ImportError) as error:
        message = str(error)
        if isinstance(error, data.DataError) and error.unnamed:
            options = " ".join(f"--mapping {field}=COLUMN" for field in error.unnamed)
            message = f"{error.where}: name its columns, {options}"
        typer.secho(f"gradwire: {plain(message)}", fg="red", err=True)
        raise typer.Exit(2) from None


async def _show(
    access: Access, model: str, train_on: str, conversations: Sequence[Conversation], as_json: bool
) -> None:
    from gradwire.recipes.tokens import Tokens

    out = Console(soft_wrap=True, highlight=False)
    async with gradwire.connect(access.address, **access.options()) as service:
        info = await model_of(service, model)
        tokens = Tokens(service, info, info.context_length)
        for each in conversations:
            for row in await tokens.fitting([each], lambda talks: tokens.rows(talks, train_on)):
                if as_json:
                    print(json.dumps({key: row[key].tolist() for key in ("input_ids", "loss_mask")}))
                    continue
                trained = int(row["loss_mask"].sum())
                out.print(Text(f"{each.place}: {len(row['input_ids'])} tokens, {trained} trained on", "bold"))
                out.print(await _shown(service, info.name, row, out.is_terminal))


async def _shown(service: gradwire.ServiceClient, model: str, row: Any, coloured: bool) -> Text:
    """The text of the tokens, in stretches that are trained on or not."""
    marked = zip(row["input_ids"].tolist(), row["loss_mask"].tolist())
    stretches = [
        (bool(on), [token for token, _ in part]) for on, part in itertools.groupby(marked, lambda each: each[1])
    ]
    text = Text()
    for (on, _), decoded in zip(stretches, await service.decode(model, [ids for _, ids in stretches])):
        lines = "\n".join(map(plain, decoded.split("\n")))
        text.append(lines if coloured or not on else f">>>{lines}<<<", "green" if on else "dim")
    return text
