"""Policies to sample from, and what plain transformers says of their samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.tokenizer_files import find_tokenizer
from support.tiny import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

PROMPTS = [[1, 40, 41, 42], [1, 5], [1, 90, 17, 33, 64, 21, 8], [1, 40, 41]]
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 2,
}

TEXTS = ["the cat sat on the mat; naïve café, \U0001f600 says the cat", '{"name": "cat", "age": 3, "tags": ["a", "b"]}']

MakePolicy = Callable[..., Policy]
FullLogprobs = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("bpe") / "bpe", texts=TEXTS, vocab_size=330)


@pytest.fixture(scope="module")
def bpe(folder: Path) -> Policy:
    return Policy(ModelPool({"bpe": str(folder)}).load("bpe"))


@pytest.fixture(scope="module")
def tokens(folder: Path) -> TextTokenizer:
    file = find_tokenizer(str(folder))
    assert file is not None
    return TextTokenizer(file)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return PROMPTS


@pytest.fixture(scope="module")
def policy(tiny_model_path: Path) -> Policy:
    """The tiny model, with opinions of a middling strength: its final norm is scaled until logits deviate by 1.5."""
    split_model = ModelPool({"tiny": str(tiny_model_path)}).load("tiny")
    with torch.no_grad():
        logits = split_model.model(input_ids=torch.tensor(PROMPTS[2:3])).logits
        split_model.model.model.norm.weight.mul_(1.5 / logits.std())
    return Policy(split_model)


@pytest.fixture
def make_policy(tmp_path: Path) -> MakePolicy:
    """``make_policy(kind, **settings)``: a small random model of that architecture."""

    def make(kind: str, **settings: Any) -> Policy:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = AutoConfig.for_model(kind, **SHAPE | settings)
            AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
        return Policy(ModelPool({"model": str(tmp_path / kind)}).load("model"))

    return make


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: Path) -> TextTokenizer:
    file = find_tokenizer(str(tiny_model_path))
    assert file is not None
    return TextTokenizer(file)


@pytest.fixture(scope="session")
def full_logprobs() -> FullLogprobs:
    """Log-probabilities by plain transformers, one sequence at a time."""

    def compute(policy: Policy, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        policy.activate()
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *tokens]])
            logits = policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)

    return compute
