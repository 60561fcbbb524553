"""``POST /tokenize`` and ``POST /detokenize``, outside ``/v1``, as vLLM has them."""

from __future__ import annotations

from typing import Any

from gradwire_http.models import BoundedModel
from pydantic import BaseModel, ConfigDict

from gradwire_server.core.core import Core
from gradwire_server.doors.http.errors import application
from gradwire_server.doors.http.openai.conversations import Conversation
from gradwire_server.doors.http.openai.errors import OpenAIErrorAnswer, error_body, explain_bodies
from gradwire_server.doors.http.openai.names import find_model
from gradwire_server.doors.http.openai.requests import ChatRequest, TokenId, check_encodable, named
from gradwire_server.doors.http.protocol import CallerOf, HttpProtocol
from gradwire_server.errors import invalid


class TokenizeRequest(BoundedModel):
    """A text, or a conversation."""

    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BoundedModel):
    """Token ids."""

    model_config = ConfigDict(extra="forbid")

    model: str
    tokens: list[TokenId]


class Tokenized(BaseModel):
    """The ids of a text, and as how the vocabulary has them, if that was wanted."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """The text of ids."""

    prompt: str


PATHS = ("/tokenize", "/detokenize")


def protocol(core: Core) -> HttpProtocol:
    """The routes as a protocol."""
    app = application("gradwire's tokenizers", OpenAIErrorAnswer, error_body)
    explain_bodies(app)

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest, caller: CallerOf) -> Tokenized:
        base = find_model(core, caller, asked.model).base
        with named({"texts": "prompt", "conversations": "messages"}):
            if asked.messages:
                chat = ChatRequest(
                    model=asked.model, messages=asked.messages, tools=asked.tools,
                    add_generation_prompt=asked.add_generation_prompt, chat_template_kwargs=asked.chat_template_kwargs,
                    continue_final_message=asked.continue_final_message,
                )  # fmt: skip
                ids = list((await Conversation(core, caller, chat).request()).prompt_ids[0].ids)
            elif asked.prompt is not None:
                check_encodable(asked.prompt, "prompt")
                special = asked.add_special_tokens is not False
                (found,) = await core.texts.encode(caller, base, [asked.prompt], add_special_tokens=special)
                ids = list(found.ids)
            else:
                raise invalid("give a prompt, or messages", "prompt")
            pieces = await core.texts.pieces(caller, base, ids) if asked.return_token_strs else None
        most = core.scheduler.checks.context_length(base)
        return Tokenized(count=len(ids), max_model_len=most, tokens=ids, token_strs=pieces)

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest, caller: CallerOf) -> Detokenized:
        base = find_model(core, caller, asked.model).base
        with named({"sequences": "tokens"}):
            (text,) = await core.texts.decode(caller, base, [asked.tokens], skip_special_tokens=False)
        return Detokenized(prompt=text)

    return HttpProtocol("tokenizers", "", app, error_body, paths=PATHS, for_agents=PATHS)
