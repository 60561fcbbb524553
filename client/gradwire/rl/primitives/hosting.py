"""A model on a gradwire server, for scripts; starts a server if no address is given."""

from __future__ import annotations

import atexit
import contextlib
import tempfile
import weakref
from pathlib import Path
from typing import Any

from gradwire.connection import connect
from gradwire.rl.inference import RunInference
from gradwire.rl.primitives.background import wait_for
from gradwire.training import TrainingClient


class ServedModel:
    """One run, with the connection and the server that it needs.

    Args:
        model: A loaded ``transformers`` model, which is saved to a temporary folder and served from there, or a name
            or a path.
        reference: A second model for the server, in the same forms.
        moves: The reference "ema" starts with its weights rather than the model's; all weights are trained.
        address: Address of a running server that has the model under this name; None: an embedded server.
        state_dir: State folder of the embedded server; None: a temporary folder.
        lora: Rank of an adapter; None trains all weights.
        head: Head of the run.
        options: Options of ``gradwire.connect``.
    """

    def __init__(
        self,
        model: Any,
        *,
        reference: Any = None,
        moves: bool = False,
        address: str | None = None,
        state_dir: Path | None = None,
        lora: int | None = None,
        head: Any = "value",
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._model, self._reference, self._moves = model, reference, moves
        self._address, self._state_dir, self._options = address, state_dir, options
        self._settings = {"lora": lora, "head": head, "seed": seed}
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-model-", ignore_cleanup_errors=True)
        self._service: Any = None
        self._run: TrainingClient | None = None
        _open.add(self)

    def keep_state_in(self, folder: Path) -> None:
        """Set the state folder of an embedded server that has not started, unless ``state_dir`` was given."""
        self._state_dir = self._state_dir or folder

    @property
    def address(self) -> str:
        """``HOST:PORT`` of the server; empty if it has not started."""
        return str(self._service.address) if self._service is not None else ""

    @property
    def api_key(self) -> str:
        """The server's key, for another connection to it; empty if there is none."""
        return str(self._service.api_key) if self._service is not None else ""

    async def run(self) -> TrainingClient:
        """The run; the first use starts the server."""
        if self._run is None:
            names = {"policy": self._name("policy", self._model)}
            if self._reference is not None:
                names["reference"] = self._name("reference", self._reference)
            if self._address is None:
                models = [f"{name}={place}" for name, place in names.items()]
                self._service = await connect(models=models, state_dir=self._state_dir, **self._options)
            else:
                self._service = await connect(self._address, **self._options)
            base = "policy" if self._address is None else names["policy"]
            self._run = await self._service.create_run(base, **self._settings)
            if self._reference is not None and self._moves:
                await self._move_reference(self._run, "reference" if self._address is None else names["reference"])
            else:
                await self._run.update_reference(ema=1.0)  # the reference "ema" starts as a copy of the current policy
        return self._run

    async def _move_reference(self, run: TrainingClient, model: str) -> None:
        """Let the reference "ema" start with another model's weights, which the run has for a moment."""
        other = await self._service.create_run(model, **self._settings)
        theirs = await other.save_checkpoint("reference")
        await run.save_checkpoint("start")
        await run.load_checkpoint(theirs, weights_only=True)
        await run.update_reference(ema=0.0)
        await run.load_checkpoint("start", weights_only=True)

    async def inference(self, tokenizer: Any = None) -> RunInference:
        """The run's own sampler."""
        run = await self.run()
        return await RunInference.of(self._service, run, tokenizer)

    def _name(self, role: str, model: Any) -> str:
        if isinstance(model, str | Path):
            return str(model)
        if not hasattr(model, "save_pretrained"):
            raise TypeError(
                f"the {role} is {type(model).__name__}; it must be a transformers model, a name or path, or an "
                'InferenceModule with backend="server"'
            )
        if self._address is not None:
            raise ValueError("a loaded model needs an embedded server; with an address, name a model of that server")
        folder = Path(self._folder.name) / role
        model.save_pretrained(folder)
        return str(folder)

    def close(self) -> None:
        """Close the connection, and stop the embedded server."""
        service, self._service = self._service, None
        if service is not None:
            wait_for(service.close())
        self._folder.cleanup()


_open: weakref.WeakSet[ServedModel] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close connections that the script left open; embedded servers end with the process in any case."""
    for each in list(_open):
        with contextlib.suppress(RuntimeError):  # after this point Python starts no threads
            each.close()
