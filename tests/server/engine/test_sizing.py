"""Memory computed from a configuration, against tensors that are really made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.layers.activations import Activations
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.policy_from_config import make_policy
from gradwire_server.engine.scoring.memory import ActivationMeter, measured_image_bytes
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.sizing import meta_model
from gradwire_server.engine.sizing.advice import advice, longest_row, more_runs
from gradwire_server.engine.sizing.estimate import Device, Estimate, Workload, estimate
from gradwire_server.engine.sizing.meta_model import MODEL, MetaModel, MetaPool
from gradwire_server.engine.sizing.meta_step import step_bytes
from gradwire_server.engine.sizing.parts import GIB, trained_bytes
from support.mixtures import CONFIGS, mixture
from support.tiny import tiny_model
from support.vision import vision_model
from transformers import BertConfig, Gemma3TextConfig, MambaConfig

LAYERS, HIDDEN = 5, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return tiny_model(path, num_layers=LAYERS, hidden_size=HIDDEN, context_length=1 << 17)


def run_config(**settings: Any) -> pb.RunConfig:
    rank = settings.pop("rank", 0)
    config = pb.RunConfig(base_model=MODEL, **settings)
    if rank:
        config.lora.rank = rank
    return config


def real_policy(model: Path, config: pb.RunConfig) -> Policy:
    return make_policy(ModelPool({MODEL: str(model)}), config, "run")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rank", [0, 8])
def test_activations_on_meta_tensors_are_those_that_autograd_really_saves(
    model: Path, rank: int, checkpointing: bool
) -> None:
    config = run_config(rank=rank, gradient_checkpointing=checkpointing)
    policy, tokens = real_policy(model, config), 128
    meter = ActivationMeter(policy)
    with meter:
        policy.hidden(torch.zeros(tokens, dtype=torch.int64), torch.tensor([tokens]), training=True)
    activations = Activations.RECOMPUTE if checkpointing else Activations.KEEP
    computed = MetaModel(str(model), torch.float32, config).step(1, tokens, {"logprobs"}, Budget(), activations)
    # Masks and positions of a few bytes a token are not on meta tensors. What is alive and not saved are the result and
    # a state of the last layer.
    states = tokens * HIDDEN * 4
    assert 0.97 * meter.bytes <= computed["activations"] <= meter.bytes + 2 * states


@pytest.mark.long
def test_a_run_holds_what_is_computed(model: Path) -> None:
    for config in (run_config(rank=8), run_config(head="reward"), run_config(rank=4, head="value")):
        policy, meta = real_policy(model, config), MetaModel(str(model), torch.float32, config)
        assert meta.trained_parameters == policy.num_trainable_parameters
        assert meta.adapter_bytes == sum(each.nbytes for each in policy.masters().values())
        assert meta.weight_bytes == policy.split_model.weight_bytes - buffer_bytes(policy)


@pytest.mark.parametrize(
    "settings",
    [{}, {"rank": 4}, {"rank": 4, "targets": {"Mixtral": ["w1", "w3"]}}],
    ids=["full", "lora", "lora on experts"],
)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_mixture_of_experts_is_computed_on_meta_tensors(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """Weights, what a run holds, and what autograd saves, with experts in grouped products."""
    path = mixture(tmp_path / "model", name)
    config, tokens = run_config(rank=settings.get("rank", 0)), 64
    if "targets" in settings:
        config.lora.target_modules.extend([*settings["targets"].get(name, ["gate_proj", "up_proj"]), "o_proj"])
    policy, meta = real_policy(path, config), MetaModel(str(path), torch.float32, config)
    assert meta.trained_parameters == policy.num_trainable_parameters
    assert meta.weight_bytes == policy.split_model.weight_bytes - buffer_bytes(policy)
    for activations in (Activations.KEEP, Activations.RECOMPUTE):
        meter = ActivationMeter(policy)
        with meter:
            ids = torch.arange(tokens) % 64
            policy.hidden(ids, torch.tensor([tokens]), training=True, activations=activations)
        computed = meta.step(1, tokens, {"logprobs"}, Budget(), activations)
        assert 0.95 * meter.bytes <= computed["activations"] <= 1.05 * meter.bytes + 2 * tokens * 32 * 4


def buffer_bytes(policy: Policy) -> int:
    return sum(buffer.nbytes for buffer in policy.model.buffers())


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 16), (torch.bfloat16, 18), (torch.float64, 32)])
def test_a_trained_weight_has_a_master_a_gradient_and_two_moments(dtype: torch.dtype, count: int) -> None:
    assert trained_bytes(dtype) == count


@pytest.mark.parametrize("checkpointing", [False, True])
def test_few_layers_tell_the_bytes_of_all(model: Path, checkpointing: bool) -> None:
    config = run_config(rank=8)
    pool = MetaPool({MODEL: str(model)}, torch.float32)
    policy = make_policy(pool, run_config(rank=8, gradient_checkpointing=checkpointing), "run")
    whole = step_bytes(policy, 2, 64, {"logprobs"}, Budget())
    activations = Activations.RECOMPUTE if checkpointing else Activations.KEEP
    found = MetaModel(str(model), torch.float32, config).step(2, 64, {"logprobs"}, Budget(), activations)
    assert sum(found.values()) == pytest.approx(whole.peak, rel=1e-6)


@pytest.mark.slow
def test_many_parts_of_logits_do_not_shorten_what_has_few(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number for the one budget is found from short rows, as for code that loops over the tokens."""
    monkeypatch.setattr(meta_model, "MOST_OPERATIONS", 1000)
    other, few = MetaModel(str(model), torch.float32, run_config(rank=8)), Budget()
    other.step(1, 64, {"logprobs"}, Budget(logits_elements=16), Activations.KEEP)
    alone = MetaModel(str(model), torch.float32, run_config(rank=8))
    steps = [each.step(1, 64, {"logprobs"}, few, Activations.KEEP) for each in (other, alone)]
    assert steps[0] == steps[1]
    assert other._walks and not alone._walks


def test_a_model_with_layers_of_several_kinds_is_counted_whole(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(tmp_path)
    found = estimated(tmp_path, lora_rank=4, tokens=32)
    assert found.num_parameters > 0 and found.parts["activations"] > 0


def estimated(model: Path, device: Device | None = None, **settings: Any) -> Estimate:
    settings = {"dtype": torch.float32, "tokens": 64, "rows": 4} | settings
    return estimate(Workload(str(model), **settings), device or Device("cpu", 8 * GIB))


@pytest.mark.long
def test_each_part_grows_with_what_it_is_for(model: Path) -> None:
    one = estimated(model)
    assert one.total_bytes == sum(one.parts.values())
    assert one.parts["weights"] == 4 * one.num_parameters
    many = estimated(model, runs=5)
    for name in ("adapters", "gradients", "moments"):
        assert many.parts[name] == 5 * one.parts[name] > 0
    assert many.parts["weights"] == one.parts["weights"]
    full = estimated(model, lora_rank=0, references=("base", str(model)))
    assert full.parts["references"] == 2 * full.parts["weights"]
    assert sum(full.parts[name] for name in ("weights", "masters", "gradients", "moments")) == 16 * full.num_parameters
    low = estimated(model, lora_rank=0, dtype=torch.bfloat16)
    assert sum(low.parts[name] for name in ("weights", "masters", "gradients", "moments")) == 18 * full.num_parameters
    sampling = estimated(model, samples=3)
    assert sampling.parts["key_values"] == 3 * 64 * 2 * LAYERS * 64 * 4  # keys and values of as many heads as queries
    assert sampling.parts["known"] == GIB - sampling.parts["key_values"] and not one.parts["known"]
    assert estimated(model, samples=10**5).parts["known"] == 0
    assert estimated(model, tokens=128).parts["activations"] == pytest.approx(2 * one.parts["activations"], rel=0.05)
    assert one.activations[True] < one.activations[False] == one.parts["activations"]


@pytest.mark.slow  # twenty estimates
def test_the_advice_is_what_the_estimate_then_confirms(model: Path) -> None:
    fits = estimated(model, Device("cuda", 2 * GIB), dtype=torch.bfloat16)
    assert fits.fits and advice(fits)[0].startswith("It fits")
    longest, more = longest_row(fits), more_runs(fits)
    assert longest > 64 and more > 0
    assert estimated(model, Device("cuda", 2 * GIB), dtype=torch.bfloat16, runs=1 + more).fits
    assert not estimated(model, Device("cuda", 2 * GIB), dtype=torch.bfloat16, runs=20 + 2 * more).fits
    many = estimated(model, Device("cuda", 2 * GIB), dtype=torch.bfloat16, runs=10 * more)
    fewer = re.fullmatch(r"It fits with (\d+) runs instead of [\d,]+: .*", advice(many)[1])
    assert fewer is not None and 0.9 * more <= int(fewer[1]) <= 1.1 * more
    assert estimated(model, Device("cuda", 2 * GIB), dtype=torch.bfloat16, runs=int(fewer[1])).fits
    small = Device("cuda", fits.needed_bytes)
    sentences = advice(estimated(model, small, dtype=torch.bfloat16, lora_rank=0, tokens=2048))
    assert sentences[0].startswith("It does not fit") and len(sentences) == 2


def test_no_row_is_advised_that_is_longer_than_the_context(tmp_path: Path) -> None:
    found = estimated(tiny_model(tmp_path / "short", context_length=128), tokens=32)
    assert longest_row(found) > 128
    assert "A row may have up to about 128 tokens." in advice(found)
    assert not any("A row may" in each for each in advice(replace(found, workload=replace(found.workload, tokens=128))))


@pytest.mark.long
def test_a_model_without_attention_is_estimated_and_one_that_sees_all_tokens_is_named(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 6}
    MambaConfig(**shape, state_size=8).save_pretrained(tmp_path / "mamba")
    found = estimated(tmp_path / "mamba", lora_rank=0, samples=2)
    assert found.parts["activations"] > 0 == found.parts["key_values"]
    BertConfig(**shape, num_attention_heads=2, intermediate_size=64).save_pretrained(tmp_path / "bert")
    with pytest.raises(OperationError, match="tokens attend to later ones"):
        estimated(tmp_path / "bert", lora_rank=0)


@pytest.mark.slow  # 16,384 tokens, a chunk after another
def test_a_long_row_fits_because_the_server_recomputes_it(model: Path) -> None:
    fits = estimated(model, Device("cpu", int(0.98 * GIB)), tokens=16_384)
    assert fits.chosen == Activations.RECOMPUTE | Activations.CHUNK
    kept = fits.needed_bytes - fits.parts["activations"] + fits.activations[False]
    assert fits.fits and kept > fits.usable_bytes
    assert any("recomputes them in the backward pass and computes feed-forward layers" in each for each in advice(fits))
    always = estimated(model, Device("cpu", 8 * GIB), tokens=256, checkpointing=True)
    assert always.chosen == Activations.RECOMPUTE and always.parts["activations"] == always.activations[True]


@pytest.mark.long
def test_logits_are_all_kept_or_12_bytes_a_token(model: Path) -> None:
    """The vocabulary has 100 tokens; the scored id, its log-probability and its place are kept whatever there is."""
    tokens, every = 60_000, 4 * 59_999 * 100
    fits = estimated(model, Device("cuda", 8 * GIB), tokens=tokens)
    assert fits.parts["logits"] == every + 12 * 59_999
    assert f"keep the logits of such rows for the backward pass: {every / 2**20:.1f} MiB" in " ".join(advice(fits))
    tight = estimated(model, Device("cuda", int(1.3 * GIB)), tokens=tokens)
    assert tight.parts["logits"] == 12 * 59_999
    assert "computes them again in the backward pass" in " ".join(advice(replace(fits, parts=tight.parts)))


@pytest.mark.long
def test_a_micro_batch_has_as_many_rows_as_the_engine_would_choose(model: Path) -> None:
    found = estimated(model, tokens=200, rows=64)
    assert found.microbatch_rows == found.budget.microbatch_tokens // 200
    assert estimated(model, tokens=4096).microbatch_rows == 1


@pytest.mark.long
def test_tokens_that_rows_share_are_counted_once(model: Path) -> None:
    flat, shared = (estimated(model, tokens=200, rows=8, shared_tokens=count) for count in (0, 120))
    assert flat.microbatch_rows == shared.microbatch_rows == 8
    ratio = shared.parts["activations"] / flat.parts["activations"]
    assert ratio == pytest.approx((120 + 8 * 80) / (8 * 200), rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_vl", "smolvlm"])
def test_the_vision_part_is_counted_as_the_engine_counts_it(tmp_path: Path, kind: str) -> None:
    path = vision_model(tmp_path / kind, kind)
    for config in (run_config(), run_config(rank=4)):
        policy, meta = real_policy(path, config), MetaModel(str(path), torch.float32, config)
        assert meta.trained_parameters == policy.num_trainable_parameters
        for recompute in (False, True):
            expected = measured_image_bytes(policy, recompute=recompute)
            # On meta tensors attention may be computed with its matrix, 64 by 64 for the patches of the measurement.
            assert expected <= meta.image_bytes(recompute=recompute) <= 1.5 * expected
    text, images = (estimated(path, lora_rank=0, tokens=100, image_tokens=count) for count in (0, 60))
    assert text.parts["images"] == 0 < images.parts["images"]
    assert images.total_bytes > text.total_bytes
    frozen = estimated(path, lora_rank=4, tokens=100, image_tokens=60)
    assert frozen.parts["images"] / frozen.microbatch_rows < images.parts["images"] / images.microbatch_rows


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tokens": 257}, "tokens"),
        ({"tokens": 60, "image_tokens": 60}, "image_tokens"),
        ({"tokens": 60, "shared_tokens": 60}, "shared_tokens"),
        ({"quantize": "nf4", "lora_rank": 4}, "quantize"),
        ({"references": ("/no/such/model",)}, "reference"),
    ],
)
def test_what_the_server_would_refuse_is_not_estimated(tmp_path: Path, settings: dict[str, Any], field: str) -> None:
    path = vision_model(tmp_path / "smolvlm", "smolvlm")
    with pytest.raises(OperationError) as refused:
        estimated(path, **settings)
    assert refused.value.field == field


def test_a_model_of_text_has_no_image_tokens(model: Path) -> None:
    with pytest.raises(OperationError, match="models that take them"):
        estimated(model, image_tokens=4)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without the sentence of transformers about a name that peft uses."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield
