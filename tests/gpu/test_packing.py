"""Packed sequences and shared prefixes on a CUDA device: the varlen kernel against padded rows and plain attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gradwire_server.engine.model.attention.varlen import LONG, long_kernel, varlen_kernel
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.packing import Packing, arrange
from gradwire_server.engine.model.split_model import SplitModel
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LENGTHS, GROUPS = [70, 90, 40, 41, 33, 33, 33, 120, 120, 64, 80], [2, 1, 4, 2, 2]


@pytest.fixture(params=[LlamaConfig, MistralConfig])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = request.param(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2 * LONG,
        initializer_range=0.2,
    )
    if isinstance(config, MistralConfig):
        config.sliding_window = 32
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def states_and_gradient(split_model: SplitModel, packing: Packing) -> tuple[Tensor, Tensor]:
    generator, lengths = torch.Generator().manual_seed(0), torch.tensor(LENGTHS)
    parts, number = [], 0
    for size in GROUPS:
        beginning = torch.randint(64, (30,), generator=generator)
        for _ in range(size):
            parts += [beginning, torch.randint(64, (LENGTHS[number] - 30,), generator=generator)]
            number += 1
    arranged = arrange(packing, torch.cat(parts), lengths, torch.tensor(GROUPS))
    states = split_model.states(arranged).float()[arranged.places.to(split_model.device)]
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1)).to(states.device)
    (gradient,) = torch.autograd.grad((states * weights).sum(), split_model.model.get_input_embeddings().weight)
    return states.detach().cpu(), gradient.float().cpu()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_and_shared_are_as_near_to_float64_as_padded(path: Path, dtype: torch.dtype) -> None:
    exact = states_and_gradient(ModelPool({"m": str(path)}, "cpu", torch.float64).load("m"), Packing.PADDED)
    split_model = ModelPool({"m": str(path)}, "cuda", dtype).load("m")
    assert split_model.packing is Packing.SHARED
    padded = states_and_gradient(split_model, Packing.PADDED)
    for packing in (Packing.PACKED, Packing.SHARED):
        for mine, theirs, expected in zip(states_and_gradient(split_model, packing), padded, exact, strict=True):
            assert relative_error(mine, expected) < 1.5 * relative_error(theirs, expected) + 1e-6


def test_half_precision_uses_a_varlen_kernel() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")
    assert varlen_kernel(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16) is not None


def test_long_sequences_are_as_near_to_float64_as_padded(path: Path) -> None:
    lengths = torch.tensor([LONG + 37, LONG])
    ids = torch.randint(64, (int(lengths.sum()),), generator=torch.Generator().manual_seed(0))

    def states(device: str, kind: torch.dtype, packing: Packing) -> Tensor:
        arranged = arrange(packing, ids, lengths)
        with torch.no_grad():
            computed = ModelPool({"m": str(path)}, device, kind).load("m").states(arranged)
        return computed[arranged.places.to(computed.device)].double().cpu()

    exact, padded = states("cpu", torch.float64, Packing.PADDED), states("cuda", torch.bfloat16, Packing.PADDED)
    alone = states("cuda", torch.bfloat16, Packing.PACKED)
    assert relative_error(alone, exact) < 1.5 * relative_error(padded, exact) + 1e-6


def test_hopper_computes_long_sequences_by_cudnn() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN's attention is used from compute capability 9.0 on")
    assert long_kernel(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16) is not None
