"""A real grpc.aio server over an engine without a model, and a whole server with the HTTP doors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest
from support.front import door, start
from support.server import free_port
from support.tinker import HttpServer, TinkerClient
from support.tiny import llama_2_tokenizer, tiny_model

__all__ = ["door", "start"]

TEXTS = [
    "the cat sat on the mat; naïve café says the cat",
    '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "assistant: user: ",
]
TEMPLATE = """{{ bos_token }}{% if tools %}tools: {{ tools | tojson }}
{% endif %}{% for message in messages %}{{ message.role }}:
{%- if message.reasoning_content %} <think>{{ message.reasoning_content }}</think>{% endif %} {{ message.content }}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}{"name": "{{ call.function.name }}", "parameters":
{{- call.function.arguments | tojson }}}
{%- endfor %}{% endif %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
DOCUMENTED = "Qwen/Qwen3-0.6B"


@pytest.fixture(scope="session")
def tinker_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("tinker")
    served = HttpServer(tiny_model(folder / "model"), folder / "state", free_port(), "--threads", "1")
    served.start()
    yield served
    served.end()


@pytest.fixture
async def tinker(tinker_server: HttpServer) -> AsyncIterator[TinkerClient]:
    """A session of its own."""
    async with httpx.AsyncClient(base_url=tinker_server.url, timeout=60) as http:
        yield await TinkerClient(http).begin()


@pytest.fixture(scope="session")
def openai_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Two models of one folder, whose template takes tools writes calls as Llama does; one with Llama 2's blanks."""
    folder = tmp_path_factory.mktemp("openai")
    model = tiny_model(folder / "model", texts=TEXTS, vocab_size=340, context_length=1024)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    blanks = tiny_model(folder / "blanks")
    llama_2_tokenizer().save(str(blanks / "tokenizer.json"))
    others = ["--model", f"{DOCUMENTED}={model}", "--model", f"blanks={blanks}"]
    running = HttpServer(model, folder / "state", free_port(), *others)
    running.start()
    yield running
    assert running.end() == 0


@pytest.fixture(scope="session")
def client(openai_server: HttpServer) -> Iterator[openai.OpenAI]:
    url = f"{openai_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        yield client
