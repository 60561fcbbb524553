"""An HTTP server that passes the requests of Tinker's SDK on, and keeps those that train."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import gradwire
import httpx
import numpy as np
import uvicorn
from gradwire_proto.v1 import tinker_pb2 as pb

UNPASSED = ("connection", "content-encoding", "content-length", "date", "host", "transfer-encoding")


class RecordingProxy:
    """The proxy of one server.

    Attributes:
        url: Its address.
        trained: Requests of ``forward_backward`` and the settings of ``optim_step``, by model and number.
    """

    def __init__(self, upstream: str) -> None:
        self.url = ""
        self.trained: dict[str, dict[int, pb.ForwardBackwardRequest | dict[str, float]]] = {}
        self.client = httpx.AsyncClient(base_url=upstream, timeout=120)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self._note(scope["path"], body)
        headers = [(name, value) for name, value in scope["headers"] if name.decode() not in UNPASSED]
        target = f"{scope['path']}?{scope['query_string'].decode()}"
        answer = await self.client.request(scope["method"], target, content=body, headers=headers)
        kept = [(name.lower(), value) for name, value in answer.headers.raw if name.lower().decode() not in UNPASSED]
        await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
        await send({"type": "http.response.body", "body": answer.content})

    def _note(self, path: str, body: bytes) -> None:
        if path.endswith("/forward_backward"):
            message = pb.ForwardBackwardRequest.FromString(body)
            self.trained.setdefault(message.model_id, {})[message.seq_id] = message
        elif path.endswith("/optim_step"):
            asked = json.loads(body)
            self.trained.setdefault(asked["model_id"], {})[asked["seq_id"]] = asked["adam_params"]


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals alone, and says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.up.set()


@contextlib.asynccontextmanager
async def recording_proxy(upstream: str) -> AsyncIterator[RecordingProxy]:
    """Serve a proxy of a server at this URL."""
    proxy = RecordingProxy(upstream)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = _Server(uvicorn.Config(proxy, log_config=None, log_level="warning", lifespan="off", ws="none"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await server.up.wait()
        try:
            yield proxy
        finally:
            server.should_exit = True
            await serving
            await proxy.client.aclose()


async def losses_of(
    service: gradwire.ServiceClient,
    info: gradwire.RunInfo,
    trained: dict[int, pb.ForwardBackwardRequest | dict[str, float]],
) -> list[float]:
    """Train a new run like another one, by gradwire's own SDK with the same rows; the losses of its updates."""
    assert info.lora is not None
    run = await service.create_run(info.base_model, lora=dict(info.lora), seed=info.seed)
    losses, others = [], []
    for _, asked in sorted(trained.items()):
        if isinstance(asked, dict):
            betas = (asked["beta1"], asked["beta2"])
            rest = {"weight_decay": asked["weight_decay"], "max_grad_norm": asked["grad_clip_norm"]}
            others.append(run.optim_step(asked["learning_rate"], betas=betas, eps=asked["eps"], **rest))
            continue
        rows = [_row(datum) for datum in asked.data]
        kwargs = {name: value.text or value.number for name, value in asked.config_values.items()}
        if asked.forward_only:
            others.append(run.forward(rows, asked.loss_fn, kwargs))
        else:
            losses.append(run.forward_backward(rows, asked.loss_fn, kwargs))
    await gradwire.gather(*others)
    return [result.loss for result in await gradwire.gather(*losses)]


def _row(datum: pb.Datum) -> dict[str, Any]:
    row: dict[str, Any] = {
        "input_ids": np.concatenate([np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in datum.model_input])
    }
    for name, tensor in datum.loss_fn_inputs.items():
        assert tensor.WhichOneof("encoding") == "dense"
        dtype = np.float32 if tensor.dtype == pb.TINKER_DTYPE_FLOAT32 else np.int64
        row[name] = np.frombuffer(tensor.dense, dtype).reshape(list(tensor.shape) or -1)
    return row
