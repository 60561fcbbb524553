"""The message of a sampling request, from prompts and options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb

from gradwire.errors import InvalidArgumentError, type_of
from gradwire.wire.columns import token_rows
from gradwire.wire.images import to_image_columns
from gradwire.wire.requests import message

Prompts = str | Sequence[Any]
"""A text, a row of token ids, or a list of either."""


class SamplingOptions(TypedDict, total=False):
    """How tokens are drawn and where samples end: the keyword arguments of every method that samples.

    A dictionary of them is passed on with ``run.sample(prompts, **options)``.

    Attributes:
        max_tokens: Maximum number of tokens per sample; 64 by default.
        temperature: Divides the logits; 0 always takes the most probable token. 1 by default.
        top_k: Sample from this many most probable tokens; 0, the default, samples from all.
        top_p: Sample from the most probable tokens with this total probability; 1, the default, samples from all.
        stop: Stop strings; the text ends before the first one found.
        stop_token_ids: Stop tokens in addition to the model's own end tokens.
        seed: The same seed gives the same samples; None, the default, draws from the run's own generator.
        ignore_eos: Continue past the model's end tokens.
        min_p: Leave out tokens less probable than this share of the most probable one's probability, after ``top_k``
            and ``top_p`` (Nguyen et al. 2024).
        repetition_penalty: Makes tokens of the prompt and of the sample so far less probable if above 1, the default:
            divides their positive logits and multiplies their negative ones (Keskar et al. 2019).
        presence_penalty: Subtracted from the logits of tokens in the sample so far.
        frequency_penalty: Subtracted from a token's logit for each time it is in the sample so far.
        logit_bias: Token id -> number from -100 to 100 added to its logit.
        json_schema: The text is a JSON document of this schema; the server needs ``gradwire[guided]``. A sample that
            ends with ``"length"`` is the beginning of one.
        top_logprobs: Also return this many most probable tokens in each place, for ``top_k_distillation``.
        deterministic: Compute the samples in a batch of their own: with a seed, the same call gives the same bits of
            log-probabilities on the same machine, whatever else is asked of the server at the time. Other requests'
            batches then take turns with it, and it finds no prompt that others have left in the cache.
    """

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    seed: int | None
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    json_schema: Mapping[str, Any] | str | None
    top_logprobs: int
    deterministic: bool


DEFAULTS: SamplingOptions = {"max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
"""Options that are not off by default."""


def sample_call(
    prompts: Prompts,
    options: SamplingOptions,
    *,
    n: int = 1,
    images: Any = None,
    prompt_logprobs: bool = False,
    top_prompt_logprobs: int = 0,
) -> tuple[pb.SampleCall, dict[str, Column]]:
    """Build the message, and columns with the prompts' ids, if they were given as ids, and with their images.

    Args:
        options: Checked options.
        n: Samples per prompt.
        images: A list of images for each prompt, or None.
        prompt_logprobs: Also return the log-probabilities of the prompts' tokens.
        top_prompt_logprobs: Also return this many most probable tokens in each place of the prompts.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts) if _are_texts(prompts) else []
    columns = {} if texts else {"prompt_ids": token_rows("prompt_ids", prompts)}
    if images is not None:
        columns |= to_image_columns(images, len(texts) or columns["prompt_ids"].num_rows)
    arguments: dict[str, Any] = {"n": n, **DEFAULTS, **options}
    stop, logit_bias = arguments.pop("stop", ()), arguments.pop("logit_bias", {})
    json_schema = arguments.pop("json_schema", None)
    if not isinstance(logit_bias, Mapping):
        raise InvalidArgumentError(
            f"logit_bias maps token ids to numbers, and is no {type(logit_bias).__name__}",
            field="logit_bias",
            rule="a mapping",
        )
    for name in ("n", "top_p", "repetition_penalty"):
        value = arguments[name]
        if not value > 0:  # the wire would take 0 for its default
            raise InvalidArgumentError(f"sample: {name} is {value}; it must be greater than 0", field=name, rule="> 0")
    call = message(
        pb.SampleCall,
        prompts=texts,
        stop=[stop] if isinstance(stop, str) else stop,
        logit_bias=[message(pb.LogitBias, token_id=token, bias=bias) for token, bias in logit_bias.items()],
        json_schema=_schema(json_schema),
        prompt_logprobs=prompt_logprobs,
        top_prompt_logprobs=top_prompt_logprobs,
        **arguments,
    )
    return call, columns


def _schema(schema: Mapping[str, Any] | str | None) -> str:
    if schema is None or isinstance(schema, str):
        return schema or ""
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"json_schema is not a JSON object: {error}", field="json_schema", rule="a JSON schema"
        ) from None


def _is_list(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def _are_texts(prompts: Sequence[Any]) -> bool:
    if not hasattr(prompts, "__len__"):
        raise InvalidArgumentError(
            f"prompts are texts or rows of token ids, not {type_of(prompts)}", field="prompts", rule="a list"
        )
    if any(isinstance(each, Mapping) for prompt in prompts for each in (prompt if _is_list(prompt) else [prompt])):
        raise InvalidArgumentError(
            "prompts are texts or rows of token ids, and these are chat messages: give the ids that `await "
            "service.render(messages, train_on=None, add_generation_prompt=True)` returns as input_ids",
            field="prompts", rule="texts or ids",
        )  # fmt: skip
    kinds = {isinstance(prompt, str) for prompt in prompts}
    if kinds == {True, False}:
        raise InvalidArgumentError(
            "prompts are either all texts or all rows of token ids", field="prompts", rule="one kind"
        )
    return kinds == {True}
