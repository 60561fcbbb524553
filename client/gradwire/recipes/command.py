"""``gradwire train NAME CONFIG.yaml``: run a recipe, print its example, estimate it."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.cli.text import warnings_to_stderr
from gradwire.errors import GradwireError
from gradwire.recipes.folder import next_steps
from gradwire.recipes.launch import ALONE, Launch
from gradwire.recipes.settings import Settings, SettingsError
from gradwire.recipes.settings_file import built, example, load

RECIPES = {
    "sft": "SFT", "dpo": "DPO", "kto": "KTO", "orpo": "ORPO", "simpo": "SimPO", "reward": "Reward",
    "process_reward": "ProcessReward", "ppo": "PPO", "grpo": "GRPO", "rloo": "RLOO", "gigpo": "GiGPO",
    "distill": "Distill",
}  # fmt: skip
"""Name -> the class of its settings, in the module of the name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of ``gradwire train``; a mistake in the arguments ends with one sentence and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="gradwire train",
        description="Train by a recipe. Run again on the same folder, it goes on where it stood.",
        epilog="gradwire train --example sft > sft.yaml writes a configuration with a comment on every setting.",
    )
    parser.add_argument("recipe", nargs="?", choices=RECIPES, help="what to train")
    parser.add_argument("config", nargs="?", help="a YAML file; without one, what --set says")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override; may be repeated")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="say tokens, steps, memory and time after two steps of a run that is deleted",
    )
    parser.add_argument("--example", choices=RECIPES, help="print a configuration and exit")
    given = parser.parse_args(arguments)
    with warnings_to_stderr("gradwire train"):
        _carry_out(parser, given)


def _carry_out(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    try:
        if arguments.example:
            sys.stdout.write(example(_recipe(arguments.example)[0]))
            return
        if not arguments.recipe or not (arguments.config or arguments.set):
            parser.error("name a recipe and its configuration: gradwire train sft sft.yaml, or --set NAME=VALUE")
        kind, module = _recipe(arguments.recipe)
        settings = load(kind, arguments.config, arguments.set)
        if arguments.dry_run:  # an end by another program deletes its run as well
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        estimate = asyncio.run(module.train(settings, Launch(dry_run=arguments.dry_run)))
    except (SettingsError, GradwireError, ValueError, OSError, ImportError) as error:
        print(f"gradwire train: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(
            "gradwire train: interrupted; the same command goes on from the last checkpoint, if there is one",
            file=sys.stderr,
        )
        raise SystemExit(130) from None
    print(
        estimate if arguments.dry_run else "\n".join([f"{settings.folder}/report.html", *next_steps(settings.folder)])
    )


def settings_of(recipe: str, values: Mapping[str, Any]) -> Settings:
    """Build a recipe's settings.

    Raises:
        SettingsError: There is no such recipe, or a setting is unknown or out of range.
    """
    return built(settings_kind(recipe), values)


def settings_kind(recipe: str) -> type[Settings]:
    """Return the class of a recipe's settings.

    Raises:
        SettingsError: There is no such recipe.
    """
    if recipe not in RECIPES:
        raise SettingsError(f"there is no recipe {recipe!r}; there are {', '.join(RECIPES)}")
    return _recipe(recipe)[0]


def is_on_rewards(recipe: str) -> bool:
    """Whether a recipe trains on rewards, in iterations that are counted from 0."""
    from gradwire.recipes.rl import RLSettings

    return issubclass(settings_kind(recipe), RLSettings)


async def train(recipe: str, settings: Settings, launch: Launch = ALONE) -> None:
    """Run a recipe."""
    await _recipe(recipe)[1].train(settings, launch)


def _recipe(name: str) -> tuple[type[Settings], Any]:
    module = importlib.import_module(f"gradwire.recipes.{name}")
    return getattr(module, RECIPES[name]), module
