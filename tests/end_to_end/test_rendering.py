"""Chat templates on the server, held against ``apply_chat_template`` for the forms of four families."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire.data import Conversation, Preference, Rating
from gradwire.errors import InvalidArgumentError, LimitExceededError, UnsupportedError
from gradwire.recipes.tokens import NOT_IN_HISTORY, RowEncoder
from gradwire.rl import RunInference, SamplingParams, Tool
from gradwire.rl.generation import Generation, ServiceCodec, TokenizerCodec
from gradwire.rl.prompts import TokenHistory
from gradwire.rl.types import UserText
from gradwire_server.tokenizing.learned_turns import CLOSED
from support.chats import FORMS, chat_model
from support.server import Server

pytestmark = pytest.mark.long

THOUGHT = "<think>\ntwo and two\n</think>\n\n"
TALK = [
    {"role": "user", "content": "what is 2+2?\n"},
    {"role": "assistant", "content": f"{THOUGHT}It is <b>four</b>. "},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "  yes"},
]
TOLD = [{"role": "system", "content": "be brief"}, *TALK[:3], {"role": "assistant", "content": f"{THOUGHT}yes"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL_TALK = [
    {"role": "user", "content": "add 2 and 2"},
    {"role": "assistant", "content": "", "reasoning_content": "call it", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "four", "reasoning_content": "told so"},
]
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("chats")
    return {form: chat_model(folder / form, form, padded=50 if form == "qwen" else 0) for form in FORMS}


@pytest.fixture(scope="module")
def address(models: dict[str, Path], tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = [flag for form, path in models.items() for flag in ("--model", f"{form}={path}")]
    flags += ["--limit", "max_messages=40", "--threads", "1"]
    server = Server(tiny_model_path, tmp_path_factory.mktemp("server"), *flags).start()
    yield server.address
    server.end()


@pytest.fixture(scope="module")
def tokenizers(models: dict[str, Path]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    return {form: AutoTokenizer.from_pretrained(path) for form, path in models.items()}


def learned(tokenizer: Any, row: gradwire.Rendered) -> list[str]:
    """The text of each stretch of tokens that is trained on."""
    edges = np.flatnonzero(np.diff(row["loss_mask"], prepend=0, append=0))
    return [tokenizer.decode(row["input_ids"][a:b]) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("form", FORMS)
async def test_the_ids_are_those_of_apply_chat_template(form: str, address: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[form]
    conversations = [TALK, TOLD, TALK[:1], TALK[:3]]
    async with gradwire.connect(address) as service:
        for prompt in (False, True):
            for extra in ({}, OFF):
                rows = await service.render(conversations, add_generation_prompt=prompt, model=form, **extra)
                expected = tokenizer.apply_chat_template(conversations, add_generation_prompt=prompt, **extra)
                assert [row["input_ids"].tolist() for row in rows] == expected["input_ids"]
        if form in ("llama", "qwen", "mistral"):
            tool = Tool.of(lambda a, b: a + b).schema()
            talk = TALK if form == "mistral" else TOOL_TALK
            row = await service.render(talk, tools=[tool], model=form)
            assert row["input_ids"].tolist() == tokenizer.apply_chat_template(talk, tools=[tool])["input_ids"]


ANSWER = f"{THOUGHT}It is <b>four</b>."
MASKS: list[tuple[str, Any, dict[str, Any], list[str]]] = [
    ("llama", TALK, {}, [f"{ANSWER}<|eot_id|>", "yes<|eot_id|>"]),
    ("llama", TOLD, {}, [f"{ANSWER}<|eot_id|>", f"{THOUGHT}yes<|eot_id|>"]),
    ("llama", TOOL_TALK, {}, ['{"name": "add", "parameters": {"a": 2, "b": 2}}<|eot_id|>', "four<|eot_id|>"]),
    ("gemma", TALK, {}, [f"{ANSWER}<end_of_turn>", "yes<end_of_turn>"]),
    ("gemma", TOLD, {"train_on": "last"}, [f"{THOUGHT}yes<end_of_turn>"]),
    ("mistral", TALK, {}, [f" {ANSWER}</s>", " yes</s>"]),
    # The system message is written before a last question only: no answer stands behind its prompt.
    ("mistral", TOLD, {}, []),
    # Earlier reasoning is dropped; the last answer has a place for it, empty where there is none.
    ("qwen", TALK, {}, ["<think>\n\n</think>\n\n  yes<|im_end|>"]),
    ("qwen", TALK, OFF, ["  yes<|im_end|>"]),
    ("qwen", TOLD, {}, [f"{THOUGHT}yes<|im_end|>"]),
    ("qwen", TOLD, {"train_on": "last"}, [f"{THOUGHT}yes<|im_end|>"]),
    ("qwen", TOLD, {"train_on": lambda m: m["role"] == "user"}, ["what is 2+2?\n<|im_end|>", "sure?<|im_end|>"]),
    ("qwen", TOLD, {"train_on": lambda m: "four" in m["content"]}, []),
    ("qwen", TOOL_TALK, {}, [
        '<think>\ncall it\n</think>\n\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
        "<|im_end|>", "<think>\ntold so\n</think>\n\nfour<|im_end|>"]),
    # The end of the text stands behind the last turn only.
    ("phi", TALK, {}, [f"{THOUGHT}It is <b>four</b>. <|end|>", "  yes<|end|>\n<|endoftext|>"]),
    ("phi", TALK[:3], {}, [f"{THOUGHT}It is <b>four</b>. <|end|>"]),
    ("olmo", TALK, {}, [f"{THOUGHT}It is <b>four</b>. <|endoftext|>", "  yes<|endoftext|>"]),
    ("granite", TALK, {}, [f"{THOUGHT}It is <b>four</b>. <|end_of_text|>", "  yes<|end_of_text|>"]),
    # Nothing ends an answer but the next turn: recipes add an end, as `gradwire render` shows.
    ("glm", TALK, {}, [f"\n{THOUGHT}It is <b>four</b>.", "\n  yes"]),
    ("marked", TALK, {}, [f"{THOUGHT}It is <b>four</b>. <|im_end|>", "  yes<|im_end|>"]),
    ("marked", TALK, {"train_on": "last"}, ["  yes<|im_end|>"]),
    ("marked", TALK, {"train_on": lambda m: m["role"] == "user"}, ["what is 2+2?\n<|im_end|>", "sure?<|im_end|>"]),
]  # fmt: skip


async def test_the_mask_covers_what_the_model_writes(address: str, tokenizers: dict[str, Any]) -> None:
    async with gradwire.connect(address) as service:
        for form, talk, options, expected in MASKS:
            row = await service.render(talk, model=form, **options)
            assert learned(tokenizers[form], row) == expected, (form, options)
        row = await service.render(TALK, train_on="all", model="qwen")
        assert row["loss_mask"].all() and len(row["loss_mask"]) == len(row["input_ids"])
        marked = tokenizers["marked"].apply_chat_template(TALK, return_assistant_tokens_mask=True, return_dict=True)
        assert (await service.render(TALK, model="marked"))["loss_mask"].tolist() == marked["assistant_masks"]


async def test_recipes_learn_every_answer_behind_its_prompt(
    address: str, tokenizers: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tool = Tool.of(lambda a, b: a + b).schema()
    empty, sure = "<think>\n\n</think>\n\n", {"role": "user", "content": "sure?"}
    talk, yes = (TALK[0], {"role": "assistant", "content": "4"}), {"role": "assistant", "content": "yes"}
    thought = yes | {"reasoning_content": "so"}
    off = Conversation((*talk[:1], thought), template_kwargs=OFF, place="a, line 4")
    async with gradwire.connect(address) as service:
        info = next(each for each in await service.list_models() if each.name == "qwen")
        tokens = RowEncoder(service, info, 900)
        whole = Conversation((*talk, sure, yes), (tool,), weight=0.5, place="a, line 1")
        rows = await tokens.rows([whole, Conversation(talk), off, replace(off, place="a, line 5")])
        assert [learned(tokenizers["qwen"], row) for row in rows] == [
            [f"{empty}yes<|im_end|>"], [f"{empty}4<|im_end|>"], [f"{empty}4<|im_end|>"], ["yes<|im_end|>"],
            ["yes<|im_end|>"],
        ]  # fmt: skip
        assert [row["weights"][0] for row in rows] == [0.5, 0.5, 1, 1, 1]
        assert tokens.remarks == {CLOSED: {"a, line 4": None, "a, line 5": None}}
        tokens.tell_of_rows()
        assert [each for each in caplog.messages if "reasoning" in each] == [
            f"a, line 4: {CLOSED}; such rows are counted at the end", f"2 rows: {CLOSED}",
        ]  # fmt: skip
        # Of pairs and ratings all that the assistant writes in an answer is learned, and nothing of their prompts.
        called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        answer = (called, TOOL_TALK[2], yes)
        (pair,) = await tokens.pairs([Preference((*talk, sure), answer, (yes,), (tool,))])
        (rated,) = await tokens.ratings([Rating((*talk, sure), answer, True, (tool,))])
        for row in ({name: pair[f"chosen_{name}"] for name in ("input_ids", "loss_mask")}, rated):
            found = learned(tokenizers["qwen"], row)
            assert len(found) == 1 and found == [f"{empty}yes<|im_end|>"], found
        assert tokens.remarks.keys() == {CLOSED, NOT_IN_HISTORY}
        (prompt,) = await tokens.prompts([Conversation(talk, (tool,), OFF)], 8)
        expected = tokenizers["qwen"].apply_chat_template(
            list(talk[:1]), tools=[tool], add_generation_prompt=True, **OFF
        )["input_ids"]
        assert prompt.tolist() == expected
        small = RowEncoder(service, replace(info, vocab_size=100), 256, on_error="skip")
        for encode in (small.rows, lambda some: small.prompts(some, 0)):
            assert not await small.fitting([replace(whole, place="here")], encode)
            assert "and the model has 100: the tokenizer's added tokens need" in small.skipped["here"]


async def test_what_a_template_leaves_out_is_said_once(address: str, caplog: pytest.LogCaptureFixture) -> None:
    tool = Tool.of(lambda a, b: a + b).schema()
    plain = [TOOL_TALK[0], {"role": "assistant", "content": "four", "tool_calls": [CALL], "reasoning_content": "so"}]
    async with gradwire.connect(address) as service:
        cases = {
            "phi": (TOLD, None, ["the system message"]),
            "gemma": (plain, [tool], ["the reasoning of the last message", "the tools", "tool calls"]),
            "llama": (plain, [tool], ["the reasoning of the last message"]),
            "qwen": (TOOL_TALK, [tool], []),
            "mistral": (TOLD, [tool], ["the system message"]),  # which it writes before a last question only
            "marked": ([TALK[0] | {"at": "noon"}, TALK[1]], None, ["'at' of messages"]),
        }
        await service.render_turns([TOLD], model="mistral")  # whose rows begin with prompts, which have it
        assert not caplog.messages
        for form, (talk, tools, parts) in cases.items():
            caplog.clear()
            for _ in range(2):
                await service.render([talk, talk[:2]], tools=tools, model=form)
            said = [record.message for record in caplog.records if "does not write" in record.message]
            assert [each.split(" does not write ")[1].split(",")[0] for each in said] == parts, form


async def test_rows_are_a_batch(address: str) -> None:
    async with gradwire.connect(address) as service:
        many = [
            [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": str(n)}] for n in range(5000)
        ]
        rows = await service.render(many, model="llama")
        again = await service.render(many[4321:4323], model="llama")
        assert len(rows) == 5000 and rows[4321]["input_ids"].tolist() == again[0]["input_ids"].tolist()
        run = await service.create_run("llama", lora=2)
        result = await run.forward_backward(rows[:4], "causal_lm")
        assert result.num_loss_tokens == sum(int(row["loss_mask"].sum()) for row in rows[:4])


async def test_what_a_tokenizer_says_of_itself(address: str, tokenizers: dict[str, Any]) -> None:
    async with gradwire.connect(address) as service:
        info, tokenizer = await service.tokenizer_info("qwen"), tokenizers["qwen"]
        assert (info.model, info.vocab_size, info.chat_template) == ("qwen", len(tokenizer), tokenizer.chat_template)
        assert info.special_tokens["eos_token"] == "<|im_end|>"
        assert info.special_token_ids["<|im_end|>"] == tokenizer.eos_token_id
        assert (await service.tokenizer_info("tiny")).chat_template == ""


async def test_errors_say_what_to_do(address: str) -> None:
    user = {"role": "user", "content": "hi"}
    async with gradwire.connect(address) as service:
        cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
            (TALK, {"model": "tiny"}, UnsupportedError, "has no chat template: add a chat_template.jinja"),
            (TALK, {}, InvalidArgumentError, "say which one, model=NAME"),
            ([TALK, [user, user]], {"model": "gemma"}, InvalidArgumentError, "conversation 1: .* roles must alternate"),
            (TALK, {"model": "qwen", "train_on": "user"}, InvalidArgumentError, 'train_on is "assistant", "last"'),
            ("hi", {"model": "qwen"}, InvalidArgumentError, "messages is a list of messages"),
            ([{"content": "hi"}], {"model": "qwen"}, InvalidArgumentError, 'message 0 is no mapping with a "role"'),
            ([[]], {"model": "qwen"}, InvalidArgumentError, "conversation 0 has no messages"),
            ([user] * 41, {"model": "qwen"}, LimitExceededError, "max_messages=N"),
            ([user], {"model": "qwen", "tools": [len]}, InvalidArgumentError, "a tool is its JSON schema"),
            ([{**user, "token_ids": [10**6]}], {"model": "qwen"}, InvalidArgumentError, "token_ids is a list of ids"),
            (
                [[user], [user, {"role": "model", "content": "yo"}]],
                {"model": "qwen"},
                InvalidArgumentError,
                "conversation 1, message 1: .* does not know the role 'model' and leaves the message out",
            ),
            (TALK, {"model": "qwen", "chat_template": "other"}, InvalidArgumentError, "no chat template 'other'"),
        ]
        for messages, options, kind, words in cases:
            with pytest.raises(kind, match=words):
                await service.render(messages, **options)


async def test_a_role_that_the_template_writes_is_no_mistake(address: str, tokenizers: dict[str, Any]) -> None:
    talk = [{"role": "expert", "content": "hi"}, {"role": "expert", "content": None}, {"role": "gpt", "content": "yo"}]
    async with gradwire.connect(address) as service:
        row = await service.render(talk[::2], model="llama")
        assert row["input_ids"].tolist() == tokenizers["llama"].apply_chat_template(talk[::2], return_dict=False)
        assert not row["loss_mask"].any()  # no assistant has spoken
        with pytest.raises(InvalidArgumentError, match=r"message 0: .* the role 'expert'"):
            await service.render(talk, model="qwen")


def as_sampled(tokenizer: Any, text: str, end: bool = True) -> Generation:
    """A response in tokens of one character, which is not how its text would be encoded."""
    ids = [number for character in text for number in tokenizer.encode(character, add_special_tokens=False)]
    ids += [tokenizer.eos_token_id] * end
    return Generation(text, np.array(ids), np.zeros(len(ids), np.float32), "eos" if end else "length")


@pytest.mark.parametrize("form", FORMS)
async def test_the_policy_reads_what_a_tool_said_under_any_template(
    form: str, address: str, tokenizers: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma's refuses a third role, Phi's and Mistral's leave it out; llama's and Qwen's have one."""
    missing = {
        "gemma": ["tool"],
        "phi": ["system", "tool"],
        "mistral": ["tool"],
        "olmo": ["tool"],
        "llama": [],
        "qwen": [],
    }
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
    talk: list[Any] = [{"role": "system", "content": "think"}, {"role": "user", "content": "add one"}]
    async with gradwire.connect(address) as service:
        for codec in (ServiceCodec(service, form), TokenizerCodec(tokenizers[form])):
            caplog.clear()
            for _ in range(2):
                prompts, history, messages = [], TokenHistory(codec), list(talk)
                for said in ("the answer is 4", "think of two"):
                    prompts.append(tokenizers[form].decode(await history.prompt_ids(messages)))
                    messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": said}]
                prompts.append(tokenizers[form].decode(await history.prompt_ids(messages)))
                written = ["".join(prompt.split()) for prompt in prompts]
                assert all(text.count("theansweris4") == (number > 0) for number, text in enumerate(written))
                assert all(text.count("thinkoftwo") == (number > 1) for number, text in enumerate(written))
                assert all("think" in text.replace("thinkoftwo", "") for text in written)
            told = [record.message for record in caplog.records if "has no role" in record.message]
            if form in missing:
                assert [each.split("'")[1] for each in told] == missing[form]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("form", ["llama", "qwen", "gemma", "mistral"])
async def test_histories_keep_the_tokens_that_were_sampled(
    form: str, keeps: bool, address: str, tokenizers: dict[str, Any]
) -> None:
    """Over the server's tokenizer and the user's own, with a template that trims, and one that drops reasoning."""
    tokenizer = tokenizers[form]
    first, second = as_sampled(tokenizer, f"{THOUGHT}It is four. "), as_sampled(tokenizer, "so it is", end=False)
    async with gradwire.connect(address) as service:
        for codec in (ServiceCodec(service, form), TokenizerCodec(tokenizer)):
            history = TokenHistory(codec)
            history.keeps = keeps
            messages: list[Any] = [TALK[0]]
            start = await history.prompt_ids(messages)
            history.wrote(first)
            messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "sure?"}]
            middle = (await history.prompt_ids(messages)).tolist()
            history.wrote(second)
            messages += [{"role": "assistant", "content": second.text}, {"role": "user", "content": "why?"}]
            end = (await history.prompt_ids(messages)).tolist()
            expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            if form != "qwen" or not keeps:
                assert "".join(tokenizer.decode(end).split()) == "".join(expected.split())
            if form == "qwen" and not keeps:  # behind the reasoning that its template drops
                answer = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
                answer += as_sampled(tokenizer, "It is four. ").token_ids.tolist()
                assert str(answer)[1:-1] in str(middle) and str(answer)[1:-1] in str(end)
                assert "two and two" not in tokenizer.decode(end)
            else:
                written = [*start, *first.token_ids]
                assert middle[: len(written)] == written
            both = [*middle, *second.token_ids]
            assert end[: len(both)] == both


async def test_conversations_with_a_run_are_rendered(
    address: str, tokenizers: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with gradwire.connect(address) as service:
        run = await service.create_run("qwen", lora=2)
        inference = await RunInference.of(service, run, **OFF)
        history = TokenHistory(inference.codec)
        prompt = await history.prompt_ids(TALK[:1])
        expected = tokenizers["qwen"].apply_chat_template(TALK[:1], add_generation_prompt=True, **OFF)["input_ids"]
        assert prompt.tolist() == expected
        assert (await TokenHistory(inference.codec).prompt_ids(UserText(TALK[0]["content"]))).tolist() == expected
        (made,) = await inference.generate([prompt], SamplingParams(max_tokens=8, seed=1))
        history.wrote(made)
        turn = [*TALK[:1], {"role": "assistant", "content": made.text}, TALK[2]]
        assert str(made.token_ids.tolist())[1:-1] in str((await history.prompt_ids(turn)).tolist())

        plain = ServiceCodec(service, "tiny")
        with caplog.at_level(logging.WARNING, "gradwire.rl"):
            for _ in range(2):
                ids = await TokenHistory(plain).prompt_ids(TALK[2:3])
        assert (await plain.decode([ids])) == ["user: sure?\nassistant: "]
        assert [record.message for record in caplog.records if "no chat template" in record.message] == [
            "tiny has no chat template: conversations are written as lines of `role: content`. An instruct model's own "
            "tokenizer has one; for a base model, give RolloutManager(template=...)"
        ]


async def test_ids_beyond_the_tokenizer_are_kept(address: str, tokenizers: dict[str, Any]) -> None:
    """A sampler draws any id of a padded vocabulary, and the episode goes on."""
    size = len(tokenizers["qwen"])
    ids = [40, size + 10, 41]
    async with gradwire.connect(address) as service:
        answer = {"role": "assistant", "content": (await service.decode("qwen", [ids]))[0], "token_ids": ids}
        for more in ([], [{"role": "user", "content": "again"}]):
            row = await service.render([{"role": "user", "content": "hi"}, answer, *more], model="qwen")
            (place,) = np.flatnonzero(np.asarray(row["input_ids"]) == size + 10)
            assert np.asarray(row["loss_mask"])[place - 1 : place + 2].tolist() == [1, 1, 1]
        with pytest.raises(InvalidArgumentError, match=f"from 0 to {size + 49}"):
            await service.render([{**answer, "token_ids": [size + 50]}], model="qwen")


def test_without_an_event_loop(address: str) -> None:
    with gradwire.sync.connect(address) as service:
        assert service.render(TALK, model="qwen")["loss_mask"].sum() > 0
        assert service.tokenizer_info("qwen").vocab_size > 0
