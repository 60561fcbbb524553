"""Engines of several ranks beside engines of one process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from gradwire_proto.v1 import training_pb2 as pb

from support.engine import EngineProcess, LocalEngine, token_rows

ROWS = token_rows([[1, 20, 30, 40, 50], [1, 9, 8, 7, 6, 5, 4], [1, 60, 61], [1, 2, 3, 4], [1, 7]])
STEP = pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, max_grad_norm=1.0)
CAUSAL = pb.LossCall(loss_fn="causal_lm", outputs=["logprobs"])
FAILING = """
import gc
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire_losses.fields import INPUT_IDS
from gradwire_losses.outputs import LossOutput, Term
from gradwire_losses.registry import register_loss

def failing(name, error, streams):
    '''A loss that fails once, on the last rank.'''
    failures = [error]

    def fails(batch, scores, config):
        if failures and dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1:
            raise failures.pop()
        return LossOutput({"mine": Term(-scores.logprobs.sum(), batch.num_scored, "tokens")})

    register_loss(name, fields=[INPUT_IDS], metrics={}, reference="none", formula="none", streams=streams)(fails)

@register_loss("spoils", fields=[INPUT_IDS], metrics={}, reference="none", formula="none", streams=True)
def spoils(batch, scores, config):
    if dist.get_rank() == 1:
        (run,) = (each for each in gc.get_objects() if type(each).__name__ == "EngineRun")
        next(iter(run.policy.masters().values())).data.flatten()[0] += 1e-3
    return LossOutput({"mine": Term(-scores.logprobs.sum(), batch.num_scored, "tokens")})

def runs_out(module, given, made=None):
    '''Run out of memory once on the last rank in the middle of a layer, as the file beside this one says.'''
    armed = Path(__file__).with_name("armed")
    if not type(module).__name__.endswith("MLP") or not armed.exists() or dist.get_rank() != dist.get_world_size() - 1:
        return
    if armed.read_text() == "forward" and made is None:
        armed.unlink()
        raise torch.OutOfMemoryError("injected")
    if armed.read_text() == "backward" and made is not None and made.requires_grad:
        armed.unlink()
        made.register_hook(ran_out)

def ran_out(gradient):
    raise torch.OutOfMemoryError("injected")

torch.nn.modules.module.register_module_forward_pre_hook(runs_out)
torch.nn.modules.module.register_module_forward_hook(runs_out)

failing("memory", torch.OutOfMemoryError("injected"), False)
failing("memory_in_its_part", torch.OutOfMemoryError("injected"), True)
failing("fault", ValueError("injected"), False)
failing("fault_in_its_part", ValueError("injected"), True)
failing("fault_beside", ValueError("injected"), True)
"""
"""A file of losses that fail on one rank, and of layers that do."""


@dataclass
class Engines:
    """One process, and a group of ranks, each with a state folder."""

    one: LocalEngine
    group: EngineProcess
    folder: Path

    def weights(self, name: str, run_id: str) -> str:
        """A hash of a checkpoint's tensors: weights, moments, accumulation."""
        found = hashlib.sha256()
        files = sorted((self.folder / name / "runs" / run_id / "checkpoints").rglob("*.safetensors"))
        assert files
        for file in files:
            found.update(file.read_bytes())
        return found.hexdigest()
