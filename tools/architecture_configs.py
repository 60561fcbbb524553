"""Tiny configurations of the architectures that ``make architectures`` checks: their sizes, and what else each needs.

A configuration exercises what its family does: windows of 6 tokens, chunks of 8, and original lengths of 16, which some
of the rows that it is tried with exceed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_HEAD_DIM = {"head_dim": None}
ALL_HEADS = {"num_key_value_heads": 4}
WINDOW = {"sliding_window": 6}
MIXTURE = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1,
}  # fmt: skip
INKLING = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 6,
    "d_rel": 4, "rel_extent": 16,
}  # fmt: skip
INDEXED = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 8}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
THIRD_DENSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
MAMBA_2 = {"mamba_d_head": 8, "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    """Rotary embeddings of a kind, with an original length of 16 tokens where the kind has one."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0} | settings}


ORIGINAL = {"original_max_position_embeddings": 16}
LONG_ROPE = rope("longrope", **ORIGINAL, short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 4.0, 6.0, 8.0])
YARN = rope("yarn", **ORIGINAL, factor=4.0)

CONFIGURATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "AFMoE": ("afmoe", MIXTURE | WINDOW),
    "A.X K1": ("axk1", MIXTURE | LATENT | ALL_HEADS | THIRD_DENSE),
    "A.X K2": ("axk2", MIXTURE | LATENT | ALL_HEADS | INDEXED | THIRD_DENSE | {"gated_norm_rank": 4}),
    "Apertus": ("apertus", {}),
    "Arcee": ("arcee", YARN),
    "Aria": ("aria_text", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "Bailing hybrid": (
        "bailing_hybrid",
        MIXTURE | LATENT | ALL_HEADS | THIRD_DENSE
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "Bamba": ("bamba", MAMBA_2 | {"attn_layer_indices": [1]}),
    "BioGPT": ("biogpt", {}),
    "BitNet": ("bitnet", {}),
    "BLOOM": ("bloom", {}),
    "CodeGen": ("codegen", {"rotary_dim": 4}),
    "Cohere": ("cohere", {}),
    "Cohere 2": ("cohere2", WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "Cohere 2 MoE": ("cohere2_moe", MIXTURE | WINDOW | ALTERNATING | THIRD_DENSE),
    "Cohere Compass": (
        "cohere_compass_text",
        WINDOW
        | ALTERNATING
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
                "full_attention": None,
            },
        },
    ),
    "CTRL": ("ctrl", {"dff": 64}),
    "CWM": ("cwm", WINDOW),
    "DBRX": (
        "dbrx",
        {"d_model": 32, "n_heads": 4, "n_layers": 3, "hidden_size": None, "num_hidden_layers": None,
         "num_attention_heads": None, "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10_000.0},
         "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "DeepSeek-V2": ("deepseek_v2", MIXTURE | LATENT | ALL_HEADS),
    "DeepSeek-V3": ("deepseek_v3", MIXTURE | LATENT | ALL_HEADS),
    "DeepSeek-V3.2": ("deepseek_v32", MIXTURE | LATENT | ALL_HEADS | INDEXED),
    "DeepSeek-V4": (
        "deepseek_v4",
        MIXTURE | LATENT | WINDOW | INDEXED | {
            "num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2, "head_dim": 16,
            "partial_rotary_factor": 0.5, "qk_rope_head_dim": 8, "index_topk": 2,
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
            "mlp_layer_types": ["hash_moe", "moe", "moe"]},
    ),
    "DiffLlama": ("diffllama", {}),
    "Doge": ("doge", {}),
    "dots1": ("dots1", MIXTURE | {"first_k_dense_replace": 1}),
    "dots3": ("dots3_note_text", MIXTURE | LATENT | ALL_HEADS | THIRD_DENSE),
    "ERNIE 4.5": ("ernie4_5", {}),
    "ERNIE 4.5 MoE": ("ernie4_5_moe", MIXTURE | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}),
    "EXAONE 4": ("exaone4", WINDOW | {"sliding_window_pattern": 2}),
    "EXAONE MoE": ("exaone_moe", MIXTURE | WINDOW),
    "Falcon": ("falcon", NO_HEAD_DIM),
    "Falcon, ALiBi": ("falcon", NO_HEAD_DIM | {"alibi": True}),
    "Falcon, new decoder": ("falcon", NO_HEAD_DIM | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon-H1": ("falcon_h1", MAMBA_2 | {"mamba_d_ssm": 64}),
    "Falcon-Mamba": ("falcon_mamba", {}),
    "Flint": ("flint", MIXTURE | WINDOW | ALTERNATING | {"mlp_only_layers": [0]}),
    "FlexOlmo": ("flex_olmo", MIXTURE),
    "Gemma": ("gemma", {}),
    "Gemma 2": ("gemma2", WINDOW | {"query_pre_attn_scalar": 8}),
    "Gemma 3": ("gemma3_text", WINDOW | {"query_pre_attn_scalar": 8, "sliding_window_pattern": 2}),
    "Gemma 3n": (
        "gemma3n_text",
        WINDOW | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 2,
                  "num_hidden_layers": 4, "laurel_rank": 4, "intermediate_size": [64] * 4,
                  "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
                  "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "Gemma 4": (
        "gemma4_text",
        WINDOW | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "global_head_dim": 16},
    ),
    "Gemma 4, unified": (
        "gemma4_unified_text",
        WINDOW | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                  "per_layer_config": {"02": {"head_dim": 16}}},
    ),
    "GLM": ("glm", {}),
    "GLM-4": ("glm4", {}),
    "GLM-4 MoE": ("glm4_moe", MIXTURE | {"first_k_dense_replace": 1}),
    "GLM-4 MoE Lite": ("glm4_moe_lite", MIXTURE | LATENT | ALL_HEADS),
    "GLM MoE DSA": ("glm_moe_dsa", MIXTURE | LATENT | ALL_HEADS | INDEXED),
    "GPT-2": ("gpt2", {}),
    "GPT-BigCode": ("gpt_bigcode", {}),
    "GPT-J": ("gptj", {"rotary_dim": 4}),
    "GPT-Neo": ("gpt_neo", {"num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 6}),
    "GPT-NeoX": ("gpt_neox", {}),
    "GPT-NeoX Japanese": ("gpt_neox_japanese", {}),
    "gpt-oss": ("gpt_oss", MIXTURE | WINDOW),
    "Granite": ("granite", {}),
    "Granite MoE": ("granitemoe", MIXTURE),
    "Granite MoE, shared": ("granitemoeshared", MIXTURE | {"shared_intermediate_size": 16}),
    "Granite 4": (
        "granitemoehybrid",
        MIXTURE | MAMBA_2 | {"shared_intermediate_size": 16, "layer_types": ["mamba", "attention", "mamba"]},
    ),
    "Granite, windows": ("granite_swa", WINDOW | ALTERNATING),
    "Granite MoE, windows": ("granitemoe_swa", MIXTURE | WINDOW | ALTERNATING),
    "Helium": ("helium", {}),
    "HRM text": ("hrm_text", {"num_hidden_layers": 1, "H_cycles": 2, "L_cycles": 2, "prefix_lm": False}),
    "Hunyuan": ("hunyuan_v1_dense", {}),
    "Hunyuan, dynamic NTK": ("hunyuan_v1_dense", rope("dynamic", factor=2.0, alpha=8.0)),
    "Hunyuan MoE": ("hunyuan_v1_moe", MIXTURE | {"moe_topk": 2}),
    "Hunyuan 3": ("hy_v3", MIXTURE | THIRD_DENSE | {"num_shared_experts": 1}),
    "Hunyuan 4": (
        "hy_v4",
        MIXTURE | LATENT | ALL_HEADS | INDEXED | THIRD_DENSE | {
            "hc_mult": 2, "indexer_types": ["full", "shared", "full"],
            "layer_types": ["indexed_attention"] * 3},
    ),
    "HyperCLOVA X": ("hyperclovax", {}),
    "Inkling": ("inkling_text", MIXTURE | THIRD_DENSE | INKLING),
    "Inkling 2": (
        "inkling2_text",
        MIXTURE | INKLING | {"unpadded_vocab_size": 64, "log_scaling_n_floor": 8, "n_layers_per_attn_res_block": 2},
    ),
    "InternLM 3": ("internlm3", {}),
    "IQuest-Coder": ("iquestcoder", {}),
    "Jais 2": ("jais2", {}),
    "Jamba": (
        "jamba",
        MIXTURE | {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
                   "use_mamba_kernels": False},
    ),
    "JetMoE": ("jetmoe", MIXTURE | {"kv_channels": 8}),
    "Kimi Linear": (
        "kimi_linear",
        MIXTURE | LATENT | ALL_HEADS | {"linear_attn_config": {
            "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1, 3], "full_attn_layers": [2]}},
    ),
    "Kolibri 1": ("kolibri1", MIXTURE | WINDOW | ALTERNATING),
    "Laguna": (
        "laguna",
        MIXTURE | WINDOW | ALTERNATING | THIRD_DENSE | {"num_attention_heads_per_layer": [4, 4, 2]},
    ),
    "LFM2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "LFM2 MoE": ("lfm2_moe", MIXTURE | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}),
    "LFM3": ("lfm3", WINDOW | {"layer_types": ["conv", "full_attention", "sliding_attention"], "conv_L_cache": 3}),
    "Llama": ("llama", {}),
    "Llama, dynamic NTK": ("llama", rope("dynamic", factor=4.0)),
    "Llama, linear": ("llama", rope("linear", factor=4.0)),
    "Llama 3.1": ("llama", rope("llama3", **ORIGINAL, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    "Llama, LongRoPE": ("llama", LONG_ROPE),
    "Llama, YaRN": ("llama", YARN),
    "Llama 4": ("llama4_text", MIXTURE | {"attention_chunk_size": 8, "intermediate_size_mlp": 64, "head_dim": 8}),
    "LongCat Flash": (
        "longcat_flash",
        MIXTURE | LATENT | ALL_HEADS | {"num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16,
                                        "zero_expert_num": 2, "moe_topk": 2},
    ),
    "Mamba": ("mamba", {"state_size": 8}),
    "Mamba 2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
    "Mellum": ("mellum", MIXTURE | WINDOW | ALTERNATING | THIRD_DENSE),
    "MiMo V2 Flash": ("mimo_v2_flash", MIXTURE | WINDOW),
    "MiniCPM 3": ("minicpm3", LATENT | ALL_HEADS | {"dim_model_base": 32}),
    "MiniMax": ("minimax", MIXTURE | {"block_size": 8}),
    "MiniMax M2": ("minimax_m2", MIXTURE | {"rotary_dim": 4}),
    "MiniMax M3": (
        "minimax_m3_vl_text",
        MIXTURE | {"rotary_dim": 4, "dense_intermediate_size": 64, "shared_intermediate_size": 16,
                   "mlp_layer_types": ["dense", "sparse", "sparse"], "index_n_heads": 2, "index_head_dim": 8,
                   "index_block_size": 4, "index_topk_blocks": 2,
                   "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"]},
    ),
    "Ministral": ("ministral", WINDOW),
    "Ministral 3": ("ministral3", {}),
    "Mistral": ("mistral", WINDOW),
    "Mixtral": ("mixtral", MIXTURE),
    "ModernBERT decoder": ("modernbert-decoder", {"local_attention": 12}),
    "MPT": ("mpt", {}),
    "nanochat": ("nanochat", {}),
    "Nemotron": ("nemotron", {}),
    "Nemotron-H": (
        "nemotron_h",
        MIXTURE | {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
                   "layer_types": ["mamba", "attention", "moe"], "moe_shared_expert_intermediate_size": 16},
    ),
    "OLMo": ("olmo", {}),
    "OLMo, clipped": ("olmo", {"clip_qkv": 1.0}),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", WINDOW),
    "OLMo hybrid": ("olmo_hybrid", DELTA),
    "OLMoE": ("olmoe", MIXTURE),
    "GPT": ("openai-gpt", {}),
    "OPT": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "Persimmon": ("persimmon", {}),
    "Phi": ("phi", {}),
    "Phi-3": ("phi3", WINDOW),
    "Phi-3, LongRoPE": ("phi3", LONG_ROPE | ORIGINAL),
    "Phi-MoE": ("phimoe", MIXTURE),
    "Phi-MoE, LongRoPE": (
        "phimoe",
        MIXTURE | ORIGINAL
        | {"rope_parameters": LONG_ROPE["rope_parameters"] | {"short_mscale": 1.2, "long_mscale": 1.3}},
    ),
    "Qwen2": ("qwen2", {}),
    "Qwen2, windows": ("qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "Qwen2 MoE": ("qwen2_moe", MIXTURE),
    "Qwen3": ("qwen3", {}),
    "Qwen3 MoE": ("qwen3_moe", MIXTURE),
    "Qwen3-Next": ("qwen3_next", MIXTURE | DELTA),
    "Qwen3.5": ("qwen3_5_text", DELTA),
    "Qwen3.5 MoE": ("qwen3_5_moe_text", MIXTURE | DELTA),
    "Qwen4 (experimental)": (
        "qwen4_exp_text",
        MIXTURE | DELTA
        | {"hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8,
           "indexer_budget": 8, "indexer_compress_ratio": 2, "ple_layer_ids": [1], "ple_embed_dim": 32,
           "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8,
           "split_ngram_parts": 2},
    ),
    "RecurrentGemma": ("recurrent_gemma", {"lru_width": 32, "attention_window_size": 6}),
    "RWKV": ("rwkv", {"attention_hidden_size": 32}),
    "Seed-OSS": ("seed_oss", {}),
    "SmolLM3": ("smollm3", {}),
    "Solar Open": ("solar_open", MIXTURE),
    "StableLM": ("stablelm", {}),
    "StarCoder2": ("starcoder2", WINDOW),
    "VaultGemma": ("vaultgemma", WINDOW | {"query_pre_attn_scalar": 8}),
    "XGLM": ("xglm", {"ffn_dim": 64}),
    "xLSTM": ("xlstm", {"chunkwise_kernel": "chunkwise--native_autograd", "chunk_size": 8, "num_heads": 2,
                        "qk_dim_factor": 1.0}),
    "Youtu": ("youtu", LATENT | ALL_HEADS),
    "ZAYA": ("zaya", MIXTURE | {"router_hidden_size": 16, "num_experts_per_tok": 1, "layer_types": ["hybrid"] * 3}),
    "Zamba": (
        "zamba",
        {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 8,
         "mamba_dt_rank": 4, "n_mamba_heads": 2, "use_mamba_kernels": False, "attention_head_dim": 16,
         "attention_hidden_size": 64},
    ),
    "Zamba 2": (
        "zamba2",
        {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 8,
         "mamba_headdim": 8, "n_mamba_heads": 8, "chunk_size": 8, "mamba_ngroups": 1, "use_mamba_kernels": False,
         "attention_head_dim": 16, "attention_hidden_size": 64, "adapter_rank": 4, "num_mem_blocks": 1},
    ),
}  # fmt: skip
