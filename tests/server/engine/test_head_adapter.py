"""LoRA on the output head: scores, gradients and samples are those of peft's own forward in float64."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gradwire_losses.layouts import read_batch
from gradwire_losses.registry import get_loss
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.split_model import HeadAdapter, OutputHead
from gradwire_server.engine.scoring.divergence import score_divergence
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.scoring.token_scores import score_tokens, token_logits
from gradwire_server.engine.state.engine_run import EngineRun
from peft import LoraConfig, get_peft_model
from support.engine import LocalEngine, token_rows
from support.plain_peft import with_adapter
from support.training import train_on
from transformers import AutoModelForCausalLM

T, H, V, R = 13, 8, 21, 3
WHOLE = Budget(microbatch_tokens=10**6, activation_bytes=1 << 40)
SMALL = Budget(microbatch_tokens=9, activation_bytes=0, logits_elements=3 * 64)
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
GEMMA = {"tie_word_embeddings": True, "sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen3": {"tie_word_embeddings": True, "head_dim": 8},
    "Gemma2": {**GEMMA, "final_logit_softcapping": 5.0},
    "Granite": {"tie_word_embeddings": True, "logits_scaling": 2.0},
    "Phi": {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "GPTNeoX": {"tie_word_embeddings": False},
}
"""Untied and tied heads, with a soft cap, a scale, a bias, and one that is not named lm_head."""
ROWS = [[1, 20, 30, 40, 50, 3, 4, 5], [1, 9, 8, 7], [1, 60]]


def saved_model(name: str, folder: Path) -> Path:
    config = getattr(transformers, f"{name}Config")(**(SIZES | MODELS[name]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).double().save_pretrained(folder)
    return folder


def moved(run: EngineRun) -> EngineRun:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for master in run.policy.masters().values():
            master.add_(torch.randn(master.shape, generator=generator, dtype=master.dtype), alpha=0.05)
    run.policy.sync()
    return run


def peft_model(folder: Path, run: EngineRun) -> torch.nn.Module:
    """The run's adapter in peft, on plain transformers."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    head = next(name for name, module in base.named_modules() if module is base.get_output_embeddings())
    targets = {name.partition(".lora_")[0] for name in run.policy.trainable_parameters()}
    assert head in targets
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        model = get_peft_model(
            base,
            LoraConfig(r=4, lora_alpha=6, target_modules=sorted(targets), task_type="CAUSAL_LM"),
            autocast_adapter_dtype=False,
        )
    own = dict(model.named_parameters())
    for name, tensor in run.policy.state_tensors().items():
        place = own["base_model.model." + name.replace(".weight", ".default.weight")]
        with torch.no_grad():
            place.copy_(tensor)
    return model


def plain_logprobs(model: torch.nn.Module) -> torch.Tensor:
    rows = [
        model(input_ids=torch.tensor([row]), use_cache=False)
        .logits[0, :-1]
        .log_softmax(-1)
        .gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        for row in ROWS
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("budget", [WHOLE, SMALL], ids=["whole", "small"])
@pytest.mark.parametrize("name", MODELS)
def test_training_has_pefts_gradients_in_float64(name: str, budget: Budget, tmp_path: Path) -> None:
    folder = saved_model(name, tmp_path / "model")
    pool = ModelPool({"tiny": str(folder)}, dtype=torch.float64)
    settings = pb.LoraSettings(rank=4, alpha=6, target_modules=["all-linear", "lm_head"])
    run = moved(EngineRun(pool, "run-a", pb.RunConfig(base_model="tiny", lora=settings)))
    batch = read_batch(get_loss("causal_lm"), token_rows(ROWS), vocab_size=64, context_length=64)
    config = get_loss("causal_lm").config()
    found = train_on(run.policy, batch, get_loss("causal_lm"), config, run.accumulator, budget=budget)
    reference = peft_model(folder, run)
    expected = -plain_logprobs(reference).mean()
    assert found.loss == pytest.approx(expected.item(), rel=1e-6)  # losses are reported in float32
    expected.backward()
    gradients, factor = run.accumulator.normalised()
    theirs = {
        each.removeprefix("base_model.model.").replace(".default.", "."): parameter.grad
        for each, parameter in reference.named_parameters()
        if parameter.grad is not None
    }
    assert gradients.keys() == theirs.keys()
    for each, gradient in gradients.items():
        # Norms of transformers compute in float32 whatever the weights, and so does the loss in its scores.
        torch.testing.assert_close(gradient * factor, theirs[each], rtol=0, atol=1e-5 * float(theirs[each].abs().max()))
    run.close()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kept", [0, T * V])
@pytest.mark.parametrize("chunk_elements", [1, 3 * V, 10**6])
def test_scores_equal_plain_softmax(softcap: float | None, kept: int, chunk_elements: int) -> None:
    torch.manual_seed(0)
    hidden, weight, bias, a, b = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((T, H), (V, H), (V,), (R, H), (V, R))
    )
    ids = torch.randint(V, (T, 2))
    head = OutputHead(weight, bias, 1.5, softcap, adapter=HeadAdapter(a, b, 0.7))
    merged = OutputHead(weight + 0.7 * b @ a, bias, 1.5, softcap)
    settings: Any = {"temperature": 0.8, "entropy": True, "mean_logprobs": True, "collision": True}
    settings |= {"chunk_elements": chunk_elements, "kept_elements": kept}
    ours, theirs = (score_tokens(hidden, each, ids, **settings) for each in (head, merged))
    torch.testing.assert_close(ours.collision, theirs.collision)
    torch.testing.assert_close(token_logits(hidden, head), token_logits(hidden, merged))
    teacher = torch.randn(T, H, dtype=torch.float64)
    found, expected = (
        [
            *(scores.logprobs, scores.entropy, scores.mean_logprobs),
            score_divergence(hidden, each, teacher, each, beta=0.3, chunk_elements=chunk_elements),
        ]
        for scores, each in ((ours, head), (theirs, merged))
    )
    upstream = [torch.randn_like(score) for score in found]
    parameters = (hidden, weight, bias, a, b)
    gradients = torch.autograd.grad(found, parameters, upstream)
    reference = torch.autograd.grad(expected, parameters, upstream)
    for mine, other in zip([*found, *gradients], [*expected, *reference], strict=True):
        torch.testing.assert_close(mine, other)


BATCH = token_rows(ROWS)
LORA = {"rank": 4, "alpha": 6.0, "target_modules": ["q_proj", "lm_head"]}


@pytest.mark.parametrize("asked", ["peft", "merged"])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("Llama", ["q_proj", "lm_head"]),
        ("Qwen3", ["q_proj", "lm_head"]),
        ("Llama", ["embed_tokens"]),
        ("Qwen3", ["embed_tokens"]),
        ("Qwen3", ["all-linear", "embed_tokens"]),
        ("Qwen3", ["embed_tokens", "lm_head"]),
    ],
)
def test_an_export_has_the_runs_logprobs(name: str, targets: list[str], asked: str, tmp_path: Path) -> None:
    folder = saved_model(name, tmp_path / "model")
    engine = LocalEngine({"tiny": folder}, tmp_path / "state")
    engine.create("run-other", lora=2, seed=5)  # another adapter on the same model, not on its head
    engine.create("run-a", lora=LORA | {"target_modules": targets})
    for _ in range(3):
        engine.train("run-a", BATCH, 3e-2)
        engine.train("run-other", BATCH)
    expected = engine.logprobs("run-a", BATCH)
    engine.do("run-a", export=pb.ExportModel(name="out", format=asked))
    out = tmp_path / "state" / "runs" / "run-a" / "exports" / "out"
    if asked == "peft":
        model: Any = with_adapter(folder, out)
    else:
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for module, own, theirs in (
            ("embed_tokens", model.get_input_embeddings(), base.get_input_embeddings()),
            ("lm_head", model.get_output_embeddings(), base.get_output_embeddings()),
        ):
            learned = (own.weight - theirs.weight).abs().max()
            assert learned > 1e-3 if module in targets else learned == 0, module
    with torch.no_grad():
        np.testing.assert_allclose(plain_logprobs(model.eval()).numpy(), expected, atol=1e-5)
    assert not np.allclose(expected, engine.logprobs("run-a", BATCH, model="base"), atol=1e-2)


def test_dropout_and_a_checkpoint_reach_the_head(tmp_path: Path) -> None:
    engine = LocalEngine({"tiny": saved_model("Qwen3", tmp_path / "model")}, tmp_path / "state")
    losses = {}
    for run_id, dropout in (("run-a", 0.3), ("run-same", 0.3), ("run-none", 0.0)):
        engine.create(run_id, lora={**LORA, "target_modules": ["lm_head"], "dropout": dropout}, seed=2)
        losses[run_id] = [engine.train(run_id, BATCH, 3e-2)[0] for _ in range(3)]
    assert losses["run-a"] == losses["run-same"]
    assert losses["run-a"][0] == pytest.approx(losses["run-none"][0])  # B starts at zero
    assert losses["run-a"][2] != pytest.approx(losses["run-none"][2])
    expected = engine.logprobs("run-a", BATCH)
    assert np.array_equal(engine.logprobs("run-a", BATCH), expected)
    engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="one"))
    engine.train("run-a", BATCH, 3e-2)
    assert not np.allclose(engine.logprobs("run-a", BATCH), expected, atol=1e-3)
    assert np.array_equal(engine.logprobs("run-same", BATCH, model="run-a/one"), expected)
    engine.do("run-a", load_checkpoint=pb.LoadCheckpoint(checkpoint="run-a/one"))
    assert np.array_equal(engine.logprobs("run-a", BATCH), expected)
