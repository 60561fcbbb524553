"""Prompts of episodes: answers that come back changed stand there with their sampled tokens, or as the text that they
are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gradwire.rl.generation import Generation, TokenizerCodec
from gradwire.rl.prompts import TokenHistory

SAMPLED = 1000
"""Added to the ids of sampled characters, so that no text is encoded to what was sampled for it."""


def written(messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool) -> str:
    return "".join(f"{m['role']}: {m['content']}$" for m in messages) + "assistant: " * add_generation_prompt


@pytest.fixture
def history() -> TokenHistory:
    tokenizer = SimpleNamespace(
        chat_template="one",
        all_special_ids=[ord("$")],
        all_special_tokens=["$"],
        encode=lambda text, add_special_tokens: [ord(character) for character in text],
        decode=lambda ids, skip_special_tokens=False: "".join(chr(each % SAMPLED) for each in ids if each != ord("$")),
        apply_chat_template=written,
    )
    return TokenHistory(TokenizerCodec(tokenizer))


def answer(text: str, whole: str = "", *, shift: int = SAMPLED) -> Generation:
    """A response; ``whole`` with the stop string, before which its text ends."""
    ids = np.array([ord(character) + shift for character in whole or text])
    return Generation(text, ids, np.zeros(len(ids), np.float32), "stop" if whole else "length")


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("back", [" four\n", "four ", "fo  ur", "four</a>", "four </a> "])
async def test_an_answer_that_comes_back_changed_keeps_its_tokens(history: TokenHistory, back: str) -> None:
    first, made = (await history.prompt_ids([asked("2+2")])).tolist(), answer(" four\n", " four\n</a>")
    history.wrote(made, ["</b>", "</a>"])
    prompt = (await history.prompt_ids([asked("2+2"), said(back), asked("sure?")])).tolist()
    begun = [*first, *made.token_ids]
    assert prompt[: len(begun)] == begun
    assert "".join(map(chr, prompt[len(begun) :])) == "$user: sure?$assistant: "


async def test_another_answer_is_the_text_that_it_is(history: TokenHistory) -> None:
    for text in ("four", "five"):
        await history.prompt_ids([asked("2+2")])
        history.wrote(answer(text), ["!"])
    for other in ("fourth", "four!", "six"):
        prompt = (await history.prompt_ids([asked("2+2"), said(other), asked("sure?")])).tolist()
        assert max(prompt) < SAMPLED


async def test_a_text_that_was_said_twice_stands_for_what_it_answered(history: TokenHistory) -> None:
    """Where a conversation has the second alone, the first's tokens are not taken for it."""
    talk = [asked("one?"), said("yes"), asked("two?"), said("yes"), asked("three?")]
    for size, shift in ((1, 1000), (3, 2000)):
        await history.prompt_ids(talk[:size])
        history.wrote(answer("yes", shift=shift))
    both = (await history.prompt_ids(talk)).tolist()
    assert [each // SAMPLED for each in both if each >= SAMPLED] == [1, 1, 1, 2, 2, 2]
    other = (await history.prompt_ids([asked("four?"), said("yes"), asked("three?")])).tolist()
    assert max(other) < SAMPLED, "nothing says which of the two it is"
    again = (await history.prompt_ids([*talk[:2], asked("other?")])).tolist()
    assert [each // SAMPLED for each in again if each >= SAMPLED] == [1, 1, 1]


@pytest.mark.parametrize("keeps", [False, True])
async def test_reasoning_that_the_template_drops_is_kept_if_asked(history: TokenHistory, keeps: bool) -> None:
    def dropping(messages: list[dict[str, str]], **settings: bool) -> str:
        return written([{**each, "content": each["content"].rpartition("/")[2]} for each in messages], **settings)

    history._codec.tokenizer.apply_chat_template = dropping  # type: ignore[attr-defined]
    history.keeps = keeps
    row: list[int] = []
    talk = [asked("2+2")]
    for number in range(3):
        prompt = (await history.prompt_ids(talk)).tolist()
        assert (prompt[: len(row)] == row) == (keeps or number == 0)
        history.wrote(made := answer(f"think/four{number}", shift=SAMPLED))
        row = [*prompt, *made.token_ids]
        talk += [said(made.text), asked("sure?")]
    prompt = (await history.prompt_ids(talk)).tolist()
    assert "".join(chr(each % SAMPLED) for each in prompt).count("think/") == 3 * keeps
