"""Each learned turn begins where the sampler's prompt for it ends, and is what the model writes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.errors import ServiceError
from gradwire_server.limits import Limits
from gradwire_server.tokenizing.chat_template import ChatTemplate
from gradwire_server.tokenizing.known_texts import KnownTexts
from gradwire_server.tokenizing.learned_turns import CLOSED, EMPTY, NO_PROMPT, REWRITTEN
from gradwire_server.tokenizing.rendering import Renderer
from support.chats import FORMS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

OPENED = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if WRITTEN %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
        {{- m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
"""Prompts open the reasoning: it is written where it is given, or never, as by DeepSeek's templates."""
TEMPLATES = {
    **{form: template for form, (template, *_) in FORMS.items()},
    "opened": OPENED.replace("WRITTEN", "m.reasoning_content is string and (loop.last or keep)"),
    "swallowed": OPENED.replace("WRITTEN", "false"),
}
SPECIALS = sorted({word for _, _, words in FORMS.values() for word in words} | {"</s>", "<s>", "<think>", "</think>"})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ["ĊĊ", "Ġf", "Ġy", "es", ":Ġ"]
    made = Tokenizer(
        models.BPE(
            vocab={each: at for at, each in enumerate([*alphabet, *pairs])},
            merges=[("Ċ", "Ċ"), ("Ġ", "f"), ("Ġ", "y"), ("e", "s"), (":", "Ġ")],
        )
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIALS)
    return made


class Rows:
    """The rows of one conversation, as its learned stretches behind what is before them."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, template: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "chat_template.jinja").write_text(TEMPLATES.get(template, template))
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
        self._tokenizer = tokenizer
        self._renderer = Renderer("m", tokenizer, ChatTemplate(folder), Limits(), KnownTexts(tokenizer))
        self.remarks: list[str] = []

    def rows(self, talk: Any, train_on: Any = pb.TRAIN_ON_ASSISTANT, **variables: Any) -> list[pb.RenderedConversation]:
        request = pb.RenderRequest(
            conversations=[pb.Conversation(messages_json=json.dumps(talk))], train_on=train_on,
            template_kwargs_json=json.dumps(variables), unroll=train_on != pb.TRAIN_ON_NOTHING,
            add_generation_prompt=train_on == pb.TRAIN_ON_NOTHING,
        )  # fmt: skip
        rows = list(self._renderer.render("me", request).rows)
        self.remarks = list(rows[0].remarks)
        return rows

    def learned(self, talk: Any, **variables: Any) -> list[list[str]]:
        """The learned stretches of each row; each begins behind the prompt of an answer, token by token."""
        prompts = [
            list(self.rows(talk[:at], pb.TRAIN_ON_NOTHING, **variables)[0].ids)
            for at, each in enumerate(talk) if each["role"] == "assistant" and at
        ]  # fmt: skip
        found = []
        for row in self.rows(talk, **variables):
            ids, stretches, at = list(row.ids), [], 0
            for on, part in itertools.groupby(row.loss_mask):
                size = len(list(part))
                if on:
                    assert ids[:at] in prompts, self._tokenizer.decode(ids[:at], skip_special_tokens=False)
                    stretches.append(self._tokenizer.decode(ids[at : at + size], skip_special_tokens=False))
                at += size
            found.append(stretches)
        return found


USER = [{"role": "user", "content": text} for text in ("two and two?", "sure?\n", "why?")]
FOUR, YES, SO = ({"role": "assistant", "content": text} for text in (" four. ", "\nyes", "so"))
TALK = [USER[0], FOUR, USER[1], YES, USER[2], SO]
TOLD = [{"role": "system", "content": "be brief"}, *TALK]
WHY = {"reasoning_content": "I add"}
CALL = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]}
CALLED = [USER[0], {"role": "assistant", "content": "", **WHY, **CALL}, {"role": "tool", "content": "4"}, FOUR | WHY]
THOUGHT = "<think>\nI add\n</think>\n\n"
NONE = "<think>\n\n</think>\n\n"
CASES: list[tuple[str, Any, dict[str, Any], list[list[str]], list[str]]] = [
    ("llama", TOLD, {}, [["four.<|eot_id|>", "yes<|eot_id|>", "so<|eot_id|>"]], []),
    ("gemma", TALK, {}, [["four.<end_of_turn>", "yes<end_of_turn>", "so<end_of_turn>"]], []),
    # The tokens of a later prompt have its two line breaks as one.
    ("phi", TALK, {}, [[" four. <|end|>", "so<|end|>\n</s>"], ["\nyes<|end|>\n</s>"]], []),
    ("phi", TALK[:3], {}, [[" four. <|end|>"]], []),
    ("olmo", TALK, {}, [[" four. </s>", "so</s>"], ["\nyes</s>"]], []),
    ("granite", TOLD, {}, [[" four. <|end_of_text|>", "\nyes<|end_of_text|>", "so<|end_of_text|>"]], []),
    ("glm", TALK, {}, [["\n four.", "\n\nyes", "\nso"]], []),
    ("marked", TALK, {}, [[" four. <|im_end|>", "so<|im_end|>"], ["\nyes<|im_end|>"]], []),
    ("mistral", TALK, {}, [[" four.</s>", " yes</s>", " so</s>"]], []),
    # The system message is before the last question of a prompt, and nowhere behind an answer.
    ("mistral", TOLD, {}, [[" so</s>"], [" yes</s>"], [" four.</s>"]], []),
    # The last answer has a place for its reasoning, empty where there is none; earlier ones have none in the history.
    ("qwen", TALK[:4], {}, [[f"{NONE}yes<|im_end|>"], [f"{NONE} four. <|im_end|>"]], []),
    ("qwen", [USER[0], FOUR | WHY, *TALK[2:4]], {}, [[f"{NONE}yes<|im_end|>"], [f"{THOUGHT} four. <|im_end|>"]], []),
    ("qwen", [USER[0], {**FOUR, "content": f"{THOUGHT}4"}, USER[1]], {}, [[f"{THOUGHT}4<|im_end|>"]], []),
    ("qwen", CALLED, {}, [[
        f'{THOUGHT}\n<tool_call>\n{{"name": "add", "arguments": {{"a": 2}}}}\n</tool_call><|im_end|>',
        f"{THOUGHT} four. <|im_end|>"]], []),
    # The prompt says that there is no reasoning.
    ("qwen", [USER[0], YES], {"enable_thinking": False}, [["yes<|im_end|>"]], []),
    ("qwen", [USER[0], YES | WHY], {"enable_thinking": False}, [["yes<|im_end|>"]], [CLOSED]),
    ("qwen", [USER[0], {**YES, "content": f"{THOUGHT}yes"}], {"enable_thinking": False}, [["yes<|im_end|>"]], [CLOSED]),
    ("opened", [USER[0], SO | WHY], {}, [["I add\n</think>\n\nso<|im_end|>"]], []),
    ("opened", [USER[0], SO], {}, [["\n</think>\n\nso<|im_end|>"]], [EMPTY]),
    ("opened", [USER[0], SO | WHY, USER[1], SO], {}, [
        ["\n</think>\n\nso<|im_end|>"], ["I add\n</think>\n\nso<|im_end|>"]], [EMPTY]),
    ("swallowed", [USER[0], SO | {"content": f"{THOUGHT}so"}, USER[1]], {}, [["I add\n</think>\n\nso<|im_end|>"]], []),
    # The row with the last turn comes first, though only the other one is the whole conversation.
    ("opened", [USER[0], SO | WHY, USER[1], {**SO, "content": f"{THOUGHT}so"}], {"keep": True}, [
        ["I add\n</think>\n\nso<|im_end|>"], ["I add\n</think>\n\nso<|im_end|>"]], []),
    ("marked", [FOUR, *TALK[:2]], {}, [[" four. <|im_end|>"]], [NO_PROMPT]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "talk", "variables", "expected", "remarks"), CASES, ids=lambda each: str(each)[:24])
def test_a_learned_turn_stands_behind_its_prompt(
    form: str, talk: Any, variables: Any, expected: Any, remarks: Any, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows = Rows(tmp_path, tokenizer, form)
    assert rows.learned(talk, **variables) == expected
    rows.rows(talk, **variables)
    assert rows.remarks == remarks


def test_a_turn_that_stands_behind_no_prompt_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = Rows(tmp_path, tokenizer, "swallowed")
    for answer in (SO, SO | WHY):
        with pytest.raises(
            ServiceError, match=r"conversation 0, message 1: the prompt for this answer ends with .*think"
        ):
            rows.rows([USER[0], answer])


def test_an_answer_of_which_the_template_writes_nothing_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = Rows(tmp_path, tokenizer, "marked")
    with pytest.raises(ServiceError, match=r"conversation 0, message 1: the template writes nothing of this answer"):
        rows.rows([USER[0], {"role": "assistant", "content": "", **CALL}])


def test_without_rows_of_their_own_such_turns_are_not_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = Rows(tmp_path, tokenizer, "qwen")
    request = pb.RenderRequest(conversations=[pb.Conversation(messages_json=json.dumps(TALK[:4]))])
    (row,) = rows._renderer.render("me", request).rows
    text = tokenizer.decode([each for each, on in zip(row.ids, row.loss_mask) if on], skip_special_tokens=False)
    assert text == f"{NONE}yes<|im_end|>" and row.remarks == [REWRITTEN]


def test_a_token_across_the_end_of_a_prompt_is_divided(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """As a sampler writes it, whose prompt ends there."""
    template = "{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}"
    rows = Rows(tmp_path, tokenizer, template + "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}")
    assert rows.learned([USER[0], SO, USER[0], YES | {"content": "yes"}]) == [["so", "yes"]]
    rows = Rows(tmp_path, tokenizer, template + "{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}")
    assert rows.learned([USER[0], SO, USER[0], YES | {"content": "four"}]) == [[" four"], [" so"]]
