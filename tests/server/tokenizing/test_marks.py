"""Masks by a template's own ``{% generation %}`` marks, held against transformers' ``assistant_masks``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.limits import Limits
from gradwire_server.tokenizing.chat_template import ChatTemplate
from gradwire_server.tokenizing.known_texts import KnownTexts
from gradwire_server.tokenizing.rendering import Renderer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TURN = """{{- '<' + m.role + '>' }}{%- if m.role == 'assistant' %}ASSISTANT{%- else %}{{- m.content }}{%- endif %}
{{- ';' }}"""
LOOP = (
    "{%- for m in messages %}" + TURN + "{%- endfor %}{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"
)
MARKED = "{%- generation %}{{- WORDS }}{%- endgeneration %}"
CONTENT, THOUGHT = MARKED.replace("WORDS", "m.content"), MARKED.replace("WORDS", "'(' + m.thinking | default('') + ')'")
CALLS = "{%- for c in m.tool_calls or [] %}{{- '|' }}" + MARKED.replace("WORDS", "c.name") + "{%- endfor %}"
TEMPLATES = {
    "calls": LOOP.replace("ASSISTANT", "{{- '()' }}" + CONTENT + CALLS),
    "last turn": LOOP.replace(
        "ASSISTANT", "{%- if loop.last %}" + THOUGHT + CONTENT + "{%- else %}{{- m.content }}{%- endif %}"
    ),
    "thoughts of the last turn": LOOP.replace("ASSISTANT", "{%- if loop.last %}" + THOUGHT + "{%- endif %}" + CONTENT),
    # What is written of the earlier messages changes with the number of the later ones.
    "numbered": "{{- messages | length }}" + LOOP.replace("ASSISTANT", CONTENT + CALLS),
}
CALLED = {"role": "assistant", "content": "yes", "tool_calls": [{"name": "f"}, {"name": "g"}]}
ASKED, THEN = {"role": "user", "content": "a"}, {"role": "user", "content": "c"}
FIRST, SECOND = {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "d", "thinking": "e"}
TALK = [ASKED, FIRST, THEN, SECOND]
CALLING = [ASKED, CALLED, THEN, SECOND]
GIVEN = pb.TRAIN_ON_GIVEN
ON, LAST = pb.TRAIN_ON_ASSISTANT, pb.TRAIN_ON_LAST


@pytest.fixture
def tokenizer() -> Tokenizer:
    made = Tokenizer(
        models.BPE(vocab={each: at for at, each in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def learned(
    folder: Path,
    tokenizer: Tokenizer,
    template: str,
    talk: list[Any],
    train_on: Any,
    train: tuple[bool, ...] = (),
    unroll: bool = False,
) -> tuple[list[int], list[int]]:
    (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    request = pb.RenderRequest(
        conversations=[pb.Conversation(messages_json=json.dumps(talk), train=train)], train_on=train_on, unroll=unroll
    )
    row, *_ = Renderer("m", tokenizer, ChatTemplate(folder), Limits(), KnownTexts(tokenizer)).render("me", request).rows
    return list(row.ids), list(row.loss_mask)


@pytest.mark.parametrize("template", ["calls", "last turn"])  # the others write answers otherwise in the history
@pytest.mark.parametrize("talk", [TALK, CALLING, TALK[:2], CALLING[:2], TALK[:3]], ids=str)
def test_all_marks_are_learned(tmp_path: Path, tokenizer: Tokenizer, template: str, talk: list[Any]) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    reference.chat_template = TEMPLATES[template]
    expected = reference.apply_chat_template(
        talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )  # fmt: skip
    found = learned(tmp_path, tokenizer, template, talk, ON)
    assert found == (expected["input_ids"], expected["assistant_masks"])


@pytest.mark.parametrize(
    ("template", "talk", "train", "expected"),
    [
        ("calls", CALLING, (), "d"),
        ("calls", CALLING[:2], (), "yesfg"),
        ("calls", CALLING, (0, 1, 0, 0), "yesfg"),
        ("calls", CALLING, (1, 0, 0, 1), "a;d"),
        ("last turn", TALK, (), "(e)d"),
        ("last turn", TALK, (0, 1, 0, 0), "()b"),
        ("last turn", TALK[:3], (), "()b"),
        ("thoughts of the last turn", TALK, (), "(e)d"),
        ("thoughts of the last turn", TALK, (0, 1, 0, 0), "()b"),
        ("thoughts of the last turn", [ASKED, SECOND, FIRST], (0, 1, 0), "(e)d"),
        ("numbered", TALK, (), "d;"),
        ("numbered", TALK, (0, 1, 0, 0), "b;"),
    ],
    ids=str,
)
def test_the_marks_of_a_message_are_its_own(
    tmp_path: Path, tokenizer: Tokenizer, template: str, talk: list[Any], train: tuple[int, ...], expected: str
) -> None:
    given = tuple(map(bool, train))
    ids, mask = learned(tmp_path, tokenizer, template, talk, GIVEN if train else LAST, given, unroll=True)
    text = tokenizer.decode([each for each, on in zip(ids, mask) if on])
    assert text == expected


def test_sampled_tokens_are_learned_where_a_mark_begins_within_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    sampled = tokenizer.encode("()b;").ids
    ids, mask = learned(tmp_path, tokenizer, "calls", [ASKED, {**FIRST, "token_ids": sampled}], ON)
    assert ids[-4:] == sampled and sum(mask) == sum(mask[-4:]) == 4
