"""Batched generation with a policy's own weights and a key-value cache.

Legend: ``R`` samples in progress (rows), ``V`` vocabulary. A prompt goes through the model once, however many
samples it has. Prompts of one batch are padded on the left. A row whose sample has ended leaves the batch, and its
cache with it. A token is drawn by inverting the cumulative distribution at one uniform number, and those numbers
belong to the sample: what it is batched with changes nothing but float rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gradwire_proto.v1 import training_pb2
from tokenizers.decoders import DecodeStream
from torch import Tensor

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.policy import Policy
from gradwire_server.engine.scoring import token_logits
from gradwire_server.engine.tokenizers import TextTokenizer
from gradwire_server.sampling.base import Sample, SamplingParams, StopReason


class LocalSampler:
    """Samples with the weights where they are.

    Args:
        cache_tokens: tokens of key-value cache at a time, padding included.
        logits_elements: entries of ``[R, V]`` at a time.
    """

    def __init__(self, cache_tokens: int = 1 << 16, logits_elements: int = 1 << 25) -> None:
        self._cache_tokens = cache_tokens
        self._logits_elements = logits_elements

    @torch.no_grad()
    def sample(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        tokenizer: TextTokenizer | None = None,
    ) -> list[list[Sample]]:
        """See :class:`.base.Sampler`."""
        _check(policy, prompts, params, tokenizer)
        facts = policy.facts
        ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | set(facts.eos_token_ids)
        policy.activate()
        rows = [
            [_Row(p, k, prompt, params, facts.context_length, tokenizer) for k in range(params.n)]
            for p, prompt in enumerate(prompts)
        ]
        every = [row for of_prompt in rows for row in of_prompt]
        for batch in self._batches(every, params.max_tokens, facts.vocab_size):
            _generate(policy, batch, params, ends)
        eos = frozenset(facts.eos_token_ids)
        return [[row.finish(eos - params.stop_token_ids, tokenizer) for row in of_prompt] for of_prompt in rows]

    def _batches(self, rows: list[_Row], max_tokens: int, vocab_size: int) -> list[list[_Row]]:
        """Rows of similar prompts together, a prompt's samples side by side, longest first."""
        most = max(1, self._logits_elements // vocab_size)
        batches: list[list[_Row]] = []
        width = 0
        for row in sorted(rows, key=lambda row: (-len(row.prompt), row.prompt_index, row.sample_index)):
            if batches and len(batches[-1]) < min(most, self._cache_tokens // width):
                batches[-1].append(row)
            else:
                batches.append([row])
                width = len(row.prompt) + max_tokens
        return batches


class _Row:
    """A sample in progress."""

    def __init__(
        self,
        prompt_index: int,
        sample_index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        context_length: int,
        tokenizer: TextTokenizer | None,
    ) -> None:
        self.prompt_index = prompt_index
        self.sample_index = sample_index
        self.prompt = prompt
        self.limit = min(params.max_tokens, context_length - len(prompt))
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ended_by: StopReason | None = None
        self._stop = params.stop
        self._longest_stop = max(map(len, params.stop), default=0)
        self._tokenizer = tokenizer if params.stop else None
        self._stream = DecodeStream(skip_special_tokens=True) if params.stop else None
        self._text = ""
        self._stopped_text: str | None = None
        key = np.array([params.seed % 2**64, prompt_index << 32 | sample_index], np.uint64)
        self._random = np.random.Generator(np.random.Philox(key=key))

    def uniform(self) -> float:
        return self._random.random()

    def append(self, token: int, logprob: float, ends: frozenset[int]) -> bool:
        """Takes a token; whether the sample goes on."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in ends or self._finds_stop(token):
            self.ended_by = "stop"
        elif len(self.token_ids) >= self.limit:
            self.ended_by = "length"
        return self.ended_by is None

    def _finds_stop(self, token: int) -> bool:
        if self._stream is None or self._tokenizer is None:
            return False
        piece = self._stream.step(self._tokenizer.tokenizer, token)
        if not piece:
            return False
        start = max(0, len(self._text) - self._longest_stop + 1)
        self._text += piece
        places = [place for stop in self._stop if (place := self._text.find(stop, start)) >= 0]
        if places:
            self._stopped_text = self._text[: min(places)]
        return bool(places)

    def finish(self, eos: frozenset[int], tokenizer: TextTokenizer | None) -> Sample:
        reason = self.ended_by or "length"
        by_token = reason == "stop" and self._stopped_text is None
        if by_token and self.token_ids[-1] in eos:
            reason = "eos"
        text = self._stopped_text
        if text is None and tokenizer is not None:
            text = tokenizer.decode([self.token_ids[:-1] if by_token else self.token_ids])[0]
        return Sample(self.token_ids, self.logprobs, reason, text)


def _check(
    policy: Policy, prompts: Sequence[Sequence[int]], params: SamplingParams, tokenizer: TextTokenizer | None
) -> None:
    facts = policy.facts

    def refuse(row: int, message: str, rule: str) -> OperationError:
        return OperationError(
            training_pb2.ERROR_CODE_INVALID_BATCH, f"prompt {row} {message}", field="prompts", row=row, rule=rule
        )

    if not prompts:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_BATCH, "sample needs at least one prompt", field="prompts", rule="not empty"
        )
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise refuse(row, "has no tokens; begin with the model's start token, say", "at least one token")
        if len(prompt) >= facts.context_length:
            raise refuse(
                row,
                f"has {len(prompt)} tokens, and the model's context of {facts.context_length} leaves no room after it",
                f"tokens < {facts.context_length}",
            )
        wrong = next((token for token in prompt if not 0 <= token < facts.vocab_size), None)
        if wrong is not None:
            raise refuse(row, f"has the token id {wrong}", f"0 <= id < {facts.vocab_size}")
    if params.stop and tokenizer is None:
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"model {facts.name!r} has no tokenizer here, so stop strings cannot be found: use stop_token_ids",
            field="stop",
        )


def _generate(policy: Policy, rows: list[_Row], params: SamplingParams, ends: frozenset[int]) -> None:
    trunk, head = policy.hosted.trunk, policy.output_head()
    state, mask, cache = _prefill(policy, rows)
    while True:
        logits = token_logits(state, head, temperature=params.temperature or 1.0)
        uniform = torch.tensor([row.uniform() for row in rows], dtype=torch.float64).to(logits.device)
        tokens, logprobs = draw(logits, uniform, params)
        drawn = zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)
        going = [index for index, (row, token, logprob) in enumerate(drawn) if row.append(token, logprob, ends)]
        if not going:
            return
        if len(going) < len(rows):
            rows = [rows[index] for index in going]
            kept = torch.tensor(going)  # on the CPU: the cache may be spread over devices
            cache.batch_select_indices(kept)
            mask, tokens = mask[kept], tokens[kept]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        step = trunk(
            input_ids=tokens[:, None].to(mask.device),
            attention_mask=mask,
            position_ids=mask.sum(dim=1, keepdim=True) - 1,
            past_key_values=cache,
            use_cache=True,
        )
        state = step.last_hidden_state[:, -1]


def _prefill(policy: Policy, rows: list[_Row]) -> tuple[Tensor, Tensor, Any]:
    """The state after each row's prompt ``[R, H]``, the mask ``[R, width]`` of real tokens, and the cache."""
    first = [index for index, row in enumerate(rows) if not index or rows[index - 1].prompt_index != row.prompt_index]
    prompts = [rows[index].prompt for index in first]
    counts = np.diff([*first, len(rows)])
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros(len(prompts), width, dtype=torch.int64)
    for place, prompt in enumerate(prompts):
        ids[place, width - len(prompt) :] = torch.tensor(prompt)
        mask[place, width - len(prompt) :] = 1
    ids, mask = ids.to(policy.device), mask.to(policy.device)
    output = policy.hosted.trunk(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
        use_cache=True,
    )
    state, cache = output.last_hidden_state[:, -1], output.past_key_values
    if len(rows) > len(prompts):
        spread = torch.from_numpy(np.repeat(np.arange(len(prompts)), counts))
        cache.batch_select_indices(spread)
        state, mask = state[spread], mask[spread]
    return state, mask, cache


def draw(logits: Tensor, uniform: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token of each distribution: ``[R, V]`` logits over the temperature, ``[R]`` uniform numbers in [0, 1).

    Returns:
        ``[R]`` tokens, and ``[R]`` their log-probabilities in the whole distribution, before top-k and top-p.
    """
    normalizer = logits.logsumexp(dim=-1, keepdim=True)
    if params.temperature == 0:
        tokens = logits.argmax(dim=-1, keepdim=True)
    else:
        order = None
        kept = logits
        if 0 < params.top_k < logits.shape[-1]:
            kept, order = logits.topk(params.top_k, dim=-1)
        elif params.top_p < 1:
            kept, order = logits.sort(dim=-1, descending=True)
        weights = (kept - kept.amax(dim=-1, keepdim=True)).exp()
        if params.top_p < 1:
            before = weights.cumsum(dim=-1, dtype=torch.float64) - weights
            weights = weights.masked_fill(before >= params.top_p * weights.sum(dim=-1, keepdim=True), 0.0)
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        targets = uniform[:, None].to(cumulative.dtype) * cumulative[:, -1:]
        places = torch.searchsorted(cumulative, targets, right=True)
        last = weights.shape[-1] - 1 - weights.flip(-1).ne(0).long().argmax(dim=-1, keepdim=True)
        places = places.minimum(last)
        tokens = places if order is None else order.gather(1, places)
    return tokens.squeeze(1), (logits.gather(1, tokens) - normalizer).squeeze(1)
