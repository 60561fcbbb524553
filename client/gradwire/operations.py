"""The operations of a run, submitted in program order."""

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
from gradwire.entries import Request
from gradwire.errors import InvalidArgumentError
from gradwire.files import check_folder, download
from gradwire.futures import Future
from gradwire.link import RunLink
from gradwire.losses import LossCatalogue, model_path
from gradwire.queue import OperationQueue
from gradwire.requests import Batch, OnNonFinite, Output, message
from gradwire.results import Checkpoint, Columns, LossResult, OptimStepResult, SampleResult
from gradwire.sampling import NO_BIAS, Prompts, sample_call
from gradwire.transport import Transport

Array = npt.NDArray[Any]


class Operations:
    """The operations of one run. Every method submits at once, in program order, and returns a future.

    A failed operation leaves the run unchanged. Operations that were submitted behind it before its error was raised,
    up to and including the next ``optim_step``, fail with an :class:`~gradwire.errors.AbortedPredecessorError` that
    names the first cause.
    """

    def __init__(self, transport: Transport, queue: OperationQueue, link: RunLink, losses: LossCatalogue) -> None:
        self._transport = transport
        self._queue = queue
        self._link = link
        self._losses = losses

    @property
    def run_id(self) -> str:
        """The run's id, accepted by ``get_training_client`` from this or any other process."""
        return self._queue.run_id

    def forward_backward(
        self,
        batch_data: Batch,
        loss_fn: str,
        loss_kwargs: Mapping[str, Any] | None = None,
        outputs: Sequence[Output] = (),
        on_nonfinite: OnNonFinite = "error",
        timeout: float | None = None,
    ) -> Future[LossResult]:
        """Compute a loss of the batch and add its gradients to those accumulated since the last ``optim_step``.

        Args:
            batch_data: Columns (a mapping from field to values) or rows (a list of mappings), with the fields that the
                loss declares; ``list_losses`` and docs/losses.md give their dtypes and shapes. Most losses take
                ``input_ids`` int ``[rows, tokens]``, ragged, or padded with an ``attention_mask`` of 0 and 1. Per-token
                fields (``loss_mask``, ``old_log_probs`` in nats, ``rewards``) are ``[rows, tokens]``; entry t belongs
                to token t. Lists, numpy arrays or torch tensors.
            loss_fn: The name of a loss, e.g. ``"causal_lm"``.
            loss_kwargs: Arguments of the loss; omitted ones have the loss's defaults.
            outputs: Per-token outputs to return beside loss and metrics; none by default. See :meth:`forward`.
            on_nonfinite: ``"error"``: a loss or gradient that is not finite fails the operation and names the row.
                ``"skip"``: it leaves the batch out with a warning; the batch adds no gradient and its loss is NaN.
            timeout: Seconds after its acceptance by the server from which on the operation fails with
                ``DeadlineExceededError``, whether it waits or is being executed. None for no limit.

        Returns:
            A future of the loss, the metrics, the outputs, the token counts and the timings in seconds.

        Errors of the future:
            InvalidBatchError: The batch breaks a rule; names the field, the row and the rule.
            InvalidArgumentError: An argument of the loss is unknown, missing or out of range.
            UnknownLossError: The server has no such loss.
            UnknownModelError, UnknownCheckpointError: The reference model does not exist.
            UnsupportedError: The run lacks the head that the loss reads.
            LimitExceededError: The batch is larger than the server accepts.
            NonFiniteError: The loss or its gradient is NaN or infinite.
            OutOfMemoryError: A single example does not fit the device's memory."""

        def build() -> Request:
            return requests.forward_backward(self._losses, batch_data, loss_fn, loss_kwargs, outputs, on_nonfinite)

        return self._queue.submit("forward_backward", build, LossResult.from_wire, timeout)

    def forward(
        self,
        batch_data: Batch,
        loss_fn: str | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        outputs: Sequence[Output] = ("logprobs",),
        model: str | Checkpoint | None = None,
        temperature: float = 1.0,
        timeout: float | None = None,
    ) -> Future[LossResult]:
        """Score the batch without gradients.

        Args:
            batch_data: As for :meth:`forward_backward`; without a loss ``input_ids``, and optionally
                ``attention_mask`` and ``loss_mask``, all ``[rows, tokens]``.
            loss_fn: A loss to compute as well.
            loss_kwargs: Arguments of the loss.
            outputs: The outputs to return. Each is a list with one float32 array per row over the row's scored tokens
                (all but the first, or those that a mask selects): ``"logprobs"`` and ``"entropy"`` in nats,
                ``"values"`` of a value head, and others, which the error for an unknown name lists. ``"rewards"`` of a
                reward head is one array ``[rows]``.
            model: The model to score with instead of the run: ``"base"``, ``"ema"``, a checkpoint, or a model of the
                server.
            temperature: Divides the logits; only without a loss.
            timeout: Seconds after its acceptance by the server from which on the operation fails with
                ``DeadlineExceededError``, whether it waits or is being executed. None for no limit.

        Errors of the future: those of :meth:`forward_backward`.
        """

        def build() -> Request:
            if loss_fn is None:
                if loss_kwargs:
                    raise InvalidArgumentError("loss_kwargs need a loss_fn", field="loss_kwargs", rule="with loss_fn")
                return requests.forward_scores(batch_data, outputs, model, temperature)
            if temperature != 1:
                raise InvalidArgumentError(
                    f"temperature divides the logits of plain scores; {loss_fn} has its own arguments",
                    field="temperature",
                    rule="without loss_fn",
                )
            return requests.forward_loss(self._losses, batch_data, loss_fn, loss_kwargs, outputs, model)

        return self._queue.submit("forward", build, LossResult.from_wire, timeout)

    def forward_backward_custom(
        self,
        batch_data: Batch,
        fn: CustomLoss,
        scores: Sequence[Output] = ("logprobs",),
        weight: float = 1.0,
        temperature: float = 1.0,
        framework: Framework | None = None,
        timeout: float | None = None,
    ) -> Future[LossResult]:
        """Compute your own loss locally on scores from the server, and send its gradients back.

        ``fn(batch_data, scores)`` runs in a worker thread. ``scores`` maps each name to a list of arrays, one per row,
        over the row's scored tokens (``"rewards"``: one array ``[rows]``). If your process has imported torch they are
        tensors that require gradients, and ``fn`` returns the loss or ``(loss, metrics)``. Otherwise they are numpy
        arrays, and ``fn`` returns ``(loss, gradients)`` or ``(loss, gradients, metrics)``, where gradients have the
        shapes of the scores. The future raises any exception of ``fn``. The model runs one forward and one backward
        while the batch fits the activation budget; a larger batch (``result.recomputed``) costs a second forward.

        Args:
            batch_data: ``input_ids``, and optionally ``attention_mask`` and ``loss_mask``.
            fn: The loss function.
            scores: The scores to pass to ``fn``: any of the :data:`Output` names. ``candidate_logprobs`` needs the
                batch field ``candidates [rows, tokens, candidates]``.
            weight: The number of rows or tokens that the loss averages over. The batches of an accumulation are
                weighted in proportion to it.
            temperature: Divides the logits.
            framework: ``"torch"`` or ``"numpy"``; by default torch if it is imported.
            timeout: Seconds after the acceptance of the scores from which on the whole fails with
                ``DeadlineExceededError``: scores, ``fn`` and gradients. None for no limit.
        """
        call = CustomCall(batch_data, fn, weight, "numpy")

        def build() -> Request:
            call.framework = framework_in_use(framework)
            if not callable(fn):
                raise InvalidArgumentError(f"fn is the loss, a function, not a {type(fn).__name__}", field="fn")
            return requests.kept_forward(batch_data, scores, weight, temperature)

        return self._queue.submit_pair("forward_backward_custom", build, call.compute, call.result, timeout)

    def optim_step(
        self,
        learning_rate: float | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        on_nonfinite: OnNonFinite = "error",
        timeout: float | None = None,
        optimizer: Literal["adamw", "sgd", "muon"] = "adamw",
        momentum: float | None = None,
        head_learning_rate: float | None = None,
        decay: Literal["all", "matrices"] = "all",
    ) -> Future[OptimStepResult]:
        """Take one optimizer step with the gradients accumulated since the last one.

        A step always ends its accumulation: if it fails, is aborted or is cancelled, the accumulated gradients are
        discarded and the next accumulation starts from zero.

        Args:
            learning_rate: Step size, 0 or more; by default 1e-5 for a run made for RL (``head="value"`` or
                ``kind="rl"``), else 1e-4.
            betas: Decay of the first and second moment, each ``0 <= beta < 1``.
            eps: Added to the root of the second moment.
            weight_decay: Decoupled weight decay (Loshchilov & Hutter, 2019); for ``"sgd"`` added to the gradient.
            max_grad_norm: Scale the gradient down to this Euclidean norm; 0 disables clipping.
            on_nonfinite: ``"error"``: a gradient that is not finite fails the step. ``"skip"``: it skips the step.
            timeout: Seconds after its acceptance by the server from which on the operation fails with
                ``DeadlineExceededError`` if it still waits; once begun it is finished. None for no limit.
            optimizer: ``"adamw"``, ``"sgd"`` or ``"muon"`` (Jordan et al. 2024), which updates embeddings, heads, norms
                and biases by AdamW. Each keeps moments of its own.
            momentum: Of ``"sgd"`` (0.9 by default) and ``"muon"`` (0.95).
            head_learning_rate: Step size of the run's own head; by default the same.
            decay: What weight decay applies to: all weights, or matrices only (no norms and biases).

        Returns:
            A future of the gradient norm before clipping, the learning rate, the number of steps so far, and the
            number of accumulated operations.

        Errors of the future:
            NothingToStepError: There was no ``forward_backward`` since the last step.
            InvalidArgumentError: A value is out of range.
            NonFiniteError: The gradient is NaN or infinite; weights and moments are unchanged.
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
                optimizer=optimizer,
                momentum=momentum,
                head_learning_rate=head_learning_rate,
                decay_matrices_only=_matrices_only(decay),
                max_grad_norm=max_grad_norm,
                skip_nonfinite=requests.skips(on_nonfinite),
            )
            return Request.of(pb.Operation(optim_step=step))

        return self._queue.submit("optim_step", build, OptimStepResult.from_wire, timeout)

    def zero_grad(self, timeout: float | None = None) -> Future[None]:
        """Discard the gradients accumulated since the last ``optim_step``.

        Use it to drop a batch after its ``forward_backward``. It is not needed between steps, nor after a
        failed step.

        Args:
            timeout: Seconds after its acceptance by the server from which on the operation fails with
                ``DeadlineExceededError`` if it still waits; once begun it is finished. None for no limit.
        """

        def build() -> Request:
            return Request.of(pb.Operation(zero_grad=pb.ZeroGrad()))

        return self._queue.submit("zero_grad", build, _no_result, timeout)

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
        timeout: float | None = None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] = NO_BIAS,
        json_schema: Mapping[str, Any] | str | None = None,
        top_logprobs: int = 0,
    ) -> Future[SampleResult]:
        """Generate continuations of prompts with the run's weights at this point of the program.

        Args:
            prompts: Texts, or rows of token ids; a single text or row is a list of one.
            n: Samples per prompt.
            max_tokens: Maximum number of tokens per sample.
            temperature: Divides the logits; 0 always takes the most probable token.
            top_k: Sample from this many most probable tokens; 0 samples from all.
            top_p: Sample from the most probable tokens with this total probability; 1 samples from all.
            stop: Stop strings; the text ends before the first one found.
            stop_token_ids: Stop tokens in addition to the model's own end tokens.
            seed: The same seed gives the same samples; None draws from the run's own generator.
            ignore_eos: Continue past the model's end tokens.
            timeout: Seconds after its acceptance by the server from which on the operation fails with
                ``DeadlineExceededError``, whether it waits or is being executed. None for no limit.
            min_p: Leave out tokens less probable than this share of the most probable one's probability, after
                ``top_k`` and ``top_p`` (Nguyen et al. 2024).
            repetition_penalty: Makes tokens of the prompt and of the sample so far less probable if above 1: divides
                their positive logits and multiplies their negative ones (Keskar et al. 2019).
            presence_penalty: Subtracted from the logits of tokens in the sample so far.
            frequency_penalty: Subtracted from a token's logit for each time it is in the sample so far.
            logit_bias: Token id -> number from -100 to 100 added to its logit.
            json_schema: The text is a JSON document of this schema; the server needs ``gradwire[guided]``. A sample
                that ends with ``"length"`` is the beginning of one.
            top_logprobs: Also return this many most probable tokens in each place, for ``top_k_distillation``.

        Returns:
            A future; ``.samples[p][k]`` is the k-th sample of prompt p: token ids, text, log-probabilities.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "prompts", "timeout")}

        def build() -> Request:
            call, columns = sample_call(prompts, **arguments)
            return Request.of(pb.Operation(sample=call), columns)

        return self._queue.submit("sample", build, SampleResult.from_wire, timeout)

    def compute_logprobs(
        self,
        batch_data: Batch | Sequence[Any],
        model: str | Checkpoint | None = None,
        temperature: float = 1.0,
        timeout: float | None = None,
    ) -> Future[list[Array]]:
        """Compute the log-probabilities of each row's scored tokens, in nats.

        Scored are all tokens but the first, or those that a mask selects.

        Args:
            batch_data: A batch of ``input_ids`` with optional masks, or plain rows of token ids.
            model: Another model to score with (see ``forward``).
            temperature: Divides the logits.
            timeout: As for :meth:`forward`.
        """
        return self._scores("compute_logprobs", "logprobs", batch_data, model, temperature, timeout)

    def compute_values(self, batch_data: Batch | Sequence[Any], timeout: float | None = None) -> Future[list[Array]]:
        """Compute the value head's output for each scored token of each row. The run needs ``head="value"``;
        ``timeout`` is as for :meth:`forward`."""
        return self._scores("compute_values", "values", batch_data, timeout=timeout)

    def compute_rewards(self, batch_data: Batch | Sequence[Any], timeout: float | None = None) -> Future[Array]:
        """Compute the reward head's output ``[rows]``, read at each row's last token. The run needs
        ``head="reward"``; ``timeout`` is as for :meth:`forward`."""
        return self._scores("compute_rewards", "rewards", batch_data, timeout=timeout)

    def update_reference(self, ema: float = 0.99, timeout: float | None = None) -> Future[None]:
        """Move the reference ``"ema"`` towards the run: ``ema * reference + (1 - ema) * policy``; ``timeout`` is as for
        :meth:`optim_step`."""

        def build() -> Request:
            return Request.of(pb.Operation(update_reference=message(pb.UpdateReference, ema=ema)))

        return self._queue.submit("update_reference", build, _no_result, timeout)

    def save_checkpoint(
        self, name: str = "", note: str = "", overwrite: bool = False, timeout: float | None = None
    ) -> Future[Checkpoint]:
        """Save weights, optimizer state, random generators and the position in the queue.

        Args:
            name: Letters, digits and ``._-``; empty: ``step-N``.
            note: A note for people.
            overwrite: Replace a checkpoint of the same name instead of raising AlreadyExistsError.
            timeout: Seconds after its acceptance by the server from which on the operation fails with
                ``DeadlineExceededError`` if it still waits; once begun it is finished. None for no limit.
        """

        def build() -> Request:
            save = message(pb.SaveCheckpoint, name=name, note=note, overwrite=overwrite)
            return Request.of(pb.Operation(save_checkpoint=save))

        return self._queue.submit("save_checkpoint", build, Checkpoint.from_wire, timeout)

    def load_checkpoint(
        self, checkpoint: str | Checkpoint, weights_only: bool = False, timeout: float | None = None
    ) -> Future[Checkpoint]:
        """Restore a checkpoint, ``"NAME"`` of this run or ``"RUN_ID/NAME"``; the future gives its description.

        Args:
            checkpoint: The checkpoint to restore.
            weights_only: Keep the optimizer state and the random generators as they are.
            timeout: Seconds after its acceptance by the server from which on the operation fails with
                ``DeadlineExceededError`` if it still waits; once begun it is finished. None for no limit.
        """

        def build() -> Request:
            load = message(pb.LoadCheckpoint, checkpoint=model_path(checkpoint), weights_only=weights_only)
            return Request.of(pb.Operation(load_checkpoint=load))

        return self._queue.submit("load_checkpoint", build, Checkpoint.from_wire, timeout)

    def export(
        self,
        path: str | os.PathLike[str],
        format: Literal["auto", "hf", "peft", "merged"] = "auto",
        timeout: float | None = None,
    ) -> Future[Path]:
        """Write the run's weights at this point of the program to a local folder.

        Args:
            path: The folder; created if missing.
            format: ``"hf"`` for ``transformers``, ``"peft"`` for the adapter alone, ``"merged"`` for the adapter
                merged into its base; ``"auto"``: ``"peft"`` for a LoRA run, else ``"hf"``.
            timeout: As for :meth:`save_checkpoint`; the transfer of the files, which follows, is not limited.

        Errors of the future:
            InvalidArgumentError: The path is a file, or the format is unknown.
        """
        name = f"export-{secrets.token_hex(8)}"

        def build() -> Request:
            check_folder("export", path)
            return Request.of(pb.Operation(export=message(pb.ExportModel, name=name, format=format)))

        async def fetch(export: pb.ExportResult) -> Path:
            source = pb.DownloadRequest(export=f"{self.run_id}/{export.name or name}")
            return await download(self._transport, source, Path(path))

        exported = self._queue.submit("export", build, lambda result, columns: result.export, timeout)
        return exported._then(f"export of {self.run_id}", fetch)

    def _scores(
        self,
        label: str,
        output: Output,
        batch: Batch | Sequence[Any],
        model: str | Checkpoint | None = None,
        temperature: float = 1.0,
        timeout: float | None = None,
    ) -> Future[Any]:
        def build() -> Request:
            return requests.forward_scores(requests.as_rows(batch), (output,), model, temperature)

        def scores(result: pb.OperationResult, columns: Columns) -> Any:
            return LossResult.from_wire(result, columns).outputs[output]

        return self._queue.submit(label, build, scores, timeout)

    def __repr__(self) -> str:
        return f"<TrainingClient {self.run_id}>"


def _no_result(result: pb.OperationResult, columns: Columns) -> None:
    return None


def _matrices_only(decay: str) -> bool:
    if decay not in ("all", "matrices"):
        raise InvalidArgumentError(
            f'decay is "all" or "matrices", not {decay!r}', field="decay", rule='"all" or "matrices"'
        )
    return decay == "matrices"
