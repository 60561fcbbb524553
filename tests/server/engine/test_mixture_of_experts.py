"""LoRA on mixtures of experts: every linear layer and the experts, and the router only where it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.model.policy import LoraPolicy
from gradwire_server.engine.model.policy_from_config import make_policy
from gradwire_server.engine.model.pool import ModelPool
from gradwire_server.engine.state.exports import save_adapter
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.1,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "Qwen3-MoE": Qwen3MoeConfig(**SHAPE, moe_intermediate_size=16, num_experts=4, head_dim=16),
    "Mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "DeepSeek": DeepseekV3Config(
        **SHAPE, moe_intermediate_size=16, n_routed_experts=4, n_group=1, topk_group=1, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1,
    ),
}  # fmt: skip


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def make(model: Path, *targets: str, pool: ModelPool | None = None, run: str = "run-1") -> LoraPolicy:
    config = pb.RunConfig(base_model="m")
    config.lora.rank = 4
    config.lora.target_modules.extend(targets)
    policy = make_policy(pool or ModelPool({"m": str(model)}), config, run)
    assert isinstance(policy, LoraPolicy)
    return policy


def test_the_router_is_left_out_unless_it_is_named(model: Path) -> None:
    names = list(make(model).trainable_parameters())
    assert any(".experts." in name for name in names) and any(".self_attn." in name for name in names)
    assert not any(".gate." in name for name in names)
    named = list(make(model, "gate").trainable_parameters())
    assert named and all(".gate." in name for name in named)


def test_every_linear_layer_beside_the_experts_has_an_adapter(model: Path) -> None:
    pool = ModelPool({"m": str(model)})
    policy = make(model, pool=pool)
    head = policy.model.get_output_embeddings()
    linear = {name for name, layer in policy.model.named_modules() if type(layer) is nn.Linear and layer is not head}
    adapted = {name.partition(".lora_")[0] for name in policy.trainable_parameters()}
    bare = {name.removesuffix(".base_layer") for name in linear if ".lora_" not in name}
    assert bare and bare <= adapted
    assert list(make(model, pool=pool, run="run-2").trainable_parameters()) == list(policy.trainable_parameters())


def test_an_adapter_on_experts_trains_and_loads_in_plain_peft(model: Path, tmp_path: Path) -> None:
    policy, ids = make(model), torch.arange(24) % 64
    for name, parameter in policy.trainable_parameters().items():
        if "lora_B" in name:
            parameter.data.copy_(0.1 * torch.sin(torch.arange(parameter.numel())).view_as(parameter))
    states = policy.hidden(ids, torch.tensor([24]), training=True)
    states.square().mean().backward()
    assert all(each.grad is not None and each.grad.abs().max() > 0 for each in policy.trainable_parameters().values())
    (tmp_path / "adapter").mkdir()
    save_adapter(policy, tmp_path / "adapter")
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "adapter")
    with torch.no_grad():
        expected = plain.base_model.model.model(input_ids=ids[None]).last_hidden_state[0]
    assert torch.allclose(states.detach(), expected, atol=1e-4)
