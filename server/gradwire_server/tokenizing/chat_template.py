"""A model's chat template, in a sandbox: it comes with the model, and can neither reach the process nor its files.

The variables, filters and functions are those that ``transformers`` gives a template, so that both write the same.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from gradwire_proto.chat import Message, Span, TemplateError
from jinja2 import Environment, UndefinedError, nodes
from jinja2 import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; a template finds it under the first two whichever was given."""
MARKS = "marks_of_generation"
_ONE_THOUGHT = re.compile(r"if message\.content and message\.thinking\b")
"""gpt-oss' template refuses what the model writes: a thought, a word to the user, and a call."""
_TOOLS_IN_MESSAGE = re.compile(r"""message(\.tools\b|\[["']tools["']\])""")
"""Phi-4-mini's template reads the tools from the system message, and no calls."""

_WANTS_NONE = re.compile(r"""\['content'\] is none\s*-?%\}""")
"""DeepSeek's templates write calls where the content is none, and leave them out where it is empty."""


class _Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}``: puts the marks of the present rendering around its text."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [nodes.Name(MARKS, "load", lineno=line)])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, marks: tuple[str, str], caller: Callable[[], str]) -> str:
        return marks[0] + caller() + marks[1]


class _SafeNamespace(Namespace):
    """A namespace that takes no names with a leading underscore."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *given = args
        values = dict(*given, **attributes)
        for name in values:
            _public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: str) -> None:
    if name.startswith("_"):
        raise JinjaError(f"a namespace may not hold {name!r}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise JinjaError(message)


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise,
        strftime_now=lambda form: datetime.now().strftime(form),
        namespace=_SafeNamespace,
        dict=lambda *args, **entries: dict(*args, **entries),
    )
    return environment


class ChatTemplate:
    """The chat templates of a tokenizer's folder.

    Args:
        folder: with ``chat_template.jinja`` or ``tokenizer_config.json``, as ``save_pretrained`` leaves them.

    Attributes:
        sources: name -> template; the one that is used unless another is named is ``"default"``.
        special_tokens: role -> text, e.g. ``"eos_token"``.
    """

    def __init__(self, folder: Path) -> None:
        config = {**_read(folder / "special_tokens_map.json"), **_read(folder / "tokenizer_config.json")}
        templates = config.get("chat_template")
        self.sources: dict[str, str] = {}
        if isinstance(templates, str):
            self.sources["default"] = templates
        elif isinstance(templates, list):
            self.sources.update({each["name"]: each["template"] for each in templates})
        if (file := folder / "chat_template.jinja").is_file():
            self.sources["default"] = file.read_text()
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            self.sources[file.stem] = file.read_text()
        texts = {role: _text(config.get(role)) for role in ROLES}
        self.special_tokens = {role: text for role, text in texts.items() if text}
        self._environment = _environment()
        self._compiled: dict[str, Any] = {}

    def choose(self, name: str | None, tools: Sequence[Any] | None) -> str:
        """The name of the template for a conversation: that asked for, one for tools where there are some, the default.

        Raises:
            TemplateError: There is none of this name.
        """
        if name is None:
            name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            known = ", ".join(self.sources)
            raise TemplateError(f"the model has no chat template {name[:100]!r}; it has {known}")
        return name

    def marks_generation(self, name: str) -> bool:
        """Whether a template says itself what the assistant writes."""
        return re.search(r"{%[-+]?\s*generation\s*[-+]?%}", self.sources[name]) is not None

    def write(self, name: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """Write a conversation, and tell which spans its generation markers enclose.

        Raises:
            TemplateError: The template is broken, or refuses these messages.
        """
        nonce = secrets.token_hex(8)
        marks = (f"\ufdd0{nonce}\ufdd1", f"\ufdd2{nonce}\ufdd3")
        try:
            if _TOOLS_IN_MESSAGE.search(self.sources[name]):
                messages = _with_tools(messages, variables.get("tools"))
            if _WANTS_NONE.search(self.sources[name]):
                messages = [{**each, "content": None} if _only_calls(each) else each for each in messages]
            aliased = [_aliased(each) for each in messages]
            if _ONE_THOUGHT.search(self.sources[name]):
                aliased = [_with_one_thought(each) for each in aliased]
            values = {**self.special_tokens, **variables, MARKS: marks, "messages": aliased}
            if name not in self._compiled:
                self._compiled[name] = self._environment.from_string(self.sources[name])
            try:
                text = self._compiled[name].render(values)
            except TypeError:  # DeepSeek's templates add the arguments of calls to texts
                text = self._compiled[name].render({**values, "messages": [_with_texts(each) for each in aliased]})
            except UndefinedError:  # gpt-oss' template adds the descriptions of tools to texts; they may lack one
                described = [_described(each) for each in variables.get("tools") or ()]
                text = self._compiled[name].render({**values, "tools": described or variables.get("tools")})
        except JinjaError as error:
            raise TemplateError(str(error)) from error
        except RecursionError as error:
            raise TemplateError("it recurses without end") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, LookupError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return _unmarked(text, marks)


def _unmarked(text: str, marks: tuple[str, str]) -> tuple[str, list[Span]]:
    first, *rest = text.split(marks[0])
    spans, parts, place = [], [first], len(first)
    for part in rest:
        inside, _, outside = part.partition(marks[1])
        spans.append((place, place + len(inside)))
        parts += [inside, outside]
        place += len(inside) + len(outside)
    return "".join(parts), spans


def _with_tools(messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Message]:
    """Put tools into the system message, and calls into the assistant's texts, as Phi-4-mini was trained with them."""
    with_tools = []
    for message in messages:
        if calls := message.get("tool_calls"):
            written = [{name: _function(call)[name] for name in ("name", "arguments")} for call in calls]
            text = json.dumps(written, ensure_ascii=False)
            message = {**message, "content": f"{message.get('content') or ''}<|tool_call|>{text}<|/tool_call|>"}
        with_tools.append(message)
    if tools:
        if not with_tools or with_tools[0].get("role") != "system":
            with_tools.insert(0, {"role": "system", "content": ""})
        text = json.dumps([_function(tool) for tool in tools], ensure_ascii=False)
        with_tools[0] = {"tools": text, **with_tools[0]}
    return with_tools


def _only_calls(message: Message) -> bool:
    return bool(message.get("tool_calls")) and not message.get("content")


def _with_texts(message: Message) -> Message:
    """The message with the arguments of its calls as JSON in a text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    texts = []
    for call in calls:
        function = _function(call)
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            changed = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            call = changed if function is call else {**call, "function": changed}
        texts.append(call)
    return {**message, "tool_calls": texts}


def _described(tool: Any) -> Any:
    """A tool with a description, empty if it has none."""
    function = _function(tool)
    if not isinstance(function, dict):
        return tool
    described = {"description": "", **function}
    return described if function is tool else {**tool, "function": described}


def _function(entry: Any) -> Any:
    return entry.get("function", entry) if isinstance(entry, dict) else entry


def _aliased(message: Message) -> dict[str, Any]:
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_one_thought(message: dict[str, Any]) -> dict[str, Any]:
    thought, content = message.get("thinking"), message.get("content")
    if not (message.get("tool_calls") and isinstance(thought, str) and thought and isinstance(content, str)):
        return message
    return {**message, "thinking": f"{thought}\n\n{content}".rstrip(), "content": ""}


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    found = json.loads(file.read_text())
    return found if isinstance(found, dict) else {}


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else token if isinstance(token, str) else ""
