"""Activations that are kept or computed again: which, with the same bits, and the same again when repeated."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_losses import registry
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.model.attention import masked as attention_masked
from gradwire_server.engine.model.attention.masked import MaskedSegments, masked_attention
from gradwire_server.engine.model.layers import activations, feed_forward
from gradwire_server.engine.model.layers.activations import ALL, Activations
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.packing import lay_out
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.policy_from_config import make_policy
from gradwire_server.engine.operations import limits
from gradwire_server.engine.operations.request import Request
from gradwire_server.engine.scoring.activation_choice import Costs, LongRow, choose
from gradwire_server.engine.scoring.memory import ActivationMeter, Memory, measured_token_bytes, token_bytes
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.sizing.meta_model import MODEL, MetaModel
from support.engine import LocalEngine, token_rows
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Qwen3MoeConfig,
)

CAUSAL = pb.LossCall(loss_fn="causal_lm", outputs=["logprobs"])
ROWS = token_rows([[length, *range(20, 20 + length)] for length in (40, 12, 11, 3)])  # none begins as another
MODES = {"full": {}, "lora": {"lora": {"rank": 4}}, "dropout": {"lora": {"rank": 4, "dropout": 0.2}, "dropout": 0.1}}


@pytest.fixture
def engine(tiny_model_path: Path, tmp_path: Path) -> LocalEngine:
    return LocalEngine({"tiny": tiny_model_path}, tmp_path)


def executed(
    engine: LocalEngine, run_id: str, budget: Budget | None = None, recorded: pb.MemoryLimits | None = None
) -> pb.LossResult:
    """A forward_backward within a budget, by default the one that the engine decides, or a recorded one again."""
    asked = engine_pb2.EngineOperation(run_id=run_id, seq=1, operation=pb.Operation(forward_backward=CAUSAL))
    if recorded is not None:
        asked.limits.CopyFrom(recorded)
    decision = engine.context.decisions.execute([Request(engine_pb2.EngineRequest(id=1, operation=asked), ROWS, None)])
    (answer,) = engine.engine.execute(decision if budget is None else replace(decision, budgets=[budget]))
    assert answer.reply.result.status == pb.STATUS_SUCCEEDED, answer.reply.result.error
    return answer.reply.result.loss


def accumulated(engine: LocalEngine, run_id: str) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in engine.context.runs[run_id].accumulator.state_tensors().items()}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and expected
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("together", [False, True], ids=["streams", "whole-batch"])
@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_recomputed_activations_give_the_same_bits(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], together: bool
) -> None:
    if together:
        spec = registry.get_loss("causal_lm")
        monkeypatch.setitem(registry._REGISTRY, "causal_lm", replace(spec, streams=lambda config, present: False))
    found = []
    for run_id, kept_tokens in (("run-a", ALL), ("run-b", 20), ("run-c", 0)):
        engine.create(run_id, seed=3, **settings)
        result = executed(engine, run_id, Budget(25, kept_tokens=kept_tokens))
        found.append((dict(result.activations), result.loss, accumulated(engine, run_id)))
    count = sum(found[0][0].values())
    beyond = 1 if settings.get("dropout") else 2  # with dropout each row goes alone, else 12 and 11 tokens share one
    assert [each[0] for each in found] == [
        {"keep": count}, {"keep": count - beyond, "recompute": beyond}, {"recompute": count},
    ]  # fmt: skip
    assert found[0][1] == found[1][1] == found[2][1]
    assert_same_bits(found[1][2], found[0][2])
    assert_same_bits(found[2][2], found[0][2])


@pytest.mark.long
def test_what_does_not_fit_is_recomputed_unless_the_run_says_otherwise(engine: LocalEngine) -> None:
    for run_id, setting in (("free", {}), ("always", True), ("never", False)):
        engine.create(run_id, **({} if setting == {} else {"gradient_checkpointing": setting}))
    free, always, never = (engine.context.runs[run_id] for run_id in ("free", "always", "never"))
    each = token_bytes(free.policy)

    def small(tokens: float) -> Memory:
        return Memory(torch.device("cpu"), machine_bytes=int(3 * tokens * each))

    budget = small(60).budget(free)
    assert budget.microbatch_tokens == 30 and 58 <= budget.kept_tokens <= 60  # a row may take kept graphs' part, too
    assert [budget.activations(tokens) for tokens in (58, 61)] == [Activations.KEEP, Activations.RECOMPUTE]
    assert budget.activations(1000) == Activations.RECOMPUTE | Activations.CHUNK
    assert budget.activations(1000).label == "recompute+chunk"
    assert small(60).budget(never).kept_tokens == ALL
    assert Memory(torch.device("cpu"), 300, 5).budget(free).kept_tokens == 300  # what is configured is kept
    for run_id, expected in (("free", {"keep": 4}), ("always", {"recompute": 4}), ("never", {"keep": 4})):
        assert dict(executed(engine, run_id, Budget(10)).activations) == expected
    wide = Memory(torch.device("cpu")).budget(free)
    assert wide.kept_tokens > 10_000 and wide.microbatch_tokens == Budget().microbatch_tokens
    assert measured_token_bytes(always.policy).recomputed == pytest.approx(
        measured_token_bytes(free.policy).recomputed, rel=0.1
    )  # the last norm's input beside those of two layers


def test_a_row_that_does_not_fit_is_recomputed_and_the_log_says_so_once(
    tiny_model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LocalEngine({"tiny": tiny_model_path}, tmp_path, microbatch_tokens=16, activation_budget_gib=1000 / 2**30)
    engine.create("run-a", seed=3)
    caplog.set_level(logging.INFO, "gradwire_server.engine.operations.limits")
    for _ in range(2):
        result = engine.do("run-a", ROWS, forward_backward=CAUSAL).proto.loss
        assert dict(result.activations) == {"recompute+chunk": 1, "keep": 2}
    assert [record.getMessage() for record in caplog.records] == [
        "run run-a: activations of micro-batches above 16 tokens: recompute+chunk"
    ]


def test_a_repetition_is_executed_within_the_limits_of_the_first_time(
    engine: LocalEngine, tiny_model_path: Path, tmp_path: Path
) -> None:
    engine.create("run-a", seed=3)
    first = executed(engine, "run-a", Budget(15, activation_bytes=100, kept_tokens=20))
    other = LocalEngine({"tiny": tiny_model_path}, tmp_path / "other")  # with all the memory of this machine
    other.create("run-a", seed=3)
    again = executed(other, "run-a", recorded=first.limits)
    assert again == first
    assert dict(again.activations) == {"recompute": 1, "keep": 3}
    assert_same_bits(accumulated(other, "run-a"), accumulated(engine, "run-a"))
    less = LocalEngine({"tiny": tiny_model_path}, tmp_path / "less", microbatch_tokens=12)
    less.create("run-a", seed=3)  # what a person configures goes before what is recorded
    assert executed(less, "run-a", recorded=first.limits).limits.microbatch_tokens == 12


def test_limits_are_the_same_after_the_wire() -> None:
    for budget in (Budget(), Budget(3, 1 << 60, 5, 7, kept_tokens=11, whole_tokens=12), Budget(kept_tokens=0)):
        wire = pb.MemoryLimits.FromString(limits.to_wire(budget).SerializeToString())
        assert limits.from_wire(wire) == budget


def test_a_row_that_runs_out_of_memory_is_tried_with_recomputation(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run_id, settings in (("free", {}), ("never", {"gradient_checkpointing": False})):
        engine.create(run_id, **settings)
    decisions, rows = engine.context.decisions, token_rows([[1, 2, 3]])
    smaller = decisions.after_out_of_memory(engine.context.runs["free"], rows, Budget())
    assert smaller is not None and smaller.kept_tokens == 0
    assert smaller.microbatch_tokens == Budget().microbatch_tokens
    smallest = decisions.after_out_of_memory(engine.context.runs["free"], rows, smaller)
    assert smallest is not None and smallest.whole_tokens == 0
    assert decisions.after_out_of_memory(engine.context.runs["free"], rows, smallest) is None
    assert decisions.after_out_of_memory(engine.context.runs["never"], rows, Budget()) is None


# ------------------------------------------------------------------ long rows


def long_llama(folder: Path, dtype: torch.dtype = torch.float64, **settings: Any) -> Path:
    shape = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.2,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MistralForCausalLM(MistralConfig(**shape | settings)).to(dtype).save_pretrained(folder)
    return folder


def gradients(policy: Policy, treatment: Activations, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.arange(int(lengths.sum())) * 7 % 64
    for parameter in policy.trainable_parameters().values():
        parameter.grad = None
    states = policy.hidden(ids, lengths, training=True, activations=treatment)
    policy.activate(training=True, activations=treatment)
    weights = torch.sin(torch.arange(states.numel(), dtype=states.dtype)).view_as(states)
    (states * weights).sum().backward()
    found = {name: each.grad for name, each in policy.trainable_parameters().items() if each.grad is not None}
    return found | {"states": states.detach()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys() and len(found) > 3
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=tolerance, atol=tolerance * float(each.abs().max() + 1))


@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 4}}, {"lora": {"rank": 4, "dropout": 0.2}}], ids=MODES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_chunks_of_tokens_give_the_same_up_to_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(feed_forward, "CHUNK_TOKENS", 16)
    monkeypatch.setattr(feed_forward, "CHUNK_BYTES", 0)
    pool = ModelPool({"tiny": str(long_llama(tmp_path, dtype))}, dtype=dtype)
    config = pb.RunConfig(base_model="tiny", seed=3)
    if settings:
        config.lora.CopyFrom(pb.LoraSettings(**settings["lora"]))
    policy, lengths = make_policy(pool, config, "run"), torch.tensor([70, 9])
    chunked, found = 0, []
    forward = feed_forward.checkpoint

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal chunked
        chunked += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(feed_forward, "checkpoint", counted)
    for treatment in (Activations.KEEP, Activations.RECOMPUTE, Activations.RECOMPUTE | Activations.CHUNK):
        torch.manual_seed(5)
        found.append(gradients(policy, treatment, lengths))
        assert bool(chunked) == (Activations.CHUNK in treatment)
    assert_same_bits(found[1], found[0])
    if settings.get("lora", {}).get("dropout"):  # masks are drawn by the chunk, and are others
        assert found[2].keys() == found[0].keys()
    else:
        assert_close(found[2], found[0], tolerance)
    policy.activate()
    with torch.no_grad():
        chunked = 0
        policy.hidden(torch.zeros(70, dtype=torch.int64), torch.tensor([70]))
    assert not chunked


@pytest.mark.parametrize(("least_bytes", "chunks"), [(0, 6), (8192, 2), (16384, 0)])
def test_a_chunk_has_no_less_than_its_fewest_tokens_and_bytes(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, least_bytes: int, chunks: int
) -> None:
    """Many small tensors would fragment the heap: a row of 65,536 tokens of 64 units took 690 MiB instead of 355."""
    monkeypatch.setattr(feed_forward, "CHUNK_TOKENS", 16)
    monkeypatch.setattr(feed_forward, "CHUNK_BYTES", least_bytes)
    sizes: list[int] = []
    forward = feed_forward.checkpoint

    def measured(layer: Any, hidden: torch.Tensor, **kwargs: Any) -> Any:
        sizes.append(hidden.nbytes)
        return forward(layer, hidden, **kwargs)

    monkeypatch.setattr(feed_forward, "checkpoint", measured)
    engine.create("run", lora=4)
    policy = engine.context.runs["run"].policy
    assert policy.facts.hidden_size == 32  # so that 8,192 bytes are 64 tokens
    policy.hidden(
        torch.zeros(96, dtype=torch.int64),
        torch.tensor([96]),
        training=True,
        activations=Activations.RECOMPUTE | Activations.CHUNK,
    )
    assert len(sizes) == chunks * policy.facts.num_layers


@pytest.mark.parametrize("window", [None, 5, 64], ids=["all", "narrow", "wide"])
@pytest.mark.parametrize("lengths", [[90], [40, 90, 40, 7]], ids=["one", "several"])
def test_attention_in_pieces_gives_the_same_up_to_rounding(
    monkeypatch: pytest.MonkeyPatch, window: int | None, lengths: list[int]
) -> None:
    sizes = torch.tensor(lengths)
    ids = torch.cat([torch.arange(length) % 64 for length in lengths])  # the last three begin alike
    layout = lay_out(ids, sizes, torch.tensor([1, 3]) if len(lengths) > 1 else None)
    generator = torch.Generator().manual_seed(0)
    found, pairs = [], []
    real = torch.nn.functional.scaled_dot_product_attention

    def measured(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        pairs.append(q.shape[0] * q.shape[2] * k.shape[2])
        return real(q, k, v, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", measured)
    count = layout.input_ids.numel()
    heads = [torch.randn(count, each, 8, dtype=torch.float64, generator=generator) for each in (4, 2, 2)]
    for most in (None, 400):
        if most is not None:
            monkeypatch.setattr(attention_masked, "MOST_PAIRS", most)
            monkeypatch.setattr(attention_masked, "LONG_PAIRS", 2 * most)
            pairs.clear()
        q, k, v = (each.clone().requires_grad_() for each in heads)
        out = masked_attention(q, k, v, MaskedSegments(layout.masked.segments), 0.3, window)
        out.backward(torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view_as(out))
        found.append([out.detach(), q.grad, k.grad, v.grad])
    assert max(pairs) <= 800
    for mine, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Phi3", "GPT2", "GPTNeoX", "Qwen3Moe"])
def test_feed_forward_layers_are_found_by_their_structure(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(SHAPES[name]).eval()
    found = {type(layer).__name__ for layer in feed_forward.feed_forward_layers(model)}
    count = len(list(feed_forward.feed_forward_layers(model)))
    # A mixture's own layers are one tensor of all experts; its one layer without experts is found.
    assert (count, found) == (1 if name == "Qwen3Moe" else 2, {f"{name}MLP"})


def _shapes() -> dict[str, Any]:
    small = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "pad_token_id": None,
    }  # fmt: skip
    grouped = small | {"num_key_value_heads": 2}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    return {
        "Llama": LlamaConfig(**grouped),
        "Gemma3": Gemma3TextConfig(**grouped, head_dim=8),
        "Phi3": Phi3Config(**grouped),
        "GPT2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
        "GPTNeoX": GPTNeoXConfig(**small),
        "Qwen3Moe": Qwen3MoeConfig(**grouped, head_dim=8, **moe),
    }


SHAPES = _shapes()


# ------------------------------------------------------------------ host memory


def test_offloaded_activations_give_the_same_bits_and_are_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where it brings nothing, the mechanism is forced."""
    monkeypatch.setattr(activations, "LEAST_BYTES", 1)
    pool = ModelPool({"tiny": str(long_llama(tmp_path))}, dtype=torch.float64)
    policy = make_policy(pool, pb.RunConfig(base_model="tiny", seed=3), "run")
    lengths, found, copied = torch.tensor([70, 9]), [], []
    real = activations.Offloading

    def noted(weights: Any) -> Any:
        copied.append(real(weights))
        return copied[-1]

    monkeypatch.setattr(activations, "Offloading", noted)
    for treatment in (Activations.KEEP, Activations.OFFLOAD, Activations.RECOMPUTE | Activations.OFFLOAD):
        found.append(gradients(policy, treatment, lengths))
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])
    meter = ActivationMeter(policy)
    with meter:
        policy.hidden(torch.zeros(79, dtype=torch.int64), lengths, training=True)
    whole, inputs = (each.bytes for each in copied)
    assert 0.9 * meter.bytes < whole <= meter.bytes  # what several functions save is copied once
    assert inputs < whole / 4


def test_offloading_on_meta_tensors_leaves_the_device(tmp_path: Path) -> None:
    model = long_llama(tmp_path, torch.float32)
    meta = MetaModel(str(model), torch.float32, pb.RunConfig(base_model=MODEL))
    kept, offloaded, recomputed, both = (
        meta.step(1, 2048, {"logprobs"}, Budget(), treatment)["activations"]
        for treatment in (
            Activations.KEEP, Activations.OFFLOAD, Activations.RECOMPUTE, Activations.RECOMPUTE | Activations.OFFLOAD,
        )
    )  # fmt: skip
    assert offloaded < kept / 4 and both < recomputed < kept


ROW = LongRow(tokens=1000, kept_bytes=100.0, input_bytes=10.0, working_bytes=20.0, attention=1e-3)


@pytest.mark.parametrize(
    ("costs", "device_bytes", "host_bytes", "expected"),
    [
        # Recomputing takes 1000 * 1 us * 2 = 2 ms; copies of all activations take 200 kB over the rate.
        (Costs(1e-6, 1e7), 30_000, 1e6, Activations.RECOMPUTE),
        (Costs(1e-6, 1e9), 30_000, 1e6, Activations.OFFLOAD),
        (Costs(1e-6, 1e9), 30_000, 50_000, Activations.RECOMPUTE),  # too much for the host
        (Costs(1e-6, 1e7), 25_000, 1e6, Activations.RECOMPUTE | Activations.OFFLOAD),  # inputs do not fit the device
        (Costs(1e-6, 1e9), 25_000, 1e6, Activations.OFFLOAD),
        (Costs(1e-6, 1e7), 25_000, 5_000, Activations.RECOMPUTE),  # nothing fits
        (Costs(1e-6, 1e9), 10_000, 1e6, Activations.RECOMPUTE | Activations.OFFLOAD),  # not even a layer: in chunks
    ],
)
def test_the_cheapest_that_fits_is_chosen(
    costs: Costs, device_bytes: float, host_bytes: float, expected: Activations
) -> None:
    assert choose(ROW, costs, device_bytes, host_bytes) == expected


def test_a_gpu_measures_the_costs_once_and_a_cpu_never_offloads(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create("run-a")
    run, asked = engine.context.runs["run-a"], []

    def measured(memory: Memory, run: Any) -> Costs:
        asked.append(run)
        return Costs(1.0, 1e12)  # a slow GPU on a fast bus

    monkeypatch.setattr(Memory, "_measured_costs", measured)
    memory = Memory(torch.device("cuda"), machine_bytes=1 << 40)
    budgets = [memory.budget(run, longest, free_bytes=4 << 20) for longest in (10, 400, 400)]
    assert [each.activations(400) for each in budgets] == [
        Activations.RECOMPUTE, Activations.OFFLOAD, Activations.OFFLOAD,
    ]  # fmt: skip
    assert limits.from_wire(limits.to_wire(budgets[1])) == budgets[1]
    assert len(asked) == 1
    cpu = Memory(torch.device("cpu"), 16, 1000, machine_bytes=1 << 30)
    assert Activations.OFFLOAD not in cpu.budget(run, longest=5000).activations(5000) and len(asked) == 1
