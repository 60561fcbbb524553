"""In a deterministic run, log-probabilities of sampling, scoring and training are the same to the bit."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_proto import codec
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.config import EngineSettings
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.layers import exact_products
from gradwire_server.engine.process.setup import check_settings
from gradwire_server.engine.sizing.estimate import Device, Workload, estimate
from support.engine import LocalEngine, Result, token_rows
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

VOCAB = 300


@pytest.fixture(autouse=True)
def restored() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shaped as SmolLM2 (3 heads of 64 for one of keys, tied embeddings), with logits of an ordinary size."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=256, initializer_range=0.08,
        tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        model.model.norm.weight.mul_(2.0 / model(torch.arange(20)[None]).logits.std())
    model.save_pretrained(path)
    return path


def random_rows(*lengths: int, vocab: int = VOCAB, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, vocab, length).tolist() for length in lengths]


def parted(result: Result, name: str = "logprobs") -> list[np.ndarray]:
    column = result.columns[name]
    return np.split(column.values, np.cumsum(column.levels[-1])[:-1].tolist())


class Trainer:
    """Samples, and gives the three kinds of log-probabilities of what was sampled."""

    def __init__(self, engine: LocalEngine, prompts: list[list[int]]) -> None:
        self.engine, self.prompts = engine, prompts

    def sampled(self, n: int, model: str = "", **call: Any) -> tuple[list[list[int]], list[np.ndarray]]:
        """By the run, or by what a model's name means."""
        settings = pb.SampleCall(n=n, **{"max_tokens": 20, "temperature": 1, "seed": 3, "ignore_eos": True} | call)
        if model:
            ids = [pb.TokenIds(ids=prompt) for prompt in self.prompts]
            reply, payload = self.engine.request(sample=pb.SampleRequest(model=model, call=settings, prompt_ids=ids))
            result = Result(reply.result, codec.decode(list(reply.result.tensors), payload))
        else:
            result = self.engine.do("run-a", token_rows(self.prompts, "prompt_ids"), sample=settings)
        tokens = parted(result, "token_ids")
        rows = [[*self.prompts[number // n], *own.tolist()] for number, own in enumerate(tokens)]
        return rows, parted(result)

    def scored(self, rows: list[list[int]], temperature: float = 1.0, model: str = "") -> list[np.ndarray]:
        call = pb.LossCall(outputs=["logprobs"], temperature=temperature, model=model)
        return parted(self.engine.do("run-a", token_rows(rows), forward=call))

    def trained(self, rows: list[list[int]], n: int) -> list[np.ndarray]:
        """Of a GRPO step whose groups share their prompts."""
        responses = [np.array(row[len(self.prompts[number // n]) :], np.int32) for number, row in enumerate(rows)]
        counts = np.full(len(self.prompts), n, np.uint32)
        lengths = np.array([len(each) for each in responses], np.uint32)
        columns = token_rows(self.prompts, "prompt_ids") | {
            "response_ids": Column(np.concatenate(responses), (counts, lengths)),
            "rewards": Column(np.arange(len(rows), dtype=np.float32) % 3, (counts,)),
        }
        call = pb.LossCall(loss_fn="grpo", outputs=["logprobs"], loss_kwargs_json='{"beta": 0.0}')
        return parted(self.engine.do("run-a", columns, forward_backward=call))


def same(sampled: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return all(
        np.array_equal(mine.view(np.int32), theirs[-len(mine) :].view(np.int32))
        for mine, theirs in zip(sampled, others, strict=True)
    )


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_change_no_bit(folder: Path, tmp_path: Path, dtype: str) -> None:
    found = []
    for speculate in ("auto", "off"):
        (state := tmp_path / speculate).mkdir()
        settings: dict[str, Any] = {"dtype": dtype, "deterministic": True, "speculate": speculate}
        engine = LocalEngine({"tiny": folder}, state, **settings)
        engine.create("run-a", lora=4)
        engine.train("run-a", token_rows(random_rows(20, 9)), 3e-3)
        # With these biases a random model repeats itself.
        bias = [pb.LogitBias(token_id=token, bias=12.0) for token in range(5, 9)]
        call = pb.SampleCall(n=2, max_tokens=50, temperature=0.3, seed=3, ignore_eos=True, logit_bias=bias)
        result = engine.do("run-a", token_rows([[3, 5, 6, 7, 8, 5, 6]], "prompt_ids"), sample=call)
        found.append([each.tobytes() for name in ("token_ids", "logprobs") for each in parted(result, name)])
        assert (result.proto.sample.num_accepted_tokens > 3) == (speculate == "auto")
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [4, None], ids=["lora", "full"])
def test_the_ratio_of_training_to_sampling_is_one_exactly(
    folder: Path, tmp_path: Path, dtype: str, lora: int | None
) -> None:
    (tmp_path / "state").mkdir()
    engine = LocalEngine({"tiny": folder}, tmp_path / "state", dtype=dtype, deterministic=True, microbatch_tokens=90)
    engine.create("run-a", lora=lora)
    engine.train("run-a", token_rows(random_rows(20, 9)), 3e-3)  # an adapter that does something
    trainer = Trainer(engine, random_rows(37, 1, 16))
    rows, sampled = trainer.sampled(3)
    scored = trainer.scored(rows)
    assert same(sampled, scored) and same(sampled, trainer.trained(rows, 3))
    assert same(sampled[:1], trainer.scored(rows[:1])) and same(sampled[4:6], trainer.scored(rows[4:6]))
    assert len(np.unique(np.concatenate(sampled))) > 50
    engine.train("run-a", token_rows(random_rows(20, 9)), 3e-3)  # nothing made of old weights is left
    again, later = trainer.sampled(2, top_p=0.9)
    assert same(later, trainer.scored(again)) and not np.array_equal(scored[0], trainer.scored(rows)[0])
    greedy, logprobs = trainer.sampled(1, temperature=0)
    assert same(logprobs, trainer.scored(greedy))
    warm, logprobs = trainer.sampled(1, temperature=0.7)
    assert same(logprobs, trainer.scored(warm, temperature=0.7))
    assert np.isfinite(np.concatenate(sampled)).all()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_asks_for_it_beside_others(folder: Path, tmp_path: Path, dtype: str) -> None:
    """Whose numbers it does not change; they share the weights. Its checkpoint and its base are computed as it is."""
    engines = [LocalEngine({"tiny": folder}, tmp_path / name, dtype=dtype, microbatch_tokens=90) for name in "ab"]
    engine = engines[1]
    expected = []
    for each in engines:
        each.create("run-b", lora=4)
        if each is engine:
            each.create("run-a", lora=4, deterministic=True)
            each.train("run-a", token_rows(random_rows(20, 9)), 3e-3)
        each.train("run-b", token_rows(random_rows(20, 9)), 3e-3)
        expected.append(each.logprobs("run-b", token_rows(random_rows(20, 9, 31))))
    assert np.array_equal(*expected)
    trainer = Trainer(engine, random_rows(37, 1, 16))
    rows, sampled = trainer.sampled(3)
    assert same(sampled, trainer.scored(rows)) and same(sampled, trainer.trained(rows, 3))
    engine.do("run-a", save_checkpoint=pb.SaveCheckpoint(name="now"))
    again, of_checkpoint = trainer.sampled(3, model="run-a/now")
    assert again == rows and same(of_checkpoint, sampled)
    assert same(sampled, trainer.scored(rows, model="run-a/now"))
    scored, other = (np.concatenate(trainer.scored(rows, model=name)) for name in ("base", "tiny"))
    assert not np.array_equal(scored, other) and np.allclose(scored, other, atol=1e-4 if dtype == "float32" else 0.5)
    pool = engine.context.pool
    weights = [pool.get("tiny", exact=exact).model.get_input_embeddings().weight for exact in (True, False)]
    assert weights[0].data_ptr() == weights[1].data_ptr()
    panels = exact_products.panel_bytes(pool.get("tiny", exact=True).model)
    assert pool.held_bytes == pool.get("tiny").weight_bytes + panels


@pytest.mark.long
@pytest.mark.parametrize("lora", [4, None], ids=["lora", "full"])
def test_the_memory_of_its_copies_of_weights_is_estimated(folder: Path, tmp_path: Path, lora: int | None) -> None:
    gc.collect()
    before = sum(each.panels.nbytes for each in exact_products._panels.values())
    engine = LocalEngine({"tiny": folder}, tmp_path)
    engine.create("run-a", lora=lora, deterministic=True)
    for _ in range(2):
        engine.train("run-a", token_rows(random_rows(20, 9)))
    held = sum(each.panels.nbytes for each in exact_products._panels.values()) - before
    workload = Workload(str(folder), lora_rank=lora or 0, tokens=64, rows=4, dtype=torch.float32, deterministic=True)
    assert estimate(workload, Device("cpu", 8 << 30)).parts["panels"] == held
    assert estimate(replace(workload, deterministic=False), Device("cpu", 8 << 30)).parts["panels"] == 0


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [4, None], ids=["lora", "full"])
def test_layers_with_a_window(tmp_path: Path, dtype: str, lora: int | None) -> None:
    """Of Gemma 3's kind: two layers within 12 tokens and one with all."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=48, sliding_window=12, max_position_embeddings=256, initializer_range=0.3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(config)
        model.model.norm.weight.fill_(2.0 / model(torch.arange(20)[None]).logits.std() - 1)
    model.save_pretrained(tmp_path / "model")
    engine = LocalEngine({"tiny": tmp_path / "model"}, tmp_path / "state", dtype=dtype, microbatch_tokens=90)
    engine.create("run-a", lora=lora, deterministic=True)
    engine.create("run-b", lora=lora)
    norms = [engine.train(run, token_rows(random_rows(40, 9)), 3e-3)[1] for run in ("run-a", "run-b")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3 if dtype == "float32" else 0.05)
    trainer = Trainer(engine, random_rows(37, 1, 16))
    rows, sampled = trainer.sampled(3)
    assert same(sampled, trainer.scored(rows)) and same(sampled, trainer.trained(rows, 3))
    assert same(sampled[4:6], trainer.scored(rows[4:6]))
    assert len(np.unique(np.concatenate(sampled))) > 50


def test_what_cannot_be_computed_so_is_refused(folder: Path, tmp_path: Path) -> None:
    for setting in ({"dtype": "mixed"}, {"kernels": "plain"}, {"quantize": "int8"}, {"compile": True}):
        settings = EngineSettings(device="cpu", deterministic=True, **setting)
        with pytest.raises(OperationError, match="--deterministic: "):
            check_settings(settings)
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    models = {"tiny": folder, "mamba": tmp_path / "mamba"}

    def refusal(engine: LocalEngine, model: str) -> pb.Error:
        lora = pb.LoraSettings(rank=2)
        asked = pb.RunConfig(base_model=model, lora=lora, deterministic=True)
        return engine.request(create_run={"run_id": "run-a", "config": asked})[0].error

    refused = refusal(LocalEngine(models, tmp_path / "one"), "mamba")
    assert "cannot be computed as a deterministic run: it takes padded sequences" in refused.message
    assert (refused.code, refused.field) == (pb.ERROR_CODE_UNSUPPORTED, "deterministic")
    refused = refusal(LocalEngine(models, tmp_path / "other", kernels="plain"), "tiny")
    assert "deterministic: leave out --kernels plain" in refused.message
    assert (refused.code, refused.field) == (pb.ERROR_CODE_UNSUPPORTED, "deterministic")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_one_on_a_real_model(tmp_path: Path, dtype: str) -> None:
    model = os.environ.get("GRADWIRE_TEST_SMOLLM2")
    if model is None:
        pytest.skip("GRADWIRE_TEST_SMOLLM2 names no folder of SmolLM2-135M-Instruct")
    engine = LocalEngine({"tiny": Path(model)}, tmp_path, dtype=dtype, deterministic=True)
    engine.create("run-a", lora=8)
    engine.train("run-a", token_rows(random_rows(40, 20, vocab=40000)), 1e-3)
    trainer = Trainer(engine, random_rows(24, 40, vocab=40000))
    rows, sampled = trainer.sampled(2, max_tokens=16)
    assert same(sampled, trainer.scored(rows)) and same(sampled, trainer.trained(rows, 2))
    assert same(sampled[3:], trainer.scored(rows[3:]))
