"""Operations that change a run: gradients, optimizer steps, the moving reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from gradwire_proto.v1 import training_pb2 as pb

from gradwire.custom import CustomCall, CustomLoss, Framework, check_loss, framework_in_use
from gradwire.futures import Future
from gradwire.operations.submitter import Submitter, no_result
from gradwire.results import LossResult, OptimStepResult, TrainStepResult
from gradwire.wire import requests
from gradwire.wire.entries import Request
from gradwire.wire.options import check_options
from gradwire.wire.requests import Batch, OnNonFinite, OptimizerOptions, Output, message


class TrainingOperations(Submitter):
    """Operations that change the run. Every method submits at once and returns a future."""

    def forward_backward(
        self,
        batch_data: Batch,
        loss_fn: str,
        loss_kwargs: Mapping[str, Any] | None = None,
        outputs: Sequence[Output] = (),
        on_nonfinite: OnNonFinite = "error",
        timeout: float | None = None,
        accumulate: bool = False,
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
            accumulate: True: this is a part of a batch, and more follows. The server holds it; the next call without it
                (or :meth:`train_step`) brings the last part, evaluates the loss once on all parts, exactly as on one
                batch, and returns that. For losses that take a statistic of their batch (``LossInfo.whole_batch``) and
                batches larger than one call; other losses give the same in several calls without it.

        Returns:
            A future of the loss, the metrics, the outputs, the token counts and the timings in seconds. With
            ``accumulate`` the loss is None and the counts are 0.

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
            others = {"skip_nonfinite": requests.skips(on_nonfinite), "accumulate": accumulate}
            call, columns = requests.loss_call(self._losses, batch_data, loss_fn, loss_kwargs, outputs, **others)
            return Request.of(pb.Operation(forward_backward=call), columns)

        return self._queue.submit("forward_backward", build, LossResult.from_wire, timeout)

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
            check_loss(fn)
            return requests.kept_forward(batch_data, scores, weight, temperature)

        return self._queue.submit_pair("forward_backward_custom", build, call.compute, call.result, timeout)

    def optim_step(
        self,
        learning_rate: float | None = None,
        *,
        on_nonfinite: OnNonFinite = "error",
        timeout: float | None = None,
        **options: Unpack[OptimizerOptions],
    ) -> Future[OptimStepResult]:
        """Take one optimizer step with the gradients accumulated since the last one.

        A step always ends its accumulation: if it fails, is aborted or is cancelled, the accumulated gradients are
        discarded and the next accumulation starts from zero.

        Args:
            learning_rate: Step size, 0 or more; by default by the rule of docs/lora.md, for the run's model: a policy's
                rate for a run made for RL (``head="value"`` or ``kind="rl"``), that of scores with another head, else
                that of answers.
            on_nonfinite: ``"error"``: a gradient that is not finite fails the step. ``"skip"``: it skips the step.
            timeout: Seconds after its acceptance by the server from which on the operation fails with
                ``DeadlineExceededError`` if it still waits; once begun it is finished. None for no limit.
            options: See :class:`gradwire.OptimizerOptions`.

        Returns:
            A future of the gradient norm before clipping, the learning rate, the number of steps so far, and the
            number of accumulated operations.

        Errors of the future:
            NothingToStepError: There was no ``forward_backward`` since the last step, or a last part is missing.
            InvalidArgumentError: A value is out of range.
            NonFiniteError: The gradient is NaN or infinite; weights and moments are unchanged.
        """

        check_options(OptimizerOptions, options, self.optim_step)

        def build() -> Request:
            step = requests.optim_step(learning_rate, on_nonfinite, options)
            return Request.of(pb.Operation(optim_step=step))

        return self._queue.submit("optim_step", build, OptimStepResult.from_wire, timeout)

    def train_step(
        self,
        batch_data: Batch,
        loss_fn: str,
        loss_kwargs: Mapping[str, Any] | None = None,
        outputs: Sequence[Output] = (),
        on_nonfinite: OnNonFinite = "error",
        timeout: float | None = None,
        *,
        learning_rate: float | None = None,
        **options: Unpack[OptimizerOptions],
    ) -> Future[TrainStepResult]:
        """Compute a loss and its gradients and take an optimizer step, as one operation.

        Equal to :meth:`forward_backward` and :meth:`optim_step` behind it, to the last bit, for less than half of what
        the two cost beside the computation: one submission, one entry in the server's journal, one result. Gradients
        that were accumulated before it are part of the step.

        It is carried out as a whole or leaves weights and moments as they were: if it fails, is cancelled or times out
        before the optimizer begins, there was no step. Its accumulation ends in any case, as with
        :meth:`optim_step`.

        Args:
            batch_data: As for :meth:`forward_backward`; after calls with ``accumulate=True``, the last part.
            loss_fn: The name of a loss.
            loss_kwargs: Arguments of the loss.
            outputs: Per-token outputs to return.
            on_nonfinite: ``"error"``: a loss or gradient that is not finite fails the operation. ``"skip"``: a loss
                that is not finite leaves the batch out, and a gradient that is not finite skips the step.
            timeout: Seconds after its acceptance by the server from which on the operation fails with
                ``DeadlineExceededError`` if it waits or computes gradients; the optimizer's step, once begun, is
                finished. None for no limit.
            learning_rate: As for :meth:`optim_step`.
            options: As for :meth:`optim_step`.

        Returns:
            A future of the loss with its metrics, and of the step: gradient norm, learning rate, number of steps.

        Errors of the future: those of :meth:`forward_backward` and :meth:`optim_step`.
        """

        check_options(OptimizerOptions, options, self.train_step)

        def build() -> Request:
            step = requests.optim_step(learning_rate, on_nonfinite, options)
            others = {"skip_nonfinite": requests.skips(on_nonfinite)}
            call, columns = requests.loss_call(self._losses, batch_data, loss_fn, loss_kwargs, outputs, **others)
            return Request.of(pb.Operation(train_step=pb.TrainStep(loss=call, optim_step=step)), columns)

        return self._queue.submit("train_step", build, TrainStepResult.from_wire, timeout)

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

        return self._queue.submit("zero_grad", build, no_result, timeout)

    def update_reference(self, ema: float = 0.99, timeout: float | None = None) -> Future[None]:
        """Move the reference ``"ema"`` towards the run: ``ema * reference + (1 - ema) * policy``; ``timeout`` is as for
        :meth:`optim_step`."""

        def build() -> Request:
            return Request.of(pb.Operation(update_reference=message(pb.UpdateReference, ema=ema)))

        return self._queue.submit("update_reference", build, no_result, timeout)
