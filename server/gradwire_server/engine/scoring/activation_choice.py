"""Choose what becomes of the activations of a row that is too long to keep them, by arithmetic and measured costs.

Legend: a row has ``T`` tokens; a token's forward takes ``f`` seconds without attention to other tokens; keeping takes
``k`` bytes a token, the inputs of the layers ``i`` and one layer alone ``w``; a copy moves ``c`` bytes a second. Then

    recompute                 takes  T f (1 + a T)                      and on the device  T (i + w) bytes
    offload                   takes  2 T k / c                          and on the device  T w, on the host  T k
    recompute and offload     takes  both with i in place of k          and on the device  T w, on the host  T i

where ``a T`` is the cost of attention to ``T`` tokens: two products of the hidden size a layer, half of them causal,
beside two operations a parameter, so ``a = layers * hidden / parameters``. The cheapest that fits is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.model.layers.activations import Activations
from gradwire_server.engine.model.policy import Policy

FORWARD_TOKENS = 1024
COPY_BYTES = 64 << 20


@dataclass(frozen=True)
class LongRow:
    """The memory and work of a row whose activations are kept, recomputed or copied.

    Attributes:
        kept_bytes: Activations a token, all layers.
        input_bytes: Inputs of the layers a token.
        working_bytes: Activations of one layer a token, and what exists for a moment.
        attention: Cost of attention to one more token, relative to the rest of a token's forward.
    """

    tokens: int
    kept_bytes: float
    input_bytes: float
    working_bytes: float
    attention: float


@dataclass(frozen=True)
class Costs:
    """Measured costs.

    Attributes:
        forward_s: Seconds of a token's forward.
        copy_rate: Bytes a second from the device to pinned host memory.
    """

    forward_s: float
    copy_rate: float


def choose(row: LongRow, costs: Costs, device_bytes: float, host_bytes: float) -> Activations:
    """The cheapest treatment of a row's activations that fits; where none does, the one that takes least of the device.

    Args:
        device_bytes: Memory of the device that a row may take.
        host_bytes: Host memory for offloaded activations.
    """
    forward_s = row.tokens * costs.forward_s * (1 + row.attention * row.tokens)

    def copies_s(bytes_a_token: float) -> float:
        return 2 * row.tokens * bytes_a_token / costs.copy_rate

    both = Activations.RECOMPUTE | Activations.OFFLOAD
    fitting = [
        (seconds, treatment)
        for seconds, on_device, on_host, treatment in (
            (forward_s, row.input_bytes + row.working_bytes, 0.0, Activations.RECOMPUTE),
            (copies_s(row.kept_bytes), row.working_bytes, row.kept_bytes, Activations.OFFLOAD),
            (forward_s + copies_s(row.input_bytes), row.working_bytes, row.input_bytes, both),
        )
        if row.tokens * on_device <= device_bytes and row.tokens * on_host <= host_bytes
    ]
    if fitting:
        return min(fitting, key=lambda each: each[0])[1]
    return both if row.tokens * row.input_bytes <= host_bytes else Activations.RECOMPUTE


def measured_costs(policy: Policy, agreement: Agreement) -> Costs:
    """Measure the costs on a GPU; the policy's weights are there."""
    tokens = max(1, min(FORWARD_TOKENS, policy.facts.context_length))
    device_side = torch.empty(COPY_BYTES, dtype=torch.uint8, device=policy.device)
    host_side = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def forward() -> None:
        policy.hidden(torch.zeros(tokens, dtype=torch.int64), torch.tensor([tokens]))

    with preserved_rng(), torch.no_grad():
        forward_s = agreement.seconds_on(policy.device, forward) / tokens
        copy_s = agreement.seconds_on(policy.device, lambda: host_side.copy_(device_side, non_blocking=True))
    return Costs(forward_s, COPY_BYTES / copy_s)
