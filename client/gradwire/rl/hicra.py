"""HICRA for trajectories of steps: credit assignment that weights a planner's rewards before the update.

A trajectory is a planner's step followed by the steps of the agents that it called. The token-level HICRA method, which
amplifies the advantages of planning tokens, is an option of the group losses (``planning_alpha``);
``gradwire.rl.strategic_grams`` finds the phrases that mark such tokens.
"""

from __future__ import annotations

import importlib
import math
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.loop.loggers import MetricLogger
from gradwire.rl.advantages import Floats, Numbers

Mask = npt.NDArray[np.bool_]

ALIASES = {
    "enabled": "enabled",
    "multiplier": "multiplier",
    "planner_weight": "multiplier",
    "normalize": "normalize",
    "normalization_eps": "normalization_eps",
    "eps": "normalization_eps",
    "epsilon": "normalization_eps",
}
ROUNDING = 1e-12  # a total below this share of the sum of magnitudes counts as 0
HELP = {
    "hicra_planner_reward_ratio": "Mean over trajectories of the first step's reward over the total, 0 where that is 0",
    "hicra_depth": "Mean number of steps of a trajectory",
    "hicra_success_total": "Trajectories whose rewards add up to more than 0",
}


class HICRACreditAssigner:
    """Turns the rewards of a batch of trajectories into credits: normalised, scaled, zero outside the mask.

    ``assigner(rewards, mask)`` and ``assigner.assign(rewards, mask)`` are equivalent. A disabled assigner returns zeros
    and records nothing: use the raw rewards then. An enabled one can return zeros as well (equal rewards, normalised):
    skip the update unless ``credits.any()``.

    Each call of an enabled assigner records three metrics of the raw rewards: ``hicra_planner_reward_ratio``,
    ``hicra_depth`` and ``hicra_success_total``. They are available as gauges and a counter of ``prometheus_client``'s
    default registry if that package is installed (``gradwire[prometheus]``), as :attr:`metrics`, and as lines of
    ``logger``.

    Args:
        enabled: False returns zeros and records nothing.
        multiplier: Weight of the credits; ``planner_weight`` in configuration files.
        normalize: Scale the batch's rewards to mean 0 and variance 1 over the entries of the mask, before weighting.
        normalization_eps: Added to the variance under the root; greater than 0.
        logger: Any logger of ``gradwire.loop.loggers``; receives the metrics at iterations 0, 1, 2, ..., one per call.
            A loop that logs its own metrics adds :attr:`metrics` to them instead, under its own iteration numbers.

    Raises:
        TypeError, ValueError: A setting has the wrong type or is out of range; names the setting.
    """

    def __init__(
        self,
        enabled: bool = True,
        multiplier: float = 1.0,
        normalize: bool = True,
        normalization_eps: float = 1e-8,
        *,
        logger: MetricLogger | None = None,
    ) -> None:
        self.enabled = _switch("enabled", enabled)
        self.multiplier = _number("multiplier", multiplier)
        self.normalize = _switch("normalize", normalize)
        self.normalization_eps = _number("normalization_eps", normalization_eps)
        if self.normalization_eps <= 0:
            raise ValueError(f"normalization_eps must be greater than 0, got {normalization_eps}")
        self._logger = logger
        self._calls = 0
        self._metrics: dict[str, float] = {}

    def __repr__(self) -> str:
        settings = ("enabled", "multiplier", "normalize", "normalization_eps")
        return f"HICRACreditAssigner({', '.join(f'{name}={getattr(self, name)!r}' for name in settings)})"

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last call; empty before the first. ``hicra_success_total`` counts since the assigner
        was created."""
        return dict(self._metrics)

    def __call__(self, rewards: Any, mask: Any = None) -> Any:
        """Compute the credits of a batch.

        Args:
            rewards: ``[episodes, steps]``, padded; entries outside the mask are ignored. An array, nested lists, or a
                torch tensor.
            mask: ``[episodes, steps]``, true (or 1) where an episode has a step; by default everywhere.

        Returns:
            ``[episodes, steps]``, 0 outside the mask: float64, or for a tensor a tensor of its dtype on its device,
            without a gradient.

        Raises:
            ValueError: The shapes differ, or a reward inside the mask is not finite; names its position.
        """
        credits = self._credits(*_read(_as_array(rewards), None if mask is None else _as_array(mask)))
        torch = _torch_of(rewards)
        if torch is None:
            return credits
        like = rewards if rewards.is_floating_point() else torch.empty(0, device=rewards.device)
        return torch.from_numpy(credits).to(dtype=like.dtype, device=like.device)

    assign = __call__

    def _credits(self, inside: Mask, steps: Floats) -> Floats:
        if not self.enabled:
            return np.zeros_like(steps)
        self._record(inside, steps)
        credits = self._normalized(inside, steps) if self.normalize else steps
        return np.where(inside, self.multiplier * credits, 0.0)

    def _normalized(self, inside: Mask, steps: Floats) -> Floats:
        entries = steps[inside]
        if not len(entries) or entries.min() == entries.max():
            return np.zeros_like(steps)  # exact: rounding must not create credits from equal rewards
        centred: Floats = (steps - entries.mean()) / math.sqrt(entries.var() + self.normalization_eps)
        return centred

    def _record(self, inside: Mask, steps: Floats) -> None:
        if not len(steps):
            return
        totals = steps.sum(axis=1)
        first = np.take_along_axis(steps, inside.argmax(axis=1)[:, None], axis=1)[:, 0] if steps.size else totals
        totals = np.where(np.abs(totals) > ROUNDING * np.abs(steps).sum(axis=1), totals, 0.0)
        ratios = np.divide(first, totals, out=np.zeros_like(totals), where=totals != 0)
        successes = float((totals > 0).sum())
        self._metrics = {
            "hicra_planner_reward_ratio": float(ratios.mean()),
            "hicra_depth": float(inside.sum(axis=1).mean()),
            "hicra_success_total": self._metrics.get("hicra_success_total", 0.0) + successes,
        }
        collectors = _prometheus_collectors()
        if collectors:
            for name in ("hicra_planner_reward_ratio", "hicra_depth"):
                collectors[name].set(self._metrics[name])
            collectors["hicra_success_total"].inc(successes)
        if self._logger is not None:
            self._logger.log(self._calls, self._metrics)
        self._calls += 1


def _torch_of(values: Any) -> Any:
    """The module torch if ``values`` is one of its tensors; the client itself does not import it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(values, torch.Tensor) else None


def _as_array(values: Any) -> Any:
    return values if _torch_of(values) is None else values.detach().cpu().numpy()


def _read(rewards: Numbers, mask: npt.ArrayLike | None) -> tuple[Mask, Floats]:
    """Validate the mask, and the rewards with zeros outside it."""
    try:
        numbers = np.asarray(rewards, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rewards must be numbers [episodes, steps], padded to one length: {error}") from None
    if numbers.ndim != 2:
        raise ValueError(f"rewards must have the shape [episodes, steps], got {list(numbers.shape)}")
    chosen = np.ones(numbers.shape, bool) if mask is None else np.asarray(mask)
    if chosen.shape != numbers.shape:
        raise ValueError(f"mask has the shape {list(chosen.shape)} but rewards have {list(numbers.shape)}")
    if chosen.dtype != bool and not np.isin(chosen, (0, 1)).all():
        raise ValueError("mask must be true or false (1 or 0) for each step")
    inside = chosen.astype(bool)
    wrong = np.argwhere(inside & ~np.isfinite(numbers))
    if len(wrong):
        episode, step = wrong[0].tolist()
        raise ValueError(f"rewards, episode {episode}, step {step}: {numbers[episode, step]} is not a finite number")
    return inside, np.where(inside, numbers, 0.0)


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {value!r}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


_COLLECTORS: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _prometheus_collectors() -> dict[str, Any]:
    """Create the collectors once in the default registry, by name; empty if prometheus_client is not installed."""
    try:
        client = importlib.import_module("prometheus_client")
    except ModuleNotFoundError:
        return {}
    if client.REGISTRY not in _COLLECTORS:
        _COLLECTORS[client.REGISTRY] = {
            name: (client.Counter if name.endswith("_total") else client.Gauge)(name, help_text)
            for name, help_text in HELP.items()
        }
    return _COLLECTORS[client.REGISTRY]


def build_hicra_from_dict(
    config: Mapping[str, Any] | None, *, logger: MetricLogger | None = None
) -> HICRACreditAssigner:
    """Build the assigner that a configuration describes.

    Args:
        config: The settings themselves, or a dictionary that has them under ``hicra``, at any depth; other
            keys beside such a block are ignored. ``planner_weight`` is an alias of ``multiplier``; ``eps`` and
            ``epsilon`` are aliases of ``normalization_eps``. Omitted settings, and None, have their defaults.
        logger: As for :class:`HICRACreditAssigner`.

    Raises:
        ValueError: An unknown setting, a value out of range, two aliases of one setting that disagree, or two
            blocks ``hicra``; the message names the place.
        TypeError: A value or block of the wrong type.
    """
    place, block = _find_block({} if config is None else config)
    settings: dict[str, Any] = {}
    written_as: dict[str, str] = {}
    for key, value in block.items():
        if key not in ALIASES:
            raise ValueError(f"{place}{key}: no such setting; the settings are {', '.join(ALIASES)}")
        name = ALIASES[key]
        if value is None:
            continue
        if name in settings and settings[name] != value:
            raise ValueError(
                f"{place}{key} is {value!r} and {place}{written_as[name]} is {settings[name]!r}; "
                f"they are two names of one setting: keep one"
            )
        settings[name], written_as[name] = value, key
    try:
        return HICRACreditAssigner(**settings, logger=logger)
    except (TypeError, ValueError) as error:
        name, _, rest = str(error).partition(" ")
        raise type(error)(f"{place}{written_as.get(name, name)} {rest}") from None


def _find_block(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Find the block of settings, and the prefix of its setting names in messages."""
    if not isinstance(config, Mapping):
        raise TypeError(f"HICRA's settings must be a dictionary, got {config!r}")
    blocks = list(_blocks(config, ()))
    if len(blocks) > 1:
        raise ValueError(f"there are two blocks of HICRA's settings: {', '.join('.'.join(path) for path, _ in blocks)}")
    if not blocks:
        return "", config
    path, block = blocks[0]
    if block is not None and not isinstance(block, Mapping):
        raise TypeError(f"{'.'.join(path)} must be a dictionary of settings, got {block!r}")
    return ".".join(path) + ".", block or {}


def _blocks(config: Mapping[str, Any], path: Sequence[str]) -> Iterator[tuple[Sequence[str], Any]]:
    for key, value in config.items():
        if key == "hicra":
            yield (*path, key), value
        elif isinstance(value, Mapping):
            yield from _blocks(value, (*path, str(key)))
