"""liger-kernel's norms, gates and rotary embeddings on a CUDA device against transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.packing import Packing, arrange
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, OlmoConfig, PretrainedConfig, Qwen3Config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FAMILIES: dict[str, Any] = {"qwen3": Qwen3Config, "llama": LlamaConfig, "gemma3": Gemma3TextConfig, "olmo": OlmoConfig}


@pytest.fixture(params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config: PretrainedConfig = FAMILIES[request.param](
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if "norm" in name:  # as after a training: zeros or ones would hide which of both a norm adds
            torch.nn.init.uniform_(weight, 0.2, 0.8)
    model.save_pretrained(tmp_path)
    return tmp_path


def states_and_gradients(pool: ModelPool) -> list[torch.Tensor]:
    split_model = pool.load("m")
    lengths = torch.tensor([40, 33, 64])
    ids = torch.randint(64, (int(lengths.sum()),), generator=torch.Generator().manual_seed(1))
    arranged = arrange(Packing.PACKED, ids, lengths, torch.ones(3, dtype=torch.long))
    states = split_model.states(arranged).float()
    weights = [weight for name, weight in split_model.model.named_parameters() if "layers.0." in name]
    gradients = torch.autograd.grad(
        (states * torch.sin(torch.arange(states.numel()).view_as(states).cuda())).sum(), weights
    )
    return [each.detach().float().cpu() for each in (states, *gradients)]


def test_they_are_as_near_to_float64_as_transformers(path: Path) -> None:
    pytest.importorskip("liger_kernel")
    models = {"m": str(path)}
    exact = states_and_gradients(ModelPool(models, "cuda", torch.float64))
    plain = states_and_gradients(ModelPool(models, "cuda", torch.bfloat16, fused=False))
    pool = ModelPool(models, "cuda", torch.bfloat16)
    norm = pool.load("m").model.model.layers[0].post_attention_layernorm
    replaced = [kind for kind in type(norm).__mro__ if kind.__name__ == type(norm).__name__]
    assert len(replaced) == 2 or type(norm).__name__ == "OlmoLayerNorm"  # which has no weight, and no kernel
    for mine, theirs, right in zip(states_and_gradients(pool), plain, exact, strict=True):
        scale = right.norm() + 1e-6
        assert (mine - right).norm() / scale < 1.5 * (theirs - right).norm() / scale + 1e-3
