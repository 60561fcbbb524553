"""A sampler without a model: a character a token, and answers by rule."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire.rl.inference import Generation, SamplingParams, TopLogits


class CharacterCodec:
    end_text = ""

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[np.ndarray]:
        start = [1] if add_special_tokens else []
        return [np.array(start + [ord(character) for character in text], np.int64) for text in texts]

    async def decode(self, rows: Sequence[Any]) -> list[str]:
        return ["".join(chr(token) for token in row if token > 3) for row in rows]


Answer = Callable[[str, int], str]


class RuleInference:
    """Answers each prompt by a function of its text and a number drawn from seed, place and prompt.

    Attributes:
        batches: sizes of the batches that came.
        fail: raised once by each of the next calls, as far as there are any.
        second_per_token: a batch takes as long as its longest answer.
        version: of the weights that it was told of last; samples carry it.
    """

    def __init__(self, answer: Answer, second_per_token: float = 0.0) -> None:
        self.answer = answer
        self.codec = CharacterCodec()
        self.batches: list[int] = []
        self.prompts: list[str] = []
        self.fail: list[Exception] = []
        self.second_per_token = second_per_token
        self.version = 0

    def can_update(self, run: Any) -> bool:
        return True

    async def update_weights(self, run: Any, version: int) -> None:
        self.version = version

    async def generate(self, prompts: Sequence[Any], params: SamplingParams) -> list[Generation]:
        if self.fail:
            raise self.fail.pop(0)
        version, texts = self.version, await self.codec.decode(prompts)
        self.batches.append(len(texts))
        self.prompts += texts
        answers = []
        for place, text in enumerate(texts):
            digest = hashlib.blake2b(f"{params.seed} {place} {text}".encode(), digest_size=4).digest()
            answers.append(self.answer(text, int.from_bytes(digest, "little")))
        rows = [np.array([*map(ord, answer[: params.max_tokens]), 2], np.int64) for answer in answers]
        await asyncio.sleep(self.second_per_token * max(len(row) for row in rows))
        return [
            Generation(text, row, np.full(len(row), -0.5, np.float32), "eos", version)
            for text, row in zip(answers, rows)
        ]

    async def get_logprobs(self, rows: Sequence[Any], *, temperature: float = 1.0) -> list[np.ndarray]:
        return [np.full(len(row) - 1, -0.5, np.float32) for row in rows]

    async def get_logits(self, prompts: Sequence[Any], *, top_k: int = 5) -> list[TopLogits]:
        raise NotImplementedError


@pytest.fixture(scope="session")
def rule_inference() -> Callable[..., RuleInference]:
    return RuleInference


@pytest.fixture
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no checkpoint_dir is given, the log goes to ``runs`` here."""
    monkeypatch.chdir(tmp_path)
