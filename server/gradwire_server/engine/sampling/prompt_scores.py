"""Log-probabilities of the tokens of prompts, and other tokens in their places: probable, given or drawn ones.

The prompts are divided among the ranks of an engine, in micro-batches as those of a run with as many lanes. The results
are the same on any number of ranks to rounding, or to the bit if each rank computes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from gradwire_losses.batch import Batch, sent
from torch import Tensor

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import invalid
from gradwire_server.engine.executor import Executor, Scored, Turn, executor_of
from gradwire_server.engine.interruption import between_micro_batches
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.vision.row_images import ImagePrompt, images_of_pieces
from gradwire_server.engine.sampling.drawing.draw import draw_many
from gradwire_server.engine.sampling.samplers.sampler import TopTokens
from gradwire_server.engine.scoring.planner import Budget, MicroBatch, split
from gradwire_server.engine.scoring.token_scores import chosen_logprobs, token_logits
from gradwire_server.engine.threads import suited_threads


@dataclass(frozen=True)
class Draws:
    """Tokens to draw in each place, independently.

    Attributes:
        count: How many.
        temperature: Divides the logits; 0 for the most probable token.
        seed: The same seed draws the same tokens.
    """

    count: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class PromptScores:
    """Scores of prompts.

    Legend: ``P`` prompts, ``T`` tokens that were sent of all of them but their first, ``K`` candidates in each place.

    Attributes:
        lengths: ``[P]`` scored tokens of each prompt, uint32.
        logprobs: ``[T]`` float32, in nats, given the tokens before.
        top: ``[T, k]`` the most probable tokens in each place, most probable first; None if none were wanted.
        candidates: ``[T, K]`` float32 log-probabilities of given ids in each place; None if none were given.
        drawn: ``[T, count]`` drawn tokens and their log-probabilities; None if none were wanted.
    """

    lengths: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]
    top: TopTokens | None
    candidates: npt.NDArray[np.float32] | None = None
    drawn: TopTokens | None = None


def candidate_ids(prompts: Sequence[Sequence[int]], candidates: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """``[T, K]`` ids to score in each place of all prompts, from those of each prompt, one after another."""
    places = [len(prompt) - 1 for prompt in prompts]
    widths = {len(ids) // count for ids, count in zip(candidates, places, strict=False) if count > 0}
    width = widths.pop() if len(widths) == 1 else 0
    if len(candidates) != len(prompts) or any(len(ids) != width * n for ids, n in zip(candidates, places, strict=True)):
        message = "prompt_candidates are equally many ids for each token of each prompt but its first"
        raise invalid(message, "prompt_candidates")
    ids = torch.tensor([token for each in candidates for token in each], dtype=torch.int64)
    if len(ids) and int(ids.max()) >= vocab_size:
        raise invalid(f"prompt_candidates has {int(ids.max())}; there are {vocab_size} tokens", "prompt_candidates")
    return ids.view(sum(places), width)


def score_prompts(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    top: int = 0,
    candidates: Tensor | None = None,
    draws: Draws | None = None,
    budget: Budget,
    agreement: Agreement,
    divided: bool = True,
) -> PromptScores:
    """Score prompts without gradients. If memory runs out, with half as many tokens at a time.

    Args:
        prompts: Token ids, at least one a prompt.
        temperature: Divides the logits.
        top: Most probable tokens to return in each place.
        candidates: ``[T, K]`` ids to score in each place.
        draws: Tokens to draw in each place.
        budget: Memory limits.
        agreement: This process's agreement with the others of the engine.
        divided: Whether each process computes some of the prompts, or all.

    Raises:
        MemoryError: Also one prompt alone does not fit into memory.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    images = images_of_pieces([(prompt, 0, len(prompt)) for prompt in prompts])
    batch = Batch(
        ids, lengths, torch.cat([_scored(prompt) for prompt in prompts]), torch.ones_like(lengths), images=images
    )
    longest = int(lengths.max())
    executor = executor_of(agreement.ranks if divided else 1, agreement)

    def attempt(budget: Budget) -> PromptScores:
        return _scores(policy, batch, temperature, top, candidates, draws, budget, executor)

    while True:
        alone = budget.microbatch_tokens <= longest and budget.logits_elements <= policy.facts.vocab_size
        found = agreement.unless_out_of_memory(partial(attempt, budget), alone=alone)
        if found is not None:
            return found
        budget = replace(
            budget,
            microbatch_tokens=max(min(budget.microbatch_tokens, len(ids)) // 2, 1),
            logits_elements=max(budget.logits_elements // 2, 1),
        )


def _scores(
    policy: Policy,
    batch: Batch,
    temperature: float,
    top: int,
    candidates: Tensor | None,
    draws: Draws | None,
    budget: Budget,
    executor: Executor,
) -> PromptScores:
    uniform = _uniform(draws, batch.num_scored)

    def empty(places: int) -> dict[str, Tensor]:
        return {
            "logprobs": torch.zeros(places),
            "top_ids": torch.zeros(places, top, dtype=torch.int32),
            "top_logprobs": torch.zeros(places, top),
            "candidates": torch.zeros(places, 0 if candidates is None else candidates.shape[1]),
            "drawn_ids": torch.zeros(places, uniform.shape[1], dtype=torch.int32),
            "drawn_logprobs": torch.zeros(places, uniform.shape[1]),
        }

    def compute(micro: MicroBatch) -> dict[str, Tensor]:
        part, scores = micro.batch, empty(len(micro.tokens))
        hidden = policy.hidden(part.input_ids, part.lengths, part.read_positions, images=part.images)
        head, chunk = policy.output_head(), max(1, budget.logits_elements // policy.facts.vocab_size)
        for start in range(0, len(hidden), chunk):
            among = slice(start, start + chunk)
            logits = token_logits(hidden[among], head, temperature=temperature)
            places = micro.tokens[among]

            log_p = None if policy.split_model.exact else logits.log_softmax(dim=-1)

            def of(ids: Tensor, logits: Tensor = logits, log_p: Tensor | None = log_p) -> Tensor:
                found = chosen_logprobs(logits, ids) if log_p is None else log_p.gather(1, ids)
                return found.float().cpu()

            def keep(name: str, ids: Tensor, among: slice = among, of: Callable[[Tensor], Tensor] = of) -> None:
                scores[f"{name}_ids"][among] = ids.int().cpu()
                scores[f"{name}_logprobs"][among] = of(ids)

            scores["logprobs"][among] = of(sent(part.targets[among, None], logits.device))[:, 0]
            if candidates is not None:
                scores["candidates"][among] = of(sent(candidates[places], logits.device))
            if top:
                keep("top", logits.topk(top, dim=-1).indices)
            if draws is not None:
                keep("drawn", draw_many(logits, sent(uniform[places], logits.device), draws.temperature))
        return scores

    packing = policy.packing(images=batch.images is not None)
    micros = split(batch, budget.microbatch_tokens, packing, image_cost=budget.image_cost, lanes=executor.lanes)

    def score(turn: Turn) -> Scored:
        micro = micros[turn.number]
        between_micro_batches()
        if not (micro.batch.num_scored or executor.in_step):
            return [empty(0)]
        with suited_threads(policy.device, len(micro.batch.input_ids), policy.facts.num_parameters):
            return [policy.compute(partial(compute, micro))]

    with torch.no_grad():
        scored = executor.score("prompts", len(micros), score)
    whole = empty(batch.num_scored)
    for micro, (computed,) in zip(micros, scored, strict=True):
        for name, values in computed.items():
            whole[name][micro.tokens] = values
    arrays = {name: values.numpy() for name, values in whole.items()}
    return PromptScores(
        lengths=batch.row_lengths.numpy().astype(np.uint32),
        logprobs=arrays["logprobs"],
        top=(arrays["top_ids"], arrays["top_logprobs"]) if top else None,
        candidates=None if candidates is None else arrays["candidates"],
        drawn=(arrays["drawn_ids"], arrays["drawn_logprobs"]) if draws else None,
    )


def _scored(prompt: Sequence[int]) -> Tensor:
    """``[L]`` which of a prompt's tokens are scored: those that were sent, but the first."""
    scored = prompt.sent.clone() if isinstance(prompt, ImagePrompt) else torch.ones(len(prompt), dtype=torch.bool)
    scored[scored.nonzero()[0]] = False
    return scored


def _uniform(draws: Draws | None, places: int) -> Tensor:
    """``[places, count]`` numbers in [0, 1), the same however the places are computed."""
    if draws is None:
        return torch.zeros(places, 0)
    generator = np.random.Generator(np.random.Philox(draws.seed))
    return torch.from_numpy(generator.random((places, draws.count)))
