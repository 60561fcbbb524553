"""Exported reward and classification heads in transformers' own classes for sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architecture_configs import CONFIGURATIONS
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.model.layers.head_files import WITHOUT_CLASS
from make_architectures import rows_of, save_model, served_configuration
from peft import AutoPeftModelForSequenceClassification
from support.engine import LocalEngine, token_rows
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

ROWS = rows_of((12, 3, 7), 1)
FAST = ("CTRL", "Gemma 3", "GPT-2", "Mixtral", "OPT", "Qwen3")
"""A head of another name, a nested configuration, a learned table of positions, experts, a narrow embedding; the rest
in the slow lane."""


def with_class() -> list[Any]:
    """The families that have a class of a model and a head in transformers."""
    kinds = {name: kind for name, (kind, _) in CONFIGURATIONS.items() if kind not in WITHOUT_CLASS}
    known = [
        name
        for name, kind in kinds.items()
        if type(AutoConfig.for_model(kind)) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    ]
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in known]


def plain_scores(model: Any) -> np.ndarray:
    """``[rows, labels]`` by transformers alone, of the padded rows."""
    width = max(map(len, ROWS))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in ROWS])
    with torch.no_grad():
        return np.asarray(model.eval()(input_ids=ids, attention_mask=(ids != 0).long()).logits)


def loaded(folder: Path) -> Any:
    """The folder in transformers' class for sequences; nothing of it may be missing."""
    model, found = AutoModelForSequenceClassification.from_pretrained(
        folder, config=served_configuration(folder), dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["mismatched_keys"]
    return model


def scores(engine: LocalEngine, run_id: str, name: str = "rewards") -> np.ndarray:
    """``[rows]``, or ``[rows, labels]`` of a classification, by the engine."""
    return engine.do(run_id, token_rows(ROWS), forward=pb.LossCall(outputs=[name])).columns[name].values


def exported(engine: LocalEngine, state: Path, run_id: str, form: str = "hf") -> Path:
    engine.do(run_id, export=pb.ExportModel(name="out", format=form))
    return state / "runs" / run_id / "exports" / "out"


@pytest.mark.parametrize("name", with_class())
def test_transformers_class_for_sequences_gives_the_same_rewards(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path / "model")
    engine = LocalEngine({"m": tmp_path / "model"}, tmp_path)
    engine.create("run-a", base_model="m", head="reward", seed=3)
    expected = scores(engine, "run-a")
    folder = exported(engine, tmp_path, "run-a")
    np.testing.assert_allclose(plain_scores(loaded(folder))[:, 0], expected, rtol=1e-4, atol=1e-5)
    assert AutoConfig.from_pretrained(folder).architectures[0].endswith("ForSequenceClassification")


@pytest.mark.parametrize("form", ["merged", "peft"])
def test_an_adapter_with_its_head(tiny_model_path: Path, tmp_path: Path, form: str) -> None:
    engine = LocalEngine({"tiny": tiny_model_path}, tmp_path)
    engine.create("run-a", lora=4, head="classification", num_labels=3, seed=3)
    rated = token_rows(ROWS) | {"label": Column(np.array([0, 2, 1], np.int64), ())}
    engine.do("run-a", rated, forward_backward=pb.LossCall(loss_fn="sequence_classification"))
    engine.do("run-a", optim_step=pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8))
    folder, expected = exported(engine, tmp_path, "run-a", form), scores(engine, "run-a", "class_logits")
    if form == "merged":
        model = loaded(folder)
        again = LocalEngine({"tiny": folder}, tmp_path / "again")
        again.create("run-b", lora=2, head="classification", num_labels=3, seed=9)
        np.testing.assert_allclose(
            scores(again, "run-b", "class_logits"), scores(engine, "run-a", "class_logits"), atol=1e-5
        )
    else:
        model = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=3, dtype=torch.float32)
    np.testing.assert_allclose(plain_scores(model), expected, atol=1e-5)


def test_a_padding_token_that_ends_texts_is_not_declared(tiny_model_path: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    declared, first = [], tokenizer.pad_token or "a"
    for padding in (first, tokenizer.eos_token):
        folder = tmp_path / str(len(declared))
        tokenizer.pad_token, model.config.pad_token_id = padding, None
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        engine = LocalEngine({"tiny": folder}, folder / "state")
        engine.create("run-a", head="reward")
        declared.append(AutoConfig.from_pretrained(exported(engine, folder / "state", "run-a")).pad_token_id)
    assert declared == [tokenizer.convert_tokens_to_ids(first), None]
