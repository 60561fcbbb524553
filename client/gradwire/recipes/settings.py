"""Settings of a training: dataclasses with documented fields, and the checks of their values."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from gradwire_proto.rates import Learned

from gradwire.data import OnError

LEAST = {
    0: ("limit", "seed", "lora_rank", "learning_rate", "warmup", "weight_decay", "max_steps", "batch_tokens",
        "eval_every", "eval_problems", "save_every", "lora_alpha", "lora_dropout", "dropout", "neftune_noise_alpha",
        "head_learning_rate", "max_grad_norm", "keep", "patience", "learning_rate_multiplier", "record_every",
        "missing_eos_penalty"),
    1: ("batch_size", "accumulation", "epochs", "max_tokens", "answer_tokens", "group_size", "answers", "turns",
        "passes"),
}  # fmt: skip
"""Smallest value of a number -> the settings."""
OF_ADAPTER = ("lora_alpha", "lora_targets", "rslora")
"""Settings that are fixed once an adapter is created."""
Schedule = Literal["constant", "linear", "cosine", "wsd"]
LOGGERS = ("tensorboard", "wandb", "trackio", "mlflow")


class SettingsError(ValueError):
    """Invalid settings; the message names the file, the line and the rule."""


def setting(default: Any, help: str) -> Any:
    """Declare a setting with its default and the comment that the example shows."""
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


def loss_arguments(loss_fn: str, more: str = "") -> Any:
    """Declare the setting with the arguments of a recipe's loss; ``more`` follows its name in the comment."""
    help = f"arguments of {loss_fn}{more}: see docs/losses.md"
    return dataclasses.field(default_factory=dict, metadata={"help": help, "loss_fn": loss_fn})


NAMES: Mapping[Any, str] = types.MappingProxyType(
    {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a mapping", list: "a list"}
)


def value_of(hint: Any, value: Any, place: str) -> Any:
    """Convert a value of a file to a setting's type.

    Raises:
        SettingsError: It is of another type.
    """
    if value is None and hint is str:
        return ""
    if isinstance(hint, types.UnionType):
        kinds = tuple(typing.get_origin(each) or each for each in hint.__args__)
        if not isinstance(value, kinds):
            raise SettingsError(f"{place} is {_said(value)}; it must be {' or '.join(NAMES[each] for each in kinds)}")
        hint = type(value)
    kind = typing.get_origin(hint) or hint
    kind = str if kind is typing.Literal else kind
    if kind is float and isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", value):
        value = float(value)  # YAML 1.1 takes 1e-4 for a text
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind in (dict, list) and value is None:
        value = kind()
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise SettingsError(f"{place} is {_said(value)}; it must be {NAMES[kind]}")
    if not _is_finite(value):
        raise SettingsError(f"{place} is {_said(value)}; numbers must be finite")
    if kind is dict and (joined := [name for name, each in value.items() if each is None and ":" in str(name)]):
        field, _, of = str(joined[0]).partition(":")
        raise SettingsError(
            f"{place} has {joined[0]!r}, without a value: write a blank behind the colon, {field}: {of}"
        )
    return value


def _is_finite(value: Any) -> bool:
    """Whether no number of a value is NaN or infinite, however deep it is."""
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _said(value: Any) -> str:
    return "empty" if value is None else repr(value)


@dataclass
class ServiceSettings:
    """Settings of everything that works with a server."""

    model: str = setting("Qwen/Qwen3-0.6B", "a model: Hugging Face name or folder; with an address, a name it serves")
    address: str = setting("", "HOST:PORT of a running server; empty starts one here, with its state in the folder")
    folder: str = setting("runs/training", "metrics, checkpoints' positions and the report; a rerun continues there")

    @property
    def starts_from(self) -> str:
        """The training whose server is used where there is no address: FOLDER, FOLDER@CHECKPOINT; empty for none."""
        return ""

    def check(self) -> None:
        """Check that the values fit together.

        Raises:
            SettingsError: They do not."""
        for name in ("model", "folder", "data"):
            if not getattr(self, name, "."):
                raise SettingsError(f"{name} is empty")
        for name, hint in typing.get_type_hints(type(self)).items():
            if typing.get_origin(hint) is Literal:
                self.check_choice(name, typing.get_args(hint))
        for least, names in LEAST.items():
            for name in names:
                value = getattr(self, name, least)
                if not least <= value < math.inf:  # NaN is not either
                    raise SettingsError(f"{name} is {value}; it must be at least {least}")

    def check_choice(self, name: str, known: Sequence[str]) -> None:
        """Check that a setting is one of those that are known.

        Raises:
            SettingsError: It is not."""
        if getattr(self, name) not in known:
            raise SettingsError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")


@dataclass
class Settings(ServiceSettings):
    """Settings of every training."""

    learns: ClassVar[Learned] = "answers"

    data: str | list[Any] = setting(
        "train.jsonl",
        "a .jsonl, .csv or .parquet file, or a data set of the Hugging Face hub; or a list of these, each a name or "
        "{path, weight, limit, mapping, split}",
    )
    split: str = setting("train", "split of a data set of the hub")
    mapping: dict[str, str] = setting({}, "field -> column, where the columns are not recognised")
    limit: int = setting(0, "rows to use at most; 0: all")
    on_error: OnError = setting("raise", "raise, or skip: what to do with a row that does not fit")
    validation: str = setting("", "a file of rows to evaluate on, in place of held_out")
    held_out: float = setting(0.02, "share of the rows to evaluate on, which share no prompt with the others; 0: none")
    seed: int = setting(0, "of the adapter, the order of the rows and sampling")
    init_from: str = setting("", "FOLDER, FOLDER@CHECKPOINT or RUN_ID/NAME of an earlier training to start from")
    lora_rank: int = setting(16, "rank of the adapter; 0 trains all weights; that of init_from, if there is one")
    lora_alpha: float = setting(0.0, "the adapter is scaled by alpha / rank; 0: alpha is twice the rank")
    lora_dropout: float = setting(0.0, "share of the adapter's inputs that is dropped; 0: that of dropout")
    lora_targets: list[str] = setting(["all-linear"], "modules with an adapter; all-linear, lm_head, vision, or names")
    rslora: bool = setting(False, "scale by alpha / sqrt(rank) instead")
    dropout: float = setting(0.0, "of the model and the adapter")
    deterministic: bool = setting(False, "the same bits in sampling, scoring and training, on a CPU; or as the server")
    learning_rate: float = setting(0.0, "at its peak; 0: by the model's width and what is trained, see docs/lora.md")
    learning_rate_multiplier: float = setting(1.0, "times learning_rate, or the one that is chosen")
    schedule: Schedule = setting("cosine", "constant, linear, cosine or wsd")
    optimizer: Literal["adamw", "adamw8bit", "sgd", "muon"] = setting("adamw", "adamw, adamw8bit, sgd or muon")
    optimizer_args: dict[str, Any] = setting({}, "betas, eps, momentum: as for optim_step")
    head_learning_rate: float = setting(0.0, "of a reward or value head; 0: learning_rate")
    warmup: float = setting(0.1, "steps over which the learning rate rises; below 1: a share of the steps")
    max_grad_norm: float = setting(1.0, "longer gradients are scaled down to it; 0: they are not")
    weight_decay: float = setting(0.0, "of matrices; norms and biases are not decayed")
    batch_size: int = setting(16, "rows of a batch; the server divides it by its memory, which changes no result")
    epochs: int = setting(1, "times that every row is seen")
    max_steps: int = setting(0, "steps at most; 0: as the epochs have")
    max_tokens: int = setting(2048, "longest row; what is longer is treated as overlong says")
    eval_every: int = setting(50, "steps between evaluations; the last step is always evaluated; 0: never")
    eval_first: bool = setting(False, "evaluate before the first step as well")
    save_every: int = setting(50, "steps between checkpoints; the last step is always saved; 0: those of an epoch")
    keep: int = setting(0, "newest checkpoints to keep; 0: all; `best` is kept besides")
    loggers: list[str] = setting([], "of tensorboard, wandb, trackio, mlflow; metrics.jsonl is always written")
    tags: dict[str, str] = setting({}, "labels of the run, by which the console and `gradwire runs` find and group it")
    record_batches: float = setting(0.02, "share of the batches that the console shows, besides the first; 0: none")
    wandb: dict[str, Any] = setting({}, "project, name, entity, tags: what wandb.init takes, of the logger wandb")
    loss: dict[str, Any] = setting({}, "arguments of the loss: see docs/losses.md")

    @property
    def starts_from(self) -> str:
        return self.init_from

    def check(self) -> None:
        super().check()
        for each in self.loggers:
            if each not in LOGGERS:
                raise SettingsError(f"loggers has {each!r}; there are {', '.join(LOGGERS)}")
        for name in ("lora_dropout", "dropout"):
            if getattr(self, name) >= 1:
                raise SettingsError(f"{name} is {getattr(self, name)}; it must be at least 0 and less than 1")
        for name in OF_ADAPTER if self.init_from else ():
            if getattr(self, name) != getattr(type(self)(), name):
                raise SettingsError(f"{name} is that of init_from, whose adapter goes on: leave it out")
        if not isinstance(self.data, str):
            for part in self.data:
                check_part(part)
        unknown = sorted({*self.optimizer_args} - {"betas", "eps", "momentum"})
        if unknown:
            raise SettingsError(f"optimizer_args has {unknown[0]!r}; there are betas, eps, momentum")
        if not 0 <= self.record_batches <= 1:
            raise SettingsError(f"record_batches is {self.record_batches}; it must be from 0 to 1")
        if not 0 <= self.held_out < 1:
            raise SettingsError(f"held_out is {self.held_out}; it must be at least 0 and less than 1")

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """The data sets, each with its ``path`` and what else is said of it."""
        given = [self.data] if isinstance(self.data, str) else self.data
        return [{"path": each} if isinstance(each, str) else each for each in given]


PART: Mapping[str, Any] = {"path": str, "weight": float, "limit": int, "mapping": dict, "split": str}
"""Keys of one entry of ``data``, when several data sets are given, and their types."""


def check_part(part: Any) -> None:
    """Check one of several data sets.

    Raises:
        SettingsError: It is neither a name nor a mapping of these keys."""
    if isinstance(part, str) and part:
        return
    if not isinstance(part, Mapping) or not part.get("path"):
        raise SettingsError(f"data has {part!r}; each is a name, or a mapping with a path and {', '.join(PART)}")
    for name, value in part.items():
        if name not in PART:
            raise SettingsError(f"data has {part['path']} with {name!r}; it takes {', '.join(PART)}")
        number = value_of(PART[name], value, f"data has {part['path']}, whose {name}")
        if PART[name] in (int, float) and not 0 <= number < math.inf:
            raise SettingsError(f"data has {part['path']}, whose {name} is {value}; it must be at least 0")


@dataclass
class RowSettings(Settings):
    """Settings of trainings on the rows of a data set."""

    batch_tokens: int = setting(0, "tokens of a batch at most, which takes rows until then; 0: batch_size rows")
    accumulation: int = setting(1, "batches of a step")
    order_by: str = setting("", "column of numbers: each epoch takes the smallest first; empty: rows are shuffled")
    neftune_noise_alpha: float = setting(0.0, "noise on the embeddings, as NEFTune's; 5 is usual, 0: none")
    overlong: Literal["cut", "cut_start", "skip", "raise"] = setting(
        "cut", "cut (at the end, with a warning), cut_start, skip or raise"
    )
    best_by: str = setting("", "metric of evaluations, as loss, by which a checkpoint `best` is kept; empty: none is")
    patience: int = setting(0, "evaluations without a better best_by after which the training ends; 0: never")

    def check(self) -> None:
        super().check()
        if self.patience and not self.best_by:
            raise SettingsError("patience is set, and needs best_by, the metric that should get better, as loss")
