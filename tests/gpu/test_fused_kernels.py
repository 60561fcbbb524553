"""liger-kernel's norms, gates and rotary embeddings on a CUDA device against transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_server.engine.model.loading.pool import ModelPool
from support.normed import normed_model, states_and_gradients
from transformers import Gemma3TextConfig, LlamaConfig, OlmoConfig, Qwen3Config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FAMILIES: dict[str, Any] = {"qwen3": Qwen3Config, "llama": LlamaConfig, "gemma3": Gemma3TextConfig, "olmo": OlmoConfig}


@pytest.fixture(params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(normed_model(FAMILIES[request.param], tmp_path))


def computed(pool: ModelPool) -> list[torch.Tensor]:
    states, gradients = states_and_gradients(pool.load("m"))
    return [each.detach().float().cpu() for each in (states, *gradients)]


def test_they_are_as_near_to_float64_as_transformers(path: Path) -> None:
    pytest.importorskip("liger_kernel")
    models = {"m": str(path)}
    exact = computed(ModelPool(models, "cuda", torch.float64))
    plain = computed(ModelPool(models, "cuda", torch.bfloat16, fused=False))
    pool = ModelPool(models, "cuda", torch.bfloat16)
    norm = pool.load("m").model.model.layers[0].post_attention_layernorm
    replaced = [kind for kind in type(norm).__mro__ if kind.__name__ == type(norm).__name__]
    assert len(replaced) == 2 or type(norm).__name__ == "OlmoLayerNorm"  # which has no weight, and no kernel
    for mine, theirs, right in zip(computed(pool), plain, exact, strict=True):
        scale = right.norm() + 1e-6
        assert (mine - right).norm() / scale < 1.5 * (theirs - right).norm() / scale + 1e-3
