"""Reference models whose layers are in host memory, and on the device only while they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.model.loading.offload import num_layer_bytes, offload_layers
from support.engine import LocalEngine, token_rows
from support.tiny import tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

PAIRS = token_rows([[1, 20, 30, 40, 50], [1, 9, 8, 7]], "chosen_input_ids") | token_rows(
    [[1, 3, 9], [1, 4, 5]], "rejected_input_ids"
)
META = torch.device("meta")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "other", seed=3, num_layers=3)


@pytest.fixture
def engine(tiny_model_path: Path, other: Path, tmp_path: Path) -> LocalEngine:
    return LocalEngine({"tiny": tiny_model_path, "other": other}, tmp_path)


def dpo(reference: Any, **more: Any) -> pb.LossCall:
    return pb.LossCall(loss_fn="dpo", loss_kwargs_json=json.dumps({"reference_model": reference} | more))


@pytest.mark.parametrize("name", ["base", "other"])
def test_an_offloaded_reference_gives_the_same_bits(engine: LocalEngine, name: str) -> None:
    sums = []
    for run, reference in (("run-a", name), ("run-b", {"name": name, "offload": True})):
        engine.create(run)
        engine.train(run, token_rows([[1, 5, 6, 7]]))
        metrics = dict(engine.do(run, PAIRS, forward_backward=dpo(reference)).proto.loss.metrics)
        sums.append((metrics, engine.context.runs[run].accumulator.state_tensors()))
    (plain, one), (offloaded, same) = sums
    assert plain == offloaded and abs(plain["reward_margin"]) > 1e-6
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert engine.context.references.loaded[-1].endswith("offload")


def test_weights_are_on_the_device_only_while_they_compute(other: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(other).requires_grad_(False)
    ids = torch.arange(8)[None]
    expected = model(input_ids=ids).logits
    weights = dict(model.get_decoder().layers.named_parameters())
    addresses = {name: weight.data_ptr() for name, weight in weights.items()}
    size = sum(weight.nbytes for weight in weights.values())
    offload_layers(model, torch.device("cpu"))
    layers = model.get_decoder().layers
    found: dict[str, Tensor] = {}

    def look(module: nn.Module, *_: Any) -> None:
        found.update({str(id(module)): module.weight})

    linear = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    for module in linear:
        old = module._old_forward  # accelerate calls it between bringing the weights and taking them away
        module._old_forward = lambda x, module=module, old=old: (look(module), old(x))[1]
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert len(found) == len(linear) and all(not weight.is_meta for weight in found.values())
    assert all(weight.is_meta for weight in layers.parameters()) and num_layer_bytes(model) == size
    assert not any(weight.is_meta for weight in (model.get_input_embeddings().weight, model.lm_head.weight))
    kept = {
        f"{name}.{key}": module._hf_hook.weights_map[key]
        for name, module in layers.named_modules()
        for key, _ in module.named_parameters(recurse=False)
    }
    assert {name: weight.data_ptr() for name, weight in kept.items()} == addresses


def test_a_forward_on_another_device_takes_the_weights_there(other: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(other).requires_grad_(False)
    offload_layers(model, META)
    assert model(input_ids=torch.zeros(1, 8, dtype=torch.int64, device=META)).logits.device == META
    for module in model.get_decoder().layers.modules():
        for key, _ in module.named_parameters(recurse=False):
            assert module._hf_hook.execution_device == META
            assert module._hf_hook.weights_map[key].device == torch.device("cpu")


@pytest.mark.parametrize(
    ("reference", "more", "field", "words"),
    [
        ({"name": "run-a/one", "offload": True}, {}, "reference_model", "only models can be offloaded: export it"),
        ({"name": "ema", "offload": True}, {}, "reference_model", "on their device"),
        ({"name": "other", "offload": True}, {"reference_dtype": "bfloat16"}, "reference_dtype", "leave out one"),
        ({"name": "other", "offload": True, "quantize": "nf4"}, {}, "reference_model", "leave out quantize or offload"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(
    engine: LocalEngine, reference: dict[str, Any], more: dict[str, Any], field: str, words: str
) -> None:
    engine.create("run-a")
    engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="one"))
    error = engine.op("run-a", PAIRS, forward_backward=dpo(reference, **more)).proto.error
    assert error.code == pb.ERROR_CODE_INVALID_ARGUMENT and error.field.startswith(field) and words in error.message
