"""Previews of a training: its first rows as learned, and a dry run, each by a command in its own process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradwire
from gradwire.jobs import FILE_SETTINGS
from gradwire.recipes.command import is_on_rewards
from gradwire_http.child_processes import start_process

from gradwire_console.workspace import Server

PATIENCE_S = 300.0
PREVIEWED = 3
"""Rows that a preview shows."""
KINDS = {"dpo": "preferences", "orpo": "preferences", "simpo": "preferences", "reward": "preferences",
         "kto": "ratings", "process_reward": "steps"}  # fmt: skip
"""Recipe -> what it takes rows for, if neither for conversations nor, as those on rewards, for prompts."""
SHOWN_CHARS = 2000
"""Characters of a sequence that a preview shows."""


@dataclass(frozen=True)
class FirstRow:
    """A sequence of a data set's first rows.

    Attributes:
        name: Its role in the row: "chosen", "rejected", "good", "bad", "prompt", or "" for none.
        num_learned, num_tokens: Tokens that are learned, and all.
        texts: Its text in stretches, each with whether it is learned.
    """

    name: str
    num_learned: int
    num_tokens: int
    texts: list[tuple[str, bool]]


async def first_rows(
    server: Server, service: gradwire.ServiceClient, recipe: str, values: Mapping[str, Any]
) -> tuple[list[FirstRow], str]:
    """The first rows of a training's data as the model gets them, and what the command said of the data.

    Args:
        values: The settings, with a file of the server as their data.

    Raises:
        ValueError: The rows cannot be learned; says why.
        GradwireError: The data cannot be fetched.
    """
    async with _fetched(service, values, ("data",)) as (folder, settings):
        words = ["render", settings["data"], "--model", settings["model"], "--rows", str(PREVIEWED), "--json"]
        words += ["--as", "prompts" if is_on_rewards(recipe) else KINDS.get(recipe, "conversations")]
        words += ["--train-on", settings["train_on"]] if "train_on" in settings else []
        words += [f"--mapping={field}={column}" for field, column in settings.get("mapping", {}).items()]
        said, told = await _command(server, service, folder, *words, "--address", server.url)
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return [
        FirstRow(row.get("row", ""), sum(row["loss_mask"]), len(row["input_ids"]), row["texts"]) for row in rows
    ], told.strip().removeprefix("gradwire render: ")


async def dry_run(server: Server, service: gradwire.ServiceClient, recipe: str, values: Mapping[str, Any]) -> str:
    """Say what a training takes: rows, tokens, steps, memory and time, by the time of one step.

    Args:
        values: The settings, with files of the server as their data.

    Raises:
        ValueError: The recipe says why it cannot be run, or it takes longer than five minutes.
        GradwireError: The data cannot be fetched.
    """
    async with _fetched(service, values, FILE_SETTINGS) as (folder, settings):
        config = folder / "settings.yaml"  # JSON is YAML
        config.write_text(json.dumps(settings | {"address": server.url, "folder": str(folder / "out")}))
        said, _ = await _command(server, service, folder, "train", recipe, str(config), "--dry-run")
    return said.strip()


@asynccontextmanager
async def _fetched(
    service: gradwire.ServiceClient, values: Mapping[str, Any], names: tuple[str, ...]
) -> AsyncIterator[tuple[Path, dict[str, Any]]]:
    """A folder with the files that some settings name, and the settings with their paths."""
    with tempfile.TemporaryDirectory(prefix="gradwire-console-") as name:
        folder, settings = Path(name), dict(values)
        for key in names:
            if str(settings.get(key) or "").startswith("file-"):
                file = await service.files.get(settings[key])
                path = folder / f"{key}-{Path(file.filename).name}"
                settings[key] = str(await service.files.download(file.file_id, path))
        yield folder, settings


async def _command(server: Server, service: gradwire.ServiceClient, folder: Path, *words: str) -> tuple[str, str]:
    """Run a command of gradwire on files in a folder; what it printed and what it said beside, without their paths.

    Raises:
        ValueError: It failed, or took longer than five minutes.
    """
    process = await start_process(
        sys.executable, "-m", "gradwire.cli", *words,
        env=os.environ | {"GRADWIRE_API_KEY": service.api_key} | server.trusted,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        said, told = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    except TimeoutError:
        raise ValueError(f"gradwire {words[0]} took longer than {PATIENCE_S:.0f} s and was stopped") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        reason = told.decode(errors="replace").strip().splitlines() or [f"it ended with {process.returncode}"]
        sentence = reason[-1].removeprefix("gradwire train: ").removeprefix("gradwire: ")
        raise ValueError(_without(folder, sentence).replace("--mapping ", "under Advanced, mapping: "))
    return said.decode(errors="replace"), _without(folder, told.decode(errors="replace"))


def _without(folder: Path, sentence: str) -> str:
    """A sentence about files with the names that people gave them."""
    return re.sub(rf"{re.escape(str(folder))}/(?:{'|'.join(FILE_SETTINGS)})-", "", sentence)
