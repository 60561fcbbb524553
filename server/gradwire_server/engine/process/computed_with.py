"""The inputs of a run's results besides its operations: the base model's files, the code, the arithmetic."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gradwire_losses
import torch
from gradwire_losses.registry import all_losses
from transformers.utils.hub import cached_file

import gradwire_server.engine
from gradwire_server.checkpoint_files import StoredFile, read_sealed, sealed
from gradwire_server.durable_files import replace_text
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.state.checkpoints import versions

log = logging.getLogger(__name__)

BASE_FILES = ("*.safetensors", "*.json", "*.model")
HASHES = "base_files.json"
AT_ONCE = 4
"""Files that are read at the same time."""
ENGINE = Path(gradwire_server.engine.__file__).parent
COMPUTING = ("model", "operations", "sampling", "scoring", "state", "training")
COMPUTING_FILES = ("executor.py", "generators.py", "lanes.py", "step.py")
"""The engine's folders and files on which a result may depend."""


class ComputedWith:
    """The facts for the runs of one engine process.

    Args:
        state_dir: Folder that keeps the digests of the models' files, so that each file is read once.
    """

    def __init__(self, pool: ModelPool, state_dir: Path) -> None:
        self._pool, self._hashes = pool, state_dir / HASHES
        self._bases: dict[str, str] = {}
        self._code: dict[str, str] = {}

    def facts(self, base_model: str, *, deterministic: bool) -> dict[str, str]:
        """Name -> value of everything that a run on a model depends on; what is off has no fact."""
        if not self._code:
            self._code = versions() | {"code": _digest_of_code()}
            for loss in all_losses():
                self._code[f"loss {loss.name}"] = _digest(inspect.getsourcefile(loss.function))
        further: dict[str, str] = {"quantize": self._pool.quantize} if self._pool.quantize else {}
        if self._pool.compiled:
            further["compile"] = "on"
        if deterministic:
            further["deterministic"] = "on"
        if self._pool.kernels is not None:
            further |= self._pool.kernels.version
        if self._pool.facts(base_model).takes_images:
            further |= {"pillow": importlib.metadata.version("pillow") if importlib.util.find_spec("PIL") else ""}
        return (
            self._code
            | further
            | {
                "base model": self._base(base_model),
                "dtype": self._pool.facts(base_model).dtype,
            }
            | self.machine()
        )

    def machine(self) -> dict[str, str]:
        """The facts of the machine."""
        device = self._pool.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return {"device": name, "threads": str(torch.get_num_threads())}

    def _base(self, name: str) -> str:
        if name not in self._bases:
            self._bases[name] = self._digest_of_files(Path(self._folder(self._pool.facts(name).path)))
        return self._bases[name]

    def _folder(self, path: str) -> str:
        if Path(path).is_dir():
            return path
        config = cached_file(path, "config.json", local_files_only=True)
        return str(Path(str(config)).parent)

    def _digest_of_files(self, folder: Path) -> str:
        """Digest of a model's files; a file is read again only if its size, times or inode changed."""
        known = self._known()
        state = hashlib.blake2b(digest_size=16)
        files = [(_identity(file), file) for file in sorted({each for one in BASE_FILES for each in folder.glob(one)})]
        unread = {key: file for key, file in files if key not in known}
        with ThreadPoolExecutor(AT_ONCE) as threads:  # 16 GB take one of them as many seconds
            read = threads.map(StoredFile.of, unread.values())
        known |= {key: each.blake2b for key, each in zip(unread, read, strict=True)}
        for key, file in files:
            state.update(f"{file.name} {known[key]}\n".encode())
        try:
            if unread:
                replace_text(self._hashes, sealed(known))
        except OSError as error:  # read again at the next start
            log.warning("the digests of the base model's files were not kept: %s", error)
        return state.hexdigest()

    def _known(self) -> dict[str, str]:
        try:
            return dict(read_sealed(self._hashes))
        except (OSError, ValueError, KeyError, TypeError):  # damaged, or of an earlier version: read again
            return {}


def _identity(file: Path) -> str:
    stat = file.stat()
    return f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def _digest_of_code() -> str:
    """Digest of the code that computes: a version is the same between two commits, and rounding may not be."""
    folders = [*(ENGINE / name for name in COMPUTING), Path(gradwire_losses.__file__).parent]
    files = [
        *(ENGINE / name for name in COMPUTING_FILES),
        *(file for folder in folders for file in sorted(folder.rglob("*"))),
    ]
    files = [file for file in files if file.suffix in (".py", ".c")]
    state = hashlib.blake2b(digest_size=8)
    for file in files:
        state.update(_digest(str(file)).encode())
    return state.hexdigest()


def _digest(file: str | None) -> str:
    return hashlib.blake2b(Path(file).read_bytes() if file else b"", digest_size=8).hexdigest()
