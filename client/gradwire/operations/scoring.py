"""Operations that read a run's weights: scores, losses without gradients, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
from gradwire_proto.v1 import training_pb2 as pb

from gradwire.errors import InvalidArgumentError
from gradwire.futures import Future
from gradwire.operations.submitter import Submitter
from gradwire.results import Checkpoint, Columns, LossResult, SampleResult
from gradwire.sampling import NO_BIAS, Prompts, sample_call
from gradwire.wire import requests
from gradwire.wire.entries import Request
from gradwire.wire.requests import Batch, Output

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
            return requests.forward_loss(self._losses, batch_data, loss_fn, loss_kwargs, outputs, model)

        return self._queue.submit("forward", build, LossResult.from_wire, timeout)

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
        images: Sequence[Sequence[Any]] | None = None,
        deterministic: bool = False,
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
            images: A list of images for each prompt, as in a batch; a prompt has the model's image token in the place
                of each, as its chat template writes it.
            deterministic: Compute the samples in a batch of their own: with a seed, the same call gives the same bits
                of log-probabilities on the same machine, whatever else is asked of the server at the time. Other
                requests' batches then take turns with it, and it finds no prompt that others have left in the cache.

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
