"""What an operation may hold at a time, by the memory that there is; and what happens when that was too much.

How many bytes a token of a run takes is measured, by counting what autograd saves in a small forward. How many there
are to take depends on the device:

* A GPU's free memory, less what the run's gradients and moments will still need, asked for anew every second.
* On a CPU half of the machine's memory, or of the control group's limit where that is lower: never what happens to be
  free. The plan of micro-batches, and with it the last bit of a result, then depends on the machine, the model
  and the batch alone, so a replay of the journal gives the bits that were given before. Beyond 2,048 tokens a larger
  micro-batch is hardly faster there, so that only a model that is large for its machine gets less.

Memory may run out all the same. A forward that does not fit is divided and goes on, with half the budget from there
(:func:`.forward.in_pieces`); one that fails where gradients were being added up is an operation to repeat. On a
GPU the next operations of such runs get less, too; on a CPU, where that would make bits depend on an accident, not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.planner import Budget

logger = logging.getLogger(__name__)

MOST = {
    "cpu": Budget(),
    "cuda": Budget(1 << 16, activation_bytes=1 << 60, logits_elements=1 << 28, kept_logits=1 << 31),
}
"""The most that an operation is given: beyond these numbers of tokens and logits it is no faster."""
FRESH_S = 1.0
"""How long what was free on a GPU is taken to be free."""
PROBE_TOKENS = 64
PASSING_BYTES = 64
"""Of what a forward and backward holds for a moment, for each token and each element of its hidden state."""
CHUNK_BYTES = 16
"""Of what scoring holds for each logit of a chunk."""
KEPT_BYTES = 4
"""Of a logit that is kept."""


class MemoryUser(Protocol):
    """What the budget of a run's operation depends on; :class:`.engine_run.EngineRun` has it."""

    @property
    def policy(self) -> Policy: ...

    @property
    def config(self) -> training_pb2.RunConfig: ...

    @property
    def step(self) -> int: ...


class Memory:
    """What operations may hold.

    Args:
        device: that the models are on.
        microbatch_tokens, activation_bytes: as a person asked for; found out where None.
        machine_bytes: of memory; the machine's by default.
    """

    def __init__(
        self,
        device: torch.device,
        microbatch_tokens: int | None = None,
        activation_bytes: int | None = None,
        machine_bytes: int | None = None,
    ) -> None:
        self._device = device
        self._microbatch_tokens, self._activation_bytes = microbatch_tokens, activation_bytes
        # A power of two, so that a few bytes that another kernel keeps for itself change no plan.
        self._machine_bytes = machine_bytes or 1 << (machine_memory().bit_length() - 1)
        self._token_bytes: dict[bytes, float] = {}
        self._shares: dict[bytes, float] = {}
        self._free_bytes = 0
        self._free_until = 0.0

    @property
    def most(self) -> Budget:
        """The most that an operation is given."""
        return MOST[self._device.type]

    def budget(self, run: MemoryUser) -> Budget:
        """Of an operation of this run: a third of the room for the micro-batch, one for kept graphs, one for logits and
        what cannot be foreseen."""
        most, kind = self.most, _kind(run)
        tokens, activations = self._microbatch_tokens, self._activation_bytes
        room = self._room(run) * self._shares.get(kind, 1.0) / 3
        if tokens is None:
            if kind not in self._token_bytes:
                self._token_bytes[kind] = token_bytes(run.policy)
            tokens = max(1, min(int(room / self._token_bytes[kind]), most.microbatch_tokens))
        return Budget(
            tokens,
            min(int(room), most.activation_bytes) if activations is None else activations,
            max(1 << 16, min(int(room / 4 / CHUNK_BYTES), most.logits_elements)),
            min(int(room / 4 / KEPT_BYTES), most.kept_logits),
        )

    def ran_out(self, run: MemoryUser) -> None:
        """An operation found less memory than its budget said: on a GPU, the next ones of such runs get less."""
        if self._device.type == "cuda":
            kind = _kind(run)
            self._shares[kind] = self._shares.get(kind, 1.0) / 2

    def _room(self, run: MemoryUser) -> float:
        if self._device.type == "cpu":
            return self._machine_bytes / 2
        if time.monotonic() >= self._free_until:
            free, _ = torch.cuda.mem_get_info(self._device)
            unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            self._free_bytes, self._free_until = free + unused, time.monotonic() + FRESH_S
        # Gradients of an operation in float32; once the run takes its first step, those accumulated and two moments.
        copies = 1 if run.step else 4
        return max(0.9 * self._free_bytes - 4.0 * copies * run.policy.num_trainable_parameters, 0.0)


class ActivationMeter(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd saves within, weights and buffers of the model not among them."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.bytes = 0
        tensors = [*policy.model.parameters(), *policy.model.buffers(), *policy.trainable_parameters().values()]
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


def token_bytes(policy: Policy) -> float:
    """What a token takes in a forward and backward, measured in a small forward."""
    width = policy.facts.hidden_size
    saved = _saved_bytes(policy, policy.gradient_checkpointing)
    if policy.gradient_checkpointing:  # the layer whose activations are computed again
        saved += _saved_bytes(policy, False) / policy.facts.num_layers
    return saved + PASSING_BYTES * width


def _saved_bytes(policy: Policy, checkpointing: bool) -> float:
    """Of a token more: what a forward saves whatever its length, such as weights that autocast rounds, is not one's."""
    length = max(1, min(PROBE_TOKENS, policy.facts.context_length))
    saved = []
    configured, policy.gradient_checkpointing = policy.gradient_checkpointing, checkpointing
    try:
        for count in (1, 2):
            meter = ActivationMeter(policy)
            with preserved_rng(), meter:
                ids, lengths = torch.zeros(count * length, dtype=torch.int64), torch.full((count,), length)
                policy.hidden(ids, lengths, training=True)
            saved.append(meter.bytes)
    finally:
        policy.gradient_checkpointing = configured
    return max(0, saved[1] - saved[0]) / length


def _kind(run: MemoryUser) -> bytes:
    """What runs of equal need have in common."""
    config = run.config
    return f"{config.base_model}\0{config.gradient_checkpointing}\0".encode() + config.lora.SerializeToString()


def machine_memory() -> int:
    """Bytes of the machine's memory, or of the control group's where that is limited to less."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_group_limits()])


def _group_limits(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """The limits of this process's control group and of those around it, version 1 and 2."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        own = top / name.lstrip("/")
        for folder in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):  # no such folder in this container, or "max"
                yield int((folder / file).read_text())
            if folder == top:
                break
