"""What one run is asked to do, in program order."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt
from gradwire_proto.v1 import training_pb2 as pb

from gradwire import requests
from gradwire.custom import CustomCall, CustomLoss, Framework, framework_in_use
from gradwire.errors import InvalidArgumentError
from gradwire.files import download
from gradwire.futures import Future
from gradwire.link import RunLink
from gradwire.losses import LossCatalogue, model_path
from gradwire.queue import OperationQueue, Request
from gradwire.requests import Batch, OnNonFinite, Output, message
from gradwire.results import Checkpoint, Columns, LossResult, OptimStepResult, SampleResult
from gradwire.sampling import Prompts, sample_call
from gradwire.transport import Transport

Array = npt.NDArray[Any]


class Operations:
    """What one run is asked to do. Every method submits at once, in program order, and returns a future.

    An operation that fails leaves the run as it was before it, and fails those submitted behind it, through the next
    ``optim_step``, with an :class:`~gradwire.errors.AbortedPredecessorError` that names the first cause; unless they
    were submitted after that failure had been raised.
    """

    def __init__(self, transport: Transport, queue: OperationQueue, link: RunLink, losses: LossCatalogue) -> None:
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
            batch_data: columns (a mapping from field to values) or rows (a list of mappings), with the fields that the
                loss declares: their dtypes and shapes are in ``list_losses`` and docs/losses.md. Most losses take
                ``input_ids`` int ``[rows, tokens]``, ragged, or padded with an ``attention_mask`` of 0 and 1. What a
                token has (``loss_mask``, ``old_log_probs`` in nats, ``rewards``) is ``[rows, tokens]``, entry t being
                token t's. Lists, numpy arrays or torch tensors.
            loss_fn: the name of a loss, e.g. ``"causal_lm"``.
            loss_kwargs: its arguments; the loss's defaults for those left out.
            outputs: what the result shall hold beside loss and metrics, none by default: see :meth:`forward`.
            on_nonfinite: whether a loss or gradient that is not finite is an error, which names the row, or
                (``"skip"``) leaves the batch out with a warning: it then counts for nothing, and its loss is NaN.

        Returns:
            A future of the loss, the metrics, the outputs, the counts of tokens and the seconds it took.

        Errors of the future:
            InvalidBatchError: the batch breaks a rule; names the field, the row and the rule.
            InvalidArgumentError: an argument of the loss is unknown, missing or out of range.
            UnknownLossError: the server has no such loss.
            UnknownModelError, UnknownCheckpointError: the reference model is not there.
            UnsupportedError: the run lacks the head that the loss reads.
            LimitExceededError: the batch is larger than the server takes.
            NonFiniteError: the loss or its gradient is NaN or infinite.
            OutOfMemoryError: not even one example at a time fits the device.
        """

        def build() -> Request:
            return requests.forward_backward(self._losses, batch_data, loss_fn, loss_kwargs, outputs, on_nonfinite)

        return self._queue.submit("forward_backward", build, LossResult.from_wire)

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
            batch_data: as for :meth:`forward_backward`; without a loss ``input_ids``, and optionally
                ``attention_mask`` and ``loss_mask``, all ``[rows, tokens]``.
            loss_fn: a loss to compute as well.
            loss_kwargs: its arguments.
            outputs: what the result shall hold, each a list with one float32 array a row over the row's scored tokens
                (all but the first, or what a mask leaves): ``"logprobs"`` and ``"entropy"`` in nats, ``"values"`` of a
                value head, and what else the server names when asked for one it has not. ``"rewards"`` of a reward
                head is one array ``[rows]``.
            model: score with ``"base"``, ``"ema"``, a checkpoint or a model of the server's instead of the run.
            temperature: without a loss: what divides the logits.

        Errors of the future: those of :meth:`forward_backward`.
        """

        def build() -> Request:
            if loss_fn is None:
                if loss_kwargs:
                    raise InvalidArgumentError(
                        "loss_kwargs belong to a loss_fn", field="loss_kwargs", rule="with loss_fn"
                    )
                return requests.forward_scores(batch_data, outputs, model, temperature)
            if temperature != 1:
                raise InvalidArgumentError(
                    f"temperature divides the logits of plain scores; {loss_fn} has its own arguments",
                    field="temperature",
                    rule="without loss_fn",
                )
            return requests.forward_loss(self._losses, batch_data, loss_fn, loss_kwargs, outputs, model)

        return self._queue.submit("forward", build, LossResult.from_wire)

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
        shaped as the scores. What ``fn`` raises is raised by the future. It costs the model one forward and one
        backward while the batch fits the activation budget; beyond, ``result.recomputed``, a second forward.

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
            if not callable(fn):
                raise InvalidArgumentError(f"fn is the loss, a function, not a {type(fn).__name__}", field="fn")
            return requests.kept_forward(batch_data, scores, weight, temperature)

        return self._queue.submit_pair("forward_backward_custom", build, call.compute, call.result)

    def optim_step(
        self,
        learning_rate: float | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        on_nonfinite: OnNonFinite = "error",
    ) -> Future[OptimStepResult]:
        """One AdamW step with the gradients since the last one.

        A step ends its accumulation whatever becomes of it: after one that fails, is aborted or is cancelled, the
        gradients before it are gone, and the next accumulation starts from zero.

        Args:
            learning_rate: step size, 0 or more; by default 1e-5 for a run made for RL (``head="value"`` or
                ``kind="rl"``), else 1e-4.
            betas: decay of the first and second moment, each ``0 <= beta < 1``.
            eps: added to the root of the second moment.
            weight_decay: decoupled, as in Loshchilov & Hutter 2019.
            max_grad_norm: the gradient is scaled down to this Euclidean norm; 0 leaves it.
            on_nonfinite: whether a gradient that is not finite is an error or skips the step.

        Returns:
            A future of the gradient's norm before clipping, the learning rate, the number of steps so far, and the
            number of operations that were accumulated.

        Errors of the future:
            NothingToStepError: there was no ``forward_backward`` since the last step.
            InvalidArgumentError: a value out of range.
            NonFiniteError: the gradient is NaN or infinite; weights and moments are as they were.
        """

        def build() -> Request:
            if not isinstance(betas, Sequence) or len(betas) != 2:
                raise InvalidArgumentError(f"betas are two numbers, not {betas!r}", field="betas", rule="two numbers")
            step = message(
                pb.OptimStep,
                learning_rate=learning_rate or 0.0,
                default_learning_rate=learning_rate is None,
                beta1=betas[0],
                beta2=betas[1],
                eps=eps,
                weight_decay=weight_decay,
                max_grad_norm=max_grad_norm,
                skip_nonfinite=requests.skips(on_nonfinite),
            )
            return Request.of(pb.Operation(optim_step=step))

        return self._queue.submit("optim_step", build, OptimStepResult.from_wire)

    def zero_grad(self) -> Future[None]:
        """Drops the gradients since the last ``optim_step``, so that the next accumulation starts from zero.

        For a batch that turned out wrong after its ``forward_backward``. It is not needed between steps, nor after a
        step that failed.
        """
        return self._queue.submit("zero_grad", lambda: Request.of(pb.Operation(zero_grad=pb.ZeroGrad())), _no_result)

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

        Returns:
            A future; ``.samples[p][k]`` is the k-th sample of prompt p: token ids, text, log-probabilities.
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
            return Request.of(pb.Operation(update_reference=message(pb.UpdateReference, ema=ema)))

        return self._queue.submit("update_reference", build, _no_result)

    def save_checkpoint(self, name: str = "", note: str = "", overwrite: bool = False) -> Future[Checkpoint]:
        """Saves weights, optimizer, generators and place in the queue.

        Args:
            name: letters, digits, ``._-``; empty: ``step-N``.
            note: for people.
            overwrite: replaces one of the same name instead of raising AlreadyExistsError.
        """

        def build() -> Request:
            save = message(pb.SaveCheckpoint, name=name, note=note, overwrite=overwrite)
            return Request.of(pb.Operation(save_checkpoint=save))

        return self._queue.submit("save_checkpoint", build, Checkpoint.from_wire)

    def load_checkpoint(self, checkpoint: str | Checkpoint, weights_only: bool = False) -> Future[None]:
        """Goes on from a checkpoint: ``"NAME"`` of this run, or ``"RUN_ID/NAME"``.

        Args:
            checkpoint: which.
            weights_only: keeps optimizer and generators as they are.
        """

        def build() -> Request:
            load = message(pb.LoadCheckpoint, checkpoint=model_path(checkpoint), weights_only=weights_only)
            return Request.of(pb.Operation(load_checkpoint=load))

        return self._queue.submit("load_checkpoint", build, _no_result)

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
            return Request.of(pb.Operation(export=message(pb.ExportModel, name=name, format=format)))

        async def fetch(export: pb.ExportResult) -> Path:
            source = pb.DownloadRequest(export=f"{self.run_id}/{export.name or name}")
            return await download(self._transport, source, Path(path))

        exported = self._queue.submit("export", build, lambda result, columns: result.export)
        return exported._then(f"export of {self.run_id}", fetch)

    def _scores(
        self,
        label: str,
        output: Output,
        batch: Batch | Sequence[Any],
        model: str | Checkpoint | None = None,
        temperature: float = 1.0,
    ) -> Future[Any]:
        def build() -> Request:
            return requests.forward_scores(requests.as_rows(batch), (output,), model, temperature)

        def scores(result: pb.OperationResult, columns: Columns) -> Any:
            return LossResult.from_wire(result, columns).outputs[output]

        return self._queue.submit(label, build, scores)

    def __repr__(self) -> str:
        return f"<TrainingClient {self.run_id}>"


def _no_result(result: pb.OperationResult, columns: Columns) -> None:
    return None
