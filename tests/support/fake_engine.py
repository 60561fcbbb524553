"""An engine without a model: it adds numbers, and can be told to wait, to fail and to die."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine_client.client import EngineAnswer, EngineDied, Holder
from gradwire_server.engine_link.vitals import Vitals
from gradwire_server.errors import ServiceError


@dataclass
class FakeRun:
    """A run whose whole state is a list of what was done to it."""

    history: list[str] = field(default_factory=list)
    step: int = 0
    failed_seq: int = 0


class FakeEngine:
    """Carries requests out one after the other; `newest` is the one that was begun last.

    ``loss_fn`` says what a forward_backward does: "fail" and "fail-..." fail, "die" and "die-..." end the engine,
    anything else is written down. ``seconds`` says how long an operation claims to have taken, by loss or kind.
    """

    machine = folder = ""
    file_bytes = 3 << 20
    """Size of a checkpoint's largest file."""

    def __init__(self, state_dir: Path, number: int = 0) -> None:
        self.state_dir, self.number = state_dir, number
        self.holder = Holder()
        self.runs: dict[str, FakeRun] = {}
        self.seen: list[tuple[str, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.die_after: set[int] = set()
        self.dies_behind: set[int] = set()
        self.overwrites: list[bool] = []
        self.limits: dict[int, list[int]] = {}
        self.unreadable = self.disk_full = False
        self.unknown_losses: set[str] = set()
        self.seconds: dict[str, float] = {}
        self.restore_error: ServiceError | None = None
        self.vitals = Vitals()
        self.vitals.started()
        self.fails_to_start = self.is_away = False
        self._watchers: list[Callable[[], None]] = []
        self._turn = asyncio.Lock()
        self._unanswered: dict[asyncio.Future[EngineAnswer], asyncio.Task[None]] = {}
        self._begun: asyncio.Future[EngineAnswer] | None = None
        self.newest = engine_pb2.EngineRequest()
        self.most_in_pipe = 0
        self.all_suspect = False
        self.hello = engine_pb2.EngineHello(device="fake", models=[pb.ModelInfo(name="tiny", vocab_size=64)])

    @property
    def models(self) -> set[str]:
        return {model.name for model in self.hello.models}

    @property
    def is_ready(self) -> bool:
        return self.holder.alive

    def watch(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    def die(self) -> None:
        """Ends the process and everything it holds; another is up at once."""
        self.end()
        self.begin()

    def end(self) -> None:
        """Ends the process and everything it holds."""
        self.holder.alive = False
        self.runs.clear()
        self._changed()

    def begin(self) -> None:
        """Starts another process, if there is none."""
        if self.holder.alive:
            return
        self.holder = Holder()
        self._changed()

    def _changed(self) -> None:
        for watcher in self._watchers:
            watcher()

    async def close(self) -> None:
        """End what still waits at the gate; later tests share the event loop."""
        waiting = list(self._unanswered.values())
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def request(
        self,
        request: engine_pb2.EngineRequest,
        payload: Sequence[bytes] = (),
        on_frame: Callable[[pb.SampleFrame], None] | None = None,
    ) -> asyncio.Future[EngineAnswer]:
        answer = asyncio.get_running_loop().create_future()
        self._unanswered[answer] = asyncio.create_task(self._answer(answer, request, payload, self.holder, on_frame))
        self.most_in_pipe = max(self.most_in_pipe, len(self._unanswered))
        return answer

    async def withdraw(self, answer: asyncio.Future[EngineAnswer]) -> bool:
        """As over a link: others run before it is known whether the request had begun."""
        await asyncio.sleep(0)
        if answer is self._begun or answer not in self._unanswered:
            return False
        self._unanswered.pop(answer).cancel()
        answer.set_result((engine_pb2.EngineReply(not_started=pb.Empty()), b""))
        return True

    def interrupt(self, answer: asyncio.Future[EngineAnswer]) -> bool:
        """What it carries out cannot be stopped."""
        return False

    async def _answer(
        self,
        answer: asyncio.Future[EngineAnswer],
        request: engine_pb2.EngineRequest,
        payload: Sequence[bytes],
        holder: Holder,
        on_frame: Callable[[pb.SampleFrame], None] | None,
    ) -> None:
        try:
            async with self._turn:
                if not holder.alive:
                    raise EngineDied(suspect=self.all_suspect)
                self._begun, self.newest = answer, request
                if request.tells_start and on_frame is not None:
                    on_frame(pb.SampleFrame())
                await self.work(request)
                if not holder.alive:
                    raise EngineDied(suspect=False)
                outcome = self._carry_out(request, b"".join(bytes(part) for part in payload))
                if request.operation.seq in self.dies_behind:
                    self.dies_behind.discard(request.operation.seq)
                    self.die()
        except (EngineDied, ServiceError) as error:
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(outcome)
        finally:
            self._unanswered.pop(answer, None)

    async def work(self, request: engine_pb2.EngineRequest) -> None:
        """What it takes to carry a request out."""
        await self.gate.wait()

    def _carry_out(self, request: engine_pb2.EngineRequest, payload: bytes) -> tuple[engine_pb2.EngineReply, bytes]:
        reply = engine_pb2.EngineReply(id=request.id)
        kind = request.WhichOneof("kind")
        if kind == "create_run":
            create = request.create_run
            if self.restore_error is not None:
                raise self.restore_error
            if create.config.lora.rank > 100:
                raise ServiceError(pb.ERROR_CODE_INVALID_ARGUMENT, "rank too large", field="lora.rank")
            run = self.runs[create.run_id] = FakeRun()
            if create.checkpoint:
                history = self._folder(create.checkpoint) / "history"
                if not history.exists():
                    raise ServiceError(pb.ERROR_CODE_CHECKPOINT_CORRUPT, f"{create.checkpoint} cannot be read")
                seq, *run.history = history.read_text().split()
                reply.run_created.seq = int(seq)
                run.step = 0 if create.weights_only else run.history.count("step")
            reply.run_created.num_trainable_parameters = 7
            reply.run_created.step = run.step
            reply.run_created.head, reply.run_created.num_labels = create.config.head, create.config.num_labels
        elif kind == "drop_run":
            self.runs.pop(request.drop_run.run_id, None)
            reply.empty.SetInParent()
        elif kind == "verify_checkpoint":
            history = self._folder(request.verify_checkpoint.checkpoint) / "history"
            if self.unreadable or not history.exists():
                raise ServiceError(pb.ERROR_CODE_CHECKPOINT_CORRUPT, "cannot be read")
            reply.result.checkpoint.seq = int(history.read_text().split()[0])
        elif kind == "operation":
            return self._operation(request.operation, payload, reply)
        return reply, b""

    def _operation(
        self, asked: engine_pb2.EngineOperation, payload: bytes, reply: engine_pb2.EngineReply
    ) -> tuple[engine_pb2.EngineReply, bytes]:
        if asked.run_id not in self.runs:
            raise ServiceError(pb.ERROR_CODE_UNKNOWN_RUN, f"{asked.run_id} is not in this engine")
        run, operation, seq = self.runs[asked.run_id], asked.operation, asked.seq
        if asked.unless_failed and run.failed_seq >= asked.unless_failed:
            reply.not_started.SetInParent()
            return reply, b""
        self.seen.append((asked.run_id, seq))
        if seq in self.die_after or operation.forward_backward.loss_fn.partition("-")[0] == "die":
            self.die_after.discard(seq)
            self.die()
            raise EngineDied(suspect=True)
        result = reply.result
        result.seq, result.status = seq, pb.STATUS_SUCCEEDED
        kind = operation.WhichOneof("kind")
        result.timings.engine_s = self.seconds.get(operation.forward_backward.loss_fn or kind, 0.0)
        if kind == "forward_backward":
            loss_fn = operation.forward_backward.loss_fn
            if loss_fn.partition("-")[0] == "fail":
                run.failed_seq, result.status = seq, pb.STATUS_FAILED
                result.error.code, result.error.message = pb.ERROR_CODE_INVALID_BATCH, "id 99999 is outside"
                return reply, b""
            if loss_fn in self.unknown_losses:
                run.failed_seq, result.status = seq, pb.STATUS_FAILED
                result.error.code, result.error.message = pb.ERROR_CODE_UNKNOWN_LOSS, f"no loss is called {loss_fn}"
                return reply, b""
            self.limits.setdefault(seq, []).append(asked.limits.microbatch_tokens)
            result.loss.limits.microbatch_tokens = asked.limits.microbatch_tokens or 100 + seq
            run.history.append(loss_fn)
            result.loss.loss = float(len(run.history))
            return reply, payload
        if kind == "forward":
            result.loss.loss = float(len(run.history))
            return reply, payload
        if kind == "optim_step":
            run.step += 1
            run.history.append("step")
            result.optim_step.step = run.step
        elif kind == "save_checkpoint":
            self.overwrites.append(operation.save_checkpoint.overwrite)
            if self.disk_full:
                run.failed_seq, result.status = seq, pb.STATUS_FAILED
                result.error.code, result.error.message = pb.ERROR_CODE_STORAGE_FULL, "no space left on device"
                return reply, b""
            name = operation.save_checkpoint.name or f"step-{run.step}"
            with self._replacing(asked.run_id, name, operation.save_checkpoint.overwrite) as folder:
                (folder / "history").write_text(" ".join([str(seq), *run.history]))
                (folder / "deep").mkdir()
                (folder / "deep" / "big").write_bytes(bytes(self.file_bytes))
            result.checkpoint.path, result.checkpoint.name = f"{asked.run_id}/{name}", name
            result.checkpoint.step, result.checkpoint.seq = run.step, seq
        else:
            result.empty.SetInParent()
        return reply, b""

    @contextlib.contextmanager
    def _replacing(self, run_id: str, name: str, overwrite: bool) -> Iterator[Path]:
        """A new folder for a checkpoint."""
        folder = self._folder(f"{run_id}/{name}")
        if overwrite:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder

    def _folder(self, path: str) -> Path:
        run_id, _, name = path.partition("/")
        return self.state_dir / "runs" / run_id / "checkpoints" / name
