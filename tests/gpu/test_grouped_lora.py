"""Adapters of several runs by grouped kernels: what each run gets alone, in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gradwire_losses.batch import Batch
from gradwire_proto.v1.training_pb2 import LoraSettings
from gradwire_server.engine.model.adapters import layers as adapters
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import LoraPolicy
from gradwire_server.engine.model.shared_forward import hidden_together
from support.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

COUNTS = [[40, 7], [64], [3, 3, 30]]


@pytest.mark.parametrize("ranks", [(16, 16, 16), (16, 8, 4), (3, 3, 3)], ids=str)
def test_each_run_gets_what_it_gets_alone(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    pool = ModelPool({"small": str(tiny_model(tmp_path / "small", hidden_size=256))}, "cuda")
    split_model = pool.get("small")
    policies = [
        LoraPolicy(split_model, f"run-{seed}", LoraSettings(rank=rank), seed=seed) for seed, rank in enumerate(ranks)
    ]
    with torch.no_grad():
        for policy in policies:
            for parameter in policy.trainable_parameters().values():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    batches = []
    for lengths in COUNTS:
        ids = torch.randint(4, 90, (sum(lengths),))
        ones = torch.ones(len(lengths), dtype=torch.int64)
        batches.append(Batch(ids, torch.tensor(lengths), torch.ones(len(ids), dtype=torch.bool), ones))
    positions = [torch.arange(len(batch.input_ids)) for batch in batches]

    def gradients(policy: LoraPolicy) -> torch.Tensor:
        found = []
        for parameter in policy.trainable_parameters().values():
            assert parameter.grad is not None
            found.append(parameter.grad.float().flatten())
            parameter.grad = None
        return torch.cat(found)

    alone, expected = [], []
    for policy, batch, places in zip(policies, batches, positions, strict=True):
        alone.append(policy.hidden(batch.input_ids, batch.lengths, places, training=True))
        alone[-1].float().sin().sum().backward()
        expected.append(gradients(policy))
    together = hidden_together(policies, batches, positions)
    torch.cat(together).float().sin().sum().backward()
    for mine, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), atol=0.1, rtol=0.05)
    for policy, theirs in zip(policies, expected, strict=True):
        assert (gradients(policy) - theirs).norm() < 0.05 * theirs.norm()


def test_the_grouped_kernels_run_here() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no bfloat16 products on this device")
    assert adapters.grouped_products_run(torch.device("cuda", 0), torch.bfloat16)
