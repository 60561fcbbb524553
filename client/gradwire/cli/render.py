"""``gradwire render``: show rows as a model gets them, with what is trained on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

import gradwire
from gradwire.cli.data import As, File, model_of, pair
from gradwire.cli.learned import learned, show, texts
from gradwire.cli.service import Access, told, with_access
from gradwire.cli.text import plain, warnings_to_stderr


@with_access
def render(
    access: Access,
    file: File,
    kind: As = "auto",
    model: Annotated[str, typer.Option(help="A model of the server; may be left out if it has only one.")] = "",
    train_on: Annotated[
        Literal["assistant", "last", "all"], typer.Option(help="Which of the assistant's messages, or every token.")
    ] = "assistant",
    mapping: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=COLUMN", help="Column of a field, where it is not recognised; may be repeated."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows to show.")] = 1,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print an object a line: input_ids, loss_mask, and texts with whether each is trained on.",
        ),
    ] = False,
) -> None:
    """Show rows as a training gets them: the model's tokens, those that are trained on in green.

    Where the output has no colours, what is trained on stands between >>> and <<<.
    """
    from gradwire import data  # numpy and more: not for the other commands

    try:
        named = dict(pair(each) for each in mapping or ())
        chosen = kind if kind != "auto" else data.kind_of(file, mapping=named)
        with warnings_to_stderr("gradwire render"), told(access):
            shown = list(data.LOADERS[chosen](file, mapping=named, limit=rows))
            asyncio.run(_show(access, model, train_on, shown, as_json))
    except (ValueError, OSError, ImportError) as error:
        message = str(error)
        if isinstance(error, data.DataError) and error.unnamed:
            options = " ".join(f"--mapping {field}=COLUMN" for field in error.unnamed)
            message = f"{error.where}: name its columns, {options}"
        typer.secho(f"gradwire: {plain(message)}", fg="red", err=True)
        raise typer.Exit(2) from None


async def _show(access: Access, model: str, train_on: str, rows: Sequence[Any], as_json: bool) -> None:
    from gradwire.recipes.tokens import RowEncoder

    out = Console(soft_wrap=True, highlight=False)
    async with gradwire.connect(access.address, **access.options()) as service:
        info = await model_of(service, model)
        tokens = RowEncoder(service, info, info.context_length)
        for each in rows:
            found = await tokens.fitting([each], lambda some: learned(tokens, some, train_on))
            if not as_json:
                await show(out, service, info.name, each.place, found)
                continue
            for row in found:
                said: dict[str, Any] = {"row": row.name} if row.name else {}
                said |= {"input_ids": list(map(int, row.ids)), "loss_mask": list(map(int, row.mask))}
                print(json.dumps(said | {"texts": await texts(service, info.name, row)}))
