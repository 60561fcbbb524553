"""Fields and tools of a request that this server does not serve: the rule, and its tables.

A field or a tool is

- *ignored*, and named in the answer's header ``gradwire-ignored``, if the answer is as good without it: hints, billing,
  caching, and tools that a provider runs where the client has tools of its own beside them;
- *flattened* (:mod:`.tools`), if it is a function in another form: namespaces, custom tools, the older ``functions``,
  Anthropic's ``bash``, ``text_editor`` and ``memory``;
- *refused*, with what to do instead, if the answer would be wrong without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import Request
from gradwire_http.models import BoundedModel
from gradwire_proto.v1 import training_pb2 as pb
from pydantic import GetCoreSchemaHandler, PrivateAttr
from pydantic_core import CoreSchema, core_schema

from gradwire_server.doors.http.protocol import IGNORED
from gradwire_server.errors import ServiceError


@dataclass(frozen=True)
class Unserved:
    """The treatment of a field or tool: refused or ignored.

    Attributes:
        refusal: Advice in the error; empty for a field that is ignored.
        usual: Values of a field that ask for what is done anyway; None is always one.
    """

    refusal: str = ""
    usual: tuple[Any, ...] = ()


def _ignored(*names: str) -> dict[str, Unserved]:
    return dict.fromkeys(names, Unserved())


_EVERYWHERE = _ignored(
    "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
    "cache_salt", "priority", "request_id", "guided_decoding_backend", "spaces_between_special_tokens",
    "length_penalty", "stream_options.include_obfuscation",
) | {
    "use_beam_search": Unserved("sample n, and choose by their logprobs", (False,)),
}  # fmt: skip
_STORE = {"store": Unserved(usual=(False,))}
_PARALLEL = {"parallel_tool_calls": Unserved(usual=(True,))}
_MODERATION = {"moderation": Unserved("ask a moderation model before and after")}
_COUNTED = _ignored(
    "cache_control", "context_management", "billing_policy", "speed", "user_profile_id", "workspace_id",
    "output_config.task_budget", "thinking.budget_tokens", "thinking.display",
) | {
    "tool_choice.disable_parallel_tool_use": Unserved(usual=(False,)),
    "mcp_servers": Unserved("connect to the servers in the client, and give their tools as tools", ([],)),
    "compaction": Unserved("ask for a summary with a message of your own"),
}  # fmt: skip

FIELDS: Mapping[str, Mapping[str, Unserved]] = {
    "completions": _EVERYWHERE | _ignored("user", "metadata") | _STORE,
    "chat": _EVERYWHERE
    | _PARALLEL
    | _MODERATION
    | _STORE
    | _ignored("user", "metadata", "prediction", "verbosity", "audio")
    | {"modalities": Unserved("answers are text; leave it out", (["text"],))},
    "responses": _EVERYWHERE
    | _PARALLEL
    | _MODERATION
    | _ignored(
        "client_metadata", "personality", "context_management", "max_tool_calls", "access_programs",
        "background_options", "image", "text.verbosity", "reasoning.summary", "reasoning.generate_summary",
        "reasoning.context", "reasoning.mode",
    )
    | {
        "truncation": Unserved(usual=("disabled",)),
        "background": Unserved("leave it out, and take the answer as a stream", (False,)),
        "conversation": Unserved("go on with previous_response_id, or send the whole conversation as input"),
        "prompt": Unserved("send the prompt's text as instructions and input"),
    },
    "messages": _COUNTED
    | _ignored("metadata", "service_tier", "inference_geo", "diagnostics", "fallbacks", "fallback_credit_token")
    | {
        "container": Unserved("code runs in the client: give it a tool for that"),
        "thread": Unserved("send the whole conversation as messages"),
    },
    "count_tokens": _COUNTED,
}  # fmt: skip
"""The unserved fields of each door; a dotted name is a field of a field.

``reasoning_effort`` and what says the same are ignored where the model's template has no word for it.
"""

_CLIENT = "describe it as a function, which the client calls"
TOOLS: Mapping[str, Unserved] = _ignored(
    "web_search", "web_fetch", "image_generation", "code_interpreter", "code_execution", "tool_search",
    "programmatic_tool_calling", "advisor",
) | {
    "file_search": Unserved("search in the client: describe a function that does"),
    "mcp": Unserved("connect to the server in the client, and describe its tools as functions"),
    **dict.fromkeys(("computer", "browser", "local_shell", "shell", "apply_patch"), Unserved(_CLIENT)),
}  # fmt: skip
"""Beginnings of types of tools: ``web_search`` is ``web_search_20260209`` too. Any other type is refused."""


ITEMS = ("web_search_call", "tool_search_call", "tool_search_output")
"""Items of a response's input that are ignored: what another server's tools did."""


def refused(field: str, what: str, instead: str) -> ServiceError:
    """UNSUPPORTED for a field."""
    message = f"{what} is not served here; {instead}"
    return ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field=field.partition(".")[0])


def tell_ignored(http: Request, request: DoorRequest, names: Mapping[str, str]) -> None:
    """Name what a request has in vain in its answer's header, whatever the answer is.

    Args:
        names: The core's field -> the parameter, as :func:`.requests.named` has them.
    """
    http.scope[IGNORED] = [names.get(name, name) for name in request.ignored]


def unserved_tool(kind: str) -> tuple[str, Unserved]:
    """Look up a tool by its type: its name in the table, and the entry."""
    named = max((each for each in TOOLS if kind == each or kind.startswith(f"{each}_")), key=len, default="")
    return named or kind[:50], TOOLS.get(named, Unserved(_CLIENT))


class DoorRequest(BoundedModel):
    """A request that is read by the table.

    Attributes:
        door: Its key in :data:`FIELDS`.
    """

    door: ClassVar[str]
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """Names of what the request has and the answer disregards."""
        return self._ignored

    def ignore(self, names: Iterable[str]) -> None:
        """Add to :attr:`ignored`."""
        self._ignored = list(dict.fromkeys([*self._ignored, *names]))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The model's schema, for what the table leaves of a body."""
        schema = super().__get_pydantic_core_schema__(source, handler)

        def read(values: Any, validate: core_schema.ValidatorFunctionWrapHandler) -> Any:
            if not isinstance(values, dict):
                return validate(values)
            served, ignored = _served(FIELDS[cls.door], values, cls.model_fields)
            request = validate(served)
            request.ignore(ignored)
            return request

        return core_schema.no_info_wrap_validator_function(read, schema)


def _served(
    fields: Mapping[str, Unserved], values: Mapping[str, Any], known: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """A body without what is ignored, and the names of that."""
    served, ignored = dict(values), []
    for name, entry in fields.items():
        outer, _, inner = name.partition(".")
        value = values.get(outer)
        if inner:
            value = value.get(inner) if isinstance(value, Mapping) else None
        elif outer not in known:
            served.pop(outer, None)
        if value is None or value in entry.usual:
            continue
        if entry.refusal:
            raise refused(name, name, entry.refusal)
        ignored.append(name)
    return served, ignored
