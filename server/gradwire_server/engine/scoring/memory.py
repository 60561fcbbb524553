"""Memory limits of operations, chosen by the available memory.

The bytes that a token of a run takes are measured by counting what autograd saves in a small forward. The bytes
available depend on the device:

* On a GPU: the free memory, less what the run's gradients and moments will still need, queried again every second.
* On a CPU: half of the machine's memory, or of the control group's limit if that is lower, whatever is free at the
  moment. The plan of micro-batches, and with it the last bit of a result, thus depends only on the machine, the model
  and the batch, so a replay of the journal reproduces the same bits. Above 2,048 tokens a larger micro-batch is hardly
  faster on a CPU, so only a model that is large for its machine gets less.

Memory can run out all the same. The operation is then repeated within smaller limits (:mod:`.operations.decisions`).
On a GPU the next operations of such runs get less, too. On a CPU they do not, because results would depend on a chance
event.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.model.placement import storage_address, storage_addresses
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.planner import Budget

logger = logging.getLogger(__name__)

MOST = {
    "cpu": Budget(),
    "cuda": Budget(1 << 16, activation_bytes=1 << 60, logits_elements=1 << 28, kept_logits=1 << 31),
}
"""Maximum budget of an operation by device type; beyond these numbers of tokens and logits it is no faster."""
FRESH_S = 1.0
"""Seconds for which a measurement of a GPU's free memory is used."""
LEAST_TOKENS = 256
"""Micro-batches get no smaller than this to keep their logits; with fewer tokens the trunk is slower."""
PROBE_TOKENS = 64
PASSING_BYTES = 64
"""Temporary bytes in a forward and backward, per token and element of its hidden state."""
CHUNK_BYTES = 16
"""Bytes that scoring holds per logit of a chunk."""
KEPT_BYTES = 4
"""Bytes of a kept logit."""


class MemoryUser(Protocol):
    """What the budget of a run's operations depends on; :class:`.engine_run.EngineRun` implements it."""

    @property
    def policy(self) -> Policy: ...

    @property
    def config(self) -> training_pb2.RunConfig: ...

    @property
    def step(self) -> int: ...


class Memory:
    """Memory limits of operations.

    Args:
        device: The models' device.
        microbatch_tokens: Configured maximum of tokens per micro-batch; None derives it from the memory.
        activation_bytes: Configured maximum of activation bytes; None derives it from the memory.
        machine_bytes: Bytes of memory; by default the machine's.
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
        # Rounded down to a power of two, so that a few bytes more or less for the kernel change no plan.
        self._machine_bytes = machine_bytes or 1 << (machine_memory().bit_length() - 1)
        self._token_bytes: dict[bytes, float] = {}
        self._shares: dict[bytes, float] = {}
        self._free_bytes = 0
        self._free_until = 0.0

    @property
    def most(self) -> Budget:
        """Maximum budget of an operation."""
        return MOST[self._device.type]

    def budget(self, run: MemoryUser) -> Budget:
        """Budget of this run's operations.

        It gives a third of the available bytes each to the micro-batch, to kept graphs, and to logits and reserve. A
        micro-batch is small enough to keep its logits, because computing them twice costs a third more.
        """
        most, kind = self.most, _kind(run)
        tokens, activations = self._microbatch_tokens, self._activation_bytes
        room = self._room(run) * self._shares.get(kind, 1.0) / 3
        facts = run.policy.facts
        kept = min(int(room / 4 / KEPT_BYTES), max(most.kept_logits, facts.num_parameters // 4))
        if tokens is None:
            self.measure(run)
            keeping = max(kept // facts.vocab_size, LEAST_TOKENS)
            tokens = max(1, min(int(room / self._token_bytes[kind]), most.microbatch_tokens, keeping))
        return Budget(
            tokens,
            min(int(room), most.activation_bytes) if activations is None else activations,
            max(1 << 16, min(int(room / 4 / CHUNK_BYTES), most.logits_elements)),
            kept,
        )

    def measure(self, run: MemoryUser) -> None:
        """Measure, by a forward, what a token of such runs takes, unless that is known or the limit is configured."""
        kind = _kind(run)
        if self._microbatch_tokens is None and kind not in self._token_bytes:
            self._token_bytes[kind] = self._measured(run)

    def _measured(self, run: MemoryUser) -> float:
        return token_bytes(run.policy)

    def ran_out(self, run: MemoryUser) -> None:
        """Record that an operation ran out of memory: on a GPU, the next ones of such runs get half as much."""
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
        # An operation's float32 gradients, and before the run's first step also accumulated ones and two moments.
        copies = 1 if run.step else 4
        return max(0.9 * self._free_bytes - 4.0 * copies * run.policy.num_trainable_parameters, 0.0)


class ActivationMeter(torch.autograd.graph.saved_tensors_hooks):
    """Count the bytes that autograd saves within the context, without weights and buffers of the model.

    A whole copy of sharded weights counts.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.bytes = 0
        tensors = [*policy.model.parameters(), *policy.model.buffers(), *policy.trainable_parameters().values()]
        self._seen = storage_addresses(tensors)

    def _pack(self, tensor: Tensor) -> Tensor:
        address = storage_address(tensor)
        if address not in self._seen:
            self._seen.add(address)
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor


def token_bytes(policy: Policy) -> float:
    """Bytes per token of a forward and backward, measured in a small forward."""
    width = policy.facts.hidden_size
    saved = _saved_bytes(policy, policy.gradient_checkpointing)
    if policy.gradient_checkpointing:  # plus the layer whose activations are being recomputed
        saved += _saved_bytes(policy, False) / policy.facts.num_layers
    return saved + PASSING_BYTES * width


def _saved_bytes(policy: Policy, checkpointing: bool) -> float:
    """Marginal saved bytes per token; fixed costs, such as weights rounded by autocast, cancel out."""
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
    """Key of runs with equal memory needs. An adapter's scale (alpha) needs none."""
    config, lora = run.config, training_pb2.LoraSettings()
    lora.CopyFrom(run.config.lora)
    lora.ClearField("alpha")
    return f"{config.base_model}\0{config.gradient_checkpointing}\0".encode() + lora.SerializeToString()


def machine_memory() -> int:
    """Bytes of the machine's memory, or of the control group's limit if that is lower."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_group_limits()])


def resident_bytes() -> int:
    """Resident memory of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: peak memory instead, in KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _group_limits(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Limits of this process's control group and its ancestors, versions 1 and 2."""
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
