"""What a divided model asks of the group in which its layers are made whole: on GPUs NCCL, which takes no host tensors.

There is no other rank here: torch's fake group answers at once, with anything.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire_losses.registry import get_loss, load_builtin_losses
from gradwire_proto.v1.training_pb2 import LoraSettings, RunConfig
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.placement import Sharded, is_sharded, layers_of, total_norm, whole_on_host
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from support.sharding import batch_of, save_model
from support.training import train_on
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GATHER, REDUCE = "_allgather_base_", "_reduce_scatter_base_"


class Recorded(TorchDispatchMode):
    """Collectives as they are called: their names, and the devices and dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.kinds: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names[func.overloadpacket.__name__] += 1
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            self.kinds |= {(each.device.type, each.dtype) for each in tensors}
        return func(*args, **(kwargs or {}))


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.new_group(backend="fake")
    dist.destroy_process_group()


@pytest.mark.parametrize("lora", [4, 0], ids=["lora", "full"])
def test_layers_are_gathered_and_only_trained_weights_are_reduced(
    group: dist.ProcessGroup, tmp_path: Path, lora: int
) -> None:
    load_builtin_losses()
    placement = Sharded("cpu", group, lambda error: False)
    pool = ModelPool({"m": str(save_model(tmp_path / "m", tied=False))}, placement, torch.bfloat16)
    config = RunConfig(base_model="m", seed=3, lora=LoraSettings(rank=lora) if lora else None)
    run, loss = EngineRun(pool, "run", config), get_loss("causal_lm")
    layers = len(layers_of(run.policy.model))
    with Recorded() as training, contextlib.suppress(OperationError):  # what the fake group brings may be no number
        train_on(run.policy, batch_of("causal_lm"), loss, loss.config(), run.accumulator, budget=Budget())
    assert training.names[GATHER] >= 2 * layers  # forward and backward
    assert training.names[REDUCE] == (0 if lora else layers + 1)
    assert set(training.names) <= {GATHER, REDUCE}
    device = placement.device.type
    assert {kind for kind, _ in training.kinds} == {device}
    masters = run.policy.masters()
    sharded = [each for each in masters.values() if is_sharded(each)]
    assert bool(sharded) == (not lora) and all(each.device.type == device for each in masters.values())
    with Recorded() as others:
        total_norm(list(masters.values()))
        whole_on_host(masters, keep=True)
    assert (others.names.total() > 0) == (not lora)
    assert {kind for kind, _ in others.kinds} <= {device}
    assert all(dtype in (torch.float32, torch.bfloat16) for _, dtype in training.kinds | others.kinds)
