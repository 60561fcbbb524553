"""Drafts that are looked up in a sample's own context, by turns with sampling without them.

In this process, the local sampler on a model with random weights in SmolLM2-135M's shape. Such a model copies nothing,
so the tokens of one stream are given, as a grammar of one text would: a file of 2,000 tokens with one name replaced
everywhere, behind a prompt that has the file; and prose behind a prompt of other prose, which repeats nothing but
phrases. Groups of 16 sample freely. Both sides have the same tokens and log-probabilities, which is checked.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import Samples, SamplingParams
from gradwire_server.tokenizer_files import find_tokenizer

from benchmarks import ROOT
from benchmarks.real_shapes import build, smollm2
from benchmarks.report import Figure, Size, run_alone
from benchmarks.turns import Turns

DRAFTS, WITHOUT = "drafts", "without"
FIRST = 16
"""First id of a word."""
FILE, NAME, REPLACED = "server/gradwire_server/engine/sampling/batch.py", "rows", "samples"
PROSE = ("docs/architecture.md", "docs/operations.md")
TARGETS = {"edit": 1.8, "prose": 0.98, "groups": 1.0}


class Given:
    """A grammar that allows one text of tokens; see :class:`.grammar.GuidedText`."""

    def __init__(self, tokens: Sequence[int], vocabulary: int) -> None:
        self._tokens, self._vocabulary, self._at = tokens, vocabulary, 0

    def begin(self) -> Given:
        return Given(self._tokens, self._vocabulary)

    def allowed(self) -> npt.NDArray[np.bool_]:
        allowed = np.zeros(self._vocabulary, np.bool_)
        allowed[self._tokens[self._at]] = True
        return allowed

    def add(self, token: int) -> None:
        self._at += 1


class Sides:
    """A sampler with drafts and one without, each on its own copy of the model."""

    def __init__(self, model: Path) -> None:
        pool = ModelPool({"m": str(model)}, dtype=torch.float32)
        self.policy = Policy(pool.get("m"))
        self.vocabulary = self.policy.facts.vocab_size
        file = find_tokenizer(str(model))
        assert file is not None
        self._tokenizer = TextTokenizer(file)
        self._samplers = {DRAFTS: LocalSampler(), WITHOUT: LocalSampler(speculate="off")}

    def words(self, *texts: str) -> list[list[int]]:
        """Words, blanks and signs of texts as ids, equal ones alike."""
        numbers: dict[str, int] = {}
        rows = [re.findall(r"\n? *|\w+|[^\w\s]", text) for text in texts]
        return [[FIRST + numbers.setdefault(word, len(numbers)) for word in row if word] for row in rows]

    def sample(self, side: str, prompt: Sequence[int], given: Sequence[int] | None, **params: Any) -> Samples:
        """The samples of one request; ``given`` are the tokens of the only one."""
        settings: dict[str, Any] = {"max_tokens": 1, "seed": 0, "ignore_eos": True} | params
        if given is not None:
            settings |= {"max_tokens": len(given), "regex": "given"}
        sampler, grammar = self._samplers[side], Given(given or (), self.vocabulary)
        with patch.object(LocalJob, "compile", lambda job: setattr(job, "_grammar", grammar)):
            job = sampler.begin(self.policy, [prompt], SamplingParams(**settings), self._tokenizer)
            while not job.done:
                sampler.step()
        return job.samples()


def measure(size: Size) -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        build(path, partial(smollm2, num_hidden_layers=1) if size.smoke else smollm2, smoke=False)
        sides = Sides(path)
        source = (ROOT / FILE).read_text()
        file, edited = sides.words(source, re.sub(rf"\b{NAME}\b", REPLACED, source))
        before, after = sides.words(*((ROOT / each).read_text() for each in PROSE))
        most, tokens = size.pick(2000, 100), size.pick(300, 40)
        group = {"n": size.pick(16, 4), "max_tokens": size.pick(48, 8)}
        cases: dict[str, tuple[list[int], list[int] | None, dict[str, Any]]] = {
            "edit": (file[:most], edited[:tokens], {}),
            "prose": (before[: most // 8], after[:tokens], {}),
            "groups": (before[:64], None, group),
        }
        for name, (prompt, given, params) in cases.items():
            if not size.wants(name):
                continue
            table, count, samples = Turns(DRAFTS, WITHOUT), len(given or []) or group["n"] * group["max_tokens"], {}
            for turn in range(size.repeats + 1):
                for side in (DRAFTS, WITHOUT) if turn % 2 else (WITHOUT, DRAFTS):
                    with table.turn(side, count):
                        samples[side] = sides.sample(side, prompt, given, **params | {"seed": turn})
                assert samples[DRAFTS].token_ids.tolist() == samples[WITHOUT].token_ids.tolist()
                assert samples[DRAFTS].logprobs.tolist() == samples[WITHOUT].logprobs.tolist()
            table.drop_first()
            found = samples[DRAFTS]
            words = (
                f"{len(prompt)} tokens, then {count}; {found.num_accepted_tokens} of {found.num_drafted_tokens} drafted"
            )
            detail = f"{words} tokens accepted; {table.said('tokens')}"
            figures.append(
                Figure(f"speculation: {name}", table.ratio(), "x", TARGETS[name], detail=detail, samples=table.rates)
            )
    return figures


if __name__ == "__main__":
    run_alone(measure, __doc__)
