"""The OpenAI door, by the `openai` package as it is."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gradwire.sync
import httpx
import jsonschema
import openai
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.keys import Caller
from gradwire_server.doors.http.openai.answers import ScoredTokens, TextOffsets, TokenTexts, bytes_of_piece, streamed
from gradwire_server.doors.http.openai.events import _line
from gradwire_server.doors.http.openai.tools import certain_content, forced_schema, read_answer
from gradwire_server.errors import ServiceError, parked_error
from support.tinker import HttpServer
from support.tiny import EMOJI, WORDS, llama_2_tokenizer

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "integer"}}},
    },
}
CALL_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"const": "add"},
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [4, 5]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "parameters"],
    "additionalProperties": False,
}
LATIN = ("▁the", "▁cat", "s", "<0xC3>", "<0xA9>", "▁cat")
SHOWN: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
HELLO: list[Any] = [{"role": "user", "content": "hello cat"}]


@pytest.fixture(scope="module")
def server(openai_server: HttpServer) -> HttpServer:
    return openai_server


@pytest.fixture(scope="module")
def service(server: HttpServer) -> Iterator[gradwire.sync.ServiceClient]:
    with gradwire.sync.connect(server.address, connect_timeout=120) as service:
        yield service


def test_models_are_base_models_runs_and_checkpoints(
    client: openai.OpenAI, service: gradwire.sync.ServiceClient
) -> None:
    run = service.create_run("tiny", lora=4, seed=1)
    run.forward_backward({"input_ids": [[1, 40, 41, 42]] * 2}, "causal_lm").result()
    run.optim_step(learning_rate=0.05).result()
    saved = run.save_checkpoint("one").result()
    run.forward_backward({"input_ids": [[1, 40, 41, 42]] * 2}, "causal_lm").result()
    run.optim_step(learning_rate=0.05).result()
    names = [model.id for model in client.models.list()]
    assert names[0] == "tiny" and run.run_id in names and saved.path in names
    rows = [[1, 60, 61, 62, 63]]
    for name, expected in (
        ("tiny", service.sampling_client("tiny").compute_logprobs(rows)),
        (saved.path, service.sampling_client(saved).compute_logprobs(rows)),
        (run.run_id, run.compute_logprobs(rows)),
    ):
        assert client.models.retrieve(name).id == name
        found = client.completions.create(model=name, prompt=rows, max_tokens=0, echo=True, logprobs=2)
        logprobs = found.choices[0].logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
        (wanted,) = expected.result()
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1:] == pytest.approx(wanted.tolist(), abs=1e-5)
        assert all(max(top.values()) >= own for top, own in zip(logprobs.top_logprobs[1:], wanted, strict=True))
    for name in ("other", "run-x", f"{run.run_id}/none"):
        with pytest.raises(openai.NotFoundError, match="there is no model") as caught:
            client.completions.create(model=name, prompt="a")
        assert caught.value.param == "model" and caught.value.code == "unknown_model"
    service.delete_run(run.run_id)


def test_a_models_folder_is_a_name_of_it_everywhere(
    client: openai.OpenAI, service: gradwire.sync.ServiceClient, server: HttpServer
) -> None:
    rows = [[1, 60, 61, 62]]
    (expected,) = service.sampling_client("tiny").compute_logprobs(rows).result()
    for folder in (str(server.model), f"{server.model}/"):
        assert [model.name for model in service.list_models(folder)] == ["tiny"]
        assert service.encode(folder, ["the"]) == service.encode("tiny", ["the"])
        sampled = client.completions.create(model=folder, prompt=rows, max_tokens=1)
        assert sampled.usage is not None and sampled.usage.completion_tokens == 1
        (found,) = service.sampling_client(folder).compute_logprobs(rows).result()
        assert found.tolist() == expected.tolist()
        run = service.create_run(folder, lora=2)
        pair = {"chosen_input_ids": rows, "rejected_input_ids": [[1, 60, 61, 63]]}
        losses = [run.forward(pair, "dpo", {"reference_model": name}).result().loss for name in ("base", folder)]
        assert losses[0] == losses[1]
        service.delete_run(run.run_id)
    with pytest.raises(gradwire.UnknownModelError, match="has no model '/nowhere'"):
        service.list_models("/nowhere")


def test_what_vllms_clients_ask_beside(client: openai.OpenAI) -> None:
    whole: Any = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=20,
        seed=1,
        extra_body={
            "prompt_logprobs": 2,
            "min_tokens": 15,
            "skip_special_tokens": False,
            "stop_token_ids": [*range(9)],
        },
    )
    assert whole.usage.completion_tokens >= 15
    first, *places = whole.prompt_logprobs
    assert first is None and len(places) + 1 == whole.usage.prompt_tokens
    assert all(len(place) in (2, 3) and {entry["rank"] for entry in place.values()} >= {1, 2} for place in places)
    extra: Any = {"prompt_logprobs": 0}
    completion: Any = client.completions.create(model="tiny", prompt=[1, 50, 51], max_tokens=3, extra_body=extra)
    scored: Any = client.completions.create(model="tiny", prompt=[1, 50, 51], max_tokens=0, echo=True, logprobs=0)
    own = [next(iter(place.values()))["logprob"] for place in completion.choices[0].prompt_logprobs[1:]]
    assert own == pytest.approx(scored.choices[0].logprobs.token_logprobs[1:])
    begun: list[Any] = [*HELLO, {"role": "assistant", "content": "the cat"}]
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 1}
    more = client.chat.completions.create(
        **options, messages=begun, extra_body={"continue_final_message": True, "add_generation_prompt": False}
    )
    new, ended = (client.chat.completions.create(**options, messages=each) for each in (HELLO, begun))
    assert more.usage and new.usage and ended.usage
    assert new.usage.prompt_tokens < more.usage.prompt_tokens < ended.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        client.chat.completions.create(**options, messages=HELLO, extra_body={"continue_final_message": True})


def test_token_ids_are_returned_to_who_trains_on_them(client: openai.OpenAI) -> None:
    beside: Any = {"return_token_ids": True, "return_tokens_as_token_ids": True, "priority": 1, "cache_salt": "a"}
    asked: Any = {"model": "tiny", "max_tokens": 6, "seed": 2, "extra_body": beside}
    prompt = [1, 50, 51]
    completion: Any = client.completions.create(prompt=[prompt, [1]], n=2, logprobs=0, **asked)
    assert [choice.prompt_token_ids for choice in completion.choices] == [prompt, prompt, [1], [1]]
    for choice in completion.choices:
        assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    parts: Any = list(client.completions.create(prompt=prompt, stream=True, **asked))
    single: Any = client.completions.create(prompt=prompt, **asked)
    assert [token for part in parts for token in part.choices[0].token_ids] == single.choices[0].token_ids
    chat: Any = client.chat.completions.create(messages=HELLO, logprobs=True, **asked)
    ids = chat.choices[0].token_ids
    assert len(ids) == chat.usage.completion_tokens and len(chat.prompt_token_ids) == chat.usage.prompt_tokens
    assert [entry.token for entry in chat.choices[0].logprobs.content] == [f"token_id:{token}" for token in ids]
    chunks: Any = list(client.chat.completions.create(messages=HELLO, stream=True, **asked))
    assert chunks[0].prompt_token_ids == chat.prompt_token_ids
    assert [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", [])] == ids


def test_bytes_are_those_of_the_vocabulary() -> None:
    assert bytes_of_piece("<0xE2>") == [0xE2] and bytes_of_piece("Ã©Ġa") == list("é a".encode())
    assert bytes_of_piece("Ã") == [0xC3] and bytes_of_piece("▁日") is None and bytes_of_piece("") is None


@pytest.mark.parametrize("keeps", [False, True])
def test_offsets_point_into_the_text(client: openai.OpenAI, keeps: bool) -> None:
    """Of special tokens in the middle, which the text leaves out unless asked, and of parts of characters."""
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": "<s>ab€ é<s>c", "max_tokens": 100, "logprobs": 0, "temperature": 1.5, "seed": 3,
        "n": 4, "logit_bias": {"1": 6, "2": -100}, "extra_body": {"skip_special_tokens": not keeps},
    }  # fmt: skip
    whole = client.completions.create(**asked, echo=True)
    unechoed = client.completions.create(**asked)
    parts: dict[int, list[int]] = defaultdict(list)
    for part in client.completions.create(**asked, stream=True):
        for choice in part.choices:
            parts[choice.index] += choice.logprobs.text_offset  # type: ignore[union-attr, operator]
    for choice, other in zip(whole.choices, unechoed.choices, strict=True):
        assert choice.logprobs is not None and other.logprobs is not None
        tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
        answer = len(tokens) - len(other.logprobs.tokens or [])
        assert "<s>" in tokens[1:answer] and "<s>" in tokens[answer:] and "\ufffd" in tokens[answer:]
        ends = [*offsets[1:], len(choice.text)]
        for place, (token, offset, end) in enumerate(zip(tokens, offsets, ends, strict=True)):
            if token in ("<s>", "<pad>", "<unk>") and not keeps:
                assert offset == end or "\ufffd" in tokens[place - 1]  # an unfinished character before it
            elif "\ufffd" not in token:
                assert choice.text[offset:].startswith(token)
        assert offsets == sorted(offsets) and offsets[-1] <= len(choice.text)
        euro = 2 + 2 * len("<s>") * keeps
        assert choice.text.index("€") == euro and offsets.count(euro) == 3
        before = len(choice.text) - len(other.text)
        assert other.logprobs.text_offset == parts[other.index] == [offset - before for offset in offsets[answer:]]


def test_offsets_end_with_a_text_that_a_stop_string_cuts(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "the cat", "max_tokens": 30, "logprobs": 0, "seed": 4}
    text = client.completions.create(**asked).choices[0].text
    cut = client.completions.create(**asked, stop=text[5:8]).choices[0]
    assert cut.text == text[:5] and cut.logprobs is not None
    assert max(cut.logprobs.text_offset or []) <= len(cut.text)


def test_an_answer_keeps_its_leading_blank_and_the_rest_of_a_character(
    client: openai.OpenAI, service: gradwire.sync.ServiceClient
) -> None:
    """Whatever the decoder drops where a text begins: the text is what the tokens add to their prompt's."""
    for next_word, prompt, begins, whole in (
        ("▁sat", ["▁the", "▁cat"], " sat", "the cat sat"),
        ("▁sat", [], "sat", "sat"),
        (EMOJI[3], ["▁cat", *EMOJI[:3]], "\U0001f600", "cat\U0001f600"),
    ):
        ids, bias = [1, *map(WORDS.index, prompt)], {WORDS.index(next_word): 100.0}
        asked: dict[str, Any] = {"model": "blanks", "prompt": ids, "max_tokens": 1, "logprobs": 0, "temperature": 0}
        asked |= {"logit_bias": {str(token): value for token, value in bias.items()}}
        found = client.completions.create(**asked).choices[0]
        assert found.text == begins and found.logprobs is not None and found.logprobs.text_offset == [0]
        streamed_text = "".join(part.choices[0].text for part in client.completions.create(**asked, stream=True))
        assert streamed_text == begins
        echoed = client.completions.create(**asked, echo=True).choices[0]
        assert echoed.text == whole and echoed.logprobs is not None and echoed.logprobs.text_offset is not None
        assert echoed.text[echoed.logprobs.text_offset[-1] :] == begins
        sampling = service.sampling_client("blanks")
        sampled = sampling.sample([ids], max_tokens=1, temperature=0, logit_bias=bias).result()
        assert sampled.samples[0][0].text == begins


@pytest.mark.parametrize("stop", ["<|end|>", " sat<|end|>", "<|end|> sat"])
def test_a_stop_text_may_have_special_tokens(client: openai.OpenAI, stop: str) -> None:
    choices: dict[str, Any] = {"logit_bias": {str(WORDS.index(word)): 90 for word in ("▁sat", "<|end|>")}}
    asked: dict[str, Any] = {"model": "blanks", "prompt": "the cat", "max_tokens": 40, "seed": 1, **choices}
    free = client.completions.create(**asked, extra_body={"skip_special_tokens": False}).choices[0].text
    assert set(free.replace("<|end|>", "").split()) == {"sat"} and stop in free
    shown = free[: free.index(stop)].replace("<|end|>", "")
    found = client.completions.create(**asked, stop=stop).choices[0]
    assert (found.text, found.finish_reason) == (shown, "stop")
    assert "".join(part.choices[0].text for part in client.completions.create(**asked, stop=stop, stream=True)) == shown


async def test_offsets_count_spaces_that_only_the_first_token_of_a_text_loses() -> None:
    tokenizer = llama_2_tokenizer()

    async def decode(caller: Caller, model: str, rows: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        return tokenizer.decode_batch(rows, skip_special_tokens=skip_special_tokens)

    async def pieces(caller: Caller, model: str, ids: list[int]) -> list[str]:
        return [tokenizer.id_to_token(token) or "" for token in ids]

    core: Any = SimpleNamespace(texts=SimpleNamespace(decode=decode, pieces=pieces))
    texts, ids = TokenTexts(core, Caller(""), "m"), [WORDS.index(word) for word in LATIN]
    text_of = await texts.read([ScoredTokens(ids)])
    assert tokenizer.decode(ids) == "the catsé cat"
    assert TextOffsets(texts).add(ids) == [0, 3, 7, 8, 8, 9] and [*map(text_of, ids[1:3])] == [" cat", "s"]
    blank = [WORDS.index(word) for word in ("▁", "▁cat", "s")]
    await texts.read([ScoredTokens(blank)])
    assert tokenizer.decode(blank) == " cats" and TextOffsets(texts).add(blank) == [0, 0, 4]


def test_an_address_without_v1_is_explained(server: HttpServer) -> None:
    explained = pytest.raises(openai.NotFoundError, match=r"/models is not served here; there are .*/v1 \(openai\)")
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as wrong, explained:
        wrong.models.list()


def test_completions_are_those_of_the_sampler(client: openai.OpenAI, service: gradwire.sync.ServiceClient) -> None:
    options: dict[str, Any] = {"n": 2, "max_tokens": 12, "temperature": 0.9, "seed": 5, "top_p": 0.95}
    options |= {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    found = client.completions.create(
        model="tiny",
        prompt=["the cat", "a mat"],
        logprobs=3,
        logit_bias={"40": 2},
        extra_body={"min_p": 0.01},
        **options,
    )
    expected = (
        service.sampling_client("tiny")
        .sample(["the cat", "a mat"], top_logprobs=3, logit_bias={40: 2.0}, min_p=0.01, **options)
        .result()
    )
    samples = [sample for of_prompt in expected.samples for sample in of_prompt]
    assert [choice.text for choice in found.choices] == [sample.text for sample in samples]
    for choice, sample in zip(found.choices, samples, strict=True):
        assert choice.logprobs is not None and choice.logprobs.tokens is not None
        assert choice.logprobs.token_logprobs == pytest.approx(sample.logprobs.tolist(), abs=1e-5)
        assert choice.finish_reason == ("length" if sample.stop_reason == "length" else "stop")
        assert len(choice.logprobs.tokens) == len(sample.token_ids)
    assert found.usage is not None
    assert found.usage.prompt_tokens == expected.num_prompt_tokens
    assert found.usage.completion_tokens == expected.num_sampled_tokens


def test_a_stream_is_the_completion(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "prompt": "the cat",
        "n": 3,
        "max_tokens": 20,
        "seed": 4,
        "stop": ["at", "zz"],
    }
    whole = client.completions.create(**options, logprobs=1)
    texts, tokens, reasons = [""] * 3, [0] * 3, [None] * 3
    usage = None
    for part in client.completions.create(**options, logprobs=1, stream=True, stream_options={"include_usage": True}):
        usage = part.usage or usage
        for choice in part.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is not None and choice.logprobs.tokens is not None
            tokens[choice.index] += len(choice.logprobs.tokens)
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]  # type: ignore[call-overload]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None and whole.usage is not None and usage.total_tokens == whole.usage.total_tokens
    assert sum(tokens) == usage.completion_tokens


def test_chat_in_whole_and_in_parts(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": " cat"}]},
    ]
    options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_completion_tokens": 15, "seed": 2}
    whole = client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=2)
    assert len({choice.message.content for choice in whole.choices}) == 2 and whole.usage is not None
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    for place in logprobs.content:
        assert len(place.top_logprobs) == 2 and place.top_logprobs[0].logprob >= place.logprob
        assert place.bytes is not None and bytes(place.bytes).decode(errors="replace") == place.token
    text, reason, role = "", None, None
    for part in client.chat.completions.create(**options, stream=True):
        (choice,) = part.choices
        text += choice.delta.content or ""
        role, reason = role or choice.delta.role, choice.finish_reason or reason
    assert (role, text, reason) == ("assistant", whole.choices[0].message.content, whole.choices[0].finish_reason)


def test_beside_log_probabilities_a_part_is_one_token(client: openai.OpenAI) -> None:
    choices: dict[str, Any] = {"structured_outputs": {"choice": ["the cat sat on the mat", "a naïve mat"]}}
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "n": 8, "max_tokens": 60, "extra_body": choices}
    texts, last = defaultdict[int, str](str), dict[int, str | None]()
    for part in client.chat.completions.create(**asked, stream=True, logprobs=True, top_logprobs=2):
        (choice,) = part.choices
        texts[choice.index] += choice.delta.content or ""
        for entry in (choice.logprobs and choice.logprobs.content) or []:
            assert len(choice.logprobs.content) == 1 and len(entry.top_logprobs) == 2
            last[choice.index] = entry.token
            assert choice.delta.content in (None, entry.token) or entry.token == "�"
    assert [*last.values()] == ["</s>"] * 8 and set(texts.values()) <= set(choices["structured_outputs"]["choice"])


def test_answers_follow_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "call", "strict": True, "schema": CALL_SCHEMA}}
    found = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        response_format=schema,
        n=3,
        seed=1,
        temperature=2,  # type: ignore[arg-type]
    )
    for choice in found.choices:
        assert choice.finish_reason == "stop" and choice.message.content is not None
        jsonschema.validate(json.loads(choice.message.content), CALL_SCHEMA)
    for extra in ({"guided_json": CALL_SCHEMA}, {"structured_outputs": {"json": CALL_SCHEMA}}):
        bare = {"add_generation_prompt": True, "skip_special_tokens": True}
        guided = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=400, seed=1, extra_body=extra | bare
        )
        jsonschema.validate(json.loads(guided.choices[0].message.content or ""), CALL_SCHEMA)
        with pytest.raises(openai.BadRequestError, match="give one"):
            client.chat.completions.create(
                model="tiny", messages=HELLO, response_format={"type": "json_object"}, extra_body=extra
            )
    forms: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": "(cat|mat){2}"}, "(cat|mat){2}"),
        ({"structured_outputs": {"choice": ['say "cat"', "a\\b\n"]}}, 'say "cat"|a\\\\b\n'),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]'}}, "a[0-9]"),
    ]
    for extra, pattern in forms:
        text = client.completions.create(model="tiny", prompt="a", max_tokens=40, extra_body=extra).choices[0].text
        assert re.fullmatch(pattern, text), text
    with pytest.raises(openai.BadRequestError, match="regular expression") as caught:
        client.completions.create(model="tiny", prompt="a", extra_body={"structured_outputs": {"regex": "("}})
    assert caught.value.param == "structured_outputs"
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            r"regex and structured_outputs\.choice both",
        ),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens is 9; the rule is min_tokens <= max_tokens \(8\)"),
    ]
    for extra, message in wrong:
        with pytest.raises(openai.BadRequestError, match=message):
            client.completions.create(model="tiny", prompt="a", extra_body=extra)
    anything = client.chat.completions.create(
        model="tiny", messages=HELLO, response_format={"type": "json_object"}, max_tokens=30, seed=1
    )
    assert (anything.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize("template", ["<tool_call>", "[TOOL_CALLS]", ""])
@pytest.mark.parametrize(
    "text",
    [
        'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>{"name":"add","arguments":{}}</tool_call>',
        'First [TOOL_CALLS] and [TOOL_CALLS] [{"name": "add", "arguments": {}}]',
        '[{"name": "add", "arguments": {}}]',
        ' {"name": "add", "parameters": {"a": 1}}',
        "a < b <tool but no [TOOL call ",
        "  ",
    ],
)
def test_what_is_streamed_with_tools_is_the_beginning_of_the_whole_answer(text: str, template: str) -> None:
    content = read_answer(text, template, [ADD])[0] or ""
    sent = [certain_content(text[:end], template) for end in range(len(text))]
    assert all(content.startswith(part) for part in sent) and sent == sorted(sent, key=len)
    if "name" not in text and text.strip():
        assert len(sent[-1]) >= len(text) - 12


def test_text_around_calls_and_a_call_that_was_cut_off_stay_in_the_answer() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    cut = '<tool_call>\n{"name": "add", "argu'
    content, calls = read_answer(f"First {call} then {call} and\n{cut}", "<tool_call>", [ADD])
    assert len(calls) == 2 and content == f"First  then  and\n{cut}"


def test_no_character_but_a_newline_ends_a_line_of_a_stream() -> None:
    text = "a\x85b\u2028c\u2029d"
    line = _line({"text": text}).decode()
    assert line.splitlines() == [line.rstrip("\n"), ""] and json.loads(line.removeprefix("data: ")) == {"text": text}


def test_a_prompt_beyond_the_context_has_the_code_that_agents_look_for(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024") as caught:
        client.completions.create(model="tiny", prompt=[40] * 1100)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"


async def test_errors_name_a_model_as_it_was_asked_for() -> None:
    run = "run-" + "a2" * 8

    class Parked:
        calls: Any = SimpleNamespace(turn=lambda *_: contextlib.nullcontext())

        async def stream_sample(self, *_: Any) -> AsyncGenerator[Any]:
            raise parked_error(run, pb.Error(message=f"of {run}/step-1, and run-{'b' * 16}/c"))
            yield

    frames = streamed(cast(Any, Parked()), Caller("ann"), pb.SampleRequest(model=f"{run}/step-1"), "ft:tiny:me::abc")
    with pytest.raises(ServiceError) as caught:
        await anext(frames)
    message = caught.value.error.message
    assert "ft:tiny:me::abc is parked" in message and run not in message and f"run-{'b' * 16}/c" in message


def test_text_is_streamed_though_tools_are_given(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": [ADD], "seed": 3, "max_tokens": 40}
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.message.content is not None and not whole.message.tool_calls
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
    parts = [chunk.delta.content for chunk in chunks if chunk.delta.content]
    assert "".join(parts) == whole.message.content and chunks[-1].finish_reason == whole.finish_reason
    assert len(parts) > 3


def test_tools_are_called_and_answered(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": [ADD], "seed": 3}
    for choice_of_tool in ("required", {"type": "function", "function": {"name": "add"}}):
        choice = client.chat.completions.create(**options, tool_choice=choice_of_tool).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None and choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "add"
        jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])
    with client.chat.completions.stream(**options, tool_choice="required") as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls" and streamed.message.tool_calls
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    # An untrained model, held to the form that its template teaches, calls of its own accord.
    schema: Any = {"type": "json_schema", "json_schema": {"name": "call", "schema": CALL_SCHEMA}}
    whole = client.chat.completions.create(**options, response_format=schema)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls and whole.usage is not None
    options["max_tokens"] = whole.usage.completion_tokens - 1  # all but the end token
    (cut,) = client.chat.completions.create(**options, response_format=schema).choices
    assert cut.finish_reason == "length" and cut.message.tool_calls
    del options["max_tokens"]
    plain = client.chat.completions.create(**options, response_format=schema, tool_choice="none").choices[0]
    assert plain.finish_reason == "stop" and plain.message.content and not plain.message.tool_calls
    turn = choice.message.model_dump(exclude_none=True)
    answered = [*HELLO, turn, {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "5"}]
    last = client.chat.completions.create(model="tiny", messages=answered, tools=[ADD], max_tokens=5, seed=1)
    assert last.usage is not None and last.usage.prompt_tokens > 100


def test_schemas_of_forced_calls_share_their_definitions() -> None:
    place = {"enum": ["here", "there"]}
    parameters = {"type": "object", "properties": {"place": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": place}}
    tools = [{"function": {"name": name, "parameters": parameters}} for name in ("go", "look")]
    schema = json.loads(forced_schema(tools, "<tool_call>"))
    jsonschema.validate({"name": "go", "arguments": {"place": "here"}}, schema)
    for wrong in ({"name": "go", "arguments": {"place": "away"}}, {"name": "run", "arguments": {}}, {"name": "go"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    tools[1]["function"]["parameters"] = parameters | {"$defs": {"Place": {"type": "string"}}}
    with pytest.raises(ServiceError, match="Place"):
        forced_schema(tools, "")


@pytest.mark.parametrize(
    ("template", "text", "content", "arguments"),
    [
        (
            "<tool_call>",
            'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            "Well.",
            ['{"a": 1}'],
        ),
        ("<tool_call>", '<tool_call>{"name":"add","arguments":{}}</tool_call>' * 2, None, ["{}", "{}"]),
        ("<tool_call>", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', "same", []),
        ("<tool_call>", '<tool_call>{"name": "add", "arguments": </tool_call>', "same", []),
        ("<tool_call>", "no call", "same", []),
        ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}]', None, ['{"a": 2}']),
        ("[TOOL_CALLS]", '[{"name": "add", "arguments": {"a": 2}}, 3]', "same", []),
        ("llama", '{"name": "add", "parameters": {"a": 3}}', None, ['{"a": 3}']),
        ("llama", '{"name": ["add"]}', "same", []),
        ("llama", "[" * 10_000, "same", []),
    ],
)
def test_calls_are_read_in_the_forms_of_templates(
    template: str, text: str, content: str | None, arguments: list[str]
) -> None:
    found, calls = read_answer(text, template, [ADD])
    assert found == (text if content == "same" else content)
    assert [call["function"]["arguments"] for call in calls] == arguments


BAD: list[tuple[str, dict[str, Any], str | None, str]] = [
    (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": 1.5}]},
        "messages.0",
        "tool_calls of message 0 is a float, not a list",
    ),
    ("completions", {"prompt": []}, "prompt", "empty"),
    ("completions", {"prompt": [[1, 100_000]]}, None, "100000"),
    ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
    ("completions", {"prompt": "a", "temperature": -1}, "temperature", "greater"),
    ("completions", {"prompt": "a", "temperature": "hot"}, "temperature", "number"),
    ("completions", {"prompt": "a", "best_of": 3}, "best_of", "not served"),
    ("completions", {"prompt": "a", "suffix": "b"}, "suffix", "not served"),
    ("completions", {"prompt": "a", "wrong": 1}, "wrong", "not a parameter"),
    ("completions", {"prompt": "a", "stop": [""]}, "stop", "empty"),
    ("completions", {"prompt": "a", "logprobs": 1000}, "logprobs", "max_top_logprobs"),
    ("completions", {"prompt": "a", "logit_bias": {"cat": 1}}, "logit_bias", "ids"),
    ("completions", {"prompt": "a", "n": 0}, "n", "greater"),
    ("completions", {"prompt": "a", "n": 2**31 - 1}, "n", "n is 2147483647: the limit is"),
    ("completions", {"prompt": ["a", "b"], "n": 60_000}, "n", "n is 60000 and there are 2 prompts: 120000 samples"),
    ("chat/completions", {"messages": HELLO, "allowed_token_ids": [1]}, "allowed_token_ids", "not a parameter"),
    ("completions", {"prompt": "\ud800"}, "prompt", "surrogate"),
    ("completions", {"prompt": [1] * 2000}, "prompt", "context"),
    ("chat/completions", {"messages": [{"role": "user", "content": "cat " * 2000}]}, "messages", "context"),
    ("chat/completions", {"messages": []}, "messages", "at least 1"),
    ("chat/completions", {"messages": [{"content": "a"}]}, "messages.0", "role"),
    ("chat/completions", {"messages": [{"role": "human", "content": "a"}]}, "messages.0", "must be one of system, d"),
    ("chat/completions", {"messages": [{"role": "user", "content": 7}]}, "messages.0", "not text"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages",
        "without a url",
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": [SHOWN]}]}, "messages", "takes none"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages", "read text"),
    ("chat/completions", {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ("chat/completions", {"messages": HELLO, "tool_choice": "required"}, "tool_choice", "there are no tools"),
    (
        "chat/completions",
        {"messages": HELLO, "tool_choice": {"function": {"name": "ad"}}, "tools": [ADD]},
        "tool_choice",
        "names 'ad'; the tools are add",
    ),
    (
        "chat/completions",
        {"messages": HELLO, "tool_choice": {"function": {}}, "tools": [ADD]},
        "tool_choice",
        "or a tool: {",
    ),
    ("chat/completions", {"messages": HELLO, "tools": [{"type": "web_search"}]}, "tools", "the only tool"),
    ("chat/completions", {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format", "json_schema"),
    (
        "chat/completions",
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
        "response_format",
        "Invalid type",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), BAD, ids=[f"{path} {param}" for path, _, param, _ in BAD])
def test_mistakes_are_explained(
    server: HttpServer, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    content = json.dumps({"model": "tiny"} | body)
    for stream in (False, True):
        if stream:
            content = json.dumps({"model": "tiny", "stream": True} | body)
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{server.url}/v1/{path}", content=content, headers=headers, timeout=300)
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert words in error["message"] and error["type"] == "invalid_request_error"
        if param is not None:
            assert error["param"] == param


def test_requests_share_a_batch_and_change_nothing_for_each_other(client: openai.OpenAI) -> None:
    def ask(number: int) -> str:
        options: dict[str, Any] = {"temperature": 0.5 + number / 10, "presence_penalty": number % 2}
        answer = client.completions.create(model="tiny", prompt=f"cat {number}", max_tokens=25, seed=number, **options)
        return answer.choices[0].text

    alone = [ask(number) for number in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8))) == alone


def test_a_client_who_leaves_ends_the_generation(
    client: openai.OpenAI, server: HttpServer, service: gradwire.sync.ServiceClient
) -> None:
    """A run's next operation waits for the samples of its weights; these would be sixteen times a thousand tokens."""
    run = service.create_run("tiny", lora=2)
    body = {"model": run.run_id, "prompt": "a", "n": 16, "max_tokens": 1000, "ignore_eos": True}
    with client.completions.create(
        model=run.run_id, prompt="a", n=16, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
    before = service.server_info()
    run.compute_logprobs([[1, 2, 3]]).result()
    assert before.engine_ready
    service.delete_run(run.run_id)


def test_the_code_of_the_documentation_runs(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = gradwire.sync.connect
    monkeypatch.setattr(gradwire.sync, "connect", lambda *_: connect(server.address))
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    page = Path(__file__).parents[3] / "docs" / "openai.md"
    session: dict[str, Any] = {"__name__": "page"}
    for source in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(source, str(page), "exec"), session)
    session["client"].close()
    assert 1 <= json.loads(session["rated"].choices[0].message.content)["rating"] <= 5
    assert len(session["scored"].choices[0].logprobs.token_logprobs) > 1
