"""One server with a hybrid model, which mixes linear and full attention, and a teacher that has another tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
from _support.small_model import small_model
from architecture_configs import DELTA, SIZES
from gradwire.data import Expectations, gold_fields, padded_candidates, shared_tokens
from gradwire.rl import AlgorithmConfig, GRPOAlgorithm
from support.server import Server
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.long

TEXTS = ["the cat sat on the mat", "a dog and the cat", "the mat and a dog sat"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    hybrid = small_model(folder / "hybrid", hidden_size=32, num_layers=2)
    sizes = SIZES | DELTA | {"vocab_size": len(AutoTokenizer.from_pretrained(hybrid))}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **sizes)).save_pretrained(hybrid)
    teacher = small_model(folder / "teacher", texts=TEXTS * 20, vocab_size=262, hidden_size=32, num_layers=2, seed=5)
    return {"hybrid": hybrid, "teacher": teacher, "tiny": small_model(folder / "tiny", hidden_size=32, num_layers=2)}


@pytest.fixture(scope="module")
def several(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    more = [f"--model={name}={models[name]}" for name in ("hybrid", "teacher")]
    running = Server(models["tiny"], tmp_path_factory.mktemp("state"), *more).start()
    yield running
    assert running.end() == 0


@pytest.fixture
async def service(several: Server) -> AsyncIterator[gradwire.ServiceClient]:
    async with gradwire.connect(several.address, connect_timeout=120) as service:
        yield service


async def test_a_hybrid_model_samples_as_transformers_computes_and_learns_by_grpo(
    service: gradwire.ServiceClient, models: dict[str, Path]
) -> None:
    run = await service.create_run("hybrid", lora=8, seed=3)
    (samples,) = (await run.sample([[1, 20, 30, 7]], n=4, max_tokens=12, seed=2, stop=["a", "e"])).samples
    lengths = {len(sample.token_ids) for sample in samples}
    assert len(samples) == 4 and len(lengths) > 1
    model = AutoModelForCausalLM.from_pretrained(models["hybrid"], dtype=torch.float32).eval()
    for sample in samples:
        ids = torch.tensor([[1, 20, 30, 7, *sample.token_ids]])
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        of_sampled = expected.gather(1, ids[0, 1:, None])[3:, 0].numpy()
        np.testing.assert_allclose(sample.logprobs, of_sampled, atol=3e-5)

    batch = {
        "prompt_ids": [[1, 20, 30, 7]],
        "response_ids": [[sample.token_ids for sample in samples]],
        "old_log_probs": [[sample.logprobs for sample in samples]],
        "rewards": [[float(number) for number in range(4)]],
    }
    before = await run.train_step(batch, "grpo", learning_rate=1e-2)
    assert before.metrics["approx_kl"] == pytest.approx(0.0, abs=1e-8)
    assert (await run.forward(batch, "grpo")).loss < before.loss - 0.01

    def lower_case(response: str) -> float:
        return float(np.mean([character.islower() for character in response] or [0]))

    settings = AlgorithmConfig(batch_size=2, group_size=4, max_tokens=6, learning_rate=1e-3, seed=1)
    metrics = await GRPOAlgorithm(service, run, ["ab", "cd"], lower_case, settings).train(2, progress_bar=False)
    assert all(each["train/grad_norm"] > 0 and each["train/sampler_logprob_diff_max"] < 1e-4 for each in metrics)


async def test_a_teacher_with_another_tokenizer_is_learned_from(
    service: gradwire.ServiceClient, models: dict[str, Path]
) -> None:
    tokenizers = {name: AutoTokenizer.from_pretrained(models[name]) for name in ("tiny", "teacher")}
    vocabularies = {
        name: {tokenizer.decode([number]): number for number in tokenizer.get_vocab().values()}
        for name, tokenizer in tokenizers.items()
    }
    shared = shared_tokens(vocabularies["tiny"], vocabularies["teacher"])
    run, taught = await service.create_run("tiny", seed=3), await service.create_run("teacher", seed=3)
    for learner, name, steps in ((run, "tiny", 15), (taught, "teacher", 30)):
        ids = [tokenizers[name](text)["input_ids"] for text in TEXTS]
        for _ in range(steps):
            await learner.train_step({"input_ids": ids}, "causal_lm", learning_rate=1e-2)
    rows, fields = [], []
    for text in TEXTS:
        told: dict[str, Expectations] = {}
        for name in ("tiny", "teacher"):
            ids = tokenizers[name](text)["input_ids"]
            ends = np.cumsum([len(tokenizers[name].decode([each])) for each in ids[1:]]).tolist()
            assert ends[-1] == len(text)
            sampler = service.sampling_client((run if name == "tiny" else taught).run_id)
            ((top, logprobs),) = await sampler.compute_top_logprobs([ids], 100)
            told[name] = Expectations(ends, top, logprobs, (await sampler.compute_logprobs([ids]))[0])
            rows += [ids] if name == "tiny" else []
        fields.append(gold_fields(told["tiny"], told["teacher"], shared))
    assert 1 < len(told["teacher"].ends) < len(told["tiny"].ends) and 0 < fields[0]["piece_ends"].mean() < 1
    batch: dict[str, Any] = {"input_ids": rows, **padded_candidates(fields)}
    losses = []
    for _ in range(12):
        losses.append((await run.train_step(batch, "gold", learning_rate=1e-2)).metrics)
    assert losses[0]["num_pieces"] == sum(int(each["piece_ends"].sum()) for each in fields)
    assert losses[-1]["loss"] < 0.7 * losses[0]["loss"], [dict(each) for each in losses]
    with pytest.raises(gradwire.InvalidBatchError, match="teacher_log_probs"):
        await run.forward(batch | {"teacher_log_probs": [each[:, :1] for each in batch["teacher_log_probs"]]}, "gold")
