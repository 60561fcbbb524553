"""A dry run of a recipe: one step on the server, in a process of its own, whose run is deleted again."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradwire
from gradwire.jobs import FILE_SETTINGS
from gradwire_http.child_processes import start_process

from gradwire_console.workspace import Server

PATIENCE_S = 300.0


async def dry_run(server: Server, service: gradwire.ServiceClient, recipe: str, values: Mapping[str, Any]) -> str:
    """Say what a training takes: rows, tokens, steps, memory and time, by the time of one step.

    Args:
        values: The settings, with files of the server as their data.

    Raises:
        ValueError: The recipe says why it cannot be run, or it takes longer than five minutes.
        GradwireError: The data cannot be fetched.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-dry-run-") as name:
        folder, settings = Path(name), dict(values)
        for key in FILE_SETTINGS:
            if str(settings.get(key) or "").startswith("file-"):
                file = await service.files.get(settings[key])
                path = folder / f"{key}-{Path(file.filename).name}"
                settings[key] = str(await service.files.download(file.file_id, path))
        config = folder / "settings.yaml"  # JSON is YAML
        config.write_text(json.dumps(settings | {"address": server.url, "folder": str(folder / "out")}))
        process = await start_process(
            sys.executable, "-m", "gradwire.cli", "train", recipe, str(config), "--dry-run",
            env=os.environ | {"GRADWIRE_API_KEY": service.api_key} | server.trusted,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            said, failed = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        except TimeoutError:
            raise ValueError(f"the dry run took longer than {PATIENCE_S:.0f} s and was stopped") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode:
        reason = failed.decode(errors="replace").strip().splitlines() or [f"it ended with {process.returncode}"]
        raise ValueError(reason[-1].removeprefix("gradwire train: "))
    return said.decode(errors="replace").strip()
