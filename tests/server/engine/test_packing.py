"""Packed and prefix-sharing forwards: the states and gradients of padded ones, to rounding, and nothing across."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gradwire_server.engine.model.attention import packed
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.packing import Layout, Packing, arrange, lay_out
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.prefix_tree import MIN_PART, MIN_SAVED, branches
from gradwire_server.engine.model.split_model import SplitModel
from torch import Tensor

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
Load = Callable[..., SplitModel]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """``load("Llama", float64, **config)``: a random model of that architecture, through the host."""

    def load(name: str = "Llama", dtype: torch.dtype = torch.float64, **settings: Any) -> SplitModel:
        config_name = {"Gemma3": "Gemma3Text"}.get(name, name)
        config = getattr(transformers, f"{config_name}Config")(**(SIZES | settings))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config)
            model.save_pretrained(tmp_path / "model")
        return ModelPool({"m": str(tmp_path / "model")}, dtype=dtype).load("m")

    return load


def ragged(generator: torch.Generator, lengths: list[int], group_sizes: list[int], common: int) -> tuple[Tensor, ...]:
    """Sequences that begin with the same ``common`` tokens within each group, and differ in the next."""
    parts, number = [], 0
    for size in group_sizes:
        beginning = torch.randint(64, (common,), generator=generator)
        for index in range(size):
            rest = torch.randint(64, (lengths[number] - common,), generator=generator)
            rest[:1] = index
            parts.append(torch.cat([beginning, rest]))
            number += 1
    return torch.cat(parts), torch.tensor(lengths), torch.tensor(group_sizes)


def states_and_gradients(
    split_model: SplitModel, packing: Packing, input_ids: Tensor, lengths: Tensor, group_sizes: Tensor
) -> dict[str, Tensor]:
    arranged = arrange(packing, input_ids, lengths, group_sizes)
    states = split_model.states(arranged)[arranged.places]
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = dict(split_model.trunk.named_parameters())
    gradients = torch.autograd.grad((states * weights).sum(), list(parameters.values()))
    return {"states": states.detach(), **dict(zip(parameters, gradients, strict=True))}


LENGTHS, GROUPS = [70, 90, 40, 41, 33, 33, 33, 120, 120, 64, 80], [2, 1, 4, 2, 2]

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"num_key_value_heads": 4, "head_dim": 8}),
    ("Qwen3", {"head_dim": 16}),
    ("Mistral", {"sliding_window": 32}),
    ("Qwen2", {"sliding_window": 48, "use_sliding_window": True, "max_window_layers": 1}),
    (
        "Gemma3",
        {
            "sliding_window": 24,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("Granite", {"attention_multiplier": 0.3}),
    ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256}),
]


@pytest.mark.parametrize(("name", "settings"), MODELS, ids=lambda value: value if isinstance(value, str) else "")
def test_packed_and_shared_are_the_padded_ones(load: Load, name: str, settings: dict[str, Any]) -> None:
    split_model = load(name, **settings)
    assert split_model.packing is Packing.SHARED
    inputs = ragged(torch.Generator().manual_seed(0), LENGTHS, GROUPS, common=30)
    expected = states_and_gradients(split_model, Packing.PADDED, *inputs)
    for packing in (Packing.PACKED, Packing.SHARED):
        found = states_and_gradients(split_model, packing, *inputs)
        for key, values in expected.items():
            # GPT-2 is float64 throughout; RMSNorm computes in float32 whatever it is given.
            tolerance = (1e-9 if key == "states" or name == "GPT2" else 1e-5) * values.abs().max().item()
            torch.testing.assert_close(found[key], values, atol=tolerance, rtol=0, msg=lambda m, k=key: f"{k}: {m}")


def test_attention_with_masks_is_the_blocks(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    split_model = load()
    inputs = ragged(torch.Generator().manual_seed(0), LENGTHS, GROUPS, common=30)
    blocks = states_and_gradients(split_model, Packing.SHARED, *inputs)

    def masked(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, **_: bool) -> Tensor:
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        return packed.masked_attention(q, k, v, layout.masked, scale)[None]

    monkeypatch.setattr(packed, "in_blocks", masked)
    for key, values in states_and_gradients(split_model, Packing.SHARED, *inputs).items():
        torch.testing.assert_close(values, blocks[key], atol=1e-5 * values.abs().max().item(), rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("packing", [Packing.PACKED, Packing.SHARED])
@torch.no_grad()
def test_a_sequence_sees_nothing_of_the_others(load: Load, packing: Packing, dtype: torch.dtype) -> None:
    split_model = load(dtype=dtype, head_dim=32)
    input_ids, lengths, group_sizes = ragged(torch.Generator().manual_seed(0), LENGTHS, GROUPS, common=30)
    assert split_model.packing is Packing.SHARED

    def states(ids: Tensor) -> tuple[Tensor, ...]:
        arranged = arrange(packing, ids, lengths, group_sizes)
        return split_model.states(arranged)[arranged.places].split(LENGTHS)

    before = states(input_ids)
    for changed in (0, 2, 5, 10):
        other = input_ids.clone()
        of_changed = other.split(LENGTHS)[changed]
        of_changed[31:] = 63 - of_changed[31:]
        after = states(other)
        assert not torch.allclose(after[changed], before[changed])
        assert all(torch.equal(after[i], before[i]) for i in range(len(LENGTHS)) if i != changed)


def test_gradient_checkpointing_recomputes_with_the_layout(load: Load) -> None:
    split_model = load()
    inputs = ragged(torch.Generator().manual_seed(0), LENGTHS, GROUPS, common=30)
    expected = states_and_gradients(split_model, Packing.SHARED, *inputs)
    split_model.activate(training=True, checkpointing=True)
    for key, values in states_and_gradients(split_model, Packing.SHARED, *inputs).items():
        torch.testing.assert_close(values, expected[key], atol=1e-9, rtol=0)


def test_what_is_shared_is_computed_once() -> None:
    inputs = ragged(torch.Generator().manual_seed(0), [40, 50, 60, 25, 25], [3, 2], common=20)
    layout = lay_out(*inputs)
    assert isinstance(layout, Layout) and len(layout.input_ids) == 200 - 2 * 20 - 20
    assert [segment.length for segment in layout.segments] == [40, 30, 40, 25, 5]
    assert torch.equal(layout.input_ids[layout.places], inputs[0])
    assert torch.equal(layout.position_ids[layout.places], torch.cat([torch.arange(n) for n in inputs[1].tolist()]))


@pytest.mark.parametrize(
    ("sequences", "sharing", "own"),
    [
        ([[1] * 20, [1] * 20], [2], [20, 0]),
        ([[1] * 20, [1] * 25, [1] * 18], [3], [0, 25, 0]),
        ([[1] * 20, [1] * 19 + [2], [3] + [1] * 19], [3], [20, 1, 20]),
        ([[1] * 20, [1] * 20], [1, 1], [20, 20]),
        ([[1] * 5 + [2], [1] * 5 + [3]], [2], [6, 6]),
        ([[1] * 9 + [2], [1] * 9 + [4], [1] * 9 + [3]], [3], [10, 1, 1]),
        ([[4], [1] * 20 + [2], [1] * 17], [1, 2], [1, 21, 0]),
        # A node within a node; one that saves 16 of more than 32 times as many tokens is left out.
        ([[1] * 40, [1] * 20 + [2] * 40, [1] * 20 + [2] * 20 + [3]], [3], [40, 40, 1]),
        ([[1] * 400 + [2] * 300, [1] * 400 + [2] * 16 + [3] * 300, [1] * 400 + [4]], [3], [700, 316, 1]),
    ],
)
def test_how_much_is_shared(sequences: list[list[int]], sharing: list[int], own: list[int]) -> None:
    assert MIN_SAVED == 16 and MIN_PART == 32
    input_ids = torch.tensor([token for sequence in sequences for token in sequence])
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    held = [0] * len(sequences)
    for begin, count in zip(accumulate([0, *sharing]), sharing, strict=False):
        for branch in branches(input_ids, lengths, range(begin, begin + count)):
            held[branch.sequence] = branch.own
    assert held == own
    layout = lay_out(input_ids, lengths, torch.tensor(sharing))
    assert len(layout.input_ids) == sum(own)
    assert torch.equal(layout.input_ids[layout.places], input_ids)


def test_short_sequences_share_calls_and_long_ones_do_not_wait_for_longer_ones() -> None:
    lengths = torch.tensor([500, 300, 40, 30, 35, 30])
    buckets = lay_out(torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths).buckets
    assert [(bucket.rows, bucket.width) for bucket in buckets] == [(1, 500), (1, 300), (4, 40)]


def test_dropout_shares_nothing_and_trains(load: Load) -> None:
    assert Policy(load(attention_dropout=0.2)).packing(training=True) is Packing.SHARED
    policy = Policy(load(), dropout=0.2)
    assert policy.packing() is Packing.SHARED and policy.packing(training=True) is Packing.PACKED
    inputs = ragged(torch.Generator().manual_seed(0), LENGTHS, GROUPS, common=30)
    first, second = (policy.hidden(*inputs[:2], sharing=inputs[2], training=True) for _ in range(2))
    assert not torch.allclose(first, second)
    first.sum().backward()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Mamba", {"num_hidden_layers": 2, "state_size": 4}),
        ("Bloom", {"n_layer": 2, "n_head": 4}),
        ("Gemma2", {"sliding_window": 16, "head_dim": 8}),
    ],
)
def test_a_model_that_cannot_be_packed_is_padded(
    load: Load, name: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    split_model = load(name, torch.float32, **settings)
    assert split_model.packing is Packing.PADDED
    assert split_model.model.config._attn_implementation != packed.NAME
    assert "padded" in caplog.text
    input_ids, lengths, group_sizes = ragged(torch.Generator().manual_seed(0), [40, 50], [2], common=20)
    with torch.no_grad():
        assert len(Policy(split_model).hidden(input_ids, lengths, sharing=group_sizes)) == 90


def test_a_layer_that_keeps_its_window_to_itself_is_not_packed(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    original = packed.packed_attention

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **(kwargs | {"sliding_window": None}))

    monkeypatch.setitem(packed.AttentionInterface._global_mapping, packed.NAME, forgetful)
    assert load("Mistral", sliding_window=32).packing is Packing.PADDED


@pytest.mark.long
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3"])
def test_deep_models_with_a_padding_token_are_packed(load: Load, name: str) -> None:
    settings = {"num_hidden_layers": 24, "pad_token_id": 0, "head_dim": 8, "initializer_range": 0.1}
    split_model = load(name, torch.float32, **settings)
    assert not split_model.model.get_input_embeddings().weight[0].any()
    assert split_model.packing is Packing.SHARED


def test_the_saved_config_says_nothing_of_it(load: Load, tmp_path: Path) -> None:
    split_model = load()
    assert split_model.model.config._attn_implementation == packed.NAME
    split_model.model.save_pretrained(tmp_path / "saved")
    assert packed.NAME not in (tmp_path / "saved" / "config.json").read_text()
