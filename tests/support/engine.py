"""An engine for tests: in this process, or as the process that a server starts."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gradwire_losses.registry import LossSpec, load_builtin_losses
from gradwire_proto import codec
from gradwire_proto.codec import Column
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.config import EngineSettings
from gradwire_server.engine_link.frames import EngineLink

if TYPE_CHECKING:
    from gradwire_server.engine.operations.lifecycle import Answer
    from gradwire_server.engine.operations.request import Request

Columns = Mapping[str, Column]


def token_rows(rows: Sequence[Sequence[int]], name: str = "input_ids") -> dict[str, Column]:
    """Rows of token ids as a batch."""
    return {name: Column.from_rows([np.array(row, np.int32) for row in rows])}


def loss_call(loss: LossSpec, arguments: Mapping[str, Any] | None = None, **more: Any) -> pb.LossCall:
    """A call of a loss with these arguments and those that it requires."""
    kwargs = ({"reduction_divisor": 16.0} if loss.name == "dr_grpo" else {}) | dict(arguments or {})
    if "reference_model" in loss.config.model_fields:
        kwargs["reference_model"] = "base"
    return pb.LossCall(loss_fn=loss.name, loss_kwargs_json=json.dumps(kwargs), **more)


@dataclass(frozen=True)
class Result:
    """An operation's result and its tensors."""

    proto: pb.OperationResult
    columns: dict[str, Column]

    @property
    def ok(self) -> bool:
        return self.proto.status == pb.STATUS_SUCCEEDED


class Driver:
    """Sends requests one after another. Operations of a run are numbered from 1, unless told otherwise."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self.seqs: dict[str, int] = {}

    def exchange(
        self, request: engine_pb2.EngineRequest, columns: Columns
    ) -> tuple[engine_pb2.EngineReply, bytes | memoryview]:
        raise NotImplementedError

    def request(self, columns: Columns | None = None, **kind: Any) -> tuple[engine_pb2.EngineReply, Any]:
        request = engine_pb2.EngineRequest(id=next(self._ids), **kind)
        reply, payload = self.exchange(request, columns or {})
        assert reply.id == request.id
        return reply, payload

    def create(
        self,
        run_id: str,
        *,
        checkpoint: str = "",
        weights_only: bool = False,
        fresh_head: bool = False,
        **config: Any,
    ) -> engine_pb2.EngineReply:
        """``lora`` as a rank or as settings."""
        lora = config.pop("lora", None)
        settings = pb.RunConfig(**{"base_model": "tiny"} | config)
        if lora is not None:
            settings.lora.CopyFrom(pb.LoraSettings(**({"rank": lora} if isinstance(lora, int) else lora)))
        create = engine_pb2.EngineCreateRun(
            run_id=run_id, config=settings, checkpoint=checkpoint, weights_only=weights_only, fresh_head=fresh_head
        )
        reply, _ = self.request(create_run=create)
        self.seqs[run_id] = reply.run_created.seq
        return reply

    def op(self, run_id: str, columns: Columns | None = None, *, seq: int | None = None, **kind: Any) -> Result:
        """Run one operation, whether it succeeds or not."""
        seq = self.seqs[run_id] + 1 if seq is None else seq
        self.seqs[run_id] = seq
        specs, _ = codec.encode(columns or {})
        operation = engine_pb2.EngineOperation(run_id=run_id, seq=seq, operation=pb.Operation(**kind), tensors=specs)
        reply, payload = self.request(columns, operation=operation)
        assert not reply.HasField("error"), reply.error
        assert reply.result.seq == seq
        assert reply.result.payload_bytes == len(payload)
        return Result(reply.result, codec.decode(list(reply.result.tensors), payload))

    def do(self, run_id: str, columns: Columns | None = None, **kind: Any) -> Result:
        """Run one operation that must succeed."""
        result = self.op(run_id, columns, **kind)
        assert result.ok, result.proto.error
        return result

    def train(self, run_id: str, columns: Columns, learning_rate: float = 1e-2) -> tuple[float, float]:
        """Take one step of causal_lm; return its loss and gradient norm."""
        loss = self.do(run_id, columns, forward_backward=pb.LossCall(loss_fn="causal_lm")).proto.loss.loss
        step = pb.OptimStep(learning_rate=learning_rate, beta1=0.9, beta2=0.999, eps=1e-8, max_grad_norm=1.0)
        return loss, self.do(run_id, optim_step=step).proto.optim_step.grad_norm

    def logprobs(self, run_id: str, columns: Columns, model: str = "") -> np.ndarray:
        result = self.do(run_id, columns, forward=pb.LossCall(outputs=["logprobs"], model=model))
        return result.columns["logprobs"].values


class LocalEngine(Driver):
    """An engine in this process.

    Attributes:
        engine: what answers everything but samples and the verification of checkpoints.
        context: its parts.
    """

    def __init__(self, models: Mapping[str, Path], state_dir: Path, **settings: Any) -> None:
        from gradwire_server.engine.operations.samples import SamplesInProgress
        from gradwire_server.engine.process.engine import Engine
        from gradwire_server.engine.process.read_back import ReadBack

        super().__init__()
        load_builtin_losses()
        if "dtype" in settings:
            settings["dtype"] = str(settings["dtype"]).removeprefix("torch.")
        folders = {name: str(path) for name, path in models.items()}
        self.engine = Engine(EngineSettings(models=folders, state_dir=state_dir, **{"device": "cpu"} | settings))
        self.context = self.engine.context
        self._samples = SamplesInProgress(self.context)
        self._read_back = ReadBack(self.context.store, lambda reply: None)

    def exchange(self, request: engine_pb2.EngineRequest, columns: Columns) -> tuple[engine_pb2.EngineReply, bytes]:
        from gradwire_server.engine.operations.request import Request

        if request.HasField("verify_checkpoint"):
            return self._read_back.answer(request), b""
        asked = Request(request, columns, None)
        answer = self._sampled(asked) if asked.samples else self._executed(asked)
        return answer.reply, b"".join(answer.buffers)

    def _executed(self, request: Request) -> Answer:
        (answer,) = self.engine.execute(self.context.decisions.execute([request]))
        return answer

    def _sampled(self, request: Request) -> Answer:
        """Sample like the engine's loop: token by token, until the answer is complete."""
        list(self._samples.begin(self.context.decisions.sample(request), request))
        while not (answers := self._samples.finished()):
            self._samples.step(self.context.decisions.step_samples(self._samples.messages()))
        return answers[0]


class EngineProcess(Driver):
    """An engine process at the other end of a socket pair.

    Attributes:
        hello: what it said first.
        pulses: where its ranks tell of themselves.
    """

    def __init__(self, models: Mapping[str, Path], state_dir: Path, **settings: Any) -> None:
        super().__init__()
        ours, theirs = socket.socketpair()
        folders = {name: str(path) for name, path in models.items()}
        chosen = EngineSettings(models=folders, state_dir=state_dir, device="cpu", **{"threads": 1} | settings)
        words = [sys.executable, "-m", "gradwire_server.engine.process", str(os.getpid())]
        words += ["--fd", str(theirs.fileno()), "--settings", chosen.model_dump_json()]
        self.pulses, pulses = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words += ["--pulses", str(pulses.fileno())]
        with theirs, pulses:
            fds = [theirs.fileno(), pulses.fileno()]
            env = os.environ | {"HF_HUB_OFFLINE": "1"}
            self.process = subprocess.Popen(words, pass_fds=fds, env=env)
        self.link = EngineLink(ours)
        self.hello, _ = self.link.receive(engine_pb2.EngineReply)

    def exchange(
        self, request: engine_pb2.EngineRequest, columns: Columns
    ) -> tuple[engine_pb2.EngineReply, memoryview]:
        self.link.send(request, codec.encode(columns)[1])
        return self.receive()

    def receive(self) -> tuple[engine_pb2.EngineReply, memoryview]:
        """The next reply that is no heartbeat."""
        while True:
            reply, payload = self.link.receive(engine_pb2.EngineReply)
            if not reply.HasField("heartbeat"):
                return reply, payload

    def shut_down(self) -> int:
        self.request(shutdown={})
        code = self.process.wait(120)
        self.link.close()
        self.pulses.close()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(120)
        self.link.close()
        self.pulses.close()
