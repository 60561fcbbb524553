"""A random model of a few thousand parameters, for demonstrations without downloads."""

from __future__ import annotations

import string
import sys
from typing import Any

from gradwire.extras import require
from gradwire.rl.primitives.inference_module import InferenceModule

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"


def demonstration_inference(arguments: list[str] | None = None) -> InferenceModule:
    """Create an inference module of the model named on the command line, or of a random model."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) > 1 or (words and words[0].startswith("-")):
        raise SystemExit("one argument at most: the name or path of a model; without it, a random one is made")
    if words:
        return InferenceModule(words[0], max_new_tokens=16)
    model, tokenizer = random_model()
    print("a random model of a few thousand parameters: its output is meaningless\n")
    return InferenceModule(model=model, tokenizer=tokenizer, max_new_tokens=8)


def random_model() -> tuple[Any, Any]:
    """Create a Llama model and a tokenizer with one token per character."""
    torch = require("torch", "server", "the demonstration")
    transformers = require("transformers", "server", "the demonstration")
    tokenizers = require("tokenizers", "server", "the demonstration")
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *CHARACTERS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval(), tokenizer
