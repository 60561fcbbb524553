"""Operations that read a run's weights: scores, losses without gradients, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy.typing as npt
from gradwire_proto.v1 import training_pb2 as pb

from gradwire.errors import InvalidArgumentError
from gradwire.futures import Future
from gradwire.losses import model_path
from gradwire.operations.submitter import Submitter
from gradwire.results import Checkpoint, Columns, LossResult, SampleResult
from gradwire.wire import requests
from gradwire.wire.entries import Request
from gradwire.wire.options import check_options
from gradwire.wire.requests import Batch, Output
from gradwire.wire.sample_calls import Prompts, SamplingOptions, sample_call

Array = npt.NDArray[Any]


class ScoringOperations(Submitter):
    """Operations that read the run at their point of the program. Every method submits at once, returning a future."""

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
            scored = {"model": model_path(model)}
            call, columns = requests.loss_call(self._losses, batch_data, loss_fn, loss_kwargs, outputs, **scored)
            return Request.of(pb.Operation(forward=call), columns)

        return self._queue.submit("forward", build, LossResult.from_wire, timeout)

    def sample(
        self,
        prompts: Prompts,
        n: int = 1,
        *,
        images: Sequence[Sequence[Any]] | None = None,
        timeout: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Future[SampleResult]:
        """Generate continuations of prompts with the run's weights at this point of the program.

        Args:
            prompts: Texts, or rows of token ids; a single text or row is a list of one.
            n: Samples per prompt.
            images: A list of images for each prompt, as in a batch; a prompt has the model's image token in the place
                of each, as its chat template writes it.
            timeout: Seconds after its acceptance by the server from which on the operation fails with
                ``DeadlineExceededError``, whether it waits or is being executed. None for no limit.
            options: ``max_tokens``, ``temperature``, ``top_p``, ``stop``, ``seed`` and others: see
                :class:`gradwire.SamplingOptions`.

        Returns:
            A future; ``.samples[p][k]`` is the k-th sample of prompt p: token ids, text, log-probabilities.
        """
        check_options(SamplingOptions, options, self.sample)

        def build() -> Request:
            call, columns = sample_call(prompts, options, n=n, images=images)
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
