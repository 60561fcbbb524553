"""Exported adapters in plain peft, without gradwire."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft.tuners.lora.bnb  # noqa: F401 - peft imports bitsandbytes at its first adapter: a second, in some test's loop
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def with_adapter(base: Path, adapter: Path) -> Any:
    """The float32 base model with an adapter's folder, in evaluation."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        return PeftModel.from_pretrained(model, str(adapter)).eval()
