"""A client of the Tinker door: requests as the SDK sends them, numbered by hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from gradwire_proto.v1 import tinker_pb2 as pb

from support.server import Server

Data = Sequence[Mapping[str, Any]]
DTYPES = {"float32": pb.TINKER_DTYPE_FLOAT32, "int64": pb.TINKER_DTYPE_INT64}


class HttpServer(Server):
    """A server that serves HTTP too, on a port that it keeps over restarts."""

    def __init__(
        self, model: Path, state_dir: Path, port: int, *args: str, name: str = "tiny", real: bool = False
    ) -> None:
        super().__init__(model, state_dir, "--http", f"127.0.0.1:{port}", *args, name=name, real=real)
        self.model = model
        self.url = f"http://127.0.0.1:{port}"


def tensor(values: Any) -> pb.InputTensor:
    """A dense tensor of float32 or int64."""
    array = np.asarray(values)
    array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
    return pb.InputTensor(dense=array.tobytes(), dtype=DTYPES[array.dtype.name], shape=array.shape)


def sparse(values: Any) -> pb.InputTensor:
    """The same, without its zeros."""
    dense = tensor(values)
    array = np.frombuffer(dense.dense, np.float32 if dense.dtype == DTYPES["float32"] else np.int64)
    array = array.reshape(dense.shape)
    rows, columns = array.nonzero()
    starts = np.searchsorted(rows, np.arange(len(array) + 1))
    encoded = pb.SparseRows(
        values=array[rows, columns].tobytes(),
        row_starts=starts.astype(np.int64).tobytes(),
        columns=columns.astype(np.int64).tobytes(),
    )
    return pb.InputTensor(sparse=encoded, dtype=dense.dtype, shape=dense.shape)


def datum(seed: int = 0, length: int = 8, **fields: Any) -> dict[str, Any]:
    """A datum for cross_entropy, of random tokens."""
    ids = np.random.default_rng(seed).integers(1, 99, length + 1)
    return {"tokens": ids[:-1], "target_tokens": ids[1:], "weights": np.ones(length)} | fields


def forward_backward(
    model_id: str, seq: int, data: Data, loss: str = "cross_entropy", *, forward: bool = False, **config: float
) -> bytes:
    """The body of a request; each datum has ``tokens`` and the loss's inputs."""
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq, loss_fn=loss, forward_only=forward)
    for name, value in config.items():
        request.config_values[name].number = value
    for datum in data:
        added = request.data.add()
        added.model_input.add().encoded_text.tokens = np.asarray(datum["tokens"], np.int32).tobytes()
        for name, value in datum.items():
            if name != "tokens":
                added.loss_fn_inputs[name].CopyFrom(value if isinstance(value, pb.InputTensor) else tensor(value))
    return request.SerializeToString()


def outputs(body: bytes) -> tuple[dict[str, float], list[np.ndarray[Any, Any]]]:
    """The metrics and each datum's log-probabilities of a result."""
    answer = pb.ForwardBackwardOutput.FromString(body)
    rows = []
    for record in answer.records:
        found = record.fields["logprobs"]
        offsets = np.frombuffer(found.offsets, np.int64)
        for begin, end in itertools.pairwise(offsets):
            part = np.frombuffer(found.data[begin:end], np.float32)
            rows.append(part.reshape(-1, *found.trailing_shape))
    return dict(answer.metrics), rows


class TinkerClient:
    """One session of a client."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http, self.session_id = http, ""

    async def post(self, route: str, body: Mapping[str, Any] | bytes, status: int = 200) -> Any:
        """The answer, which must have this status."""
        given: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = await self._http.post("/api/v1/" + route, **given)
        assert answer.status_code == status, (route, answer.status_code, answer.text)
        return answer.json() if answer.headers["content-type"] == "application/json" else answer.content

    async def send(self, method: str, route: str, status: int = 200, **given: Any) -> Any:
        """The JSON of a request of any method, which must have this status."""
        answer = await self._http.request(method, "/api/v1/" + route, **given)
        assert answer.status_code == status, (route, answer.status_code, answer.text)
        return answer.json()

    async def begin(self) -> TinkerClient:
        await self.post("client/config", {"sdk_version": "0.38.0"})
        self.session_id = (await self.post("create_session", {"tags": [], "sdk_version": "0.38.0"}))["session_id"]
        return self

    async def model(self, number: int = 0, rank: int = 4, **lora: Any) -> str:
        """The id of a new model, once it is made."""
        asked = {
            "session_id": self.session_id, "model_seq_id": number, "base_model": "tiny",
            "lora_config": {"rank": rank, "seed": 1} | lora,
        }  # fmt: skip
        return str((await self.done("create_model", asked))["model_id"])

    async def wait(self, promise: Mapping[str, Any]) -> Any:
        """The result of a promise."""
        while True:
            answer = await self._http.post(
                "/api/v1/retrieve_future", json={"request_id": promise["request_id"]}, timeout=60
            )
            if answer.status_code == 408:
                continue
            assert answer.status_code == 200, (answer.status_code, answer.text)
            return answer.json() if answer.headers["content-type"] == "application/json" else answer.content

    async def done(self, route: str, body: Mapping[str, Any] | bytes) -> Any:
        """The result of a request."""
        return await self.wait(await self.post(route, body))

    async def step(self, model_id: str, seq: int, **adam: float) -> Any:
        return await self.post("optim_step", {"model_id": model_id, "seq_id": seq, "adam_params": adam})
