"""GGUF files, read back by transformers: the same logits and token ids as of the model that they are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire.errors import UnsupportedError
from gradwire.gguf_file import check_form, write_gguf
from support.chats import chat_model

pytest.importorskip("gguf", reason="the extra gguf is not installed")


def model_of(family: str, folder: Path) -> Path:
    """A tiny model of a family with a tokenizer of byte-level BPE; fewer heads of keys than of queries."""
    from transformers import AutoConfig, AutoModelForCausalLM

    chat_model(folder, "llama", hidden_size=64)
    given = json.loads((folder / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings",
             "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")  # fmt: skip
    config = AutoConfig.for_model(
        family, **{name: given[name] for name in sizes}, num_attention_heads=4, num_key_value_heads=2,
        head_dim=128 if family == "qwen3" else 16, tie_word_embeddings=family == "llama",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def in_q8_0(weights: torch.Tensor) -> torch.Tensor:
    """Weights as llama.cpp's Q8_0 keeps them: eight bits each, and for 32 in a row a scale of half precision."""
    rows = weights.reshape(-1, 32)
    scales = rows.abs().amax(1, keepdim=True) / 127
    exact = (rows * (1 / scales)).nan_to_num()  # a row of zeros has the scale 0
    levels = exact.sign() * (exact.abs() + 0.5).floor()  # a half goes away from zero, as by roundf of C
    return (levels * scales.half().float()).reshape(weights.shape)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow), "qwen3"])
def test_a_file_has_the_model_and_its_tokenizer(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_of(family, tmp_path / "model")
    ids = torch.arange(3, 90)[None]
    for form, stored in (("f16", torch.Tensor.half), ("q8_0", in_q8_0)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = stored(parameter.data).float()
        write_gguf(folder, tmp_path / f"{form}.gguf", form)
        read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=f"{form}.gguf", dtype=torch.float32)
        torch.testing.assert_close(read(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text, plain = "the answer is <|eot_id|> four, 12!", {"add_special_tokens": False}
    again = AutoTokenizer.from_pretrained(tmp_path, gguf_file="f16.gguf")
    assert again(text, **plain).input_ids == tokenizer(text, **plain).input_ids
    assert again.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "the family mamba are not written as GGUF; llama, mistral, qwen2, qwen3 are"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rotary frequencies scaled by llama3"),
        ({"tokenizer": {"byte_fallback": True}}, "tokenizers of the kind SentencePiece BPE"),
        ({"tokenizer": {"type": "Unigram"}}, "tokenizers of the kind Unigram"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "llama.cpp's name of the pre-tokenizer"),
    ],
)
def test_what_is_not_covered_is_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "model", "llama", hidden_size=64)
    config, tokenizer = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "tokenizer"))
    tokenizer["model"] |= change.pop("tokenizer", {})
    tokenizer["pre_tokenizer"] = change.pop("pre_tokenizer", tokenizer["pre_tokenizer"])
    (folder / "config.json").write_text(json.dumps(config | change))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedError, match=words):
        write_gguf(folder, tmp_path / "out.gguf", "f16")
    with pytest.raises(UnsupportedError, match="not in 'q4_k_m': the package gguf computes no K-quants; write f16"):
        check_form("q4_k_m")
