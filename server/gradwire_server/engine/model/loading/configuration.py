"""A model's configuration, and the model without weights that it describes; both are checked here and nowhere else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.model.vision.image_tokens import auto_class, takes_images

NEEDED_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")
SIZES = (
    *NEEDED_SIZES,
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


class ConfigurationError(ValueError):
    """No model can be made from a configuration; the message says what to change in ``config.json``."""


def read_configuration(path: str) -> PreTrainedConfig:
    """Read the configuration of a model.

    Args:
        path: Folder, ``config.json`` or hub name.

    Raises:
        ConfigurationError: It describes no model.
        OSError: It cannot be read.
    """
    with _explained("its config.json cannot be read by transformers", path):
        values = _given(path)
        if not isinstance(values, Mapping):
            raise ConfigurationError("its config.json holds no JSON object: take the file that the model came with")
        _check_sizes(values)
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    _check(config)
    return config


def make_configuration(values: Mapping[str, Any]) -> PreTrainedConfig:
    """Make a configuration of what a ``config.json`` holds.

    Raises:
        ConfigurationError: It describes no model.
    """
    with _explained("it cannot be read by transformers"):
        _check_sizes(values)
        rest = {name: value for name, value in values.items() if name != "model_type"}
        config: PreTrainedConfig = AutoConfig.for_model(values.get("model_type", ""), **rest)
    _check(config)
    return config


def without_weights(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Make a model on meta tensors; in the configuration's dtype, unless another is given.

    Raises:
        ConfigurationError: transformers cannot make one.
    """
    settings = {} if dtype is None else {"dtype": dtype}
    with (
        _explained("transformers cannot make a causal LM of its config.json"),
        preserved_rng(),
        init_empty_weights(include_buffers=True),
    ):
        model: PreTrainedModel = auto_class(takes_images(config)).from_config(
            config, trust_remote_code=False, **settings
        )
    return model


def without_path(sentence: str, path: str, name: str = "its folder") -> str:
    """Put a name in place of a model's path, which may also be part of a file's name, as in ``model.safetensors``."""
    return re.sub(rf"(?<![\w./-])(directory )?{re.escape(path)}(?!\.?[\w-])", name, sentence)


def _given(path: str) -> object:
    try:
        return PreTrainedConfig.get_config_dict(path)[0]
    except TypeError:  # transformers looks for names in whatever the file holds
        return None
    except OSError as error:
        cause = error.__context__
        if isinstance(cause, (json.JSONDecodeError, UnicodeDecodeError)):
            raise ConfigurationError(f"its config.json is not valid JSON: {cause}") from error
        raise


def _check(config: PreTrainedConfig) -> None:
    """Check the sizes by their common names, whatever the model's own configuration calls them."""
    text = config.get_text_config()
    sizes = {name: size_of(text, name) for name in SIZES}
    for name in NEEDED_SIZES:
        if not isinstance(sizes[name], int):
            raise ConfigurationError(f"its config.json gives {name} as {sizes[name]!r}, and it is a number above 0")
    _check_sizes(sizes)


def size_of(config: PreTrainedConfig, name: str) -> Any:
    """A size by its common name; of one that layers have of their own (Gemma 4), what the configuration says of all."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to give one for all layers
        return vars(config).get(name)


def _check_sizes(values: Mapping[str, Any]) -> None:
    for name in SIZES:
        size = values.get(name)
        if isinstance(size, int) and size < 1:
            raise ConfigurationError(f"its config.json gives {name} as {size:,}, and it is at least 1")
    if isinstance(text := values.get("text_config"), Mapping):
        _check_sizes(text)


@contextmanager
def _explained(what: str, path: str = "") -> Iterator[None]:
    try:
        yield
    except (OSError, ConfigurationError):
        raise
    except Exception as error:  # whatever transformers and torch raise at the first impossible value
        cause = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        sentence = str(cause).partition("\n")[0].strip()
        if path:  # callers name the model as its users know it
            sentence = without_path(sentence.replace(f"{path}/config.json", path), path, "it")
        if not isinstance(error, (ValueError, StrictDataclassError)):  # those are sentences, others may be a word
            sentence = f"{type(error).__name__}: {sentence}"
        raise ConfigurationError(f"{what}: {sentence}") from error
