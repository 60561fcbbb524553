"""Where a model's tokenizer is: its folder, or the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

FILE = "tokenizer.json"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files beside it that the chat template and the names of special tokens are read from."""


def find_tokenizer(path: str) -> Path | None:
    """The tokenizer.json of a model folder or hub name, downloaded with its settings if needed; None if it has none."""
    folder = Path(path)
    if folder.is_dir():
        return folder / FILE if (folder / FILE).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    def fetched(file: str) -> Path | None:
        try:
            return Path(hf_hub_download(path, file))
        except (HfHubHTTPError, HFValidationError, OSError):  # no such file or name, or offline and not cached
            return None

    tokenizer = fetched(FILE)
    if tokenizer is not None:
        for file in SETTINGS:
            fetched(file)
    return tokenizer
