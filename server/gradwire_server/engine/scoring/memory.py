"""Memory limits of operations, chosen by the available memory.

The bytes that a token of a run takes are measured by counting what autograd saves in a small forward. The bytes
available depend on the device:

* On a GPU: the free memory, less what the run's gradients and moments will still need.
* On a CPU: half of the machine's memory, or of the control group's limit if that is lower, whatever is free at the
  moment. The plan of micro-batches, and with it the last bit of a result, thus depends only on the machine, the model
  and the batch, so a replay of the journal reproduces the same bits. Above 2,048 tokens a larger micro-batch is hardly
  faster on a CPU, so only a model that is large for its machine gets less.

A row cannot be split. Where its activations do not fit, they are recomputed layer by layer in the backward pass, with
the same bits. Where one layer's do not fit either, its feed-forward part is computed in chunks of tokens. On a GPU they
may be copied to host memory instead, if that is cheaper or all that fits (:mod:`.activation_choice`); the costs are
measured once. A CPU engine's host memory is the device's, so that would bring nothing. A run's own setting,
``gradient_checkpointing``, goes before that choice.

Memory can run out all the same. The operation is then repeated within smaller limits (:mod:`.operations.decisions`).
On a GPU the next operations of such runs get less, too. On a CPU they do not, because results would depend on a chance
event.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.machine import Share
from gradwire_server.engine.model.layers.activations import ALL, Activations
from gradwire_server.engine.model.placement import storage_address, storage_addresses
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.activation_choice import Costs, LongRow, choose, measured_costs
from gradwire_server.engine.scoring.planner import Budget

logger = logging.getLogger(__name__)

MOST = {
    "cpu": Budget(),
    "cuda": Budget(1 << 16, activation_bytes=1 << 60, logits_elements=1 << 28, kept_logits=1 << 31),
}
"""Maximum budget of an operation by device type; beyond these numbers of tokens and logits it is no faster."""
LEAST_TOKENS = 256
"""Micro-batches get no smaller than this to keep their logits; with fewer tokens the trunk is slower."""
FROZEN_TOKENS = 512
"""The same where a CPU computes with a frozen output head, whose logits are not kept if they are many."""
PROBE_TOKENS = 64
PASSING_BYTES = 64
"""Temporary bytes in a forward and backward, per token and element of its hidden state."""
CHUNK_BYTES = 16
"""Bytes that scoring holds per logit of a chunk."""
KEPT_BYTES = 4
"""Bytes of a kept logit."""


class TokenBytes(NamedTuple):
    """Bytes per token of a forward and backward.

    Attributes:
        kept: With all activations kept.
        recomputed: With layers computed again: their inputs, and ``working``.
        working: Activations of one layer alone, and temporary tensors.
    """

    kept: float
    recomputed: float
    working: float


class MemoryUser(Protocol):
    """The properties of a run that its operations' memory depends on; :class:`.engine_run.EngineRun` has them."""

    @property
    def policy(self) -> Policy: ...

    @property
    def config(self) -> training_pb2.RunConfig: ...

    @property
    def step(self) -> int: ...


class Memory:
    """Memory limits of operations.

    Args:
        microbatch_tokens: Configured maximum of tokens per micro-batch; None derives it from the memory.
        activation_bytes: Configured maximum of activation bytes; None derives it from the memory.
        machine_bytes: Bytes of memory; by default the machine's.
        agreement: Measures what work costs on a GPU.
    """

    def __init__(
        self,
        device: torch.device,
        microbatch_tokens: int | None = None,
        activation_bytes: int | None = None,
        machine_bytes: int | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self._device, self._agreement = device, agreement or Agreement()
        self._microbatch_tokens, self._activation_bytes = microbatch_tokens, activation_bytes
        self._machine_bytes = machine_bytes or Share().steady_memory()
        self._budgets: WeakKeyDictionary[Policy, Budget] = WeakKeyDictionary()
        self._token_bytes: dict[bytes, TokenBytes] = {}
        self._image_bytes: dict[bytes, float] = {}
        self._costs: dict[str, Costs] = {}
        self._shares: dict[bytes, float] = {}

    @property
    def most(self) -> Budget:
        """Maximum budget of an operation."""
        return MOST[self._device.type]

    def budget(self, run: MemoryUser, longest: int = 0, free_bytes: int = 0) -> Budget:
        """Budget of an operation of this run.

        It gives a third of the available bytes each to the micro-batch, to kept graphs, and to logits and reserve. A
        micro-batch is small enough to keep its logits, because computing them twice costs a third more.

        Args:
            longest: Tokens of the operation's longest row.
            free_bytes: Free memory of a GPU; on a CPU nothing depends on it.
        """
        if self._device.type != "cpu":
            return self._computed(run, longest, free_bytes)
        if run.policy not in self._budgets:  # on a CPU it depends on nothing that changes
            self._budgets[run.policy] = self._computed(run, longest, free_bytes)
        return self._budgets[run.policy]

    def _computed(self, run: MemoryUser, longest: int, free_bytes: int) -> Budget:
        most, kind = self.most, _kind(run)
        tokens, activations = self._microbatch_tokens, self._activation_bytes
        room = self._room(run, free_bytes) * self._shares.get(kind, 1.0) / 3
        facts = run.policy.facts
        kept = min(int(room / 4 / KEPT_BYTES), max(most.kept_logits, facts.num_parameters // 4))
        self.measure(run)
        of_token = self._token_bytes[kind]
        each = of_token.recomputed if run.config.gradient_checkpointing else of_token.kept
        if tokens is None:
            keeping = max(kept // facts.vocab_size, self._least_tokens(run))
            tokens = max(1, min(int(room / each), most.microbatch_tokens, keeping))
        kept_tokens, whole_tokens, beyond = ALL, ALL, Activations.RECOMPUTE
        if may_recompute(run):
            # A row that cannot be split may take what is there for kept graphs, too.
            of_row = min(2 * room, ALL if activations is None else activations)
            kept_tokens = 0 if run.config.gradient_checkpointing else max(tokens, int(of_row / of_token.kept))
            on_device = of_token.recomputed
            if longest > kept_tokens and not run.config.gradient_checkpointing:
                beyond = self._beyond(run, longest, of_row)
                on_device = of_token.working if Activations.OFFLOAD in beyond else on_device
            whole_tokens = max(tokens, kept_tokens, int(of_row / on_device))
        return Budget(
            tokens,
            min(int(room), most.activation_bytes) if activations is None else activations,
            max(1 << 16, min(int(room / 4 / CHUNK_BYTES), most.logits_elements)),
            kept,
            kept_tokens=kept_tokens,
            beyond=beyond,
            whole_tokens=whole_tokens,
            image_cost=self._image_bytes[kind] / each,
        )

    def again(self, budget: Budget) -> Budget:
        """The budget for repeating an operation that was executed within this one: never above what is configured."""
        return replace(
            budget,
            microbatch_tokens=min(budget.microbatch_tokens, self._microbatch_tokens or ALL),
            activation_bytes=min(
                budget.activation_bytes, ALL if self._activation_bytes is None else self._activation_bytes
            ),
        )

    def measure(self, run: MemoryUser) -> None:
        """Measure, by a forward, what a token of such runs takes, unless that is known; on a GPU also what it costs."""
        kind, model = _kind(run), run.config.base_model
        if kind not in self._token_bytes:
            self._token_bytes[kind] = self._measured(run)
            self._image_bytes[kind] = self._measured_image(run)
        if self._device.type == "cuda" and model not in self._costs:
            self._costs[model] = self._measured_costs(run)

    def _measured(self, run: MemoryUser) -> TokenBytes:
        return measured_token_bytes(run.policy)

    def _measured_image(self, run: MemoryUser) -> float:
        return measured_image_bytes(run.policy, recompute=run.config.gradient_checkpointing)

    def _measured_costs(self, run: MemoryUser) -> Costs:
        return measured_costs(run.policy, self._agreement)

    def _beyond(self, run: MemoryUser, tokens: int, device_bytes: float) -> Activations:
        """Choose how to handle the activations of a row whose tokens' activations cannot be kept on the device."""
        if self._device.type != "cuda":
            return Activations.RECOMPUTE
        facts, of_token = run.policy.facts, self._token_bytes[_kind(run)]
        row = LongRow(
            tokens=tokens,
            kept_bytes=of_token.kept,
            input_bytes=of_token.recomputed - of_token.working,
            working_bytes=of_token.working,
            attention=facts.num_layers * facts.hidden_size / facts.num_parameters,
        )
        return choose(row, self._costs[run.config.base_model], device_bytes, self._machine_bytes / 2)

    def ran_out(self, run: MemoryUser) -> None:
        """Record that an operation ran out of memory: on a GPU, the next ones of such runs get half as much."""
        if self._device.type == "cuda":
            kind = _kind(run)
            self._shares[kind] = self._shares.get(kind, 1.0) / 2

    def _least_tokens(self, run: MemoryUser) -> int:
        frozen = self._device.type == "cpu" and not run.policy.trains_output_head
        return FROZEN_TOKENS if frozen else LEAST_TOKENS

    def _room(self, run: MemoryUser, free_bytes: int) -> float:
        if self._device.type == "cpu":
            return self._machine_bytes / 2
        # An operation's float32 gradients, and before the run's first step also accumulated ones and two moments.
        copies = 1 if run.step else 4
        return max(0.9 * free_bytes - 4.0 * copies * run.policy.num_trainable_parameters, 0.0)


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


def may_recompute(run: MemoryUser) -> bool:
    """Whether micro-batches of a run may recompute their activations: unless its settings or the model forbid it."""
    forbidden = run.config.HasField("gradient_checkpointing") and not run.config.gradient_checkpointing
    return not forbidden and bool(run.policy.model.supports_gradient_checkpointing)


def token_bytes(policy: Policy) -> float:
    """Bytes per token of a forward and backward, measured in a small forward."""
    found = measured_token_bytes(policy)
    return found.recomputed if policy.gradient_checkpointing else found.kept


def measured_token_bytes(policy: Policy) -> TokenBytes:
    """Bytes per token of a forward and backward, measured in a small forward.

    If the policy does not recompute always, what layers computed again keep is not measured: it is their inputs.
    """
    facts, passing = policy.facts, PASSING_BYTES * policy.facts.hidden_size
    kept = _saved_bytes(policy, False)
    if policy.gradient_checkpointing:
        inputs = _saved_bytes(policy, True)
    else:
        inputs = facts.num_layers * facts.hidden_size * policy.split_model.dtype.itemsize
    working = kept / facts.num_layers + passing
    return TokenBytes(kept + passing, inputs + working, working)


def measured_image_bytes(policy: Policy, *, recompute: bool) -> float:
    """Bytes that the vision part takes for an image token in a forward and backward; 0 for a model of text.

    A layer is computed alone, with the policy's adapter. A vision part that is not trained keeps nothing.

    Args:
        recompute: Whether its layers are computed again in the backward pass.
    """
    vision = policy.split_model.vision
    if vision is None:
        return 0.0
    kept: float = PASSING_BYTES * vision.width
    if vision.trains(policy.trainable_parameters()):
        policy.activate(training=True)
        meter = ActivationMeter(policy)
        with preserved_rng(), meter:
            vision.layer_states(PROBE_TOKENS, differentiable=True)
        of_layer = meter.bytes / PROBE_TOKENS
        if recompute:
            kept += vision.depth * vision.width * policy.split_model.dtype.itemsize + of_layer
        else:
            kept += vision.depth * of_layer
    return kept * vision.patches


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
