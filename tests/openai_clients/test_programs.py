"""Programs that speak OpenAI's API, from PyPI as they are, in an environment of their own: ``make openai``."""

from __future__ import annotations

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

BIN = Path(os.environ.get("OPENAI_CLIENTS", Path(__file__).parents[2] / ".venv-openai")) / "bin"
PACKAGES = Path(os.environ.get("OPENAI_PACKAGES", Path(__file__).parents[2] / ".venv-packages")) / "bin" / "python"
QUESTIONS = [("The cat sat on the", [" mat", " cat", " naïve"], 0), ("the cat", [" says", " sat on", "; café"], 1)]
TEXTS = ["the cat sat on the mat; naïve café says the cat", '{"name": "final_result", "parameters": {"place": "Bern"}}']
TEMPLATE = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}assistant: """

pytestmark = pytest.mark.slow
programs = pytest.mark.skipif(not (BIN / "lm_eval").exists(), reason="needs the environment of `make openai`")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    model = tiny_model(folder / "model", texts=TEXTS, vocab_size=340, context_length=2048, initializer_range=0.2)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    running = HttpServer(folder / "model", folder / "state", free_port())
    running.start()
    yield running
    assert running.end() == 0


def run(command: list[Any], folder: Path) -> str:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "OPENAI_API_KEY": "x"}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=os.environ | offline, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def encoded(service: Any, texts: list[str]) -> list[list[int]]:
    """Token ids as lm-eval makes them: without special tokens."""
    rows: list[list[int]] = service.encode("tiny", texts, add_special_tokens=False)
    return rows


@programs
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


@programs
def test_an_agent_of_pydantic_ai_gets_its_output(folder: Path, server: HttpServer) -> None:
    """The untrained model is held to the schema of the tool by which the framework takes an agent's output."""
    told = run([BIN / "python", Path(__file__).parent / "agent.py", f"{server.url}/v1", "tiny"], folder)
    output = json.loads(told.strip().splitlines()[-1])
    assert output["place"] in ("Bern", "Oslo") and output["sky"] in ("clear", "cloudy")


@pytest.mark.skipif(not PACKAGES.exists(), reason="needs the environment of `make openai`")
@pytest.mark.parametrize("package", ["anthropic", "instructor", "llm"])
def test_packages_say_what_the_server_says(folder: Path, server: HttpServer, package: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 8}
    said = httpx.post(f"{server.url}/v1/chat/completions", json=asked | {"temperature": 0}).json()
    told = run([PACKAGES, Path(__file__).parent / "packages.py", package, server.url, "tiny"], folder)
    assert json.loads(told.strip().splitlines()[-1]) == said["choices"][0]["message"]["content"]
