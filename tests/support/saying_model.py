"""A model that says set sentences by construction: its next token depends on the last one alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.tiny import tiny_model

MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""What Qwen's renderers write around turns."""


def saying_model(
    path: Path, follows: Mapping[str, Sequence[str]], *, context_length: int = 8192, special: bool = True
) -> Path:
    """Write a model after whose tokens, with high probability, one of those that ``follows`` names for them comes.

    Args:
        follows: Of a token, the ones that may follow it, each as likely; whole sentences are tokens, too.
        special: Those tokens are special ones, which texts of answers leave out.
    """
    tiny_model(path, context_length=context_length, hidden_size=64)
    tokenizer = AutoTokenizer.from_pretrained(path)
    known = {*tokenizer.get_vocab()}
    said = {each for last, after in follows.items() for each in (last, *after)} - known
    tokenizer.add_tokens(sorted({*MARKS, *said}), special_tokens=special)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(path, tie_word_embeddings=False)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)  # each token has an embedding of its own
    with torch.no_grad():
        for layer in model.model.layers:  # they add nothing yet
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        inner = torch.nn.functional.normalize(model.get_input_embeddings().weight, dim=-1)
        head = model.get_output_embeddings().weight.zero_()
        for last, after in follows.items():
            for each in after:
                head[tokenizer.convert_tokens_to_ids(each)] += 2 * inner[tokenizer.convert_tokens_to_ids(last)]
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
