"""Models sharded by ``fully_shard`` train as whole ones do, on one gloo rank, and only the seam tells them apart."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gradwire_losses.registry import get_loss
from gradwire_server.engine import model
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.placement import whole, whole_tensors
from gradwire_server.engine.operations.scores import client_backward, keep_scores
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.checkpoints import CheckpointStore
from gradwire_server.engine.state.exports import export_run
from gradwire_server.engine.state.snapshot import capture, restore
from gradwire_server.stores.folders import FolderStore
from support.sampling import samples_of
from support.sharding import (
    MANY,
    ONE,
    RECOMPUTED,
    VOCAB,
    assert_same,
    batch_of,
    compare_on_rank,
    pair,
    save_model,
    train,
)
from support.training import train_on
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=["tied", "untied"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), tied=request.param == "tied")


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "kwargs", "config", "budget"),
    [
        pytest.param("causal_lm", {}, {}, ONE, marks=pytest.mark.slow),
        ("causal_lm", {}, {}, MANY),
        pytest.param("causal_lm", {}, {}, RECOMPUTED, marks=pytest.mark.slow),
        ("causal_lm", {}, {"gradient_checkpointing": True}, ONE),
        ("causal_lm", {}, {"lora": 4}, MANY),
        ("causal_lm", {}, {"lora": 4}, RECOMPUTED),
        pytest.param("enhanced_ppo", {}, {"head": "value"}, MANY, marks=pytest.mark.slow),
        ("enhanced_ppo", {}, {"head": "value", "lora": 4}, MANY),
        pytest.param("dpo", {"reference_model": "base"}, {}, MANY, marks=pytest.mark.slow),
        ("dpo", {"reference_model": "base"}, {}, RECOMPUTED),
        ("gkd", {"reference_model": "base"}, {"lora": 4}, MANY),
    ],
)
def test_a_sharded_model_trains_as_a_whole_one(
    model_path: Path, loss: str, kwargs: dict[str, Any], config: dict[str, Any], budget: Budget
) -> None:
    plain, sharded = pair(model_path, **config)
    expected, gradients = train(plain, loss, budget, **kwargs)
    found, sharded_gradients = train(sharded, loss, budget, **kwargs)
    assert found == pytest.approx(expected, rel=1e-9)
    assert_same(sharded_gradients, gradients)
    assert_same(sharded.policy.state_tensors(), plain.policy.state_tensors())
    assert_same(sharded.optimizer.state_tensors(), plain.optimizer.state_tensors())


@pytest.mark.long
@pytest.mark.parametrize("config", [{}, {"lora": 4}, {"head": "value"}], ids=["full", "lora", "value-head"])
def test_masters_of_a_sharded_model_in_bfloat16_are_those_of_a_whole_one(
    model_path: Path, config: dict[str, Any]
) -> None:
    plain, sharded = pair(model_path, torch.bfloat16, **config)
    expected, _ = train(plain, "causal_lm", MANY)
    found, _ = train(sharded, "causal_lm", MANY)
    assert found == pytest.approx(expected, rel=1e-2)
    for name, master in plain.policy.masters().items():
        assert master.dtype == torch.float32
        torch.testing.assert_close(whole(sharded.policy.masters()[name]), master, rtol=1e-2, atol=3e-2)


@pytest.mark.long
@pytest.mark.parametrize("config", [{}, {"lora": 4}, {"head": "value"}], ids=["full", "lora", "value-head"])
def test_checkpoints_fit_whole_and_sharded_runs(model_path: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    plain, sharded = pair(model_path, **config)
    store = CheckpointStore(FolderStore(tmp_path))
    train(sharded, "causal_lm", ONE)
    sharded.move_ema(0.9)
    train_on(
        sharded.policy,
        batch_of("causal_lm"),
        get_loss("causal_lm"),
        get_loss("causal_lm").config(),
        sharded.accumulator,
        budget=ONE,
    )
    saved = {file: whole_tensors(tensors) for file, tensors in capture(sharded).items()}
    assert all(saved.values())
    for run, name in ((plain, "sharded"), (sharded, "whole")):
        store.save("run", name, saved if name == "whole" else capture(sharded), config=run.config, step=2, seq=1)
        restore(run, store, f"run/{name}")
        for file, tensors in capture(run).items():
            assert set(tensors) == set(saved[file])
            assert all(torch.equal(whole(tensor), saved[file][key]) for key, tensor in tensors.items())
    assert train(plain, "causal_lm", ONE)[0] == pytest.approx(train(sharded, "causal_lm", ONE)[0], rel=1e-9)


def test_a_sharded_model_is_exported_whole(model_path: Path, tmp_path: Path) -> None:
    _, run = pair(model_path)
    train(run, "causal_lm", ONE)
    (tmp_path / "export").mkdir()
    assert export_run(ModelPool({"m": str(model_path)}), run, tmp_path / "export", "auto").format == "hf"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    assert_same(dict(exported.named_parameters()), whole_tensors(run.policy.state_tensors()))


def test_scores_and_samples_of_a_sharded_model(model_path: Path) -> None:
    plain, sharded = pair(model_path)
    batch = batch_of("causal_lm")
    for each in (plain, sharded):
        kept, _ = keep_scores(each.policy, batch, ["logprobs", "entropy"], budget=MANY)
        gradients = {name: scores.cos() for name, scores in kept.by_name[0].items()}
        client_backward(kept, gradients, 2.0, each.accumulator)
    expected, found = (each.accumulator.normalised()[0] for each in (plain, sharded))
    assert_same(found, expected)
    drawn = [
        samples_of(each.policy, [[1, 2, 3], [4]], SamplingParams(max_tokens=8, seed=5, n=2))
        for each in (plain, sharded)
    ]
    assert drawn[0].token_ids.tolist() == drawn[1].token_ids.tolist()


def test_the_output_head_is_used_where_its_weight_is_whole(model_path: Path) -> None:
    for run in pair(model_path):
        with pytest.raises(RuntimeError, match=r"within SplitModel\.compute"):
            run.policy.output_head()
        weight = run.policy.compute(run.policy.output_head).weight
        assert weight.shape == (VOCAB, 32)
        assert not isinstance(weight, DTensor)


SEAM = {
    "get_total_norm": {"model/placement.py"},
    "full_tensor": {"model/placement.py"},
    "to_local": {"model/placement.py"},
    "DTensor": {"model/placement.py"},
    # Kernels of a CPU read tensors that are whole within a forward; copies of weights ask whether one has changed.
    "data_ptr": {
        "model/layers/cpu_kernels.py",
        "model/layers/exact_products.py",
        "model/layers/packed_linear.py",
        "model/placement.py",
        "sampling/pages/recording.py",
    },
    "save_file": {"model/layers/head_files.py", "state/checkpoints.py", "state/exports.py", "state/shared_weights.py"},
    # The adapter's settings ask for its name, quantization and the search for read weights leave it out; an export
    # unties the heads of a copy, and an optimizer asks which parameters are those of the ends.
    "get_output_embeddings": {
        "model/adapters/lora_settings.py",
        "model/layers/read_weights.py",
        "model/loading/quantization.py",
        "model/split_check.py",
        "model/split_model.py",
        "state/exports.py",
        "training/update_rules.py",
    },
    "get_input_embeddings": {
        "model/loading/packing_check.py",
        "model/split_model.py",
        "model/trunk.py",
        "model/vision/image_tokens.py",
        "state/exports.py",
        "training/update_rules.py",
    },  # the check hooks its output, the trunk is what holds it, and the vision part calls it
}


@pytest.mark.long
def test_only_the_seam_reads_whole_weights() -> None:
    engine = Path(model.__file__).parent.parent
    users: dict[str, set[str]] = {name: set() for name in SEAM}
    for file in engine.rglob("*.py"):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in users:
                users[name].add(file.relative_to(engine).as_posix())
            if isinstance(node, ast.Call) and name == "" and ast.unparse(node.func) == "save_file":
                assert ast.unparse(node.args[0]).startswith(("whole", "{")), f"{file}: {ast.unparse(node)}"
    assert users == SEAM


@pytest.mark.slow  # two processes that import torch and transformers
def test_two_ranks_train_as_one(model_path: Path, tmp_path: Path) -> None:
    mp.spawn(compare_on_rank, args=(2, tmp_path / "store", model_path), nprocs=2)
