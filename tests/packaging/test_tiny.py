"""The tests' own models: they load, and text survives their tokenizers."""

from __future__ import annotations

from pathlib import Path

import torch
from support.tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_characters(tiny_model_path: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    text = "48 + 17 = 65\nyes!"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 1
    assert len(ids) == 1 + len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    assert model.config.vocab_size == len(tokenizer)
    again = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "again"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_bpe(tmp_path: Path) -> None:
    text = "She sells 16 eggs, then 16 eggs more: 32 €."
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(tmp_path, texts=[text] * 20, vocab_size=300))
    ids = tokenizer(text)["input_ids"]
    assert len(ids) < len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
