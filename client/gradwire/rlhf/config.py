"""Settings of the two stages: the reward model, then the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from gradwire.errors import InvalidArgumentError

MIXED_PRECISION = ("bf16", "fp16")


@dataclass(frozen=True)
class _Range:
    """Allowed range of a number: an integer of at least ``low``, or a real number in an interval."""

    low: float
    high: float = math.inf
    whole: bool = False
    above: bool = False
    below: bool = False

    @property
    def rule(self) -> str:
        if self.whole:
            return f"a whole number of at least {self.low:g}"
        lower = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        if self.high == math.inf:
            return lower
        return f"{lower} and {'below' if self.below else 'at most'} {self.high:g}"

    def holds(self, value: Any) -> bool:
        kinds: Any = int if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            return False
        number = float(value)
        reaches = number > self.low if self.above else number >= self.low
        return reaches and (number < self.high if self.below else number <= self.high)


COUNT = _Range(1, whole=True)
POSITIVE = _Range(0, above=True)
NOT_NEGATIVE = _Range(0)
SHARE = _Range(0, 1)
BELOW_ONE = _Range(0, 1, below=True)
LORA = {"lora_r": COUNT, "lora_alpha": POSITIVE, "lora_dropout": BELOW_ONE}


class _Checked:
    """Base class of the two settings classes."""

    base_model: str
    use_lora: bool
    lora_r: int
    lora_alpha: float
    lora_dropout: float

    def _check(self, ranges: Mapping[str, _Range]) -> None:
        if not isinstance(self.base_model, str) or not self.base_model:
            raise refused(
                f"base_model is {self.base_model!r}; it must be a model's name or folder", "base_model", "a name"
            )
        for name, allowed in (LORA | dict(ranges)).items():
            if not allowed.holds(value := getattr(self, name)):
                raise refused(f"{name} is {value!r}; it must be {allowed.rule}", name, allowed.rule)
        for name in LORA:
            default = type(self).__dataclass_fields__[name].default  # type: ignore[attr-defined]
            if not self.use_lora and getattr(self, name) != default:
                raise refused(
                    f"use_lora is False, so all weights are trained and {name}={getattr(self, name)} has no effect: "
                    f"set use_lora=True, or leave {name} out",
                    name,
                    "only with use_lora",
                )

    @property
    def lora(self) -> dict[str, Any] | None:
        """The ``lora`` argument of ``create_run``."""
        if not self.use_lora:
            return None
        return {"rank": self.lora_r, "alpha": float(self.lora_alpha), "dropout": float(self.lora_dropout)}


@dataclass(frozen=True)
class TrainingConfig(_Checked):
    """Settings of the policy's training.

    Attributes:
        base_model: The model to train: a model's name, or a folder, e.g. the policy of the previous version.
        use_lora: Train an adapter; else all weights.
        lora_r, lora_alpha, lora_dropout: The adapter's rank, alpha (scale times rank) and dropout.
        learning_rate: Learning rate of AdamW.
        batch_size: Prompts per step; each is answered once.
        mini_batch_size: Answers per gradient computation.
        gradient_accumulation_steps: Mini-batches per optimizer step. They may span passes, and end with the step.
        ppo_epochs: Passes over the answers of a step.
        max_steps: Number of steps; a step samples, scores and trains.
        init_kl_coef: Penalty per nat of KL to the initial policy, in standard deviations of the
            ratings; subtracted from each token's reward.
        target_kl: Target KL of an answer (nats, summed over its tokens) for the adaptive coefficient; None keeps the
            coefficient fixed.
        gamma, lam: Discount, and lambda of generalised advantage estimation.
        cliprange: Clip range of the probability ratio and of the values.
        vf_coef: Weight of the value loss.
        max_new_tokens, temperature, top_k, top_p: Sampling parameters.
        device: Device of the server that the trainer starts, e.g. ``"cuda"``; None: the best available.
        mixed_precision: ``"bf16"`` or ``"fp16"``: 16-bit arithmetic over float32 weights, on the server that the
            trainer starts. Both use bfloat16, which needs no loss scaling.
        seed: Seed of the split, the order, the adapter and the sampling.
    """

    base_model: str = "gpt2"
    use_lora: bool = True
    lora_r: int = 8
    lora_alpha: float = 32
    lora_dropout: float = 0.1
    learning_rate: float = 1e-5
    batch_size: int = 8
    mini_batch_size: int = 4
    gradient_accumulation_steps: int = 1
    ppo_epochs: int = 4
    max_steps: int = 1000
    init_kl_coef: float = 0.2
    target_kl: float | None = 6.0
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    vf_coef: float = 0.1
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.95
    device: str | None = None
    mixed_precision: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check(
            {
                "learning_rate": POSITIVE,
                "batch_size": COUNT,
                "mini_batch_size": COUNT,
                "gradient_accumulation_steps": COUNT,
                "ppo_epochs": COUNT,
                "max_steps": COUNT,
                "init_kl_coef": NOT_NEGATIVE,
                "gamma": SHARE,
                "lam": SHARE,
                "cliprange": POSITIVE,
                "vf_coef": NOT_NEGATIVE,
                "max_new_tokens": COUNT,
                "temperature": POSITIVE,
                "top_k": _Range(0, whole=True),
                "top_p": _Range(0, 1, above=True),
                "seed": _Range(0, whole=True),
            }
        )
        if self.target_kl is not None and not POSITIVE.holds(self.target_kl):
            raise refused(f"target_kl is {self.target_kl!r}; it must be above 0 or None", "target_kl", "above 0")
        self._check_together()

    def _check_together(self) -> None:
        if self.mini_batch_size > self.batch_size:
            raise refused(
                f"mini_batch_size {self.mini_batch_size} exceeds batch_size {self.batch_size}: a mini-batch is a part "
                "of the batch",
                "mini_batch_size",
                "mini_batch_size <= batch_size",
            )
        if self.batch_size % self.mini_batch_size:
            raise refused(
                f"batch_size {self.batch_size} is not a multiple of mini_batch_size {self.mini_batch_size}",
                "batch_size",
                "a multiple of mini_batch_size",
            )
        gradients = self.batch_size // self.mini_batch_size * self.ppo_epochs
        if self.gradient_accumulation_steps > gradients:
            raise refused(
                f"gradient_accumulation_steps is {self.gradient_accumulation_steps}, but a step has only {gradients} "
                f"mini-batches (batch_size {self.batch_size} / mini_batch_size {self.mini_batch_size} * ppo_epochs "
                f"{self.ppo_epochs})",
                "gradient_accumulation_steps",
                "at most the mini-batches of a step",
            )
        if self.init_kl_coef == 0 and self.target_kl is not None:
            raise refused(
                f"init_kl_coef is 0, from which the controller cannot reach target_kl {self.target_kl:g}: set "
                "target_kl=None to train without a KL penalty",
                "target_kl",
                "None where init_kl_coef is 0",
            )
        if self.mixed_precision is not None and self.mixed_precision not in MIXED_PRECISION:
            raise refused(
                f"mixed_precision is {self.mixed_precision!r}; it must be 'bf16', 'fp16' or None",
                "mixed_precision",
                "bf16 or fp16",
            )
        if self.mixed_precision == "fp16" and self.device == "cpu":
            raise refused(
                "mixed_precision 'fp16' needs a GPU, but device is 'cpu': use 'bf16' or None",
                "mixed_precision",
                "fp16 not on a CPU",
            )

    def check_context(self, model: str, context_tokens: int) -> None:
        """Refuse answers that leave no room for a prompt in a model's context.

        Raises:
            InvalidArgumentError: ``max_new_tokens`` is as long as the context, or longer.
        """
        if self.max_new_tokens >= context_tokens:
            raise refused(
                f"max_new_tokens is {self.max_new_tokens}, but the context of {model} is {context_tokens} tokens for "
                "prompt and answer together",
                "max_new_tokens",
                f"at most {context_tokens - 1}",
            )

    @classmethod
    def quick(cls, **changes: Any) -> Self:
        """Preset for a smoke test: gpt2, 100 steps of 4 prompts, learning rate 1e-4."""
        return cls(**{"max_steps": 100, "batch_size": 4, "learning_rate": 1e-4} | changes)

    @classmethod
    def production(cls, **changes: Any) -> Self:
        """Preset for deployment: gpt2-medium, 5,000 steps of 16 prompts, learning rate 1e-5, rank 16."""
        own: dict[str, Any] = {
            "base_model": "gpt2-medium",
            "max_steps": 5000,
            "batch_size": 16,
            "learning_rate": 1e-5,
            "lora_r": 16,
        }
        return cls(**own | changes)

    @classmethod
    def memory_constrained(cls, **changes: Any) -> Self:
        """Preset for a small GPU: rank 4, steps of 4 prompts, mini-batches of 2, four of them per optimizer step."""
        own = {"lora_r": 4, "batch_size": 4, "mini_batch_size": 2, "gradient_accumulation_steps": 4}
        return cls(**own | changes)


@dataclass(frozen=True)
class RewardModelConfig(_Checked):
    """Settings of the reward model's training.

    Attributes:
        base_model: The model that gets a scalar head; its name or folder.
        use_lora: Train an adapter and the head; else all weights.
        lora_r, lora_alpha, lora_dropout: As for :class:`TrainingConfig`.
        batch_size: Ratings per step.
        num_epochs: Maximum number of passes over the ratings. Training stops when the validation loss has risen twice
            in a row, and keeps the weights of the best epoch.
        learning_rate: Initial learning rate of AdamW; it decays linearly to 0. None: that of scores by the rule
            of docs/lora.md.
        seed: Seed of the order, the adapter and the head.
    """

    base_model: str = "gpt2"
    use_lora: bool = True
    lora_r: int = 8
    lora_alpha: float = 32
    lora_dropout: float = 0.1
    batch_size: int = 8
    num_epochs: int = 3
    learning_rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check({"batch_size": COUNT, "num_epochs": COUNT, "seed": _Range(0, whole=True)})
        if self.learning_rate is not None and not POSITIVE.holds(self.learning_rate):
            raise refused(
                f"learning_rate is {self.learning_rate!r}; it must be above 0 or None", "learning_rate", "above 0"
            )

    @classmethod
    def of(cls, config: TrainingConfig) -> Self:
        """Derive the reward model's settings from a policy's.

        Shared settings are the policy's, except for the learning rate of an adapter, which is ten times the
        policy's: supervised learning from labels allows larger steps than learning from rewards.
        """
        shared = {name: getattr(config, name) for name in {each.name for each in fields(cls)} if hasattr(config, name)}
        return cls(**shared | {"learning_rate": config.learning_rate * (10 if config.use_lora else 1)})


def refused(message: str, field: str, rule: str) -> InvalidArgumentError:
    """Build the error for an invalid setting."""
    return InvalidArgumentError(message, field=field, rule=rule)
