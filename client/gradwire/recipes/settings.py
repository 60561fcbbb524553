"""Settings of a training: a dataclass with documented fields, read from YAML and written as an example."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml

from gradwire.data import OnError

S = TypeVar("S", bound="Checked")


LEAST = {
    0: (
        "limit",
        "seed",
        "lora_rank",
        "learning_rate",
        "warmup",
        "weight_decay",
        "max_steps",
        "batch_tokens",
        "eval_every",
        "eval_problems",
        "save_every",
        "lora_alpha",
        "lora_dropout",
        "dropout",
        "neftune_noise_alpha",
        "head_learning_rate",
        "max_grad_norm",
        "keep",
        "patience",
    ),
    1: ("batch_size", "accumulation", "epochs", "max_tokens", "answer_tokens", "group_size", "answers", "turns"),
}
"""Smallest value of a number -> the settings."""
OF_ADAPTER = ("lora_alpha", "lora_targets", "rslora")
"""What an adapter keeps for its life."""
ELSEWHERE = {
    "lr": "learning_rate", "base_model": "model", "model_name_or_path": "model", "output_dir": "folder",
    "dataset": "data", "datasets": "data", "num_train_epochs": "epochs", "num_epochs": "epochs",
    "per_device_train_batch_size": "batch_size", "micro_batch_size": "batch_size", "max_seq_length": "max_tokens",
    "gradient_accumulation_steps": "accumulation", "sequence_len": "max_tokens", "cutoff_len": "max_tokens",
    "max_length": "max_tokens", "lora_r": "lora_rank", "r": "lora_rank", "target_modules": "lora_targets",
    "lora_target": "lora_targets", "lora_target_modules": "lora_targets", "warmup_steps": "warmup",
    "warmup_ratio": "warmup", "lr_scheduler": "schedule", "lr_scheduler_type": "schedule", "optim": "optimizer",
    "betas": "optimizer_args", "adam_beta1": "optimizer_args", "adam_beta2": "optimizer_args",
    "adam_epsilon": "optimizer_args", "momentum": "optimizer_args", "eval_steps": "eval_every", "logging": "loggers",
    "save_steps": "save_every", "save_total_limit": "keep", "val_set_size": "held_out", "val_size": "held_out",
    "report_to": "loggers", "early_stopping_patience": "patience", "packing": "batch_tokens",
    "sample_packing": "batch_tokens", "num_generations": "group_size", "max_completion_length": "answer_tokens",
    "max_new_tokens": "answer_tokens", "reward_funcs": "reward", "resume_from_checkpoint": "init_from",
    "metric_for_best_model": "best_by", "max_samples": "limit", "beta": "loss",
}  # fmt: skip
"""Other trainers' words -> ours."""
LOGGERS = ("tensorboard", "wandb", "trackio", "mlflow")


class SettingsError(ValueError):
    """Invalid settings; the message names the file, the line and the rule."""


def setting(default: Any, help: str) -> Any:
    """Declare a setting with its default and the comment that the example shows."""
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


class Checked(Protocol):
    """A dataclass of settings."""

    def check(self) -> None: ...


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
        self.check_choice("on_error", ("raise", "skip"))
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
    learning_rate: float = setting(1e-4, "at its peak; 0: by the model's size")
    schedule: str = setting("cosine", "constant, linear, cosine or wsd")
    optimizer: str = setting("adamw", "adamw, adamw8bit, sgd or muon")
    optimizer_args: dict[str, Any] = setting({}, "betas, eps, momentum: as for optim_step")
    head_learning_rate: float = setting(0.0, "of a reward or value head; 0: learning_rate")
    warmup: int = setting(10, "steps over which the learning rate rises")
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
        self.check_choice("schedule", ("constant", "linear", "cosine", "wsd"))
        self.check_choice("optimizer", ("adamw", "adamw8bit", "sgd", "muon"))
        unknown = sorted({*self.optimizer_args} - {"betas", "eps", "momentum"})
        if unknown:
            raise SettingsError(f"optimizer_args has {unknown[0]!r}; there are betas, eps, momentum")
        if not 0 <= self.held_out < 1:
            raise SettingsError(f"held_out is {self.held_out}; it must be at least 0 and less than 1")

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """The data sets, each with its ``path`` and what else is said of it."""
        given = [self.data] if isinstance(self.data, str) else self.data
        return [{"path": each} if isinstance(each, str) else each for each in given]


PART: Mapping[str, Any] = {"path": str, "weight": float, "limit": int, "mapping": dict, "split": str}
"""What may be said of one of several data sets."""


def check_part(part: Any) -> None:
    """Check one of several data sets.

    Raises:
        SettingsError: It is none."""
    if isinstance(part, str) and part:
        return
    if not isinstance(part, Mapping) or not part.get("path"):
        raise SettingsError(f"data has {part!r}; each is a name, or a mapping with a path and {', '.join(PART)}")
    for name, value in part.items():
        if name not in PART:
            raise SettingsError(f"data has {part['path']} with {name!r}; it takes {', '.join(PART)}")
        number = _value(PART[name], value, f"data has {part['path']}, whose {name}")
        if PART[name] in (int, float) and not 0 <= number < math.inf:
            raise SettingsError(f"data has {part['path']}, whose {name} is {value}; it must be at least 0")


@dataclass
class RowSettings(Settings):
    """Settings of trainings on the rows of a data set."""

    batch_tokens: int = setting(0, "tokens of a batch at most, which takes rows until then; 0: batch_size rows")
    accumulation: int = setting(1, "batches of a step")
    order_by: str = setting("", "column of numbers: each epoch takes the smallest first; empty: rows are shuffled")
    neftune_noise_alpha: float = setting(0.0, "noise on the embeddings, as NEFTune's; 5 is usual, 0: none")
    overlong: str = setting("cut", "cut (at the end, with a warning), cut_start, skip or raise")
    best_by: str = setting("", "metric of evaluations, as loss, by which a checkpoint `best` is kept; empty: none is")
    patience: int = setting(0, "evaluations without a better best_by after which the training ends; 0: never")

    def check(self) -> None:
        super().check()
        self.check_choice("overlong", ("cut", "cut_start", "skip", "raise"))
        if self.patience and not self.best_by:
            raise SettingsError("patience is set, and needs best_by, the metric that should get better, as loss")


@dataclass(frozen=True)
class Given:
    """Values that a YAML file and overrides set.

    Attributes:
        values: Name -> value.
        places: Name -> where it is written, for errors.
    """

    values: dict[str, Any]
    places: Mapping[str, str]


def load(kind: type[S], path: Path | str, overrides: Sequence[str] = ()) -> S:
    """Load settings from a YAML file.

    Args:
        kind: The settings of a recipe.
        path: The file; settings that it leaves out have their defaults.
        overrides: ``"name=value"`` or ``"section.name=value"``, which override the file.

    Raises:
        SettingsError: The file or an override has a mistake; names the line.
    """
    given = read_yaml(path, overrides)
    return built(kind, given.values, given.places)


def read_yaml(
    path: Path | str, overrides: Sequence[str] = (), *, example: str = "gradwire train --example NAME"
) -> Given:
    """Read a mapping from a YAML file, overridden as :func:`load` says.

    Args:
        path, overrides: As for :func:`load`.
        example: The command that writes such a file; empty if there is none.

    Raises:
        SettingsError: The file or an override has a mistake; names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise SettingsError(f"there is no file {path}" + (f"; `{example} > {path}` writes one" if example else ""))
    if path.suffix in (".jsonl", ".csv", ".parquet", ".txt", ".md"):
        raise SettingsError(f"{path} holds data; name a YAML file of settings, in which `data: {path}` names it")
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise SettingsError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(values, dict):
        written = f"; see `{example}`" if example else ""
        raise SettingsError(f"{path}: settings are a mapping such as `model: NAME`{written}")
    places: dict[str, str] = {}
    for key, _ in root.value:
        place = f"{path}, line {key.start_mark.line + 1}"
        if key.value in places:
            raise SettingsError(f"{place}: {key.value} is set a second time")
        places[key.value] = place
    for override in overrides:
        set_by(values, override)
        places[override.partition("=")[0].partition(".")[0]] = f"--set {override}"
    return Given(values, places)


def set_by(values: dict[str, Any], override: str) -> None:
    """Set a value as ``"name=value"`` or ``"section.name=value"`` says.

    Raises:
        SettingsError: It says nothing that can be set.
    """
    dotted, equals, value = override.partition("=")
    *sections, name = dotted.strip().split(".")
    if not equals or not name or not all(sections):
        raise SettingsError(f"--set {override}: write NAME=VALUE, as learning_rate=1e-3 or loss.beta=0.1")
    section = values
    for each in sections:
        if section.get(each) is None:
            section[each] = {}
        section = section[each]
        if not isinstance(section, dict):
            raise SettingsError(f"--set {override}: {each} is a single value and has no {name}")
    try:
        section[name] = yaml.safe_load(value)
    except yaml.YAMLError:  # [::1]:50051, *.jsonl
        section[name] = value


def built(kind: type[S], content: Mapping[str, Any], places: Mapping[str, str] = types.MappingProxyType({})) -> S:
    """Build settings from values by name, those that are left out with their defaults.

    Args:
        kind: A dataclass with a method ``check``.
        places: Name -> where its value is written, for errors.

    Raises:
        SettingsError: A name is unknown, or a value does not fit.
    """
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in content.items():
        place = places.get(str(name), "")
        if name not in hints:
            near = (
                [ELSEWHERE[name]] if ELSEWHERE.get(name) in hints else difflib.get_close_matches(str(name), hints, n=1)
            )
            more = (
                f"; it takes {', '.join(hints)}" if len(hints) < 20 else "; `gradwire train --example RECIPE` shows all"
            )
            meant = f"; did you mean {near[0]}?" if near else more
            if "dora" in str(name).lower():
                meant = ": DoRA's magnitudes are not exact with grouped and paged runs; rslora is there"
            raise SettingsError(f"{place}: there is no setting {name!r}{meant}".removeprefix(": "))
        values[name] = _value(hints[name], value, f"{place}: {name}".removeprefix(": "))
    settings = kind(**values)
    try:
        settings.check()
    except SettingsError as error:
        where = places.get(str(error).partition(" ")[0], "")
        raise SettingsError(f"{where}: {error}" if where else str(error)) from None
    return settings


def _value(hint: Any, value: Any, place: str) -> Any:
    if value is None and hint is str:
        return ""
    if isinstance(hint, types.UnionType):
        kinds = tuple(typing.get_origin(each) or each for each in hint.__args__)
        if not isinstance(value, kinds):
            raise SettingsError(f"{place} is {_said(value)}; it must be {' or '.join(NAMES[each] for each in kinds)}")
        return value
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
    return value


def _said(value: Any) -> str:
    return "empty" if value is None else repr(value)


NAMES: Mapping[Any, str] = types.MappingProxyType(
    {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a mapping", list: "a list"}
)


def example(kind: type[Any]) -> str:
    """Write the defaults as YAML, with a comment on each setting."""
    return "\n".join(_lines(kind)) + "\n"


def _lines(kind: type[Any]) -> Iterator[str]:
    yield f"# {(kind.__doc__ or '').splitlines()[0]}"
    for field in dataclasses.fields(kind):
        value = getattr(kind(), field.name)
        shown = yaml.safe_dump([value], default_flow_style=True, width=1000).strip()[1:-1]
        yield f"{field.name}: {shown}  # {field.metadata.get('help', '')}"
