"""Architectures of ``tools/make_architectures.py`` whose numbers once differed from those of transformers alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_losses.registry import load_builtin_losses
from gradwire_proto.v1.training_pb2 import LoraSettings, RunConfig
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model import split_model
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.exports import export_run
from make_architectures import CONFIGURATIONS, check, save_model
from safetensors.torch import load_file, save_file

MENDED = (
    "Phi-3, LongRoPE",  # factors chosen by the longest row of a forward
    "Phi-MoE, LongRoPE",  # and scales, by a forward of its own
    "Phi-MoE",  # a router that draws in training mode and returns a tuple
    "DBRX",  # routers whose hook kept a tensor that a recomputation does not
    "Falcon",  # adds to a layer's product in place, and has a Linear of its own, which LoRA once left out
    "OLMo, clipped",
    "Jamba",  # reads the weight of a projection
    "Hunyuan 4",  # keeps some of its layers in float32, whose adapters were in bfloat16
    "Mamba",  # peft refuses an adapter on one of its layers
)
IN_CI = ("Phi-3, LongRoPE", "Falcon", "OLMo, clipped", "Mamba")


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow) if each not in IN_CI else each for each in MENDED],
)
def test_training_and_samples_have_the_numbers_of_transformers(name: str) -> None:
    load_builtin_losses()
    found = check(name)
    assert not found.wrong and not found.refusal, found
    assert not any(limit.startswith("LoRA") for limit in found.limits), found


def run_of(name: str, folder: Path, dtype: torch.dtype = torch.float32, **lora: Any) -> EngineRun:
    save_model(name, folder)
    pool = ModelPool({"m": str(folder)}, "cpu", dtype)
    return EngineRun(pool, "run-a", RunConfig(base_model="m", lora=LoraSettings(rank=2, **lora)))


def test_a_bound_of_logits_that_is_not_known_is_refused_in_bfloat16_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_model, "SOFTCAPS", ())
    with pytest.raises(OperationError, match="around its output head changes logits of up to 20"):
        run_of("Gemma 2", tmp_path, torch.bfloat16)


def test_a_model_whose_rows_depend_on_their_neighbours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_model, "fix_rotary_factors", lambda *_: None)
    with pytest.raises(OperationError, match=r"a row of .* tokens has states beside rows of up to 17 that differ"):
        run_of("Phi-3, LongRoPE", tmp_path)


def test_a_model_that_draws_in_training_mode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_model, "jittered", lambda _: [])
    with pytest.raises(OperationError, match="draws random numbers in training mode also without dropout"):
        run_of("Phi-MoE", tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("model.layers.1.mlp.down_proj.weight", float("nan"), "its weights are not finite: {}$"),
        ("model.layers.1.mlp.down_proj.weight", float("inf"), "its weights are not finite: {}$"),
        ("model.embed_tokens.weight", float("nan"), "its weights are not finite: {}$"),
        ("model.layers.1.mlp.down_proj.weight", 3e38, "its logits are not finite in torch.float32$"),
    ],
)
def test_weights_that_are_not_finite_are_named(
    tiny_model_path: Path, tmp_path: Path, place: str, value: float, reason: str
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    weights[place][-1] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OperationError, match=reason.format(place)):
        ModelPool({"m": str(folder)}, "cpu").get("m")


def test_checkpointing_that_transformers_has_not_is_refused(tmp_path: Path) -> None:
    save_model("CTRL", tmp_path)
    pool = ModelPool({"m": str(tmp_path)}, "cpu")
    for lora in ({}, {"lora": LoraSettings(rank=2)}):
        with pytest.raises(OperationError, match="CTRLLMHeadModel has no gradient checkpointing in transformers"):
            EngineRun(pool, "run-a", RunConfig(base_model="m", gradient_checkpointing=True, **lora))


def test_a_forward_that_fails_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match=r"not supported: its forward fails in torch.bfloat16: RuntimeError"):
        run_of("xLSTM", tmp_path, torch.bfloat16)


@pytest.mark.long
def test_a_layer_that_the_model_does_not_call_gets_no_adapter(tmp_path: Path) -> None:
    names = run_of("Gemma 3n", tmp_path).policy.trainable_parameters()
    assert any("modality_router" in name for name in names) and not any("correction_coefs" in name for name in names)
    with pytest.raises(OperationError, match="would be passed over: leave it out of target_modules"):
        run_of("Gemma 3n", tmp_path, target_modules=["q_proj", "correction_coefs"])


@pytest.mark.long
def test_adapters_on_shared_weights_are_exported_and_not_merged(tmp_path: Path) -> None:
    run = run_of("Zamba", tmp_path)
    for name in ("merged", "adapter"):
        (tmp_path / name).mkdir()
    with pytest.raises(OperationError, match="share their weights"):
        export_run(run._pool, run, tmp_path / "merged", "merged")
    assert export_run(run._pool, run, tmp_path / "adapter", "auto").format == "peft"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name not in MENDED])
def test_no_architecture_is_wrong_without_a_word(name: str) -> None:
    load_builtin_losses()
    found = check(name)
    assert not found.wrong, found
