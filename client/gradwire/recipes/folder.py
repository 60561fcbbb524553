"""The folder of a training: its state, and how the commands that follow the training find what was trained."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradwire.recipes.launch import Launch
from gradwire.recipes.settings import ServiceSettings, Settings, SettingsError
from gradwire.whole_files import read_state

FREE = (
    "address", "folder", "loggers", "wandb", "eval_every", "eval_first", "save_every", "keep", "best_by", "patience",
    "epochs", "max_steps", "eval_problems", "on_error", "on_failure",
    "tags", "record_batches", "record_every",
)  # fmt: skip
"""Settings that a training may change when it goes on."""
STATE = "state.json"
"""Where a training writes its run, its newest checkpoint and what a resumed training needs."""
HERE = "{folder}/"
"""The training's folder, where a state names a path in it: the folder may be moved."""
SCORING = ("Reward", "ProcessReward")
"""Recipes whose models score texts and write none."""


@dataclass(frozen=True)
class Trained:
    """A training that a folder or a checkpoint path names.

    Attributes:
        folder: The folder; None for a checkpoint that was named by its path.
        run_id: The run.
        checkpoint: ``RUN_ID/NAME``.
        model: The base model.
        address: Address of the server; empty for one of the training's own.
        server: State folder of the training's own server; empty if it used another.
        recipe: The class of the recipe's settings, as ``SFT``; empty if it is not known.
    """

    folder: Path | None
    run_id: str
    checkpoint: str
    model: str
    address: str
    server: str
    recipe: str = ""


def trained(place: str) -> Trained:
    """Find what ``FOLDER``, ``FOLDER@CHECKPOINT`` or ``RUN_ID/NAME`` names.

    Args:
        place: A training's folder; behind ``@`` the name of a checkpoint, such as ``best`` or ``step-100``, by default
            the newest.

    Raises:
        SettingsError: There is no such folder, or no training in it that has saved a checkpoint.
    """
    name, at, wanted = (place, "", "") if Path(place).is_dir() else place.rpartition("@")
    folder = Path(name if at else place)
    if not at and not folder.exists() and place.startswith("run-"):
        run_id, _, checkpoint = place.partition("/")
        return Trained(None, run_id, f"{run_id}/{checkpoint}" if checkpoint else "", "", "", "")
    if not folder.is_dir():
        raise SettingsError(
            f"there is no folder {folder}; name a training's folder, FOLDER@CHECKPOINT, or a checkpoint RUN_ID/NAME"
        )
    state = _read(folder / STATE) if (folder / STATE).is_file() else {}
    if "run_id" not in state:
        raise SettingsError(f"{folder} holds no training that has begun: it has no {STATE}")
    run_id = str(state["run_id"])
    checkpoint = f"{run_id}/{wanted}" if wanted else str(state.get("checkpoint") or "")
    if not checkpoint:
        raise SettingsError(f"the training in {folder} has saved no checkpoint yet")
    settings = state.get("settings", {})
    return Trained(
        folder, run_id, checkpoint, str(settings.get("model", "")), str(state.get("address", "")),
        str(state.get("server", "")), str(settings.get("recipe", "")),
    )  # fmt: skip


def next_steps(folder: Path | str) -> list[str]:
    """Lines that say what was trained and which commands go on from there; none before the first checkpoint."""
    try:
        training = trained(str(folder))
    except SettingsError:
        return []
    commands = [f"chat {folder}", f"export {folder} OUT --merged", f"push {folder} REPO"]
    commands.append(f"serve {folder}" if training.server else f"status --address {training.address}")
    if training.recipe in SCORING:  # it writes no text
        commands = commands[1:]
    steps = [f"trained: {training.checkpoint}", *(f"  gradwire {each}" for each in commands)]
    if training.recipe == "Reward":
        steps.append(f"  gradwire train ppo --set reward={folder} --set data=problems.jsonl")
    return steps


def server_folder(settings: ServiceSettings, launch: Launch) -> Path:
    """State folder of a server of one's own: the shared one, or that of the training it starts from, or a new one."""
    if launch.server:
        return launch.server
    start = trained(settings.starts_from) if settings.starts_from else None
    return Path(start.server) if start is not None and start.server else Path(settings.folder).absolute() / "server"


def open_folder(file: Path, settings: Settings) -> dict[str, Any]:
    """Make a training's folder, and read its state; {} if there is none.

    Raises:
        SettingsError: The folder cannot be written to, or belongs to a training with other settings.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise SettingsError(f"the folder {file.parent} cannot be used: {error.strerror}") from None
    if not file.exists():
        return {}
    state = _read(file)
    now = _identity(settings)
    before = _identity(type(settings)()) | state.get("settings", {})  # settings that are newer had their defaults
    changed = [
        f"{name} was {before.get(name)!r:.40}"
        for name, value in now.items()
        if before.get(name) != value and not _was_here(before.get(name), value, file.parent.name)
    ]
    if changed:
        others = before.get("recipe") if before.get("recipe") != now["recipe"] else ""
        which = (
            f"a training by another recipe, {others}"
            if others
            else f"a training with other settings: {', '.join(changed)}"
        )
        raise SettingsError(f"{file.parent} holds {which}; give another folder, or remove it")
    return state


def _was_here(before: Any, now: Any, folder: str) -> bool:
    """Whether a path that an earlier version wrote whole is one in the training's folder, wherever that was then."""
    return str(now).startswith(HERE) and str(before).endswith(str(now).replace(HERE, f"/{folder}/", 1))


def facts_of(settings: Settings, launch: Launch) -> dict[str, Any]:
    """Return what a training's state says of its server and its settings."""
    server = "" if settings.address else str(server_folder(settings, launch))
    return {"address": settings.address, "server": server, "settings": _identity(settings)}


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_state(file)
    except OSError as error:
        raise SettingsError(f"the folder {file.parent} cannot be used: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{error}, and no state of a training: remove the folder, or give another") from None


def _identity(settings: Settings) -> dict[str, Any]:
    """Return the settings that a resumed training may not change; paths in its folder are as seen from there."""
    inside = f"{settings.folder}/"
    kept = {name: value for name, value in asdict(settings).items() if name not in FREE}
    seen = {name: value.replace(inside, HERE, 1) for name, value in kept.items() if str(value).startswith(inside)}
    return {"recipe": type(settings).__name__} | kept | seen
