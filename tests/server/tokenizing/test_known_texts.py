"""Texts that are tokenized in parts have the ids of the whole, with tokenizers of every form."""

from __future__ import annotations

import random

import pytest
from gradwire_server.tokenizing import known_texts
from gradwire_server.tokenizing.known_texts import KnownTexts
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
ODD = [
    AddedToken("<|im_start|>x", special=True, normalized=False),  # longer than another that it begins with
    AddedToken("b<|im_end", special=True, normalized=False),  # reaches into the beginning of another
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("word", single_word=True, normalized=False),
    AddedToken("Changed", normalized=True),
    AddedToken("\n\n", normalized=False),
]
WORDS = [
    "hello",
    " world",
    "\n",
    "\n\n",
    "  ",
    "é",
    "e\u0301",
    "日本",
    "\U0001f600",
    "ab",
    "b",
    "x",
    "A",
    "<",
    "|",
    "im_end|>",
    "a.",
]
NORMAL = {
    "none": None,
    "composed": normalizers.NFKC(),
    "lowered": normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]),
    "stripped": normalizers.Strip(),
    "prepended": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
}
DIVIDED = {
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "bytes behind a blank": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "a blank first": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "blanks": pre_tokenizers.Metaspace(prepend_scheme="always"),
    "no blanks": pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
}


def made(divided: str, normal: str, *, odd: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = DIVIDED[divided], decoders.ByteLevel()
    if NORMAL[normal] is not None:
        tokenizer.normalizer = NORMAL[normal]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if "bytes" in divided else []
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["".join(WORDS) * 3, "hello world abab ab a. word Changed"], trainer)
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIALS])
    if odd:
        tokenizer.add_tokens(ODD)
    return tokenizer


def drawn(rng: random.Random, words: list[str]) -> str:
    return "".join(rng.choices(words, k=rng.randrange(60)))


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("normal", NORMAL)
@pytest.mark.parametrize("divided", DIVIDED)
def test_the_ids_of_the_parts_are_those_of_the_text(
    divided: str, normal: str, odd: bool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    tokenizer, rng = made(divided, normal, odd=odd), random.Random(seed)
    monkeypatch.setattr(known_texts, "LEAST_CHARS", 1)
    monkeypatch.setattr(known_texts, "KEPT_BYTES", 2000)
    known, cut = KnownTexts(tokenizer), 0
    words = [*WORDS, *SPECIALS, *([each.content for each in ODD] if odd else [])]
    for _ in range(150):
        text = drawn(rng, words)
        for each in (text, text + drawn(rng, words), text):
            assert known.ids("me", each) == tokenizer.encode(each, add_special_tokens=False).ids, each
            assert "".join(known.parts(each)) == each
        cut += len(known.parts(text)) > 1
    assert cut > 50


def test_only_new_parts_are_tokenized_and_keys_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, asked = made("bytes", "none", odd=False), list[str]()

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def encode_batch(self, texts: list[str], **settings: bool) -> object:
            asked.extend(texts)
            return tokenizer.encode_batch(texts, **settings)

    known = KnownTexts(Watched())  # type: ignore[arg-type]
    turns = [f"<|im_start|>user\n{'ab ' * 200}{number}<|im_end|>\n" for number in range(4)]
    for size in range(1, 5):
        asked.clear()
        known.ids("me", "".join(turns[:size]))
        assert f"ab {size - 1}" in "".join(asked) and len("".join(asked)) < 1.1 * len(turns[0])
    asked.clear()
    known.ids("another", "".join(turns))
    assert len("".join(asked)) > 3.9 * len(turns[0])
    monkeypatch.setattr(known_texts, "KEPT_BYTES", 8000)
    known.ids("me", "".join(turns))
    known.ids("me", "ab " * 2000)
    asked.clear()
    known.ids("me", turns[0])
    assert "ab 0" in "".join(asked), "the least recently used are forgotten"
