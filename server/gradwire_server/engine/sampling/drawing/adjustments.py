"""Adjustment of logits before a token is chosen: biases, penalties and grammars.

Legend: ``R`` rows, ``V`` vocabulary, ``C`` tokens. In this order, as in transformers: ``z_v + bias_v``; of tokens in
the prompt or the sample ``z / r`` where positive and ``z r`` elsewhere (Keskar et al. 2019, r the repetition penalty);
of tokens in the sample, n_v times, ``z_v - presence [n_v > 0] - frequency n_v`` (OpenAI's API reference); -inf for
tokens that end a sample too early, and for those outside a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from gradwire_losses.batch import sent
from torch import Tensor

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.sampling.pages.key_values import IntArray
from gradwire_server.engine.sampling.rows import Rows
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams


def logits_to_choose_by(logits: Tensor, params: SamplingParams, rows: Rows, drawing: IntArray) -> Tensor | None:
    """Logits to choose the next tokens of some rows by; None if they are the model's own.

    A row whose grammar cannot be followed further ends its job with an error.

    Args:
        logits: ``[R, V]`` over the temperature.
        params: The parameters that these rows share.
        drawing: ``[R]`` the rows.
    """
    choices = None
    if params.adjusts:
        prompts = [rows.job[row].prompt_of(rows.row[row]) for row in drawing]
        choices = adjusted(logits, params, prompts, rows.tokens[drawing], rows.count[drawing])
        ends = sorted(rows.job[drawing[0]].ends)  # equal for all, as their parameters and their models are
        early = rows.count[drawing] < params.min_tokens
        if ends and early.any():
            places = torch.from_numpy(early.nonzero()[0])[:, None]
            choices[sent(places, choices.device), sent(torch.tensor(ends), choices.device)] = -torch.inf
    if not params.forms:
        return choices
    choices = logits if choices is None else choices
    refused = np.zeros(choices.shape, np.bool_)
    for place, row in enumerate(drawing.tolist()):
        try:
            refused[place] = ~rows.growing[row].allowed()
        except OperationError as error:
            rows.job[row].error = error
    return choices.masked_fill(sent(torch.from_numpy(refused), choices.device), -torch.inf)


def adjusted(
    logits: Tensor,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    sampled: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int64],
) -> Tensor:
    """Logits to choose from, ``[R, V]`` over the temperature like ``logits``, which stay as they are.

    Args:
        prompts: Tokens of each row's prompt.
        sampled: ``[R, C]`` tokens of each row's sample so far, padded at the end.
        counts: ``[R]`` how many they are.
    """
    temperature = params.temperature or 1.0
    chosen = logits.clone()
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        bias = sent(torch.tensor(biases, dtype=logits.dtype) / temperature, logits.device)
        chosen[:, sent(torch.tensor(ids), logits.device)] += bias
    penalises_sample = bool(params.presence_penalty or params.frequency_penalty)
    if params.repetition_penalty == 1 and not penalises_sample:
        return chosen
    times = _times(sampled, counts, logits)
    if params.repetition_penalty != 1:
        lengths = np.array([len(prompt) for prompt in prompts])
        padded = np.zeros((len(prompts), max(lengths)), np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        seen = (times > 0) | (_times(padded, lengths, logits) > 0)
        scaled = torch.where(chosen > 0, chosen / params.repetition_penalty, chosen * params.repetition_penalty)
        chosen = torch.where(seen, scaled, chosen)
    if penalises_sample:
        chosen -= (params.presence_penalty * (times > 0) + params.frequency_penalty * times) / temperature
    return chosen


def _times(tokens: npt.NDArray[np.int32], counts: npt.NDArray[np.int64], like: Tensor) -> Tensor:
    """``[R, V]`` how often each token is among each row's first ``counts`` of ``tokens [R, C]``."""
    width = int(counts.max(initial=0))
    ids = torch.from_numpy(tokens[:, :width].astype(np.int64))
    there = torch.from_numpy(np.arange(width) < counts[:, None])
    times = torch.zeros_like(like)
    return times.scatter_add_(1, sent(ids, like.device), sent(there.to(like.dtype), like.device))
