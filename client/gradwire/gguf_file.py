"""A whole model's folder as one GGUF file, for llama.cpp and what is built on it.

The families of :data:`FAMILIES` are written, with SentencePiece's BPE, or byte-level BPE whose pre-tokenizer llama.cpp
knows. What is not covered is refused by its name: other families and tokenizers, and what llama.cpp has no place for.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.errors import UnsupportedError
from gradwire.extras import require
from gradwire.k_quants import BLOCK, in_blocks, q4_k, q6_k

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Family:
    """A family of models as llama.cpp computes it.

    Attributes:
        name: Name of its architecture in the package gguf.
        interleaved: Whether rotated pairs stand side by side, and not a half of a head apart as in transformers.
        norm: Added to the scales of norms, which transformers keeps as their difference from it.
        full_every: Every so-manieth layer attends to all tokens, others to a window; 0: llama.cpp has no windows here.
        local_theta: Base of the rotary frequencies of layers with a window; 0: that of the others.
        activation: Activation of the feed-forward layers.
        keys: Key of the configuration -> method of the writer, besides the common ones.
    """

    name: str
    interleaved: bool = False
    norm: float = 0.0
    full_every: int = 0
    local_theta: float = 0.0
    activation: str = "silu"
    keys: Mapping[str, str] = field(default_factory=dict)


CAPS = {
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
}
SCALES = {"attention_multiplier": "add_attention_scale", "embedding_multiplier": "add_embedding_scale",
          "residual_multiplier": "add_residual_scale", "logits_scaling": "add_logit_scale"}  # fmt: skip
FAMILIES = {
    "llama": Family("LLAMA", interleaved=True),
    "mistral": Family("LLAMA", interleaved=True),
    "qwen2": Family("QWEN2"),
    "qwen3": Family("QWEN3"),
    "gemma": Family("GEMMA", norm=1.0, activation="gelu_pytorch_tanh"),
    "gemma2": Family("GEMMA2", norm=1.0, activation="gelu_pytorch_tanh", full_every=2, keys=CAPS),
    "gemma3_text": Family("GEMMA3", norm=1.0, activation="gelu_pytorch_tanh", full_every=6, local_theta=10_000.0),
    "phi3": Family("PHI3"),
    "olmo2": Family("OLMO2"),
    "granite": Family("GRANITE", interleaved=True, keys=SCALES),
    "glm4": Family("GLM4"),
}
"""``model_type`` -> how llama.cpp computes it."""
FORMS = ("q4_k_m", "q8_0", "f16")
"""Forms of matrices."""
K_QUANTS = {"Q4_K": ("Q5_0", q4_k), "Q6_K": ("Q8_0", q6_k)}
"""Type of matrices -> that of those whose rows are not multiples of 256, and what computes it."""
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
LARGEST = {"GEMMA2": (46,), "GEMMA3": (62,)}
"""Architecture -> layers of the models whose queries llama.cpp scales by the width, not by the size of a head."""
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"


def check_form(form: str) -> None:
    """Check that a file can be written, with matrices in this form.

    Raises:
        UnsupportedError: It cannot.
        ImportError: The extra for GGUF files is not installed.
    """
    require("gguf", "gguf", "a GGUF file")
    if form not in FORMS:
        raise UnsupportedError(
            f"GGUF files are written in {', '.join(FORMS)}, not in {form!r}; "
            f"write f16, and let llama.cpp's llama-quantize make {form} of it"
        )


def write_gguf(folder: Path, file: Path, form: str, name: str = "") -> None:
    """Write a whole model's folder, as ``export(..., "merged")`` makes it, to a GGUF file.

    Args:
        form: One of :data:`FORMS`, of matrices; vectors stay in 32 bits.
        name: The model's name in the file; by default its family's.

    Raises:
        UnsupportedError: The model is of no covered family, or the form is unknown; names what is not covered.
    """
    check_form(form)
    gguf = require("gguf", "gguf", "a GGUF file")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise UnsupportedError(f"models of the family {kind} are not written as GGUF; {', '.join(FAMILIES)} are")
    family = FAMILIES[kind]
    _check_computed(config, family)
    rope = _rope(config, family)
    architecture = getattr(gguf.MODEL_ARCH, family.name)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name(name or str(config.get("_name_or_path") or kind))
    _write_config(writer, gguf, config, family, rope, form)
    _write_tokenizer(writer, folder, config)
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(rope, _head_size(config)))
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in _tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise UnsupportedError(f"the tensor {name} has no place in a GGUF file of the family {kind}")
        if family.interleaved:
            tensor = _interleaved(name, tensor, config)
        if tensor.ndim < 2:
            writer.add_tensor(known, tensor + np.float32(family.norm) if name.endswith("norm.weight") else tensor)
            continue
        rows = tensor.shape[-1]
        if form != "f16" and rows % 32:
            raise UnsupportedError(f"{form} takes 32 numbers at once; rows of {name} have {rows}: use f16")
        chosen = _type(known, form, config)
        short, pack = K_QUANTS.get(chosen, ("", None))
        if pack is not None and rows % BLOCK == 0:
            form_of, data = gguf.GGMLQuantizationType[chosen], in_blocks(tensor, pack)
        else:
            form_of = gguf.GGMLQuantizationType[short or chosen]
            data = gguf.quants.quantize(tensor, form_of)
        writer.add_tensor(known, data, raw_dtype=form_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _type(name: str, form: str, config: Mapping[str, Any]) -> str:
    """The type of a matrix: q4_k_m, as llama.cpp mixes it, has more bits where an error costs most."""
    if form != "q4_k_m":
        return form.upper()
    if name == "output.weight" or (name == "token_embd.weight" and config.get("tie_word_embeddings")):
        return "Q6_K"
    if "attn_v." in name or "ffn_down." in name:
        layer, eighth = int(name.split(".")[1]), config["num_hidden_layers"] // 8
        if layer < eighth or layer >= 7 * config["num_hidden_layers"] // 8 or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return "Q4_K"


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _check_computed(config: Mapping[str, Any], family: Family) -> None:
    """Check that llama.cpp computes what a configuration says.

    Raises:
        UnsupportedError: It does not; names the key.
    """
    activation = config.get("hidden_activation") or config.get("hidden_act") or family.activation
    if activation != family.activation:
        raise UnsupportedError(f"the activation is {activation}; llama.cpp has {family.activation} in this family")
    for name in {*CAPS, *SCALES, *family.keys}:
        if (config.get(name) is not None) != (name in family.keys):
            raise UnsupportedError(f"{name} is {config.get(name)}, which a GGUF file of this family cannot say")


def _rope(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Rotary frequencies of the layers that attend to all tokens.

    Raises:
        UnsupportedError: llama.cpp computes others, or other layers attend to a window.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 10_000.0), **(parameters.get("full_attention") or parameters)}
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise UnsupportedError(f"rotary frequencies scaled by {rope['rope_type']} are not written as GGUF")
    if family.full_every:
        local = (parameters.get("sliding_attention") or {}).get("rope_theta", config.get("rope_local_base_freq"))
        if family.local_theta and float(local or 0) != family.local_theta:
            raise UnsupportedError(
                f"the base of local rotary frequencies is {local}; llama.cpp's is {family.local_theta}"
            )
        layers = config.get("layer_types") or []
        if any(
            (kind == "full_attention") != (number % family.full_every == 0) for number, kind in enumerate(layers, 1)
        ):
            raise UnsupportedError(
                f"layer_types: llama.cpp has a full layer after {family.full_every - 1} with a window"
            )
        wanted = config["hidden_size"] // config["num_attention_heads"]
        wanted = wanted if config["num_hidden_layers"] in LARGEST[family.name] else _head_size(config)
        if config.get("query_pre_attn_scalar", wanted) != wanted:
            raise UnsupportedError(
                f"query_pre_attn_scalar is {config['query_pre_attn_scalar']}; llama.cpp's is {wanted}"
            )
    return rope


def _divisors(rope: Mapping[str, Any], size: int) -> Floats:
    """Factors by which llama.cpp divides Llama 3.1's rotary frequencies: ``factor`` for long waves, 1 for short."""
    waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float64) / size)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    share = np.clip((rope["original_max_position_embeddings"] / waves - low) / (high - low), 0.0, 1.0)
    return np.asarray(1 / ((1 - share) / factor + share), np.float32)


def _write_config(
    writer: Any, gguf: Any, config: Mapping[str, Any], family: Family, rope: Mapping[str, Any], form: str
) -> None:
    heads, size = config["num_attention_heads"], _head_size(config)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    context = config["max_position_embeddings"]
    if window and family.full_every:
        writer.add_sliding_window(window)
    elif window:  # llama.cpp attends to all tokens: the same as long as there are no more
        context = min(context, window)
    writer.add_context_length(context)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    writer.add_rope_dimension_count(int(size * partial))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    for name, method in family.keys.items():
        getattr(writer, method)(float(config[name]))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{form.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = described["model"]
    pieces = model.get("type") == "BPE" and bool(model.get("byte_fallback"))
    if model.get("type") != "BPE":
        raise UnsupportedError(f"tokenizers of the kind {model.get('type')} are not written as GGUF; BPE is")
    tokens = {number: token for token, number in model["vocab"].items()}
    kinds = dict.fromkeys(tokens, NORMAL)
    for added in described.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    size = config["vocab_size"]  # a token beyond it has no row of the embeddings
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(size)])
    if pieces:
        kinds |= {number: BYTE for number, token in tokens.items() if BYTE_TOKEN.fullmatch(token)}
        kinds |= {number: UNKNOWN for number, token in tokens.items() if token == model.get("unk_token")}
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", ""), rank)
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(ranks.get(tokens.get(number, ""), len(merges))) for number in range(size)])
        writer.add_add_space_prefix(_begins_with_space(described))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(described.get("pre_tokenizer") or {}))
        writer.add_token_merges(merges)
    writer.add_token_types([kinds.get(number, UNUSED) for number in range(size)])
    adding = {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id, "pad": writer.add_pad_token_id}
    for name, add in adding.items():
        number = config.get(f"{name}_token_id")
        number = number[0] if isinstance(number, list) else number
        if number is not None:
            add(number)
    processor = described.get("post_processor") or {}
    parts = [each.get("single") for each in processor.get("processors", [processor]) if each.get("single")]
    writer.add_add_bos_token(any("SpecialToken" in single[0] for single in parts))
    if template := _template(folder):
        writer.add_chat_template(template)


def _begins_with_space(described: Mapping[str, Any]) -> bool:
    """Whether SentencePiece's BPE puts a blank before a text."""
    normalizer, before = described.get("normalizer") or {}, described.get("pre_tokenizer") or {}
    steps = [normalizer, *normalizer.get("normalizers", ())]
    scheme = before.get("prepend_scheme", "always" if before.get("add_prefix_space") else "never")
    return any(each.get("type") == "Prepend" for each in steps) or (
        before.get("type") == "Metaspace" and scheme != "never"
    )


def _pre_tokenizer(described: Mapping[str, Any]) -> str:
    """llama.cpp's name of a pre-tokenizer.

    Raises:
        UnsupportedError: It has none that is known here.
    """
    steps = described.get("pretokenizers", [described])
    patterns = [each["pattern"].get("Regex", "") for each in steps if each.get("type") == "Split"]
    kinds = [each.get("type") for each in steps if each.get("type") != "Digits" or each.get("individual_digits")]
    if kinds in (["ByteLevel"], ["Digits", "ByteLevel"]) and steps[-1].get("use_regex", True):
        return "gpt-2" if len(kinds) == 1 else "smollm"
    if len(patterns) == 1 and patterns[0].startswith(CONTRACTIONS):
        rest = patterns[0].removeprefix(CONTRACTIONS)
        for start, name in (("\\p{N}{1,3}|", "llama-bpe"), ("\\p{N}|", "qwen2")):
            if rest.startswith(start):
                return name
    raise UnsupportedError(f"llama.cpp's name of the pre-tokenizer {str(patterns or kinds)[:60]} is not known here")


def _template(folder: Path) -> str:
    alone, shared = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    found = json.loads(shared.read_text(encoding="utf-8")).get("chat_template") if shared.is_file() else ""
    return found if isinstance(found, str) else ""


def _tensors(folder: Path) -> Iterator[tuple[str, Floats]]:
    """Yield the tensors of a folder's safetensors files in 32 bits, one at a time."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            size = int.from_bytes(content[:8], "little")
            for name, each in json.loads(content[8 : 8 + size]).items():
                if name == "__metadata__":
                    continue
                begin, end = (8 + size + offset for offset in each["data_offsets"])
                if each["dtype"] not in DTYPES:
                    raise UnsupportedError(f"the tensor {name} has the type {each['dtype']}, which is not read")
                read = np.frombuffer(content[begin:end], DTYPES[each["dtype"]]).reshape(each["shape"])
                wide = (read.astype(np.uint32) << 16).view(np.float32) if each["dtype"] == "BF16" else read
                yield name, np.ascontiguousarray(wide, np.float32)


def _interleaved(name: str, tensor: Floats, config: Mapping[str, Any]) -> Floats:
    """Order the rows of Llama's queries and keys as GGUF does: a rotated pair side by side."""
    heads = config["num_attention_heads"]
    if ".q_proj." not in name and ".k_proj." not in name:
        return tensor
    heads = heads if ".q_proj." in name else config.get("num_key_value_heads") or heads
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
