"""Programs that speak OpenAI's API, from PyPI as they are, in an environment of their own: ``make openai``."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire.sync
import httpx
import pytest
import yaml
from support.server import free_port
from support.tinker import HttpServer
from support.tiny import tiny_model

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
BIN = ROOT / ".venv-openai-shared" / "bin"
AIDER = ROOT / ".venv-openai-aider" / "bin" / "aider"
NODE = ROOT / ".node-openai"
DOCS = ROOT / "docs" / "openai.md"
PACKAGES = (
    "openai", "anthropic", "litellm", "langchain", "inspect_ai", "pydantic_ai", "instructor", "dspy", "guidance",
    "outlines", "llm",
)  # fmt: skip
NEEDS = {
    "openai": "`base_url=…/v1`",
    "anthropic": "`base_url=…`, without `/v1`",
    "litellm": "`openai/NAME` and `api_base=…/v1`; `anthropic/NAME` and `api_base=…`",
    "langchain": "`base_url=…/v1`; `ChatAnthropic`: without `/v1`",
    "inspect_ai": "`openai/NAME`, `base_url=…/v1`; `anthropic/NAME` without `/v1`",
    "pydantic_ai": "`OpenAIProvider(base_url=…/v1)`",
    "instructor": "a client of `openai`; it needs a release below 3.4",
    "dspy": "`openai/NAME`; `litellm.register_model` with `supports_response_schema`, for schemas",
    "guidance": "`base_url=…/v1`; `VLLMModel` for expressions and grammars",
    "outlines": "a client of `openai`; `from_vllm` for expressions and grammars",
    "llm": "`api_base: …/v1` in `extra-openai-models.yaml`",
    "openai (npm)": "`baseURL: …/v1`",
    "ai (npm)": "`createOpenAI({baseURL: …/v1})`, the same for `createAnthropic`",
    "aider": "`--model openai/NAME`, `OPENAI_API_BASE=…/v1`",
    "lm_eval": "see below",
}
"""What a user has to set for each program: a column of the table."""
MARKS = ("<!-- programs: written by make openai -->\n", "<!-- end -->")
QUESTIONS = [("The cat sat on the", [" mat", " cat", " naïve"], 0), ("the cat", [" says", " sat on", "; café"], 1)]
TEXTS = ["the cat sat on the mat; naïve café says the cat", '{"name": "final_result", "parameters": {"place": "Bern"}}']
TEMPLATE = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}assistant: """

pytestmark = pytest.mark.slow
needs_environments = "needs the environments of `make openai`"
ran: dict[str, tuple[str, str]] = {}
"""Of each program that ran to its end: its version, and what was tried."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    model = tiny_model(folder / "model", texts=TEXTS, vocab_size=340, context_length=8192, initializer_range=0.2)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    running = HttpServer(folder / "model", folder / "state", free_port())
    running.start()
    yield running
    assert running.end() == 0


def tried(package: str) -> str:
    """The docstring of a package's function in ``packages.py``."""
    functions = ast.parse((HERE / "packages.py").read_text()).body
    (found,) = [each for each in functions if isinstance(each, ast.FunctionDef) and each.name == f"with_{package}"]
    return str(ast.get_docstring(found))


def run(command: list[Any], folder: Path, address: str = "") -> str:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "OPENAI_API_KEY": "x"}
    offline |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_BASE": address} if address else {}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=os.environ | offline, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def encoded(service: Any, texts: list[str]) -> list[list[int]]:
    """Token ids as lm-eval makes them: without special tokens."""
    rows: list[list[int]] = service.encode("tiny", texts, add_special_tokens=False)
    return rows


@pytest.mark.skipif(not (BIN / "lm_eval").exists(), reason=needs_environments)
def test_lm_eval_scores_a_task_of_our_own(folder: Path, server: HttpServer) -> None:
    rows = [{"question": text, "choices": choices, "answer": answer} for text, choices, answer in QUESTIONS * 3]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "cats",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "tasks" / "cats.yaml").write_text(yaml.safe_dump(task))
    with gradwire.sync.connect(server.address, connect_timeout=120) as service:
        trained = service.create_run("tiny", lora=8, seed=1)
        right = encoded(service, [text + choices[answer] for text, choices, answer in QUESTIONS])
        for _ in range(20):
            trained.forward_backward({"input_ids": right}, "causal_lm")
            trained.optim_step(learning_rate=2e-2)
        trained.save_checkpoint("cats").result()
        found = {}
        for model in ("tiny", f"{trained.run_id}/cats"):
            arguments = f"model={model},base_url={server.url}/v1/completions,tokenizer={folder / 'model'}"
            arguments += ",tokenizer_backend=huggingface,num_concurrent=2"
            out = folder / f"out-{model.replace('/', '-')}"
            command = [BIN / "lm_eval", "--model", "local-completions", "--model_args", arguments, "--tasks", "cats"]
            run([*command, "--include_path", folder / "tasks", "--output_path", out, "--log_samples"], folder)
            (results,) = out.rglob("results_*.json")
            found[model] = json.loads(results.read_text())["results"]["cats"]["acc,none"]
            (samples,) = out.rglob("samples_cats_*.jsonl")
            client = service.sampling_client(model)
            for line in samples.read_text().splitlines():
                sample = json.loads(line)
                for choice, ((told, _greedy),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
                    ids = encoded(service, [sample["doc"]["question"], sample["doc"]["question"] + choice])
                    (logprobs,) = client.compute_logprobs([ids[1]]).result()
                    assert float(told) == pytest.approx(float(logprobs[len(ids[0]) - 1 :].sum()), abs=1e-3)
    assert found[f"{trained.run_id}/cats"] == 1.0 >= found["tiny"]
    version = run([BIN / "python", "-c", "import importlib.metadata as m; print(m.version('lm_eval'))"], folder)
    ran["lm_eval"] = version.strip(), "`local-completions`: each choice's log-probability is the sampler's"


@pytest.fixture(scope="module")
def said(server: HttpServer) -> str:
    """What the model answers, greedily, within eight tokens."""
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 8}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked | {"temperature": 0}, timeout=300).json()
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_what_the_server_says(folder: Path, server: HttpServer, said: str, package: str) -> None:
    python = ROOT / f".venv-openai-{'instructor' if package == 'instructor' else 'shared'}" / "bin" / "python"
    if not python.exists():
        pytest.skip(needs_environments)
    told = run([python, HERE / "packages.py", package, server.url, "tiny"], folder, f"{server.url}/v1")
    answer = json.loads(told.strip().splitlines()[-1])
    assert answer["said"] == said
    ran[package] = answer["version"], tried(package)


@pytest.mark.skipif(not (NODE / "node_modules").exists(), reason=needs_environments)
@pytest.mark.parametrize("package", ["openai", "ai"])
def test_packages_of_npm_say_what_the_server_says(folder: Path, server: HttpServer, said: str, package: str) -> None:
    told = run(["node", NODE / "packages.mjs", package, server.url, "tiny"], folder)
    answer = json.loads(told.strip().splitlines()[-1])
    assert answer["said"] == said
    how = "chat, streams, responses that follow each other"
    if package == "ai":
        how = "the default provider (responses), `.chat` and Anthropic's: text, streams, objects, tools"
    ran[f"{package} (npm)"] = answer["version"], how


@pytest.mark.skipif(not AIDER.exists(), reason=needs_environments)
def test_aider_edits_a_file(folder: Path, server: HttpServer) -> None:
    (folder / "a.py").write_text("a = 1\n")
    answer = {"structured_outputs": {"choice": ["a.py\n```\na = 2\n```"]}}
    settings = {"name": "openai/tiny", "edit_format": "whole", "extra_params": {"max_tokens": 99, "extra_body": answer}}
    (folder / "settings.yml").write_text(yaml.safe_dump([settings]))
    options = ["--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update", "--analytics-disable"]
    options += ["--no-pretty", "--model-settings-file", "settings.yml", "--map-tokens", "0"]
    told = run([AIDER, "--model", "openai/tiny", *options, "--message", "2!", "a.py"], folder, f"{server.url}/v1")
    assert (folder / "a.py").read_text() == "a = 2\n" and "received" in told, told
    ran["aider"] = told.split("Aider v")[1].split()[0], "an edit of a file, streamed"


def test_the_documentation_says_what_ran() -> None:
    """``GRADWIRE_WRITE_DOCS=1 make openai`` writes the table."""
    if set(ran) != set(NEEDS):
        pytest.skip(f"did not run: {', '.join(sorted(set(NEEDS) - set(ran)))}")
    rows = [f"| {name} | {ran[name][0]} | {need} | {ran[name][1]} |\n" for name, need in NEEDS.items()]
    table = "| program | version | set | tried |\n| --- | --- | --- | --- |\n" + "".join(rows)
    before, rest = DOCS.read_text().split(MARKS[0])
    written, after = rest.split(MARKS[1])
    if os.environ.get("GRADWIRE_WRITE_DOCS"):
        DOCS.write_text(before + MARKS[0] + table + MARKS[1] + after)
    else:
        assert written == table
