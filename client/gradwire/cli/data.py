"""``gradwire data``: check a data set before a training, and show what it is made of."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console

import gradwire
from gradwire.cli.text import plain, warnings_to_stderr

app = typer.Typer(help="Check a data set before a training, and show what it is made of.", no_args_is_help=True)

Kind = Literal["auto", "conversations", "preferences", "prompts", "ratings", "steps"]
File = Annotated[str, typer.Argument(help="A data file or folder, or a data set of the Hugging Face hub.")]
As = Annotated[Kind, typer.Option("--as", help="What the rows are; by default what their columns say.")]
Mapping = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD=COLUMN", help="Column of a field, where it is not recognised; may be repeated."),
]
Split = Annotated[str, typer.Option(help="Split of a data set of the hub.")]
Model = Annotated[
    str, typer.Option(help="Model whose chat template is tried as well: one of the server, or with no address a path.")
]
Address = Annotated[str, typer.Option(help="HOST:PORT of a running server; without one, a server is started.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest row of the training.")]
_Measured = tuple[list[tuple[int, int]], dict[str, str], dict[str, dict[str, None]]]
"""Tokens and trained tokens of each sequence; rows that are refused or too long; remarks on rows."""
CHUNK = 256
BARS = 12


@app.command()
def check(
    file: File,
    kind: As = "auto",
    mapping: Mapping = None,
    split: Split = "train",
    model: Model = "",
    address: Address = "",
    max_tokens: MaxTokens = 2048,
) -> None:
    """List every row that a training would refuse, with its line and the reason; end with 1 if there is one.

    With --model, the model's chat template is tried on every row, and rows above --max-tokens are listed, too.
    """
    rows = _loaded(file, kind, mapping, split)
    unfit = [error.where for error in rows.skipped]
    if model and len(rows):
        _, refused, remarks = _measured(rows, model, address, max_tokens)
        unfit += [f"{place}: {why}" for place, why in refused.items()]
        _print_remarks(remarks)
    for each in unfit:
        print(plain(each))
    print(f"{len(rows) + len(rows.skipped)} rows, {len(unfit)} of them unfit")
    raise typer.Exit(1 if unfit else 0)


@app.command()
def show(
    file: File,
    kind: As = "auto",
    mapping: Mapping = None,
    split: Split = "train",
    model: Model = "",
    address: Address = "",
    max_tokens: MaxTokens = 2048,
) -> None:
    """Show rows and duplicates; with --model, the first row as a loss sees it, lengths and the share trained on."""
    from gradwire.data.dataset import duplicates

    rows = _loaded(file, kind, mapping, split)
    if not len(rows):
        _fail(
            f"{file}: no row could be used; `gradwire data check` says of each why; the first: {rows.skipped[0].where}"
        )
    print(f"{len(rows)} {type(rows[0]).__name__.lower()}s, {len(rows.skipped)} unfit rows")
    same, prompts = duplicates(rows)
    print(f"{same} rows are repetitions of an earlier one; {prompts} rows share the prompt of an earlier one")
    turns = Counter(len(each.messages) for each in rows if hasattr(each, "messages"))
    if turns:
        print("messages a row: " + ", ".join(f"{count} x {number}" for number, count in sorted(turns.items())))
    if not model:
        for message in rows[0].prompt[:2]:
            print(f"first row, {message['role']}: {plain(str(message['content'])[:200])}")
        return
    sizes, refused, remarks = _measured(rows, model, address, max_tokens, first=True)
    _print_remarks(remarks)
    if refused:
        print(f"{len(refused)} rows are refused or too long: see `gradwire data check`")
    _print_lengths(sizes)


def _print_remarks(remarks: dict[str, dict[str, None]]) -> None:
    for remark, places in remarks.items():
        print(plain(f"{len(places)} rows, first {next(iter(places))}: {remark}"))


def _print_lengths(sizes: Sequence[tuple[int, int]]) -> None:
    lengths = sorted(length for length, _ in sizes)
    if not lengths:
        return
    total, trained = sum(lengths), sum(on for _, on in sizes)
    print(f"{total:,} tokens, {trained:,} of them ({trained / total:.0%}) trained on")
    marks = {share: lengths[min(len(lengths) - 1, int(share * len(lengths)))] for share in (0.5, 0.9, 0.99)}
    print(f"tokens a row: median {marks[0.5]}, 90% {marks[0.9]}, 99% {marks[0.99]}, longest {lengths[-1]}")
    width = max(1, -(-(lengths[-1] + 1) // BARS))
    counts = Counter(length // width for length in lengths)
    for place in range(max(counts) + 1):
        bar = "#" * -(-40 * counts[place] // max(counts.values()))
        print(f"{place * width:>7} - {(place + 1) * width - 1:<7} {counts[place]:>7} {bar}")


def _loaded(file: str, kind: Kind, mapping: Sequence[str] | None, split: str) -> Any:
    """Load the rows, unfit ones aside."""
    from gradwire import data

    try:
        named = dict(pair(each) for each in mapping or ())
        chosen = kind if kind != "auto" else data.kind_of(file, split=split, mapping=named)
        with warnings_to_stderr("gradwire data"):
            return data.LOADERS[chosen](file, mapping=named, split=split, on_error="skip")
    except (ValueError, OSError, ImportError) as error:
        message = str(error)
        if isinstance(error, data.DataError) and error.skipped:
            return data.Dataset[Any]([], error.skipped)
        if isinstance(error, data.DataError) and error.unnamed:
            message = f"{error.where}: name its columns, " + " ".join(
                f"--mapping {field}=COLUMN" for field in error.unnamed
            )
        _fail(message)


def _measured(rows: Any, model: str, address: str, max_tokens: int, *, first: bool = False) -> _Measured:
    """Measure rows with a model's template.

    Args:
        first: Whether the first row is printed as the loss sees it.
    """
    try:
        with warnings_to_stderr("gradwire data"):
            return asyncio.run(_measure(rows, model, address, max_tokens, first=first))
    except (gradwire.GradwireError, ValueError, OSError) as error:
        _fail(str(error))


async def _measure(rows: Any, model: str, address: str, max_tokens: int, *, first: bool) -> _Measured:
    from gradwire.cli.learned import Learned, learned, show
    from gradwire.recipes.tokens import RowEncoder

    own: dict[str, Any] = {} if address else {"models": [model]}
    async with gradwire.connect(address or None, **own) as service:
        info = await model_of(service, model if address else "")
        tokens = RowEncoder(service, info, max_tokens, overlong="skip", on_error="skip", tell=False)
        encoded: list[Learned] = []
        for start in range(0, len(rows), CHUNK):
            encoded += await tokens.fitting(rows[start : start + CHUNK], lambda part: learned(tokens, part))
        if first:
            whole = RowEncoder(service, info, info.context_length, on_error="skip", tell=False)
            found = await whole.fitting(rows[:1], lambda part: learned(whole, part))
            await show(Console(soft_wrap=True, highlight=False), service, info.name, rows[0].place, found)
        return [(len(ids), int(sum(mask))) for _, ids, mask in encoded], tokens.skipped, tokens.remarks


async def model_of(service: gradwire.ServiceClient, name: str) -> gradwire.ModelInfo:
    """Find a server's model; by an empty name its only one.

    Raises:
        UnknownModelError: There is none of that name.
        ValueError: No name is given, and there are several.
    """
    models = await service.list_models(name)
    if len(models) != 1:
        raise ValueError(f"give --model NAME; the server has {', '.join(each.name for each in models)}")
    return models[0]


def pair(argument: str) -> tuple[str, str]:
    """Split ``FIELD=COLUMN``.

    Raises:
        ValueError: There is no ``=``.
    """
    field, equals, column = argument.partition("=")
    if not equals:
        raise ValueError(f"--mapping {argument}: write FIELD=COLUMN, as prompt=question")
    return field, column


def _fail(message: str) -> NoReturn:
    typer.secho(f"gradwire: {plain(message)}", fg="red", err=True)
    raise typer.Exit(2)
