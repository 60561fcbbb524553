"""Forwards of tokens of several policies on one copy of a model, each computed with its own policy's adapter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire_server.engine.model.adapters.products import Span
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.pages.key_values import IntArray

_NO_ADAPTER = ""


def can_share(policy: Policy) -> bool:
    """Whether a forward in evaluation mode can be shared with other policies on the same copy of the model."""
    adapters = policy.split_model.adapters
    return policy.adapter is None or (adapters is not None and adapters.computes_in_spans(policy.adapter))


def activate_each(policies: Sequence[Policy], counts: Sequence[int]) -> None:
    """Activate policies in evaluation mode, each for so many tokens of the next forward; equal ones are neighbours."""
    first = policies[0]
    if all(policy is first for policy in policies):
        first.activate()
        return
    spans: list[Span] = []
    stop = 0
    for policy, count in zip(policies, counts, strict=True):
        start, stop = stop, stop + count
        name = policy.adapter or _NO_ADAPTER
        if spans and spans[-1].adapter == name:
            spans[-1] = spans[-1]._replace(stop=stop)
        else:
            spans.append(Span(name, start, stop))
    first.split_model.activate_spans(spans, training=False)


def neighbours(policies: Sequence[Policy]) -> IntArray:
    """An order in which equal policies are neighbours: each where it first occurs."""
    numbers: dict[Policy, int] = {}
    return np.argsort([numbers.setdefault(policy, len(numbers)) for policy in policies], kind="stable")
