"""Exported folders load with plain transformers and peft, and say the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb
from safetensors import safe_open
from safetensors.torch import load_file
from support.engine import LocalEngine, token_rows
from support.plain_peft import with_adapter
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = [[1, 20, 30, 40, 50], [1, 9, 8, 7, 6, 5, 4], [1, 60]]
BATCH = token_rows(ROWS)


@pytest.fixture
def engine(tiny_model_path: Path, tmp_path: Path) -> LocalEngine:
    return LocalEngine({"tiny": tiny_model_path}, tmp_path)


def plain_logprobs(model: torch.nn.Module) -> np.ndarray:
    found = []
    with torch.no_grad():
        for row in ROWS:
            logits = model(input_ids=torch.tensor([row])).logits[0, :-1].float()
            found.append(logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None]).squeeze(1))
    return torch.cat(found).numpy()


@pytest.mark.parametrize(
    ("lora", "asked", "written"),
    [
        (None, "auto", "hf"),
        (None, "merged", "hf"),
        (4, "auto", "peft"),
        (4, "peft", "peft"),
        (4, "merged", "hf"),
        (4, "hf", "hf"),
    ],
)
def test_a_folder_loads_and_gives_the_same_logprobs(
    engine: LocalEngine, tiny_model_path: Path, tmp_path: Path, lora: int | None, asked: str, written: str
) -> None:
    engine.create("run-other", lora=2, seed=5)
    engine.create("run-a", lora=lora, head="value")
    for _ in range(3):
        engine.train("run-a", BATCH)
        engine.train("run-other", BATCH)
    expected = engine.logprobs("run-a", BATCH)
    export = engine.do("run-a", export=pb.ExportModel(name="out", format=asked)).proto.export
    assert (export.name, export.format) == ("out", written)
    folder = tmp_path / "runs" / "run-a" / "exports" / "out"
    assert export.size_bytes == sum(each.stat().st_size for each in folder.iterdir() if not each.name.startswith("."))
    if written == "hf":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = with_adapter(tiny_model_path, folder)
    model.eval()
    assert np.allclose(plain_logprobs(model), expected, atol=1e-5)
    assert not np.allclose(expected, engine.logprobs("run-a", BATCH, model="base"), atol=1e-2)
    exported, original = (AutoTokenizer.from_pretrained(path) for path in (folder, tiny_model_path))
    assert exported("abc").input_ids == original("abc").input_ids
    head = load_file(folder / "gradwire_head.safetensors")
    assert head.keys() == {"weight", "bias"}
    with safe_open(folder / "gradwire_head.safetensors", "pt") as file:
        assert file.metadata()["kind"] == "value"
    assert np.array_equal(engine.logprobs("run-a", BATCH), expected)
    again = engine.do("run-a", export=pb.ExportModel(name="out", format=asked)).proto.export
    assert again.size_bytes == export.size_bytes


def test_a_merged_model_has_its_bases_dtype(tiny_model_path: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    engine = LocalEngine({"tiny": tmp_path / "base"}, tmp_path / "state")
    engine.create("run-a", lora=4)
    engine.do("run-a", export=pb.ExportModel(name="out", format="merged"))
    folder = tmp_path / "state" / "runs" / "run-a" / "exports" / "out"
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


@pytest.mark.parametrize("lora", [None, 4])
def test_a_run_on_an_exported_folder_starts_with_its_head(
    engine: LocalEngine, tiny_model_path: Path, tmp_path: Path, lora: int | None
) -> None:
    engine.create("run-a", lora=lora, head="reward")
    rated = {**BATCH, "scores": Column(np.array([0.9, 0.1, 0.5], np.float32), ())}
    before = head_outputs(engine, "run-a", "rewards")
    engine.do("run-a", rated, forward_backward=pb.LossCall(loss_fn="reward_regression"))
    engine.do("run-a", optim_step=pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8))
    expected = head_outputs(engine, "run-a", "rewards")
    assert not np.allclose(before, expected, atol=1e-3)
    engine.do("run-a", export=pb.ExportModel(name="out", format="hf"))
    folder = tmp_path / "runs" / "run-a" / "exports" / "out"
    other = LocalEngine({"tiny": tiny_model_path, "judge": folder}, tmp_path / "other")
    other.create("run-b", base_model="judge", lora=2, head="reward", seed=7)
    assert np.allclose(head_outputs(other, "run-b", "rewards"), expected, atol=1e-5)
    other.create("run-c", base_model="judge", head="value")
    assert not head_outputs(other, "run-c", "values").any()


def head_outputs(engine: LocalEngine, run_id: str, name: str) -> np.ndarray:
    return engine.do(run_id, BATCH, forward=pb.LossCall(outputs=[name])).columns[name].values


def test_a_full_run_has_no_adapter_to_export(engine: LocalEngine) -> None:
    engine.create("run-a")
    error = engine.op("run-a", export=pb.ExportModel(format="peft")).proto.error
    assert (error.code, error.field) == (pb.ERROR_CODE_INVALID_ARGUMENT, "format")
