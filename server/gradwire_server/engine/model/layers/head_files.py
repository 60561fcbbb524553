"""Heads in files. A reward or classification head is named as transformers' ``...ForSequenceClassification`` names it,
beside the model's weights, so that ``AutoModelForSequenceClassification`` loads the folder. A value head, for which
transformers has no class, is in a file of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from gradwire_server.engine.model.layers.heads import Head
from gradwire_server.engine.model.placement import whole_tensors
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.tokenizer_files import FILE

VALUE_FILE = "gradwire_head.safetensors"
CLASSIFIERS = {"ctrl": "classifier"}
"""The layer of the head in transformers, by type of model, where it is not "score"."""
WITHOUT_CLASS = ("modernbert-decoder",)
"""Types of models whose class for sequences has a layer more than a head, as those that have no such class."""


def classifier_name(config: PreTrainedConfig) -> str:
    """Name of the layer that maps the last token's state to scores in the model's class for sequences."""
    return CLASSIFIERS.get(config.get_text_config().model_type, "score")


def classifier_tensors(head: Head | None, config: PreTrainedConfig) -> dict[str, Tensor]:
    """The tensors of a head that belong beside a model's weights; none for a value head or no head."""
    if head is None or head.kind == "value":
        return {}
    return {f"{classifier_name(config)}.{name}": each for name, each in whole_tensors(head.state_dict()).items()}


def describe_classifier(head: Head, config: PreTrainedConfig, folder: Path) -> None:
    """Complete a saved ``config.json``, so that transformers makes a head of this shape and finds a row's last token.

    The padding token is the tokenizer's, where the model names none; one that also ends texts is left out, because
    transformers would take the token before it for the last one.
    """
    file = folder / "config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    known: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if known is not None and config.model_type not in WITHOUT_CLASS:
        written["architectures"] = [known.__name__]
    names = [f"LABEL_{number}" for number in range(head.num_outputs)]
    written |= {"id2label": dict(enumerate(names)), "label2id": {name: at for at, name in enumerate(names)}}
    text = written.get("text_config", written)
    if text.get("pad_token_id") is None and (padding := _padding_token(folder, text.get("eos_token_id"))) is not None:
        text["pad_token_id"] = padding
    file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _padding_token(folder: Path, ends: int | list[int] | None) -> int | None:
    settings, tokenizer = folder / "tokenizer_config.json", folder / FILE
    if not settings.is_file() or not tokenizer.is_file():
        return None
    named: Any = json.loads(settings.read_text(encoding="utf-8")).get("pad_token")
    text = named.get("content") if isinstance(named, dict) else named
    found = TextTokenizer(tokenizer).tokenizer.token_to_id(text) if isinstance(text, str) else None
    return None if found in (ends if isinstance(ends, list) else [ends]) else found


def save_value_head(head: Head, folder: Path) -> None:
    """Write a value head beside a model's weights or an adapter, where :func:`load_head` finds it."""
    save_file(whole_tensors(head.state_dict()), folder / VALUE_FILE, metadata={"format": "pt", "kind": head.kind})


def load_head(head: Head, folder: Path) -> None:
    """Start a head with the weights in a model's folder, if it has a head of this kind and shape."""
    if head.kind == "value":
        weights = _tensors(folder / VALUE_FILE, "")
    else:
        names = {"score", *CLASSIFIERS.values()}
        weights = next((tensors for name in sorted(names) if (tensors := _beside_weights(folder, name))), {})
    if {name: each.shape for name, each in weights.items()} == {n: each.shape for n, each in head.state_dict().items()}:
        head.load_state_dict(weights)


def _beside_weights(folder: Path, layer: str) -> dict[str, Tensor]:
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return _tensors(folder / SAFE_WEIGHTS_NAME, f"{layer}.")
    files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return {
        name: tensor
        for file in {file for tensor, file in files.items() if tensor.startswith(f"{layer}.")}
        for name, tensor in _tensors(folder / file, f"{layer}.").items()
    }


def _tensors(file: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, under their names after it."""
    if not file.is_file():
        return {}
    with safe_open(file, "pt") as stored:
        return {
            name.removeprefix(prefix): stored.get_tensor(name).to(torch.float32)
            for name in stored.keys()  # noqa: SIM118
            if name.startswith(prefix)
        }
