"""Runs on whole models and on models sharded by ``fully_shard``, trained on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire_losses.batch import Batch
from gradwire_losses.registry import get_loss, load_builtin_losses
from gradwire_proto.v1.training_pb2 import LoraSettings, OptimStep, RunConfig
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.placement import Placement, whole
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from support.training import take_step, train_on

VOCAB = 64
STEP = OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, max_grad_norm=0.5)


class Sharded(Placement):
    """Placement that shards each layer and the rest of a module over the ranks."""

    def place(self, module: nn.Module, layers: Sequence[nn.Module] = ()) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layers in [part for part in module.modules() if isinstance(part, nn.ModuleList)]:
            for layer in layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(module, mesh=mesh, reshard_after_forward=True)

    def adds_in_place(self, weight: Tensor) -> bool:
        return False


def save_model(folder: Path, *, tied: bool) -> Path:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def pair(model_path: Path, dtype: torch.dtype = torch.float64, **config: Any) -> tuple[EngineRun, EngineRun]:
    """Make the same run on a whole model and on a sharded one."""
    lora = config.pop("lora", None)
    settings = RunConfig(base_model="m", seed=3, lora=LoraSettings(rank=lora) if lora else None, **config)
    pools = (ModelPool({"m": str(model_path)}, placement, dtype) for placement in (Placement(), Sharded()))
    plain, sharded = (EngineRun(pool, "run", settings) for pool in pools)
    assert any(isinstance(each, DTensor) for each in sharded.policy.model.parameters())
    return plain, sharded


def batch_of(loss: str) -> Batch:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([7, 3, 5, 9, 4, 6])
    total = int(lengths.sum())
    scored = torch.rand(total, generator=generator) < 0.8
    scored[lengths.cumsum(0) - lengths] = False
    ids = torch.randint(VOCAB, (total,), generator=generator)
    if loss == "dpo":
        return Batch(ids, lengths, scored, torch.full((3,), 2))
    fields = {
        "importance_sampling": ("behavior_log_probs", "advantages"),
        "enhanced_ppo": ("old_log_probs", "old_values", "rewards"),
    }.get(loss, ())
    count = int(scored.sum())
    values = {name: torch.randn(count, generator=generator) for name in fields}
    return Batch(ids, lengths, scored, torch.ones(6, dtype=torch.int64), values, dict.fromkeys(values, "token"))


def train(run: EngineRun, loss_name: str, budget: Budget, **kwargs: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Take two steps; return losses, gradient norms, and the gradient of the last step."""
    loss, base = get_loss(loss_name), Policy(run.policy.split_model)
    config = loss.config(**kwargs)
    figures: list[float] = []
    for _ in range(2):
        for _ in range(2):
            figures.append(
                train_on(
                    run.policy,
                    batch_of(loss_name),
                    loss,
                    config,
                    run.accumulator,
                    teacher=base,
                    reference=lambda batch, temperature: torch.full((batch.num_scored,), -4.0),
                    outputs=["values"] if run.policy.head is not None else [],
                    budget=budget,
                ).loss
                or 0.0
            )
        gradients = {name: whole(each).clone() for name, each in run.accumulator.normalised()[0].items()}
        figures.append(take_step(run, STEP).grad_norm)
    return figures, gradients


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(whole(found[name]), tensor, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


ONE = Budget()
MANY = Budget(microbatch_tokens=12)
RECOMPUTED = Budget(microbatch_tokens=12, activation_bytes=0)


def compare_on_rank(rank: int, ranks: int, store: Path, model_path: Path) -> None:
    """Train whole and sharded runs in one of several processes, on the same batches everywhere, and compare them."""
    torch.set_num_threads(1)
    load_builtin_losses()
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    for loss, config in (("causal_lm", {}), ("causal_lm", {"lora": 4}), ("enhanced_ppo", {"head": "value"})):
        plain, sharded = pair(model_path, **config)
        (expected, gradients), (found, others) = (train(run, loss, MANY) for run in (plain, sharded))
        assert found == pytest.approx(expected, rel=1e-9)
        assert_same(others, gradients)
        assert_same(sharded.policy.state_tensors(), plain.policy.state_tensors())
    dist.destroy_process_group()
