"""``gradwire router config | train | evaluate | explain``, or ``python -m gradwire.router …``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DEFAULT_CONFIG = Path("configs/policy/rllm.yaml")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line of ``gradwire router``; exits with status 1 when a command fails."""
    parser = argparse.ArgumentParser(
        prog="gradwire router", description="Train a policy that routes requests to collaboration modes."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_config(commands)
    _add_train(commands)
    _add_evaluate(commands)
    _add_explain(commands)
    _run(parser, arguments)


def train_main(arguments: Sequence[str] | None = None) -> None:
    """Run ``gradwire router train`` as a separate command."""
    parser = argparse.ArgumentParser(description="Train a policy that routes requests to collaboration modes.")
    _train_arguments(parser)
    _run(parser, arguments)


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> None:
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"{parser.prog}: {error}") from None


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def _settings_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, metavar="FILE", help="default: %(default)s")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="trainer.learning_rate=1e-3; may be repeated"
    )


def _add_config(commands: Any) -> None:
    text = "Print the settings file, everything off."
    parser = _command(commands, "config", _config, text)
    parser.add_argument("--config", type=Path, metavar="FILE", help="check this file and print the resulting settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change a setting; may be repeated"
    )


def _config(options: argparse.Namespace) -> None:
    from gradwire.router.settings_file import load_settings, parse_settings, render

    settings = load_settings(options.config, options.set) if options.config else parse_settings("", options.set)
    sys.stdout.write(render(settings))


def _add_train(commands: Any) -> None:
    _train_arguments(_command(commands, "train", _train, "Train by PPO on synthetic rollouts."))


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_train)
    _settings_arguments(parser)
    parser.add_argument("--updates", type=int, metavar="N", help="overrides trainer.updates")
    parser.add_argument("--seed", type=int, metavar="N", help="overrides trainer.seed")
    parser.add_argument("--episode-length", type=int, metavar="N", help="overrides rollout.episode_length")
    parser.add_argument("--resume", action="store_true", help="continue the interrupted run in experiment.output_dir")
    parser.add_argument("--overwrite", action="store_true", help="start anew and replace an interrupted run")


def _train(options: argparse.Namespace) -> None:
    from rich.console import Console

    from gradwire.loop.progress import Progress
    from gradwire.router.adapter import RouterPPOAdapter, TrainingDisabledError
    from gradwire.router.console import show_curves, show_report, update_line
    from gradwire.router.settings_file import load_settings
    from gradwire.router.trainer import Figures

    overrides = list(options.set)
    for name, value in (
        ("trainer.updates", options.updates),
        ("trainer.seed", options.seed),
        ("rollout.episode_length", options.episode_length),
    ):
        if value is not None:
            overrides.append(f"{name}={value}")
    settings = load_settings(options.config, overrides)
    console = Console(highlight=False, soft_wrap=True)
    if settings.autopilot.enabled and options.updates is not None:
        settings = load_settings(options.config, [*overrides, f"autopilot.max_updates={options.updates}"])
    total = settings.autopilot.max_updates if settings.autopilot.enabled else settings.trainer.updates
    progress = Progress("router", total, show=not settings.switched_off())

    def told(figures: Figures) -> None:
        progress.say(update_line(figures))
        progress.update(int(figures["update"] or 0), {"reward": figures["mean_reward"] or 0.0})

    try:
        with progress:
            result = RouterPPOAdapter(settings).train(
                resume=options.resume, overwrite=options.overwrite, told=told, said=progress.say
            )
    except TrainingDisabledError as off:
        console.print(f"{off} in {options.config}", markup=False)
        return
    except KeyboardInterrupt as interrupted:
        kept = (
            "continue with --resume" if settings.experiment.enabled else "nothing is kept: experiment.enabled is false"
        )
        raise SystemExit(f"interrupted {interrupted}: {kept}") from None
    show_curves(console, result.history)
    if result.report is not None:
        show_report(console, result.report)
    console.print(f"stopped: {result.stopped}", markup=False)
    if result.skipped_updates:
        console.print(f"skipped: {result.skipped_updates} updates whose credits were all zero")
    if result.output_dir is None:
        console.print("nothing was written: experiment.enabled is false")
    else:
        console.print(f"policy: {result.output_dir / 'policy_state.npz'}", markup=False)


def _add_evaluate(commands: Any) -> None:
    text = "Compare a policy with other routers on held-out requests."
    parser = _command(commands, "evaluate", _evaluate, text)
    _settings_arguments(parser)
    parser.add_argument(
        "--policy", type=Path, metavar="FILE", help="default: policy_state.npz in the settings' experiment.output_dir"
    )


def _evaluate(options: argparse.Namespace) -> None:
    from rich.console import Console

    from gradwire.router.console import show_report
    from gradwire.router.evaluation import HeldOut
    from gradwire.router.policy import LinearPolicy
    from gradwire.router.settings_file import load_settings
    from gradwire.router.world import World

    settings = load_settings(options.config, options.set)
    policy = LinearPolicy.load(options.policy or Path(settings.experiment.output_dir) / "policy_state.npz")
    world = World(settings.rollout.episode_length, settings.trainer.reward_weights.weights())
    held_out = HeldOut(world, settings.evaluation.seeds, settings.evaluation.episodes)
    show_report(Console(highlight=False, soft_wrap=True), held_out.report(policy))


def _add_explain(commands: Any) -> None:
    parser = _command(commands, "explain", _explain, "Show how each feature changes the odds of each mode.")
    parser.add_argument("policy", type=Path, metavar="FILE", help="a policy_state.npz")
    parser.add_argument("--top", type=int, metavar="N", help="only the N features with the strongest effect")


def _explain(options: argparse.Namespace) -> None:
    from rich.console import Console

    from gradwire.router.console import show_weights
    from gradwire.router.policy import LinearPolicy

    show_weights(Console(highlight=False, soft_wrap=True), LinearPolicy.load(options.policy), options.top)
