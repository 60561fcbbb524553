"""The training client: one run, its operations in program order."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy.typing as npt
from gradwire_proto.v1 import training_pb2 as pb

from gradwire.batches import SCORING_FIELDS, to_columns
from gradwire.custom import CustomCall, CustomLoss, Framework, framework_in_use
from gradwire.errors import InvalidArgumentError
from gradwire.files import download
from gradwire.futures import Future
from gradwire.link import RunLink
from gradwire.losses import LossCatalogue, kwargs_json, model_path
from gradwire.queue import Request, RunQueue
from gradwire.results import Checkpoint, Columns, LossField, LossResult, OptimStepResult, RunInfo, SampleResult
from gradwire.sampling import Prompts, sample_call
from gradwire.transport import Transport

M = TypeVar("M")
Batch = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Columns or rows: see :mod:`gradwire.batches`."""
Output = Literal[
    "logprobs",
    "candidate_logprobs",
    "entropy",
    "mean_logprobs",
    "collision",
    "divergence",
    "values",
    "rewards",
    "token_rewards",
    "class_logits",
    "token_class_logits",
]
Array = npt.NDArray[Any]
OnNonFinite = Literal["error", "skip"]


class Operations:
    """What one run is asked to do. Every method submits at once, in program order, and returns a future.

    An operation that fails leaves the run as it was before it, and fails those submitted behind it, through the next
    ``optim_step``, with an :class:`~gradwire.errors.AbortedPredecessorError` that names the first cause; unless they
    were submitted after that failure had been raised.
    """

    def __init__(self, transport: Transport, queue: RunQueue, link: RunLink, losses: LossCatalogue) -> None:
        self._transport = transport
        self._queue = queue
        self._link = link
        self._losses = losses

    @property
    def run_id(self) -> str:
        """The run's id: what ``get_training_client`` takes, now or tomorrow."""
        return self._queue.run_id

    def forward_backward(
        self,
        batch_data: Batch,
        loss_fn: str,
        loss_kwargs: Mapping[str, Any] | None = None,
        outputs: Sequence[Output] = (),
        on_nonfinite: OnNonFinite = "error",
    ) -> Future[LossResult]:
        """Computes a loss of the batch, and adds its gradients to those since the last ``optim_step``.

        Args:
            batch_data: columns or rows, with the fields that the loss declares (``list_losses``).
            loss_fn: the name of a loss.
            loss_kwargs: its arguments.
            outputs: what to return for each scored token (``"rewards"``: for each sequence) beside loss and metrics.
            on_nonfinite: whether a loss or gradient that is not finite is an error, which names the row, or leaves the
                batch out with a warning: it then counts for nothing, and its loss is NaN.

        Errors of the future: InvalidBatchError, InvalidArgumentError, UnknownLossError, NonFiniteError,
        OutOfMemoryError.
        """
        return self._loss(
            "forward_backward", batch_data, loss_fn, loss_kwargs, outputs, skips=lambda: _skips(on_nonfinite)
        )

    def forward(
        self,
        batch_data: Batch,
        loss_fn: str | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        outputs: Sequence[Output] = ("logprobs",),
        model: str | Checkpoint | None = None,
        temperature: float = 1.0,
    ) -> Future[LossResult]:
        """Scores the batch, without gradients.

        Args:
            batch_data: as for ``forward_backward``; without a loss ``input_ids``, ``attention_mask``, ``loss_mask``.
            loss_fn: a loss to compute as well.
            loss_kwargs: its arguments.
            outputs: what to return for each scored token; ``"rewards"`` for each sequence.
            model: score with ``"base"``, ``"ema"``, a checkpoint or a model of the server's instead of the run.
            temperature: without a loss: what divides the logits.
        """
        return self._loss("forward", batch_data, loss_fn, loss_kwargs, outputs, model, temperature)

    def forward_backward_custom(
        self,
        batch_data: Batch,
        fn: CustomLoss,
        scores: Sequence[Output] = ("logprobs",),
        weight: float = 1.0,
        temperature: float = 1.0,
        framework: Framework | None = None,
    ) -> Future[LossResult]:
        """Computes a loss of your own, here, on scores from the server, and sends their gradients back.

        ``fn(batch_data, scores)`` runs in a worker thread. ``scores`` maps each name to a list of arrays, one a row,
        over the row's scored tokens (``"rewards"``: one array ``[rows]``). Where your process has imported torch they
        are tensors that require gradients, and ``fn`` returns the loss or ``(loss, metrics)``. Otherwise they are
        numpy arrays, and ``fn`` returns ``(loss, gradients)`` or ``(loss, gradients, metrics)``, gradients being
        shaped as the scores. What ``fn`` raises is raised by the future.

        Args:
            batch_data: ``input_ids``, and optionally ``attention_mask`` and ``loss_mask``.
            fn: the loss.
            scores: what the function gets: any of the :data:`Output` names; candidate_logprobs are those of the batch's
                ``candidates [rows, tokens, candidates]``.
            weight: what the loss averages over, e.g. its number of rows or tokens: batches of an accumulation count
                in proportion.
            temperature: divides the logits.
            framework: ``"torch"`` or ``"numpy"``; by default torch where it is imported.
        """
        call = CustomCall(batch_data, fn, weight, "numpy")

        def build() -> Request:
            call.framework = framework_in_use(framework)
            message = _message(pb.KeptForward, scores=_names(scores), temperature=temperature)
            _message(pb.Backward, weight=weight)
            columns = to_columns("forward_backward_custom", SCORING_FIELDS, batch_data)
            return Request.of(pb.Operation(kept_forward=message), columns)

        return self._queue.submit_pair("forward_backward_custom", build, call.compute, call.result)

    def optim_step(
        self,
        learning_rate: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        on_nonfinite: OnNonFinite = "error",
    ) -> Future[OptimStepResult]:
        """One AdamW step with the gradients since the last one.

        Args:
            learning_rate: step size.
            betas: decay of the first and second moment.
            eps: added to the root of the second moment.
            weight_decay: decoupled, as in Loshchilov & Hutter 2019.
            max_grad_norm: the gradient is scaled down to this Euclidean norm; 0 leaves it.
            on_nonfinite: whether a gradient that is not finite is an error or skips the step.

        Errors of the future: NothingToStepError, NonFiniteError, InvalidArgumentError.
        """

        def build() -> Request:
            if len(betas) != 2:
                raise InvalidArgumentError(f"betas are two numbers, not {betas!r}", field="betas", rule="two numbers")
            step = _message(
                pb.OptimStep,
                learning_rate=learning_rate,
                beta1=betas[0],
                beta2=betas[1],
                eps=eps,
                weight_decay=weight_decay,
                max_grad_norm=max_grad_norm,
                skip_nonfinite=_skips(on_nonfinite),
            )
            return Request.of(pb.Operation(optim_step=step))

        return self._queue.submit("optim_step", build, OptimStepResult.from_wire)

    def zero_grad(self) -> Future[None]:
        """Drops the gradients since the last ``optim_step``."""
        return self._queue.submit("zero_grad", lambda: Request.of(pb.Operation(zero_grad=pb.ZeroGrad())), _nothing)

    def sample(
        self,
        prompts: Prompts,
        n: int = 1,
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        ignore_eos: bool = False,
    ) -> Future[SampleResult]:
        """Continues prompts with the weights as they are at this place in the program.

        Args:
            prompts: texts, or rows of token ids; a single one is a list of one.
            n: samples a prompt.
            max_tokens: the most tokens a sample.
            temperature: divides the logits; 0 takes the most probable token.
            top_k: samples among this many; 0 among all.
            top_p: samples among the most probable tokens of this total probability; 1 among all.
            stop: strings; a text ends before the first one found.
            stop_token_ids: in addition to the model's own end tokens.
            seed: the same again gives the same samples; None draws from the run's own generator.
            ignore_eos: goes on past the model's end tokens.
        """

        def build() -> Request:
            call, columns = sample_call(
                prompts,
                n=n,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                stop=stop,
                stop_token_ids=stop_token_ids,
                seed=seed,
                ignore_eos=ignore_eos,
            )
            return Request.of(pb.Operation(sample=call), columns)

        return self._queue.submit("sample", build, SampleResult.from_wire)

    def compute_logprobs(
        self,
        batch_data: Batch | Sequence[Any],
        model: str | Checkpoint | None = None,
        temperature: float = 1.0,
    ) -> Future[list[Array]]:
        """Log-probabilities of the scored tokens of each row, in nats: all but the first, or what a mask leaves.

        Args:
            batch_data: a batch of ``input_ids`` with optional masks, or plainly rows of token ids.
            model: score with another model: see ``forward``.
            temperature: divides the logits.
        """
        return self._scores("compute_logprobs", "logprobs", batch_data, model, temperature)

    def compute_values(self, batch_data: Batch | Sequence[Any]) -> Future[list[Array]]:
        """The value head's output for each scored token of each row. The run needs ``head="value"``."""
        return self._scores("compute_values", "values", batch_data)

    def compute_rewards(self, batch_data: Batch | Sequence[Any]) -> Future[Array]:
        """The reward head's output ``[rows]``, read at each row's last token. The run needs ``head="reward"``."""
        return self._scores("compute_rewards", "rewards", batch_data)

    def update_reference(self, ema: float = 0.99) -> Future[None]:
        """Moves the reference ``"ema"`` towards the run: ``ema * reference + (1 - ema) * policy``."""

        def build() -> Request:
            return Request.of(pb.Operation(update_reference=_message(pb.UpdateReference, ema=ema)))

        return self._queue.submit("update_reference", build, _nothing)

    def save_checkpoint(self, name: str = "", note: str = "", overwrite: bool = False) -> Future[Checkpoint]:
        """Saves weights, optimizer, generators and place in the queue.

        Args:
            name: letters, digits, ``._-``; empty: ``step-N``.
            note: for people.
            overwrite: replaces one of the same name instead of raising AlreadyExistsError.
        """

        def build() -> Request:
            save = _message(pb.SaveCheckpoint, name=name, note=note, overwrite=overwrite)
            return Request.of(pb.Operation(save_checkpoint=save))

        return self._queue.submit("save_checkpoint", build, Checkpoint.from_wire)

    def load_checkpoint(self, checkpoint: str | Checkpoint, weights_only: bool = False) -> Future[None]:
        """Goes on from a checkpoint: ``"NAME"`` of this run, or ``"RUN_ID/NAME"``.

        Args:
            checkpoint: which.
            weights_only: keeps optimizer and generators as they are.
        """

        def build() -> Request:
            load = _message(pb.LoadCheckpoint, checkpoint=model_path(checkpoint), weights_only=weights_only)
            return Request.of(pb.Operation(load_checkpoint=load))

        return self._queue.submit("load_checkpoint", build, _nothing)

    def export(
        self, path: str | os.PathLike[str], format: Literal["auto", "hf", "peft", "merged"] = "auto"
    ) -> Future[Path]:
        """Writes the weights as they are at this place in the program to a local folder.

        Args:
            path: the folder; made where it is missing.
            format: ``"hf"`` for ``transformers``, ``"peft"`` for the adapter alone, ``"merged"`` for the adapter
                merged into its base; ``"auto"``: ``"peft"`` for a LoRA run, else ``"hf"``.
        """
        name = f"export-{secrets.token_hex(8)}"

        def build() -> Request:
            return Request.of(pb.Operation(export=_message(pb.ExportModel, name=name, format=format)))

        async def fetch(export: pb.ExportResult) -> Path:
            source = pb.DownloadRequest(export=f"{self.run_id}/{export.name or name}")
            return await download(self._transport, source, Path(path))

        exported = self._queue.submit("export", build, lambda result, columns: result.export)
        return exported._then(f"export of {self.run_id}", fetch)

    def _loss(
        self,
        label: Literal["forward_backward", "forward"],
        batch: Batch,
        loss_fn: str | None,
        loss_kwargs: Mapping[str, Any] | None,
        outputs: Sequence[Output],
        model: str | Checkpoint | None = None,
        temperature: float = 1.0,
        skips: Callable[[], bool] = bool,
    ) -> Future[LossResult]:
        return self._queue.submit(
            label,
            lambda: self._loss_request(label, batch, loss_fn, loss_kwargs, outputs, model, temperature, skips()),
            LossResult.from_wire,
        )

    def _loss_request(
        self,
        label: Literal["forward_backward", "forward"],
        batch: Batch,
        loss_fn: str | None,
        loss_kwargs: Mapping[str, Any] | None,
        outputs: Sequence[Output],
        model: str | Checkpoint | None,
        temperature: float,
        skip_nonfinite: bool = False,
    ) -> Request:
        owner: str = label
        fields: Sequence[LossField] = SCORING_FIELDS
        kwargs = ""
        if loss_fn is not None or label == "forward_backward":
            loss = self._losses.get(loss_fn)
            owner, fields, kwargs = loss.name, loss.fields, kwargs_json(loss, loss_kwargs)
        elif loss_kwargs:
            raise InvalidArgumentError("loss_kwargs belong to a loss_fn", field="loss_kwargs", rule="with loss_fn")
        call = _message(
            pb.LossCall,
            loss_fn=loss_fn or "",
            loss_kwargs_json=kwargs,
            outputs=_names(outputs),
            model=model_path(model),
            temperature=temperature if loss_fn is None else 0.0,
            skip_nonfinite=skip_nonfinite,
        )
        operation = pb.Operation(forward=call) if label == "forward" else pb.Operation(forward_backward=call)
        return Request.of(operation, to_columns(owner, fields, batch))

    def _scores(
        self,
        label: str,
        output: Output,
        batch: Batch | Sequence[Any],
        model: str | Checkpoint | None = None,
        temperature: float = 1.0,
    ) -> Future[Any]:
        rows = batch if isinstance(batch, Mapping) or _is_rows_of_fields(batch) else {"input_ids": batch}

        def scores(result: pb.OperationResult, columns: Columns) -> Any:
            return LossResult.from_wire(result, columns).outputs[output]

        return self._queue.submit(
            label, lambda: self._loss_request("forward", rows, None, None, (output,), model, temperature), scores
        )

    def __repr__(self) -> str:
        return f"<TrainingClient {self.run_id}>"


class TrainingClient(Operations):
    """One run. Made by ``create_run``, ``fork_run`` or ``get_training_client`` of a :class:`gradwire.ServiceClient`.

    The run is opened, and another writer fenced, with the first operation, or by awaiting the client itself.
    """

    def __await__(self) -> Generator[Any, None, TrainingClient]:
        yield from self._link.open().__await__()
        return self

    async def earlier_operations(self) -> dict[int, Future[Any]]:
        """What clients before this one submitted and never acknowledged: number -> future of its result.

        To be called before the first operation of this client. When the program that trains was killed, these are what
        was pending: they are done, or will be, and are not to be submitted again. ``info().accepted_seq`` is the number
        of the last.
        """
        return await self._link.adopt(_any_result)

    async def info(self) -> RunInfo:
        """The run as the server knows it now; operations in the queue do not show yet."""
        return RunInfo.from_message(
            await self._transport.unary(lambda stub: stub.GetRun, pb.GetRunRequest(run_id=self.run_id))
        )

    async def list_checkpoints(self) -> list[Checkpoint]:
        """The run's checkpoints, oldest first."""
        request = pb.ListCheckpointsRequest(run_id=self.run_id)
        answer = await self._transport.unary(lambda stub: stub.ListCheckpoints, request)
        return [Checkpoint.from_message(each) for each in answer.checkpoints]

    async def delete_checkpoint(self, checkpoint: str | Checkpoint) -> None:
        """Deletes one: ``"NAME"`` of this run, or ``"RUN_ID/NAME"``."""
        request = pb.DeleteCheckpointRequest(checkpoint=self._path_of(checkpoint))
        await self._transport.unary(lambda stub: stub.DeleteCheckpoint, request)

    async def download_checkpoint(self, checkpoint: str | Checkpoint, path: str | os.PathLike[str]) -> Path:
        """Copies a checkpoint's files to a local folder, which is made where it is missing."""
        request = pb.DownloadRequest(checkpoint=self._path_of(checkpoint))
        return await download(self._transport, request, Path(path))

    async def share(self, reader: str) -> RunInfo:
        """Lets another key of the server read this run: its results and checkpoints, sampling and forking from them.

        Args:
            reader: the name of the key, as of ``gradwire keys create``.

        Raises:
            InvalidArgumentError: when no key has this name.
        """
        request = pb.ShareRunRequest(run_id=self.run_id, reader=reader)
        return RunInfo.from_message(await self._transport.unary(lambda stub: stub.ShareRun, request))

    async def unshare(self, reader: str) -> RunInfo:
        """Takes back what :meth:`share` gave. What the reader forked or downloaded stays with it."""
        request = pb.ShareRunRequest(run_id=self.run_id, reader=reader, revoke=True)
        return RunInfo.from_message(await self._transport.unary(lambda stub: stub.ShareRun, request))

    def _path_of(self, checkpoint: str | Checkpoint) -> str:
        path = model_path(checkpoint)
        return path if "/" in path else f"{self.run_id}/{path}"


def _skips(on_nonfinite: str) -> bool:
    if on_nonfinite not in ("error", "skip"):
        raise InvalidArgumentError(
            f'on_nonfinite is "error" or "skip", not {on_nonfinite!r}', field="on_nonfinite", rule="error or skip"
        )
    return on_nonfinite == "skip"


def _message(kind: Callable[..., M], **values: Any) -> M:
    """A message, or the argument that does not fit it."""
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        for name, value in values.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError):
                raise InvalidArgumentError(
                    f"{name} = {value!r} is not valid: {error}", field=name, rule="type"
                ) from None
        raise


def _names(outputs: Sequence[str]) -> list[str]:
    return [outputs] if isinstance(outputs, str) else list(outputs)


def _is_rows_of_fields(batch: Any) -> bool:
    return isinstance(batch, Sequence) and bool(batch) and isinstance(batch[0], Mapping)


def _any_result(result: pb.OperationResult, columns: Columns) -> Any:
    """What an operation gives that is known by its result only."""
    decoders: dict[str, Callable[[pb.OperationResult, Columns], Any]] = {
        "loss": LossResult.from_wire,
        "optim_step": OptimStepResult.from_wire,
        "sample": SampleResult.from_wire,
        "checkpoint": Checkpoint.from_wire,
    }
    return decoders.get(result.WhichOneof("kind") or "", _nothing)(result, columns)


def _nothing(result: pb.OperationResult, columns: Columns) -> None:
    return None
