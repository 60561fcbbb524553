"""With ``deterministic``, log-probabilities of sampling, scoring and training are the same to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.config import EngineSettings
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.layers.exact_products import use_exact_products
from gradwire_server.engine.process.setup import check_settings
from support.engine import LocalEngine, Result, token_rows
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

VOCAB = 300


@pytest.fixture(autouse=True)
def restored() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    use_exact_products(False)


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

    def sampled(self, n: int, **call: Any) -> tuple[list[list[int]], list[np.ndarray]]:
        settings = pb.SampleCall(n=n, **{"max_tokens": 20, "temperature": 1, "seed": 3, "ignore_eos": True} | call)
        result = self.engine.do("run-a", token_rows(self.prompts, "prompt_ids"), sample=settings)
        tokens = parted(result, "token_ids")
        rows = [[*self.prompts[number // n], *own.tolist()] for number, own in enumerate(tokens)]
        return rows, parted(result)

    def scored(self, rows: list[list[int]], temperature: float = 1.0) -> list[np.ndarray]:
        call = pb.LossCall(outputs=["logprobs"], temperature=temperature)
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


def test_what_cannot_be_computed_so_is_refused(tmp_path: Path) -> None:
    for setting in ({"dtype": "mixed"}, {"kernels": "plain"}, {"quantize": "int8"}, {"compile": True}):
        settings = EngineSettings(device="cpu", deterministic=True, **setting)
        with pytest.raises(OperationError, match="--deterministic: "):
            check_settings(settings)
    config = MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, sliding_window=8, max_position_embeddings=64,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "state").mkdir()
    engine = LocalEngine({"tiny": tmp_path}, tmp_path / "state", deterministic=True)
    reply, _ = engine.request(
        create_run={"run_id": "run-a", "config": pb.RunConfig(base_model="tiny", lora=pb.LoraSettings(rank=2))}
    )
    assert "its layers attend within a window" in reply.error.message
    assert reply.error.code == pb.ERROR_CODE_UNSUPPORTED


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
