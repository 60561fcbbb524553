"""Training of fifteen architectures with dropout in their configurations against padded PyTorch without dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gradwire_losses.layouts import read_batch
from gradwire_losses.registry import get_loss
from gradwire_proto.v1.training_pb2 import RunConfig
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from support.engine import token_rows
from support.training import train_on

RATE = 0.1
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64}
HEADS_OF_8 = {"head_dim": 8}
SLIDING = {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": HEADS_OF_8,
    "Mistral": {"sliding_window": 6},
    "Gemma": HEADS_OF_8,
    "Gemma2": SLIDING,
    "Gemma3Text": SLIDING,
    "Phi": {"num_key_value_heads": 4},
    "Phi3": {},
    "GPT2": GPT,
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "StableLm": {},
    "Olmo2": {},
    "Granite": {},
}
ROWS = [[1, 20, 30, 40, 50, 3, 4, 5, 6, 7, 8, 9], [1, 9, 8, 7], [1, 60], [1, 2, 3, 4, 5, 6, 7, 8]]
TOLERANCE = 2e-6


def model_with_dropout(name: str, folder: Path) -> list[str]:
    """Save a random model of that architecture, and return the names of its rates, all of which are set."""
    config = getattr(transformers, f"{name}Config")(**(SIZES | ARCHITECTURES[name]))
    rates = [key for key, value in config.to_dict().items() if "drop" in key and isinstance(value, float | int)]
    for key in rates:
        setattr(config, key, RATE)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return rates


def padded_reference(folder: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """``[T]`` log-probabilities, and the gradient of their negated mean, by transformers on padded rows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    width = max(map(len, ROWS))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in ROWS])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ROWS])
    log_p = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].log_softmax(-1)
    logprobs = log_p.gather(2, ids[:, 1:, None])[..., 0][mask[:, 1:] == 1]
    (-logprobs.mean()).backward()
    return logprobs.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_is_that_of_padded_pytorch_without_dropout(name: str, tmp_path: Path) -> None:
    assert model_with_dropout(name, tmp_path), "this architecture has no dropout to switch off"
    logprobs, gradients = padded_reference(tmp_path)
    run = EngineRun(ModelPool({"m": str(tmp_path)}, "cpu"), "run-a", RunConfig(base_model="m"))
    loss, facts = get_loss("causal_lm"), run.policy.facts
    batch = read_batch(loss, token_rows(ROWS), vocab_size=facts.vocab_size, context_length=facts.context_length)
    with run.rng():
        found = train_on(
            run.policy, batch, loss, loss.config(), run.accumulator, outputs=["logprobs"], budget=Budget(1 << 20)
        )
    apart = (found.outputs["logprobs"] - logprobs).abs().max().item()
    sums, factor = run.accumulator.normalised()
    scale = max(gradient.abs().max().item() for gradient in gradients.values())
    gradient_apart = max((sums[key] * factor - theirs).abs().max().item() for key, theirs in gradients.items()) / scale
    print(f"{name}: log-probabilities {apart:.1e}, gradients {gradient_apart:.1e} of the largest")
    assert apart < 10 * TOLERANCE and gradient_apart < 10 * TOLERANCE
