"""Which part of a written conversation is whose, with templates that make it hard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from gradwire_proto.chat import Chat, TemplateError, UnclearTurnError, covered, cut, find_turn

TALK = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "answer"}, {"role": "user", "content": "v"}]


def chat(write: Any) -> Chat:
    return Chat(write, {1: "<end>", 2: "<eos>"}, lambda ids: "".join(map(chr, ids)))


def found(write: Any, messages: Sequence[Any] = TALK, index: int = 1) -> tuple[str, str]:
    """The content of a turn, and what ends it."""
    text = write(messages, False)
    turn = find_turn(chat(write), messages, text, index)
    return text[turn.start : turn.stop], text[turn.stop : turn.end]


def test_a_generation_prompt_that_is_not_the_turns_opening() -> None:
    def write(messages: Sequence[Any], prompt: bool) -> str:
        return "".join(f"  <{m['role']}>\n{m['content']}<end>\n" for m in messages) + "<assistant>\n" * prompt

    assert found(write) == ("answer", "<end>")


def test_a_template_that_writes_no_end() -> None:
    def write(messages: Sequence[Any], prompt: bool) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:" * prompt

    assert found(write) == (" answer", "")


@pytest.mark.parametrize(
    ("turn", "last", "end"),
    [
        ("<end>\n", "<eos>", "<end>"),  # Phi-3
        ("<end>\n", "\n<eos>", "<end>"),
        ("<end>", "", "<end>"),
        (" [/turn]\n", "<eos>", ""),  # no special token, and another end at the end: nothing says where it ends
        ("<im_end>\n", "", "<im_end>"),  # ChatML with a tokenizer that has not its tokens
        ("<eos>", "", "<eos>"),
        ("<end>\n<eos>", "", "<end>\n<eos>"),
    ],
)
@pytest.mark.parametrize("regular", [True, False])
def test_every_turns_end_is_found(turn: str, last: str, end: str, regular: bool) -> None:
    """Also where the template changes what came before: then the message is found by another content."""

    def write(messages: Sequence[Any], prompt: bool) -> str:
        said = "".join(f"<{m['role']}>\n{m['content']}{turn}" for m in messages)
        ended = "<assistant>\n" if prompt else last
        return f"{'' if regular else len(messages)}{said}{ended}"

    assert "".join(found(write)) == f"answer{end}"


def test_a_template_that_refuses_unfinished_conversations() -> None:
    def write(messages: Sequence[Any], prompt: bool) -> str:
        if len(messages) != 3:
            raise TemplateError("three, please")
        return "".join(f"<{m['role']}>{m['content']}<end>" for m in messages)

    assert found(write) == ("answer", "<end>")
    assert found(write, index=0) == ("u", "<end>")


def test_a_template_that_mixes_turns_is_unclear() -> None:
    def write(messages: Sequence[Any], prompt: bool) -> str:
        return "<end>".join(f"{m['content']} of {sum(len(m['content']) for m in messages)}" for m in messages)

    with pytest.raises(UnclearTurnError, match="where message 1 begins and ends"):
        found(write)
    pieces = cut(chat(write), [TALK[0], {**TALK[1], "token_ids": [7]}, TALK[2]])
    assert [piece.token_ids for piece in pieces] == [None]


def test_sampled_tokens_of_another_text_are_not_kept() -> None:
    def write(messages: Sequence[Any], prompt: bool) -> str:
        return "".join(f"<{m['role']}>{m['content']}<end>" for m in messages) + "<assistant>" * prompt

    def kept(text: str) -> Any:
        ids = list(map(ord, text))
        pieces = cut(chat(write), [TALK[0], {**TALK[1], "token_ids": ids}, TALK[2]])
        return ["".join(map(chr, piece.token_ids)) if piece.token_ids else piece.text for piece in pieces]

    assert kept("answer") == ["<user>u<end><assistant>", "answer", "<end><user>v<end>"]
    assert kept("think: answer") == ["<user>u<end><assistant>", "answer", "<end><user>v<end>"]
    assert kept("answer STOP") == ["<user>u<end><assistant>", "answer STOP", "<end><user>v<end>"]
    assert kept("another") == [write(TALK, False)]
    ended = cut(chat(write), [TALK[0], {**TALK[1], "token_ids": [*map(ord, "answer"), 1]}])
    assert [piece.text for piece in ended] == ["<user>u<end><assistant>", ""]


def test_tokens_that_touch_a_span_are_covered() -> None:
    # Tokens of one character, of two, of trimmed blanks (no width), and two tokens of one character.
    offsets = [(0, 1), (1, 3), (4, 4), (5, 6), (6, 7), (6, 7)]
    assert covered(offsets, [(2, 4)]) == [False, True, True, False, False, False]
    assert covered(offsets, [(0, 1), (6, 7)]) == [True, False, False, False, True, True]
    assert covered(offsets, [(16, 17)], shift=10) == [False, False, False, False, True, True]
    assert covered(offsets, []) == [False] * 6
