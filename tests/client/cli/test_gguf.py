"""GGUF files, read back by transformers and llama.cpp: the logits and token ids of the model that they are made of."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architecture_configs import SIZES
from gradwire.errors import UnsupportedError
from gradwire.gguf_file import FAMILIES, check_form, write_gguf
from gradwire.k_quants import in_blocks, q4_k, q6_k
from support.chats import TEXTS, chat_model

TEXT = "The answer of the question, which two and two make, is four."
pytest.importorskip("gguf", reason="the extra gguf is not installed")


def model_of(family: str, folder: Path, **settings: Any) -> Path:
    """A tiny model of a family with a tokenizer of byte-level BPE; fewer heads of keys than of queries."""
    from transformers import AutoConfig, AutoModelForCausalLM

    chat_model(folder, "llama", **{"hidden_size": 64, **settings})
    given = json.loads((folder / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings",
             "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")  # fmt: skip
    config = AutoConfig.for_model(
        family, **{name: given[name] for name in sizes}, num_attention_heads=4, num_key_value_heads=2,
        head_dim=128 if family == "qwen3" else 16, tie_word_embeddings=family == "llama",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def sentencepiece(folder: Path, *, prefix: bool) -> None:
    """Give a model's folder a tokenizer as SentencePiece's BPE: bytes for what it does not know, blanks as U+2581."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    trained.train_from_iterator([*TEXTS, TEXT], trainer)
    model = json.loads(trained.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    rest = [token for token, _ in sorted(model["vocab"].items(), key=lambda each: each[1]) if token not in first]
    vocab = {token: number for number, token in enumerate([*first, *rest])}
    merges = [tuple(each) for each in model["merges"]]
    made = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    marks = [normalizers.Prepend("\u2581")] if prefix else []
    made.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))


LLAMA_3_1 = {"rope_theta": 10_000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
GEMMA_3 = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
           "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}  # fmt: skip
COVERED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA_3_1}),
    "mistral": ("pieces", {"sliding_window": 128}),
    "qwen2": ("marked", {}),
    "qwen3": ("qwen", {"head_dim": 32}),
    "gemma": ("pieces", {"head_dim": 32}),
    "gemma2": ("pieces", {"sliding_window": 16, "head_dim": 32, "query_pre_attn_scalar": 32}),
    "gemma3_text": ("gemma", {"sliding_window": 16, "head_dim": 32, "query_pre_attn_scalar": 32,
                              "rope_parameters": GEMMA_3, "num_hidden_layers": 7}),
    "phi3": ("phi", {"sliding_window": 128}),
    "olmo2": ("olmo", {}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
                            "logits_scaling": 2.0}),
    "glm4": ("glm", {}),
}  # fmt: skip
"""Family -> the form of its tokenizer, and what its configuration has besides the sizes."""
LLAMA_CPP = Path(__file__).parents[3] / ".venv-llama/bin/python"
READ = """
import json, sys
import llama_cpp, numpy

file, ids = sys.argv[1], json.loads(sys.argv[2])
more = {"n_ctx": 128, "n_batch": 128, "n_threads": 1, "type_k": 0, "type_v": 0, "verbose": False}  # keys in 32 bits
model = llama_cpp.Llama(file, logits_all=True, **more)
model.eval(ids)
logits = model.scores[: len(ids)].tolist()
begins = [model.tokenize(text.encode(), add_bos=True, special=True) for text in sys.argv[3:]]
print(json.dumps({"logits": logits, "tokens": begins, "context": model.metadata, "vocabulary": model.n_vocab()}))
"""


def test_every_family_is_compared() -> None:
    assert set(COVERED) == set(FAMILIES)


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="needs llama-cpp-python: make gguf")
@pytest.mark.parametrize("family", COVERED)
def test_llama_cpp_computes_the_same(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    form, more = COVERED[family]
    sizes = {**SIZES, "max_position_embeddings": 512, **more}
    del sizes["vocab_size"]
    shape = "llama" if form == "pieces" else form
    folder = chat_model(tmp_path / "model", shape, architecture=family, config=sizes, padded=99)
    if form == "pieces":
        sentencepiece(folder, prefix=family == "mistral")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        draw = torch.rand_like(parameter) if name.endswith("norm.weight") else torch.randn_like(parameter) * 0.2
        parameter.data = draw.half().float() if parameter.dim() > 1 else draw
    model.save_pretrained(folder)
    write_gguf(folder, tmp_path / "f16.gguf", "f16")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids, texts = list(range(3, 103)), [TEXT, "  two  blanks\n\n and \u00e9\u4e2d!", "", "1234 567"]
    command = [LLAMA_CPP, "-c", READ, tmp_path / "f16.gguf", json.dumps(ids), *texts]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2_000:]
    read = json.loads(done.stdout)
    with torch.no_grad():
        exact = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    apart = (torch.tensor(read["logits"]).log_softmax(-1) - exact).norm() / (
        exact - exact.mean(-1, keepdim=True)
    ).norm()
    assert apart < 0.005, apart  # llama.cpp computes in 16 bits; a window of one more token gives over 0.4
    assert read["tokens"] == [tokenizer(text).input_ids for text in texts]


def in_q8_0(weights: torch.Tensor) -> torch.Tensor:
    """Weights as llama.cpp's Q8_0 keeps them: eight bits each, and for 32 in a row a scale of half precision."""
    rows = weights.reshape(-1, 32)
    scales = rows.abs().amax(1, keepdim=True) / 127
    exact = (rows * (1 / scales)).nan_to_num()  # a row of zeros has the scale 0
    levels = exact.sign() * (exact.abs() + 0.5).floor()  # a half goes away from zero, as by roundf of C
    return (levels * scales.half().float()).reshape(weights.shape)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow), "qwen3"])
def test_a_file_has_the_model_and_its_tokenizer(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_of(family, tmp_path / "model")
    ids = torch.arange(3, 90)[None]
    for form, stored in (("f16", torch.Tensor.half), ("q8_0", in_q8_0)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data = stored(parameter.data).float()
        write_gguf(folder, tmp_path / f"{form}.gguf", form)
        read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=f"{form}.gguf", dtype=torch.float32)
        torch.testing.assert_close(read(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text, plain = "the answer is <|eot_id|> four, 12!", {"add_special_tokens": False}
    again = AutoTokenizer.from_pretrained(tmp_path, gguf_file="f16.gguf")
    assert again(text, **plain).input_ids == tokenizer(text, **plain).input_ids
    assert again.chat_template == tokenizer.chat_template


@pytest.mark.long
def test_q4_k_m_has_more_bits_where_an_error_costs_most(tmp_path: Path) -> None:
    import gguf
    from safetensors.torch import load_file

    folder = model_of("qwen2", tmp_path / "model", hidden_size=256, num_layers=4)
    write_gguf(folder, tmp_path / "q4.gguf", "q4_k_m")
    types = {each.name: each for each in gguf.GGUFReader(tmp_path / "q4.gguf").tensors}
    found = {name: each.tensor_type.name for name, each in types.items()}
    assert (found["output.weight"], found["token_embd.weight"], found["output_norm.weight"]) == ("Q6_K", "Q4_K", "F32")
    better = ["Q4_K", "Q4_K", "Q6_K", "Q6_K"]  # every third layer, and the last eighth
    assert [found[f"blk.{layer}.ffn_down.weight"] for layer in range(4)] == better
    assert [found[f"blk.{layer}.attn_v.weight"] for layer in range(4)] == better
    exact = load_file(folder / "model.safetensors")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 4)
    for name, tensor in exact.items():
        each = types[names.get_name(name, try_suffixes=(".weight", ".bias"))]
        read = gguf.quants.dequantize(each.data, each.tensor_type).reshape(tensor.shape)
        error = float(np.linalg.norm(read - tensor.numpy()) / max(np.linalg.norm(tensor), 1e-9))
        assert error < {"Q4_K": 0.075, "Q6_K": 0.018, "Q5_0": 0.045}.get(each.tensor_type.name, 1e-6), (name, error)


def test_k_quants_of_unusual_blocks_stay_near() -> None:
    import gguf

    flat, drawn = np.full(256, 3.0, np.float32), np.random.default_rng(0).standard_normal(256).astype(np.float32)
    rows = np.stack([0 * flat, flat, -flat, 1e-2 * drawn, abs(drawn), -abs(drawn), np.eye(256, dtype=np.float32)[7]])
    for name, pack, most in (("Q4_K", q4_k, 0.08), ("Q6_K", q6_k, 0.02)):
        read = gguf.quants.dequantize(in_blocks(rows, pack), gguf.GGMLQuantizationType[name])
        assert not read[0].any()
        errors = np.linalg.norm(read[1:] - rows[1:], axis=1) / np.linalg.norm(rows[1:], axis=1)
        assert (errors < most).all(), (name, errors)


def test_rows_of_other_lengths_have_other_types(tmp_path: Path) -> None:
    import gguf
    from transformers import AutoModelForCausalLM

    folder = model_of("llama", tmp_path / "model")  # rows of 64
    write_gguf(folder, tmp_path / "q4.gguf", "q4_k_m")
    types = {each.name: each.tensor_type.name for each in gguf.GGUFReader(tmp_path / "q4.gguf").tensors}
    assert types["blk.0.attn_q.weight"] == "Q5_0" and types["token_embd.weight"] == "Q8_0"
    ids = torch.arange(3, 90)[None]
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="q4.gguf", dtype=torch.float32)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.nn.functional.cosine_similarity(read(ids).logits, exact(ids).logits, dim=-1).min() > 0.95


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "the family mamba are not written as GGUF; llama, mistral, qwen2, qwen3, gemma, "),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary frequencies scaled by yarn"),
        ({"hidden_act": "relu"}, "the activation is relu; llama.cpp has silu"),
        ({"embedding_multiplier": 2.0}, "embedding_multiplier is 2.0, which a GGUF file of this family cannot say"),
        ({"model_type": "granite"}, "which a GGUF file of this family cannot say"),
        ({"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh"}, "local rotary frequencies is None"),
        ({"tokenizer": {"type": "Unigram"}}, "tokenizers of the kind Unigram"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "llama.cpp's name of the pre-tokenizer"),
    ],
)
def test_what_is_not_covered_is_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "model", "llama", hidden_size=64)
    config, tokenizer = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "tokenizer"))
    tokenizer["model"] |= change.pop("tokenizer", {})
    tokenizer["pre_tokenizer"] = change.pop("pre_tokenizer", tokenizer["pre_tokenizer"])
    (folder / "config.json").write_text(json.dumps(config | change))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedError, match=words):
        write_gguf(folder, tmp_path / "out.gguf", "f16")
    with pytest.raises(UnsupportedError, match="written in q4_k_m, q8_0, f16, not in 'q5_k_m'; write f16, and let"):
        check_form("q5_k_m")
