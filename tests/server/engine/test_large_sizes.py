"""Whole models with the vocabularies of Qwen and Gemma and rows beyond 2,048 tokens, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gradwire_proto.v1 import training_pb2 as pb
from support.engine import LocalEngine, token_rows
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = 2049


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [151_936, 262_144])
def test_scores_gradients_and_samples_are_those_of_transformers(tmp_path: Path, vocabulary: int) -> None:
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=4096, initializer_range=0.3,
        tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    rows = [np.random.default_rng(0).integers(0, vocabulary, length).tolist() for length in (TOKENS, 3)]
    (tmp_path / "state").mkdir()
    engine = LocalEngine({"tiny": tmp_path / "model"}, tmp_path / "state")
    engine.create("run-a")
    result = engine.do(
        "run-a", token_rows(rows), forward_backward=pb.LossCall(loss_fn="causal_lm", outputs=["logprobs"])
    )
    sums, factor = engine.context.runs["run-a"].accumulator.normalised()
    expected, places = [], TOKENS + 3 - 2
    for row in rows:  # a part of the places at a time, as all logits are gigabytes
        states = model.model(torch.tensor([row])).last_hidden_state[0, :-1]
        leaf = states.detach().requires_grad_()
        for part in torch.arange(len(row) - 1).split(256):
            log_p = model.lm_head(leaf[part]).log_softmax(-1).gather(1, torch.tensor(row)[part + 1, None])[:, 0]
            (-log_p.sum() / places).backward()
            expected.append(log_p.detach())
        states.backward(leaf.grad)
    found = torch.from_numpy(result.columns["logprobs"].values.copy())
    torch.testing.assert_close(found, torch.cat(expected), atol=3e-5, rtol=1e-5)
    assert result.proto.loss.loss == pytest.approx(-float(torch.cat(expected).mean()), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(sums[name] * factor, parameter.grad, atol=1e-4 * scale, rtol=0)
    call = pb.SampleCall(n=2, max_tokens=5, temperature=1, seed=1, ignore_eos=True)
    sampled = engine.do("run-a", token_rows(rows, "prompt_ids"), sample=call)
    tokens, logprobs = (sampled.columns[name].values.reshape(4, 5) for name in ("token_ids", "logprobs"))
    for number in (0, 3):
        row = [*rows[number // 2], *tokens[number].tolist()]
        with torch.no_grad():
            logits = model.lm_head(model.model(torch.tensor([row])).last_hidden_state[0, -6:-1])
        own = logits.log_softmax(-1).gather(1, torch.tensor(row[-5:])[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(logprobs[number].copy()), own, atol=3e-5, rtol=1e-5)
