"""Requests for completions as OpenAI's clients send them, and what they ask of the sampler.

Beside OpenAI's own fields: ``top_k``, ``min_p``, ``repetition_penalty``, ``stop_token_ids``, ``ignore_eos``,
``min_tokens``, ``guided_json``, ``guided_regex``, ``guided_choice``, ``guided_grammar``, ``structured_outputs``,
``skip_special_tokens``, ``prompt_logprobs``, ``return_token_ids``, ``return_tokens_as_token_ids``,
``add_generation_prompt`` and ``continue_final_message``, as other servers name them (``extra_body`` of the ``openai``
package). A field that is not known is refused; :mod:`.unserved` has those that are known and not served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from gradwire_http.models import BoundedModel
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import ConfigDict, Discriminator, Field, Tag

from gradwire_server.doors.http.openai.unserved import DoorRequest
from gradwire_server.errors import ServiceError, invalid

GREEDY_BELOW = 1e-5
"""Temperatures below this one take the most probable token, instead of dividing logits by almost nothing."""
MAX_TOKENS = 2**31
MAX_BIAS = 1_000_000
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BoundedModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class StructuredOutputs(BoundedModel):
    """The form of the text, as vLLM names it: one of these."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = Field(default=None, min_length=1)
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = Field(default=None, min_length=1)
    json_object: Literal[True] | None = None


class SamplingRequest(DoorRequest):
    """Fields that completions and chat completions share."""

    model_config = ConfigDict(extra="forbid")

    model: str
    n: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0, lt=MAX_TOKENS)
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(default=None, min_length=1)
    guided_choice: list[str] | None = Field(default=None, min_length=1)
    guided_grammar: str | None = Field(default=None, min_length=1)
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, lt=2**31)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def given(self) -> set[str]:
        """The fields that the client has set."""
        return {name for name in SamplingRequest.model_fields if getattr(self, name) is not None}

    def call(self, max_tokens: int | None, json_schema: str = "") -> pb.SampleCall:
        """Return the request's settings as a call of the sampler."""
        forms = self._forms()
        if json_schema:
            forms.append(("response_format or tool_choice", "json_schema", json_schema))
        if len({form[1:] for form in forms}) > 1:  # clients send the older and the newer name of one form
            message = f"{forms[0][0]} and {forms[1][0]} both say what the text is: give one"
            raise invalid(message, forms[0][0])
        if self.prompt_logprobs is not None and self.stream:
            raise unsupported("prompt_logprobs are not served in a stream", "prompt_logprobs")
        temperature = 1.0 if self.temperature is None else self.temperature
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in stop:
            raise invalid("stop has an empty text, at which every answer would stop before it begins", "stop")
        call = pb.SampleCall(
            n=self.n or 1,
            max_tokens=max_tokens,
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else max(self.top_p, 1e-9),  # 0 leaves the most probable token
            stop=_encodable(stop, "stop"),
            stop_token_ids=self.stop_token_ids,
            ignore_eos=bool(self.ignore_eos),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=[_bias(token, bias) for token, bias in (self.logit_bias or {}).items()],
            min_tokens=self.min_tokens or 0,
            keep_special_tokens=self.skip_special_tokens is False,
            prompt_logprobs=self.prompt_logprobs is not None,
            top_prompt_logprobs=self.prompt_logprobs or 0,
        )
        for field, form, text in forms:
            setattr(call, form, _encodable([text], field)[0])
        if self.seed is not None:
            call.seed = self.seed % 2**64
        return call

    def _forms(self) -> list[tuple[str, str, str]]:
        """The fields that constrain the text's form: name of the field, the sampler's argument, and its value."""
        structured = self.structured_outputs or StructuredOutputs()
        forms = []
        for name, form, values in (
            ("json", "json_schema", (self.guided_json, structured.json_)),
            ("regex", "regex", (self.guided_regex, structured.regex)),
            ("choice", "grammar", (self.guided_choice, structured.choice)),
            ("grammar", "grammar", (self.guided_grammar, structured.grammar)),
            ("json_object", "json_schema", (None, '{"type": "object"}' if structured.json_object else None)),
        ):
            for field, value in zip((f"guided_{name}", f"structured_outputs.{name}"), values, strict=True):
                if name == "choice" and value is not None:
                    value = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
                if value is not None:
                    forms.append((field, form, value if isinstance(value, str) else json.dumps(value)))
        return forms


def _prompt_kind(prompt: Any) -> str:
    first = prompt[0] if isinstance(prompt, list) and prompt else ""
    if not isinstance(prompt, list):
        return "text"
    return "texts" if isinstance(first, str) else "rows" if isinstance(first, list) else "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Tag("texts")]
    | Annotated[list[TokenId], Tag("ids")]
    | Annotated[list[list[TokenId]], Tag("rows")],
    Discriminator(_prompt_kind),
]
"""Told apart by the first element: a long list is validated once, and its error is of one kind."""


class CompletionRequest(SamplingRequest):
    """``POST /v1/completions``."""

    door = "completions"

    prompt: Prompt
    max_tokens: int | None = Field(default=None, ge=0, lt=MAX_TOKENS)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, lt=2**31)
    best_of: int | None = None
    suffix: str | None = None


class JsonSchemaFormat(BoundedModel):
    """A schema with its name."""

    model_config = ConfigDict(extra="ignore")

    name: str = ""
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(BoundedModel):
    """The form of the answer."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def json_schema_text(self) -> str:
        """The schema as JSON; empty for any text."""
        if self.type == "text":
            return ""
        if self.type == "json_object":
            return '{"type": "object"}'
        if self.json_schema is None:
            raise invalid("response_format of type json_schema needs a json_schema", "response_format")
        return _encodable([json.dumps(self.json_schema.schema_)], "response_format")[0]


class ChatRequest(SamplingRequest):
    """``POST /v1/chat/completions``."""

    door = "chat"

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, lt=MAX_TOKENS)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, lt=2**31)
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None

    @property
    def offered(self) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
        """The tools and the choice among them, with those that have fields of their own."""
        tools, choice = [*(self.tools or [])], self.tool_choice
        if self.functions:
            tools += [{"type": "function", "function": function} for function in self.functions]
            called = self.function_call
            choice = {"type": "function", "function": called} if isinstance(called, dict) else called
        if self.web_search_options is not None:
            tools.append({"type": "web_search"})
        return tools, choice


@contextmanager
def named(parameters: Mapping[str, str]) -> Iterator[None]:
    """Give errors of the core the name of the parameter that the client knows.

    Args:
        parameters: The core's field -> the parameter.
    """
    try:
        yield
    except ServiceError as error:
        error.error.field = parameters.get(error.error.field, error.error.field)
        raise


def unsupported(message: str, field: str) -> ServiceError:
    """UNSUPPORTED for a field."""
    return ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field=field)


def check_encodable(text: str, field: str) -> None:
    """Check that a text has UTF-8 bytes, which lone surrogates have not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(f"{field} has half of a surrogate pair, which is no character", field) from None


def _encodable(texts: list[str], field: str) -> list[str]:
    for text in texts:
        check_encodable(text, field)
    return texts


def _bias(token: str, bias: Any) -> pb.LogitBias:
    if not (token.isascii() and token.isdigit() and len(token) < 12):
        raise invalid(f"logit_bias names tokens by their ids, not {token[:50]!r}", "logit_bias")
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= MAX_BIAS:
        raise invalid(f"logit_bias of {token} is no number from -{MAX_BIAS} to {MAX_BIAS}", "logit_bias")
    return pb.LogitBias(token_id=int(token), bias=bias)
