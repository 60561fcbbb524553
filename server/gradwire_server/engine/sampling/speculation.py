"""Choice of the rows of a batch that compute drafts of their next tokens, and of the drafts' lengths.

A forward takes several tokens of a row, each of which attends to what is before it, as it takes one of several rows.
What is drawn is the same as without drafts where the bits of a token's states do not depend on how many tokens are
computed beside it. A CPU's kernels and bfloat16 products have that property; a model is tried before its first draft.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire_server.engine.model.attention.packed import HALVES
from gradwire_server.engine.model.attention.paged import PAGE
from gradwire_server.engine.model.layers.packed_linear import MOST_ROWS, copies_in_use
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.split_model import SplitModel
from gradwire_server.engine.sampling.growing.drafts import FORWARD_TOKENS, LENGTHS
from gradwire_server.engine.sampling.pages.key_values import KeyValues
from gradwire_server.engine.sampling.pages.pages import Pages
from gradwire_server.engine.sampling.rows import Rows
from gradwire_server.engine.scoring.token_scores import token_logits

logger = logging.getLogger(__name__)

Mode = Literal["auto", "on", "off"]
TRIED = (1, 2, 4, 16)
"""Tokens of a row in the forwards that a model is tried with."""
LOW_ROWS = 16
"""Tokens up to which torch's products in bfloat16 have the same bits for each, on a Xeon with AMX."""
NUMBERS = 1 << 17
"""Numbers of each product that are compared. On a Xeon without instructions for bfloat16 one sum of 64 in 10,000
was otherwise in a row alone."""
ATTENTION = 6
"""Time that a CPU's attention takes for a number of a key over that of a product. A place behind 3,000 tokens of
SmolLM2-135M took 16 ms of a core, 13 of them in attention."""


class Speculation:
    """Drafts of rows.

    Args:
        mode: ``"auto"`` drafts where what is drawn is the same to the bit, ``"on"`` also where other roundings may
            decide a token, as rows beside a row do there; ``"off"`` never.
    """

    def __init__(self, mode: Mode = "auto") -> None:
        self.mode = mode
        self._alike: WeakKeyDictionary[SplitModel, dict[tuple[bool, bool], bool]] = WeakKeyDictionary()

    def drafts(self, rows: Rows, values: KeyValues, cache_tokens: int, most: int) -> list[list[int]]:
        """The draft of each row, empty for none.

        Args:
            cache_tokens: Tokens of key-value cache that the rows may take.
            most: Maximum tokens of the forward.
        """
        count = len(rows)
        none: list[list[int]] = [[] for _ in range(count)]
        if not count or not isinstance(values, Pages) or not any(rows.drafts):
            return none
        split_model = rows.job[0].policy.split_model
        if split_model.device.type == "meta":  # which has no numbers to compare
            return none
        low = self.mode == "auto" and split_model.dtype in HALVES and not split_model.exact
        most = min(most, LOW_ROWS if low else MOST_ROWS)
        if count >= most:
            return none
        least = least_worth(rows)
        rests = (rows.limit - rows.count).tolist()
        drafts = [
            [] if each is None else each.draft(least, rest - 1) for each, rest in zip(rows.drafts, rests, strict=True)
        ]
        if not any(drafts):
            return none
        policies = _policies(rows)
        if low and len(policies) > 1:  # their adapters' products are of other shapes beside other rows
            return none
        if self.mode == "auto" and not (all(values.alone(split_model)) and all(map(self._computes_alike, policies))):
            return none
        if count > 1 and values.more(rows.length) + PAGE * sum(map(bool, drafts)) > cache_tokens:
            return none
        for length in reversed(LENGTHS):
            cut = [draft[:length] for draft in drafts]
            if count + sum(map(len, cut)) <= most:
                return cut
        return none

    def _computes_alike(self, policy: Policy) -> bool:
        """Whether tokens computed together have the bits that they have one by one, as they are computed now."""
        known = self._alike.setdefault(policy.split_model, {})
        case = policy.adapter is not None, bool(copies_in_use())
        if case not in known:
            try:
                known[case] = _same_products(policy) and _same_states(policy)
            except (MemoryError, torch.OutOfMemoryError):  # other rows may have left when it is tried again
                return False
            if not known[case]:
                logger.info("no drafts for %s: a token's bits depend on what is computed beside it", policy.facts.name)
        return known[case]


def least_worth(rows: Rows) -> float:
    """Tokens that a place of the next forward has to bring: those of the rows in the time that a place takes."""
    facts = next(iter(_policies(rows))).facts
    numbers = 2.0 * facts.num_layers * facts.hidden_size * float(rows.length.mean())
    places = len(rows) * (1 + ATTENTION * numbers / max(1, facts.num_parameters))
    return places / (FORWARD_TOKENS + places)


def _policies(rows: Rows) -> set[Policy]:
    return {job.policy for job in rows.job}


def _same_products(policy: Policy) -> bool:
    """Whether a row has the same bits in products of any number of rows up to ``LOW_ROWS``, in bfloat16 and float16.

    Those of float32 are a kernel's, or differ in every state.
    """
    dtype, generator = policy.split_model.dtype, torch.Generator().manual_seed(0)
    if dtype not in HALVES or policy.split_model.exact:
        return True
    shapes = {each.weight.shape for each in policy.model.modules() if type(each) is nn.Linear}
    if policy.adapter is not None:
        shapes |= {each.shape for each in policy.trainable_parameters().values() if each.ndim == 2}
    for outputs, inputs in shapes:
        rows = max(LOW_ROWS, NUMBERS // outputs // LOW_ROWS * LOW_ROWS)
        sizes = (outputs, inputs), (rows, inputs), (rows, outputs)
        made = (torch.randn(size, generator=generator).to(policy.device, dtype) for size in sizes)
        weight, x, into = made

        def found(count: int, rows: int, weight: Tensor = weight, x: Tensor = x, into: Tensor = into) -> list[Tensor]:
            parts = list(zip(x[:rows].split(count), into[:rows].split(count), strict=True))
            products = [F.linear(of_x, weight) for of_x, _ in parts]
            return [torch.cat(products), torch.cat([torch.addmm(to, of_x, weight.T, alpha=0.5) for of_x, to in parts])]

        whole = found(LOW_ROWS, rows)
        for count in range(1, LOW_ROWS):
            few = found(count, count if rows == LOW_ROWS else rows // count * count)
            if not all(torch.equal(part, all_of_it[: len(part)]) for part, all_of_it in zip(few, whole, strict=True)):
                return False
    return True


def _same_states(policy: Policy) -> bool:
    """Whether tokens of a row that are computed together have the logits that they have one by one."""
    facts = policy.facts
    start = min(PAGE + 3, facts.context_length - max(TRIED))
    if start < 1:
        return False
    tokens = (np.arange(start + max(TRIED)) * 7 + 1) % facts.vocab_size
    pages = Pages()
    pages.prefill([policy], [tokens[:start].tolist()], np.zeros(1, np.int64))

    def logits(count: int) -> Tensor:
        pages.trim(np.array([start]))
        positions = np.arange(start, start + count)
        states = pages.decode([policy] * count, tokens[positions], positions, np.zeros(count, np.int64))
        return token_logits(states, policy.output_head()).clone()

    found: Sequence[Tensor] = [logits(count) for count in TRIED]
    return all(torch.equal(few, many[: len(few)]) for few, many in itertools.pairwise(found))
