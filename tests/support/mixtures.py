"""Tiny mixtures of experts of three families, from configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
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


def mixture(path: Path, name: str) -> Path:
    """Write a random model of a family as a Hugging Face folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(path)
    return path
