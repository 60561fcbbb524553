"""``gradwire export``, ``push`` and ``chat``: what to do with a training once it has ended."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import gradwire
from gradwire.cli.text import plain, warnings_to_stderr

if TYPE_CHECKING:
    from gradwire.recipes.folder import Trained

What = Annotated[
    str, typer.Argument(help="A training's folder, FOLDER@CHECKPOINT, or a checkpoint RUN_ID/NAME of a server.")
]
Address = Annotated[str, typer.Option(help="HOST:PORT of the server; by default the training's.")]
Merged = Annotated[bool, typer.Option("--merged", help="Merge the adapter into its base: a whole model.")]


def export(
    what: What,
    to: Annotated[Path, typer.Argument(help="The folder to write; created if missing.")],
    merged: Merged = False,
    gguf: Annotated[str, typer.Option(metavar="q4_k_m|q8_0|f16", help="Write a GGUF file for llama.cpp instead.")] = "",
    address: Address = "",
) -> None:
    """Write what was trained to a folder: the adapter for peft, a whole model for transformers, or a GGUF file."""

    async def work() -> None:
        from gradwire.gguf_file import check_form, write_gguf

        if gguf:
            check_form(gguf)
        async with _run_at(what, address) as (run, source):
            if gguf:
                to.mkdir(parents=True, exist_ok=True)
                file = to / f"model-{gguf}.gguf"
                with tempfile.TemporaryDirectory(dir=to) as whole:
                    await run.export(Path(whole) / "merged", "merged")
                    name = f"{(await run.info()).base_model} {source}"
                    await asyncio.to_thread(write_gguf, Path(whole) / "merged", file, gguf, name)
                print(f"{source} is in {file}")
                return
            path = await run.export(to, "merged" if merged else "auto")
            print(f"{source} is in {path}")

    _finish(work())


def push(
    what: What,
    repo: Annotated[str, typer.Argument(help="NAME or ORGANISATION/NAME on the Hugging Face hub; created if missing.")],
    merged: Merged = False,
    private: Annotated[bool, typer.Option("--private", help="Create the repository as a private one.")] = False,
    address: Address = "",
) -> None:
    """Upload what was trained to the Hugging Face hub; log in first, by `hf auth login`."""

    async def work() -> None:
        async with _run_at(what, address) as (run, source):
            address_of_commit = await run.push_to_hub(repo, "merged" if merged else "auto", private=private or None)
            print(f"{source}: {address_of_commit}")

    _finish(work())


def chat(
    what: What,
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    base: Annotated[bool, typer.Option("--base", help="Show the answer of the untrained model beside it.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    address: Address = "",
) -> None:
    """Talk to what was trained, in its chat format; an empty line or Ctrl-D ends it, /new begins again."""

    async def work() -> None:
        from gradwire.recipes.folder import trained

        training = trained(what)
        async with _opened(training, address) as service:
            source, run = training.checkpoint or training.run_id, service.get_training_client(training.run_id)
            saved = [each.path for each in await run.list_checkpoints()]
            if training.checkpoint and training.checkpoint not in saved:
                raise ValueError(f"there is no checkpoint {training.checkpoint!r}; there are {', '.join(saved)}")
            model = training.model or (await run.info()).base_model
            names = [each.name for each in await service.list_models()]
            model = model if model in names else names[0]
            talk = _Talk(service, model, system, max_tokens, temperature)
            print(f"{source} of {model}; an empty line ends it, /new begins again", flush=True)
            while text := (await asyncio.to_thread(_question)).strip():
                if text == "/new":
                    talk.messages = talk.messages[: bool(system)]
                    continue
                if base:
                    print("base> ", end="")
                    await talk.answer(text, model)
                    print("trained> ", end="")
                talk.messages += await talk.answer(text, source)

    _finish(work())


class _Talk:
    """One conversation with models that share a template."""

    def __init__(self, service: Any, model: str, system: str, max_tokens: int, temperature: float) -> None:
        self._service, self._model, self._most, self._temperature = service, model, max_tokens, temperature
        self.messages: list[Any] = [{"role": "system", "content": system}] if system else []

    async def answer(self, text: str, source: str) -> list[Any]:
        """Print an answer while it is written; return question and answer as messages."""
        from gradwire.rl.prompts import plain_chat

        asked = [*self.messages, {"role": "user", "content": text}]
        if (await self._service.tokenizer_info(self._model)).chat_template:
            row = await self._service.render(asked, None, None, add_generation_prompt=True, model=self._model)
            ids = row["input_ids"].tolist()
        else:
            (ids,) = await self._service.encode(self._model, [plain_chat(asked)])
        written = ""
        client = self._service.sampling_client(source)
        async for token in client.stream(ids, max_tokens=self._most, temperature=self._temperature):
            written += token.text
            print("\n".join(map(plain, token.text.split("\n"))), end="", flush=True)
        print(flush=True)
        return [asked[-1], {"role": "assistant", "content": written}]


def _question() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return ""


@asynccontextmanager
async def _opened(training: Trained, address: str) -> AsyncIterator[gradwire.ServiceClient]:
    """Connect to the server that holds what was trained, or start the training's own again.

    Args:
        address: ``HOST:PORT``; "" for that of the training.

    Raises:
        SettingsError: Nothing says where the server is.
    """
    from gradwire.recipes.settings import SettingsError

    address = address or training.address
    if not address and not training.server:
        raise SettingsError(f"say where the server of {training.checkpoint or training.run_id} is: --address HOST:PORT")
    own = {} if address else {"models": [training.model], "state_dir": Path(training.server)}
    async with gradwire.connect(address or None, **own) as service:  # type: ignore[arg-type]
        yield service


@asynccontextmanager
async def _run_at(what: str, address: str) -> AsyncIterator[tuple[Any, str]]:
    """A run with the weights that were named, a fork that is deleted then, and their path."""
    from gradwire.recipes.folder import trained

    training = trained(what)
    async with _opened(training, address) as service:
        if not training.checkpoint:
            yield service.get_training_client(training.run_id), training.run_id
            return
        run = await service.fork_run(training.checkpoint, name="export")
        try:
            yield run, training.checkpoint
        finally:
            await service.delete_run(run.run_id)


def _finish(work: Coroutine[Any, Any, None]) -> None:
    try:
        with warnings_to_stderr("gradwire"):
            asyncio.run(work)
    except (gradwire.GradwireError, ValueError, OSError, ImportError) as error:
        typer.secho(f"gradwire: {plain(str(error))}", fg="red", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
