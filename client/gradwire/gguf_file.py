"""A whole model's folder as one GGUF file, for llama.cpp and what is built on it.

The families of :data:`FAMILIES` are written, with byte-level BPE tokenizers whose pre-tokenizer llama.cpp knows. What
is not covered is refused by its name: other families, SentencePiece tokenizers, scaled rotary frequencies.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.errors import UnsupportedError
from gradwire.extras import require
from gradwire.k_quants import BLOCK, in_blocks, q4_k, q6_k

Floats = npt.NDArray[np.float32]
FAMILIES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""``model_type`` -> its name in the package gguf."""
FORMS = ("q4_k_m", "q8_0", "f16")
"""Forms of matrices."""
K_QUANTS = {"Q4_K": ("Q5_0", q4_k), "Q6_K": ("Q8_0", q6_k)}
"""Type of matrices -> that of those whose rows are not multiples of 256, and what computes it."""
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"


def check_form(form: str) -> None:
    """Check that matrices can be written in a form.

    Raises:
        UnsupportedError: They cannot.
    """
    if form not in FORMS:
        raise UnsupportedError(
            f"GGUF files are written in {', '.join(FORMS)}, not in {form!r}; "
            f"write f16, and let llama.cpp's llama-quantize make {form} of it"
        )


def write_gguf(folder: Path, file: Path, form: str) -> None:
    """Write a whole model's folder, as ``export(..., "merged")`` makes it, to a GGUF file.

    Args:
        form: One of :data:`FORMS`, of matrices; vectors stay in 32 bits.

    Raises:
        UnsupportedError: The model is of no covered family, or the form is unknown; names what is not covered.
    """
    check_form(form)
    gguf = require("gguf", "gguf", "a GGUF file")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise UnsupportedError(f"models of the family {family} are not written as GGUF; {', '.join(FAMILIES)} are")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UnsupportedError(f"rotary frequencies scaled by {rope.get('rope_type')} are not written as GGUF")
    architecture = getattr(gguf.MODEL_ARCH, FAMILIES[family])
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    _write_config(writer, gguf, config, rope, form)
    _write_tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in _tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise UnsupportedError(f"the tensor {name} has no place in a GGUF file of the family {family}")
        if FAMILIES[family] == "LLAMA":
            tensor = _interleaved(name, tensor, config)
        if tensor.ndim < 2:
            writer.add_tensor(known, tensor)
            continue
        rows = tensor.shape[-1]
        if form != "f16" and rows % 32:
            raise UnsupportedError(f"{form} takes 32 numbers at once; rows of {name} have {rows}: use f16")
        chosen = _type(known, form, config)
        short, pack = K_QUANTS.get(chosen, ("", None))
        if pack is not None and rows % BLOCK == 0:
            kind, data = gguf.GGMLQuantizationType[chosen], in_blocks(tensor, pack)
        else:
            kind = gguf.GGMLQuantizationType[short or chosen]
            data = gguf.quants.quantize(tensor, kind)
        writer.add_tensor(known, data, raw_dtype=kind)
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


def _write_config(writer: Any, gguf: Any, config: Mapping[str, Any], rope: Mapping[str, Any], form: str) -> None:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name(str(config.get("_name_or_path") or config["model_type"]))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{form.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = described["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "SentencePiece BPE" if model.get("byte_fallback") else model.get("type")
        raise UnsupportedError(f"tokenizers of the kind {kind} are not written as GGUF; byte-level BPE is")
    tokens = {number: token for token, number in model["vocab"].items()}
    kinds = dict.fromkeys(tokens, NORMAL)
    for added in described.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    size = max(config["vocab_size"], max(tokens) + 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(described.get("pre_tokenizer") or {}))
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([kinds.get(number, UNUSED) for number in range(size)])
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in model["merges"]])
    adding = {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id, "pad": writer.add_pad_token_id}
    for name, add in adding.items():
        number = config.get(f"{name}_token_id")
        number = number[0] if isinstance(number, list) else number
        if number is not None:
            add(number)
    begins = (described.get("post_processor") or {}).get("single") or [{}]
    writer.add_add_bos_token("SpecialToken" in begins[0])
    if template := _template(folder):
        writer.add_chat_template(template)


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
