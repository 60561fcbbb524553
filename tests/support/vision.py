"""Tiny models that take images, of both shapes, with their processors and a tokenizer, from configurations."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _support.small_model import EOS, PAD, PRINTABLE, UNKNOWN, _character_tokenizer
from PIL import Image
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Processor,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLProcessor,
)
from transformers.image_processing_backends import PilBackend

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
IDEFICS = ("idefics3", "smolvlm")
KINDS = (*QWEN, *IDEFICS, "llava", "gemma3")
TILE = 16
SPECIAL = (
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>", "<fake_token_around_image>",
    "<global-img>",
    "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and those around images."""
    plain: Tokenizer = _character_tokenizer(PRINTABLE)
    made = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)
    made.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return made


def vision_model(path: Path, kind: str) -> Path:
    """Write a random model of this kind (``model_type``), its processor and its tokenizer as a Hugging Face folder."""
    words = tokenizer()
    if kind == "gemma3":
        words.add_tokens(["\n\n", "\n\n\n", "\n\n\n\n"])
    words.chat_template = TEMPLATE.replace("IMAGE", image_mark(kind))
    text: dict[str, Any] = {
        "vocab_size": len(words), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.1,
    }  # fmt: skip
    if kind in QWEN:
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}}
        vision = {
            "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "initializer_range": 0.2,
        }  # fmt: skip
        if kind == "qwen2_vl":
            vision |= {"embed_dim": 16, "hidden_size": 32}
        else:
            vision |= {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
        if kind == "qwen2_5_vl":
            vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        if kind == "qwen3_vl":
            vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
            text |= {"head_dim": 16}
            text["rope_parameters"]["mrope_interleaved"] = True
        marks = {
            "image_token_id": words.convert_tokens_to_ids("<|image_pad|>"),
            "video_token_id": words.convert_tokens_to_ids("<|video_pad|>"),
            "vision_start_token_id": words.convert_tokens_to_ids("<|vision_start|>"),
            "vision_end_token_id": words.convert_tokens_to_ids("<|vision_end|>"),
        }
        settings: dict[str, Any] = {
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "temporal_patch_size": 2,
            "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 24 * 24},
        }  # fmt: skip
    elif kind == "gemma3":
        text |= {
            "head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        }  # fmt: skip
        vision = {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": TILE, "patch_size": 4, "vision_use_head": False,
        }  # fmt: skip
        marks = {
            "image_token_index": words.convert_tokens_to_ids("<image_soft_token>"), "mm_tokens_per_image": 4,
            "boi_token_index": words.convert_tokens_to_ids("<start_of_image>"),
            "eoi_token_index": words.convert_tokens_to_ids("<end_of_image>"),
        }  # fmt: skip
        settings = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": TILE, "width": TILE}}
    elif kind == "llava":
        text |= {"model_type": "llama"}
        vision = {
            "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
            "num_attention_heads": 2, "image_size": TILE, "patch_size": 4, "initializer_range": 0.2,
            "projection_dim": 16,
        }  # fmt: skip
        marks = {"image_token_id": words.convert_tokens_to_ids("<image>"), "image_seq_length": (TILE // 4) ** 2}
        settings = {
            "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": TILE},
            "crop_size": {"height": TILE, "width": TILE},
        }  # fmt: skip
    else:
        text |= {"model_type": "llama"}
        vision = {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": TILE, "patch_size": 4, "initializer_range": 0.2,
        }  # fmt: skip
        marks = {"image_token_id": words.convert_tokens_to_ids("<image>"), "scale_factor": 2}
        name = "SmolVLMImageProcessor" if kind == "smolvlm" else "Idefics3ImageProcessor"
        settings = {
            "image_processor_type": name, "size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE},
            "do_image_splitting": True, "do_pad": True,
        }  # fmt: skip
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=False, **marks)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        if kind == "gemma3":  # whose images begin as zeros
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.5)
    model.save_pretrained(path)
    words.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


def image_mark(kind: str) -> str:
    """What a chat template writes in the place of an image."""
    if kind == "gemma3":
        return "<start_of_image>"
    return "<|vision_start|><|image_pad|><|vision_end|>" if kind in QWEN else "<image>"


def plain_processor(path: Path, kind: str) -> Any:
    """transformers' processor of a model, made of its parts: those for videos need more than Pillow."""
    from transformers import AutoImageProcessor

    words = AutoTokenizer.from_pretrained(path)
    images: PilBackend = AutoImageProcessor.from_pretrained(path, backend="pil")
    if kind in QWEN:
        return _WithoutVideos(images, words, None)
    if kind == "gemma3":
        words.boi_token, words.eoi_token, words.image_token = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
        words.boi_token_id, words.image_token_id = words.convert_tokens_to_ids([words.boi_token, words.image_token])
        return Gemma3Processor(images, words, image_seq_length=4)
    if kind == "llava":
        return LlavaProcessor(images, words, 4, "default", image_token="<image>", num_additional_image_tokens=1)
    return Idefics3Processor(images, words, image_seq_len=(TILE // 4) ** 2 // 4)


class _WithoutVideos(Qwen2VLProcessor):
    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


def picture(seed: int, height: int, width: int) -> np.ndarray:
    """An array of random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """The bytes of a PNG file."""
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()
