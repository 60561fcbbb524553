"""Checks of settings before a server starts its engine, which takes minutes with a large model.

Each check gives the sentences about its settings that cannot work on this machine.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from gradwire_server.cli.settings_file import SettingsError
from gradwire_server.config import ServerConfig
from gradwire_server.durable_files import make_folder

HTTP_PACKAGES = ("fastapi", "uvicorn", "httptools", "zstandard")
HUB_TIMEOUT_S = 10.0
CONFIG = "config.json"


def check(config: ServerConfig) -> None:
    """Look for the files, the models and the port that the settings name.

    Raises:
        SettingsError: Some of them cannot be used.
    """
    mistakes = list(_packages(config))
    absent = [
        *_files(config),
        *(_models(config) if config.engines != 0 else ()),  # the engines elsewhere have models of their own
        *_port("--address", config.address),
        *_port("--http", config.http),
    ]
    if not (mistakes or absent):
        absent = list(_folder("--state-dir", config.state_dir))
    if mistakes or absent:
        raise SettingsError(*mistakes, *absent, may_pass=not mistakes)


def _folder(flag: str, folder: Path) -> Iterator[str]:
    """Make a folder that the server writes to."""
    try:
        make_folder(folder, 0o700)
    except (FileExistsError, NotADirectoryError) as error:
        yield f"{flag} {folder} cannot be used: {error.filename} is no folder"
    except OSError as error:
        yield f"{flag} {folder} cannot be used: {error.strerror}"
    else:
        if not os.access(folder, os.W_OK | os.X_OK):
            yield f"{flag} {folder} cannot be written to"


def _packages(config: ServerConfig) -> Iterator[str]:
    if config.http and (missing := [name for name in HTTP_PACKAGES if find_spec(name) is None]):
        yield f"--http needs {' and '.join(missing)}: pip install 'gradwire[http]'"
    if config.quantize and config.sampler == "vllm":
        yield (
            f"--quantize {config.quantize} and --sampler vllm do not go together: vLLM samples from a copy of its own, "
            "which is not quantized, so its log-probabilities would be those of another model"
        )
    elif config.quantize and find_spec("bitsandbytes") is None:
        yield f"--quantize {config.quantize} needs bitsandbytes: pip install 'gradwire[quantize]'"


def _files(config: ServerConfig) -> Iterator[str]:
    flags = {"--tls-cert": config.tls_cert, "--tls-key": config.tls_key, "--tls-client-ca": config.tls_client_ca}
    for flag, file in [*flags.items(), *(("--losses", file) for file in config.losses)]:
        if file is None:
            continue
        try:
            file.open("rb").close()
        except OSError as error:
            yield f"{flag} {file} cannot be read: {error.strerror}"


def _models(config: ServerConfig) -> Iterator[str]:
    for flag, models in (("--model", config.models), ("--allow-model", config.allow_models)):
        for path in models.values():
            fault = model_fault(path)
            if fault:
                yield f"{flag} {path}: {fault}"


def model_fault(path: str) -> str:
    """Why a model cannot be loaded from a folder or the Hugging Face hub; empty if nothing speaks against it."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return "" if (folder / CONFIG).is_file() else f"the folder has no {CONFIG}, so it is no Hugging Face model"
    if folder.suffix == ".gguf" and folder.is_file():
        return (
            "a GGUF file has quantized weights, which are not trained: name the Hugging Face folder that it was made "
            "of, or write one with `python scripts/make_models.py FILE.gguf FOLDER` of gradwire's repository"
        )
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        return f"there is no such folder{_suggestion(path)}"
    return _hub_fault(path)


def _hub_fault(name: str) -> str:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, CONFIG), str):
            return ""
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        return f"accept its licence at https://huggingface.co/{name}, then log in with `hf auth login`"
    except (RepositoryNotFoundError, HFValidationError):
        return f"there is neither such a folder nor such a model on the Hugging Face hub{_suggestion(name)}"
    except Exception:  # the hub cannot be asked; its HTTP library's errors changed between versions
        return (
            "there is no such folder, the model is not in the cache of the Hugging Face hub, and the hub cannot be "
            f"reached{_suggestion(name)}"
        )
    return ""


def _suggestion(path: str) -> str:
    """The nearest names of models on this machine: folders beside the path, and models in the hub's cache."""
    parent = Path(path).expanduser().parent
    folders = [path for path in _entries(parent) if (path / CONFIG).is_file()]
    known = {str(folder): folder.name for folder in folders}
    known |= {name: name for name in _cached()}
    wanted = {path.lower(), Path(path).name.lower()}
    scores = {
        shown: max(difflib.SequenceMatcher(None, each, name.lower()).ratio() for each in wanted)
        for shown, name in known.items()
    }
    nearest = sorted((shown for shown in scores if scores[shown] >= 0.5), key=lambda shown: -scores[shown])[:3]
    return f"; did you mean {' or '.join(nearest)}?" if nearest else ""


def _cached() -> list[str]:
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = [path.name for path in _entries(Path(HF_HUB_CACHE)) if path.name.startswith("models--")]
    return [name.removeprefix("models--").replace("--", "/") for name in folders]


def _entries(folder: Path) -> list[Path]:
    try:
        return [folder / entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return []


def _port(flag: str, address: str) -> Iterator[str]:
    if not address:
        return
    host, _, port = address.rpartition(":")
    try:
        (family, kind, protocol, _, target), *_ = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        yield f"{flag} {address}: {(error.strerror or str(error)).lower()}; give another with {flag} HOST:PORT"
