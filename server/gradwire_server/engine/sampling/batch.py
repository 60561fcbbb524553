"""Continuous batching of samples, of one policy or of several on one copy of a model.

A prompt shared by several rows goes through the model once. Rows join and leave between two tokens, and take room for
keys and values as their tokens come; :mod:`.admission` says who joins, and who leaves when there is no room left. A
token is drawn by inverting the cumulative distribution at one uniform number. These numbers belong to the sample, so
batching with other samples, or leaving and joining again, changes only float rounding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradwire_server.engine.agreement import Failure
from gradwire_server.engine.interruption import is_aside
from gradwire_server.engine.model.attention.paged import PAGE
from gradwire_server.engine.model.layers.cpu_kernels import sampling_by_kernels
from gradwire_server.engine.model.layers.packed_linear import PackedWeights
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.split_model import SplitModel
from gradwire_server.engine.model.vision.row_images import ImagePrompt
from gradwire_server.engine.sampling.admission import QUANTUM, Held, Waiting, WaitingRows
from gradwire_server.engine.sampling.division import Division
from gradwire_server.engine.sampling.drawing.draw import Uniforms
from gradwire_server.engine.sampling.drawing.kinds import Drawn, Kinds, Logits
from gradwire_server.engine.sampling.growing.growing_sample import GrowingSample
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.pace import Pace
from gradwire_server.engine.sampling.pages.key_values import IntArray, KeyValues, Room
from gradwire_server.engine.sampling.pages.pages import CHUNK_TOKENS, Pages
from gradwire_server.engine.sampling.rows import DRAWS, BoolArray, Left, Rows, begun, widened
from gradwire_server.engine.sampling.several_policies import neighbours
from gradwire_server.engine.sampling.speculation import Speculation
from gradwire_server.engine.threads import products_apart, sampling_threads

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 1 << 14
"""Maximum prompt tokens in one forward, padding included; a longer prompt goes alone."""

COMMON_TOKENS = 16 * PAGE
"""Tokens that two prompts have in common from which on one waits for the other, and a step later finds them."""

PACKING_TOKENS, PACKING_STEPS = 4096, 32
"""Tokens to compute, or steps, from which on a copy of the weights saves more time than it takes."""

ONE_THREAD_ROWS = 16
"""Rows from which on a token's small operations are large enough to be divided among threads, at a loss."""

WORTH = 8
"""Tokens that a row may have to compute for each step that there is room for, if its key has others in progress. A row
that left soon would have them computed again for few tokens of its own."""


class Batch:
    """The samples of one policy, or of several that compute in spans.

    Args:
        values: Makes the keys and values of no rows.
        cache_tokens: Tokens of key-value cache that several rows may take; one row may have what it needs.
        rows: Maximum rows at a time.
        division: Says which of the rows are this process's.
        packed: Copies of the copy's weights to compute many tokens with; None for none.
        speculation: Drafts the rows' next tokens.
        pace: Says how many tokens of prompts to compute in a step; by default nothing else is in progress.

    Attributes:
        values: Keys and values of the rows in progress.
    """

    def __init__(
        self,
        split_model: SplitModel,
        values: Callable[[], KeyValues],
        cache_tokens: int,
        rows: int,
        uniforms: Uniforms,
        division: Division,
        packed: PackedWeights | None = None,
        speculation: Speculation | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._split_model = split_model
        self._make_values = values
        self._cache_tokens, self._most = cache_tokens, rows
        self._waiting = WaitingRows()
        self._left: dict[tuple[LocalJob, int], Left] = {}
        self._joining: list[Waiting] = []
        self._steps = self._formed = 0
        self._kinds = Kinds(split_model.facts.vocab_size)
        self._jobs: list[LocalJob] = []
        self._uniforms, self._division = uniforms, division
        self._packed, self._packs = packed, False
        self._speculation = speculation or Speculation("off")
        self._pace = pace or Pace()
        self._part: tuple[Waiting, int] | None = None
        self._computed = 0
        self.values = values()
        self._rows = self._begin([])

    @property
    def jobs(self) -> Sequence[LocalJob]:
        """Unfinished jobs."""
        return self._jobs

    def add(self, job: LocalJob) -> None:
        self._jobs.append(job)
        self._waiting.add(job, self._steps)

    def remove(self, job: LocalJob) -> int:
        """Remove a job; returns the number of tokens of its samples that had not ended."""
        tokens = int(self._rows.count[self._rows.job == job].sum())
        tokens += sum(len(left.tokens) for (of, _), left in self._left.items() if of is job)
        self._jobs.remove(job)
        self._waiting.remove(job)
        self._left = {key: left for key, left in self._left.items() if key[0] is not job}
        self._keep(self._rows.job != job)
        return tokens

    def step(self) -> None:
        """Prefill new rows if there is room, and add one token to every sample."""
        with torch.no_grad():
            found = self._division.attempt(self._split_model, self._step)
        if isinstance(found, Failure):  # reported by the jobs, to whoever waits for their samples
            self._give_up(found)
        self._division.exchange(self._jobs)
        for job in [job for job in self._jobs if job.error is not None]:
            self.remove(job)
        self._jobs = [job for job in self._jobs if not job.done]
        self._kinds.forget(self._rows, len(self._jobs))

    def _step(self) -> None:
        self._steps += 1
        began, rows = time.perf_counter(), len(self._rows) > 0
        streams = any(job.begun and job.params.stream for job in self._jobs)
        self._make_room()
        # One rank's clock decides nothing where there are others.
        most = None if self._division.divides else self._pace.most(self, rows=rows)
        self._joining = self._admit(most)
        tokens = len(self._rows) + sum(len(self._prompt(each)) for each in self._joining)
        tokens += 0 if self._part is None else self._part[1]
        model = self._split_model
        packed = self._packed if self._packed is not None and self._pays_packing() else None
        apart = packed is not None and len(self._rows) >= ONE_THREAD_ROWS
        threads = sampling_threads(model.device, tokens, model.facts.num_parameters, products_only=apart)
        with threads, sampling_by_kernels(model.by_kernels), packed.in_use() if packed else nullcontext():
            self._extend(products_apart() if apart else nullcontext())
        seconds = time.perf_counter() - began
        self._pace.note(self, seconds, rows=rows, streams=streams and rows, computed=self._computed)

    def _pays_packing(self) -> bool:
        """Whether copies of the weights are worth making, by the requests alone, so that a replay repeats it."""
        joining = self._joining if self._part is None else [self._part[0]]
        if not self._packs and joining:  # what is left of the others only becomes less
            rests = [*self._rests().tolist(), *map(self._rest, joining)]
            tokens = sum(rests) + sum(len(self._prompt(each)) for each in joining)
            self._packs = tokens >= PACKING_TOKENS or max(rests) >= PACKING_STEPS
        return self._packs

    def _extend(self, decoding: AbstractContextManager[None]) -> None:
        """Compute the joining rows' prompts and, within a context, the next token of every row and its draft."""
        states = []
        drafts = self._speculation.drafts(self._rows, self.values, self._cache_tokens, self._most)
        if len(self._rows):
            with decoding:
                states.append(self._decode(drafts))
            self._rows.length += 1
        if self._part is not None:
            waiting, count = self._part
            self.values.warm(waiting.job.policy, waiting.job.tree, self._prompt(waiting), count)
            if not states and self._split_model.device.type == "cuda":
                torch.cuda.synchronize(self._split_model.device)  # so that its time is known
        if self._joining:
            states.append(self._prefill())
            drafts += [[] for _ in range(len(self._rows) - len(drafts))]
        if states:
            self._draw(states[0] if len(states) == 1 else torch.cat(states), drafts)
            if len(states) > 1:
                order = neighbours(_policies(self._rows))
                if (order[1:] < order[:-1]).any():
                    self._rows = self._rows.select(order)
                    self.values.keep(order)

    def _decode(self, drafts: Sequence[Sequence[int]]) -> Tensor:
        """States of every row's newest token and of those of its draft behind it."""
        rows = self._rows
        if not any(drafts):
            return self.values.decode(_policies(rows), rows.last, rows.length)
        assert isinstance(self.values, Pages)
        of = np.repeat(np.arange(len(rows)), [1 + len(draft) for draft in drafts])
        tokens = [token for last, draft in zip(rows.last.tolist(), drafts, strict=True) for token in (last, *draft)]
        positions = np.concatenate([np.arange(1 + len(draft)) for draft in drafts]) + rows.length[of]
        policies = [job.policy for job in rows.job[of]]
        return self.values.decode(policies, np.array(tokens), positions, of)

    def _give_up(self, failure: Failure) -> None:
        """Handle the failure of a step.

        If memory ran out, the samples go on with half as many rows at a time; so does a single one if an operation in
        progress has the memory. Any other error, or a single sample that does not fit, ends all jobs.
        """
        joining, self._joining = self._joining, []
        count = len(self._rows) + len(joining)
        if failure.out_of_memory and (count > 1 or is_aside()):
            self._most = max(count // 2, 1)
            logger.warning("out of memory with %d samples, going on with %d: %s", count, self._most, failure.error)
            self._remember(range(len(self._rows)))
            for waiting in joining:
                self._waiting.put(waiting)
            self._restart()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return
        self._restart()
        for job in self._jobs:
            job.error = failure.error
        self._waiting.clear()
        self._left.clear()

    def _restart(self) -> None:
        """Drop all rows and known pages, as memory ran out or a forward failed in their midst."""
        self.values.end(spare_memory=True)
        self._rows, self._part, self.values = self._begin([]), None, self._make_values()

    # ---- joining and leaving ----

    def _make_room(self) -> None:
        """Let rows leave for whose next tokens there is no room, or so that others may join."""
        rows = self._rows
        if len(rows) > 1 and (missing := self.values.more(rows.length) - self._cache_tokens) > 0:
            self._leave(self._held().to_leave(missing))
        if not self._waiting or not len(rows) or self.values.joins:
            return
        # Rows that must begin together do so again if a request waits that has no row among them.
        due = self._steps - self._formed >= max(QUANTUM, int(rows.length.max()) // 2)
        if due and self._waiting.jobs() - set(rows.job):
            self._leave(range(len(self._rows)))

    def _held(self) -> Held:
        return Held(self._rows.waited.tolist(), self.values.held(), (self._steps - self._rows.since).tolist())

    def _leave(self, rows: Sequence[int]) -> None:
        """Let rows leave that go on later."""
        self._remember(rows)
        kept = np.ones(len(self._rows), np.bool_)
        kept[list(rows)] = False
        self._keep(kept)

    def _remember(self, leaving: Sequence[int]) -> None:
        rows = self._rows
        for row in leaving:
            count = rows.count[row]
            tokens, logprobs = rows.tokens[row, :count].copy(), rows.logprobs[row, :count].copy()
            left = Left(tokens, logprobs, rows.growing[row], rows.drafts[row])
            self._left[rows.job[row], int(rows.row[row])] = left
            self._waiting.put(rows.waited[row])

    def _admit(self, most: int | None) -> list[Waiting]:
        """Choose the rows that join now, or the part of a prompt that is computed for one.

        Args:
            most: Most tokens of prompts to compute; None for any number, long prompts in parts.
        """
        self._part, self._computed = None, 0
        if not self._waiting or (len(self._rows) and not self.values.joins):
            return []
        admitted: list[Waiting] = []
        held, room, rests = self._held(), self._room(), self._rests()
        longest = 0
        prompts: set[tuple[bytes, tuple[int, ...]]] = set()
        blocked: Waiting | None = None
        while (first := self._waiting.next(held.of, blocked)) is not None:
            job, prompt, shared = first.job, self._prompt(first), self._shared(first)
            found, there = self.values.found(job.tree, prompt)
            count = len(self._rows) + len(admitted)
            if count >= self._most:
                break
            with_row = room.with_row(shared, len(prompt) - there)
            needs = with_row - room.tokens
            # Another page for each row in progress, so that who joins does not have to leave at once.
            missing = with_row + PAGE * count - self._cache_tokens
            if count and missing > 0:
                if not admitted and (giving := self._giving_way(held, first, needs, missing)):
                    self._leave(giving)
                    held, room, rests = self._held(), self._room(), self._rests()
                else:
                    blocked = first
                continue
            joined = np.append(rests, self._rest(first))
            if held.of(job.owner) and np.minimum(joined, len(prompt) // WORTH).sum() > -missing:
                blocked = first
                continue
            if (job.tree, prompt) not in prompts:
                if self.values.joins and not self._fits(first, prompt, found, most, prompts):
                    break
                job.find(first.row, found)
                self._computed += len(prompt) - found
            prompts.add((job.tree, prompt))
            longest = max(longest, len(prompt))
            if admitted and len(prompts) * longest > PREFILL_TOKENS:
                self._computed -= len(prompt) - found
                break
            self._waiting.pop(first)
            admitted.append(first)
            rests = joined
            room.add(shared, len(prompt) - there)
            held.add(job.owner, needs)
        return admitted

    def _fits(
        self,
        first: Waiting,
        prompt: tuple[int, ...],
        found: int,
        most: int | None,
        prompts: Collection[tuple[bytes, tuple[int, ...]]],
    ) -> bool:
        """Whether what is missing of a prompt is computed in this step, beside others; if not, a part of it may be."""
        tree, missing = first.job.tree, len(prompt) - found
        for other_tree, other in prompts:
            common = found + COMMON_TOKENS
            if other_tree == tree and missing > COMMON_TOKENS and prompt[found:common] == other[found:common]:
                return False
        at_once = CHUNK_TOKENS if most is None else most
        if missing <= at_once - (0 if most is None else self._computed):
            return True
        if isinstance(prompt, ImagePrompt):  # a part of it would have other images
            return not prompts
        if not prompts and at_once:
            first.job.find(first.row, found)
            self._part, self._computed = (first, at_once), at_once
        return False

    def _rests(self) -> IntArray:
        """``[R]`` tokens that the rows in progress may still take."""
        return self._rows.limit - self._rows.count

    def _rest(self, waiting: Waiting) -> int:
        """Tokens that a row which waits may still take."""
        left = self._left.get((waiting.job, waiting.row))
        return int(waiting.job.limits[waiting.row]) - (0 if left is None else len(left.tokens))

    def _giving_way(self, held: Held, first: Waiting, needs: int, missing: int) -> list[int]:
        return held.to_give_way(first, needs, missing, self._cache_tokens, self._waiting.jobs(first.job.owner))

    def _room(self) -> Room:
        return self.values.room({self._shared(waited) for waited in self._rows.waited})

    def _shared(self, waiting: Waiting) -> Hashable:
        """Key of the prompt whose pages a row shares with others that begin with it."""
        job, row = waiting.job, waiting.row
        if (job, row) in self._left:
            return job, row
        return job, row // job.params.n, "prompt"

    def _prompt(self, waiting: Waiting) -> tuple[int, ...]:
        """The tokens that a joining row has to compute: its prompt, and those it had sampled before it left."""
        prompt = waiting.job.prompt_of(waiting.row)
        left = self._left.get((waiting.job, waiting.row))
        if left is None:
            return prompt
        tokens = left.tokens.tolist()
        return prompt.followed_by(tokens) if isinstance(prompt, ImagePrompt) else (*prompt, *tokens)

    def _prefill(self) -> Tensor:
        """Add the rows that join; returns their states, ``[R, H]``."""
        joining = self._joining = [self._joining[place] for place in neighbours([w.job.policy for w in self._joining])]
        numbers: dict[tuple[Policy, bytes, tuple[int, ...]], int] = {}
        spread = [
            numbers.setdefault((each.job.policy, each.job.tree, self._prompt(each)), len(numbers)) for each in joining
        ]
        policies, trees, prompts = zip(*numbers, strict=True)
        new = self._begin(joining)
        if not len(self._rows):
            self._formed = self._steps
        states = self.values.prefill(policies, prompts, np.array(spread), trees)
        for each in joining:
            each.job.begun = True
            self._left.pop((each.job, each.row), None)
        if len(self._rows):
            room = max(self._rows.tokens.shape[1], new.tokens.shape[1])
            new = widened(self._rows, room).beside(widened(new, room))
        self._rows, self._joining = new, []
        return states

    def _begin(self, joining: Sequence[Waiting]) -> Rows:
        speculates = self._speculation.mode != "off" and isinstance(self.values, Pages)
        number = self._kinds.number
        return begun(joining, self._left, number, self._uniforms, self._steps, speculates=speculates)

    # ---- drawing ----

    def _draw(self, states: Tensor, drafts: Sequence[Sequence[int]]) -> None:
        """Draw the next tokens of every row, and remove rows that end.

        A row whose drawn token is the one that was drafted has the states to draw the next one from.

        Args:
            states: States of each row's newest token and of those of its draft.
        """
        rows, counts = self._rows, np.array([1 + len(draft) for draft in drafts])
        logits = self._kinds.logits(states, np.repeat(rows.kind, counts))
        by_token, texts = np.zeros(len(rows), np.bool_), dict[int, str]()
        over, whose, places = by_token.copy(), np.arange(len(rows)), counts.cumsum() - counts
        for step in range(int(counts.max())):
            drawn = self._draw_of(whose, logits, places[whose] + step)
            by_token[whose] = drawn.ends
            texts |= self._grow(whose, drawn)
            rows = self._rows
            over[whose] = drawn.ends | (rows.count[whose] >= rows.limit[whose]) | np.isin(whose, [*texts])
            last = rows.last
            whose = np.array([row for row in whose.tolist() if drafts[row][step : step + 1] == [last[row]]], np.int64)
            for row in whose.tolist():
                rows.drafts[row].num_accepted += 1
            whose = np.array([row for row in whose.tolist() if not over[row] and rows.job[row].error is None], np.int64)
            if not len(whose):
                break
            rows.length[whose] += 1
        if isinstance(self.values, Pages) and any(drafts):
            self.values.trim(self._rows.length)
            for row in [row for row, draft in enumerate(drafts) if draft]:
                self._rows.drafts[row].num_drafted += len(drafts[row])
        self._end(over, by_token, texts)

    def _draw_of(self, whose: IntArray, logits: Logits, places: IntArray) -> Drawn:
        """Draw the next token of some rows, whose states are at these places."""
        rows = self._rows
        if rows.count[whose].max() >= rows.tokens.shape[1]:
            rows = self._rows = widened(rows, 2 * rows.tokens.shape[1])
        some = rows if len(whose) == len(rows) else rows.select(whose)
        drawn = self._kinds.draw(logits, some, places, self._next_uniform(whose))
        count = rows.count[whose]
        rows.tokens[whose, count], rows.logprobs[whose, count] = drawn.tokens, drawn.logprobs
        spoilt = whose[np.isnan(drawn.logprobs)]
        for row in spoilt.tolist():
            rows.job[row].fail_non_finite(int(rows.row[row]))
        if len(spoilt):
            self.values.spoilt(spoilt)
        rows.last[whose] = drawn.tokens
        rows.count[whose] += 1
        return drawn

    def _next_uniform(self, whose: IntArray) -> npt.NDArray[np.float64]:
        rows = self._rows
        count = rows.count[whose]
        spent = (count > 0) & (count % DRAWS == 0)
        for start in np.unique(count[spent]):
            of_start = whose[spent & (count == start)]
            numbers = self._uniforms.numbers(rows.seed[of_start], rows.place[of_start], int(start), DRAWS)
            rows.uniform[of_start] = numbers
        uniform: npt.NDArray[np.float64] = rows.uniform[whose, count % DRAWS]
        return uniform

    def _grow(self, whose: IntArray, drawn: Drawn) -> dict[int, str]:
        """Hand new tokens to what follows the samples; returns the texts of those that a stop string ends."""
        rows = self._rows
        texts: dict[int, str] = {}
        for number, row in enumerate(whose.tolist()):
            if rows.drafts[row] is not None:
                rows.drafts[row].add(int(drawn.tokens[number]))
            growing: GrowingSample | None = rows.growing[row]
            if growing is None:
                continue
            token, logprob = int(drawn.tokens[number]), float(drawn.logprobs[number])
            text = growing.add(token, logprob, drawn.tops.get(number), ends=bool(drawn.ends[number]))
            if text is not None:
                texts[row] = text
        return texts

    def _end(self, over: BoolArray, by_token: BoolArray, texts: Mapping[int, str]) -> None:
        """Hand finished samples to their jobs."""
        rows = self._rows
        for row in np.flatnonzero(over).tolist():
            count = rows.count[row]
            tokens, logprobs = rows.tokens[row, :count].copy(), rows.logprobs[row, :count].copy()
            top = rows.growing[row].top if rows.growing[row] is not None else None
            text, drafts = texts.get(row), rows.drafts[row]
            rows.job[row].end(int(rows.row[row]), tokens, logprobs, bool(by_token[row]), text, top, drafts)
        self._keep(~over)

    def _keep(self, kept: BoolArray) -> None:
        """Keep only these rows."""
        if kept.all():
            return
        order = np.flatnonzero(kept)
        self._rows = self._rows.select(order)
        if len(order):
            self.values.keep(order)
        else:
            self.values.end()


def _policies(rows: Rows) -> list[Policy]:
    """The policy of each row."""
    return [job.policy for job in rows.job]
