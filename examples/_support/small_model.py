"""Create a small Llama and its tokenizer without downloads; a seed gives the same weights."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN)
PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " \n"


def small_model(
    path: Path,
    *,
    characters: str = PRINTABLE,
    texts: Sequence[str] | None = None,
    vocab_size: int = 4096,
    hidden_size: int = 96,
    num_layers: int = 4,
    num_heads: int = 4,
    context_length: int = 256,
    initializer_range: float = 0.06,
    seed: int = 0,
) -> Path:
    """Write a random Llama and its tokenizer as a Hugging Face folder, and return the folder.

    Args:
        path: The folder; created if missing.
        characters: The vocabulary, one token per character, if no ``texts`` are given.
        texts: Train a byte-level BPE tokenizer of ``vocab_size`` tokens on these instead.
        hidden_size: A multiple of ``num_heads``.
        context_length: Maximum row length in tokens.
        initializer_range: Standard deviation of the initial weights; narrow models learn faster from larger ones.
        seed: Seed of the weights.

    Special tokens: ``<pad>`` 0, ``<s>`` 1 (put before a text), ``</s>`` 2, ``<unk>`` 3.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_character_tokenizer(characters) if texts is None else _bpe_tokenizer(texts, vocab_size),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=context_length,
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=context_length,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _character_tokenizer(characters: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _beginning_with_bos(tokenizer)


def _bpe_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _beginning_with_bos(tokenizer)


def _beginning_with_bos(tokenizer: Tokenizer) -> Tokenizer:
    from tokenizers import processors

    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return tokenizer
