"""Small models made on the spot: nothing is downloaded, and a seed gives the same weights everywhere."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN)
ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"


def tiny_model(
    path: Path,
    *,
    texts: Sequence[str] | None = None,
    vocab_size: int = 512,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    context_length: int = 256,
    tie_embeddings: bool = True,
    seed: int = 0,
) -> Path:
    """Writes a random Llama and its tokenizer as a Hugging Face folder, and returns the folder.

    Args:
        path: the folder; made, must not hold another model.
        texts: a byte-level BPE tokenizer of ``vocab_size`` is trained on these; without them, one token a
            character of printable ASCII (101 tokens).
        hidden_size: a multiple of ``num_heads``.
        context_length: longest row, in tokens.
        seed: of the weights.

    Special tokens: ``<pad>`` 0, ``<s>`` 1 (put before a text), ``</s>`` 2, ``<unk>`` 3.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_character_tokenizer() if texts is None else _bpe_tokenizer(texts, vocab_size),
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
        tie_word_embeddings=tie_embeddings,
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


def _character_tokenizer():  # type: ignore[no-untyped-def]  # a tokenizers.Tokenizer, imported late
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _with_special_tokens(tokenizer, processors)


def _bpe_tokenizer(texts: Sequence[str], vocab_size: int):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return _with_special_tokens(tokenizer, processors)


def _with_special_tokens(tokenizer, processors):  # type: ignore[no-untyped-def]
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return tokenizer
