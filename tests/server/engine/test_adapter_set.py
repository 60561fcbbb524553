"""Adapters beside each other: what peft makes of each alone, and none costs the others anything."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_proto.v1.training_pb2 import LoraSettings
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import LoraPolicy, lora_config
from peft import PeftModel
from torch import nn

MIXED: list[dict[str, Any]] = [
    {"rank": 4},
    {"rank": 2, "target_modules": ["q_proj", "down_proj"]},
    {"rank": 8, "alpha": 3.0},
    {"rank": 3, "dropout": 0.5},
    {"rank": 2, "target_modules": ["embed_tokens", "v_proj"]},
    {"rank": 5, "target_modules": ["q_proj", "down_proj"], "alpha": 1.0},
    {"rank": 6, "target_modules": ["embed_tokens", "v_proj"]},
    {"rank": 4},
]
"""The last three are on the layers of earlier ones."""


@pytest.fixture
def pool(model_path: Path) -> ModelPool:
    """One without adapters of earlier tests."""
    return ModelPool({"tiny": str(model_path)})


@contextmanager
def visits() -> Iterator[list[str]]:
    """Names of the modules that walks over trees of modules visit in the body."""
    visited: list[str] = []
    walk = nn.Module.named_modules

    def counted(self: nn.Module, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        for name, module in walk(self, memo, prefix, remove_duplicate):
            visited.append(name)
            yield name, module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "named_modules", counted)
        yield visited


def policy(pool: ModelPool, number: int, settings: dict[str, Any]) -> LoraPolicy:
    return LoraPolicy(pool.get("tiny"), f"run-{number}", LoraSettings(**settings), seed=number)


def states(policy: LoraPolicy) -> torch.Tensor:
    with torch.no_grad():
        return policy.hidden(torch.arange(9), torch.tensor([5, 4]))


def moved(policy: LoraPolicy) -> LoraPolicy:
    """The policy with a B that is not zero."""
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))
    return policy


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_those_that_peft_draws_for_each_adapter_alone(model_path: Path, dtype: torch.dtype) -> None:
    pool = ModelPool({"tiny": str(model_path)}, dtype=dtype)
    for number, settings in enumerate(MIXED):
        mine = policy(pool, number, settings)
        model = pool.load("tiny").model
        config = lora_config(model, LoraSettings(**settings))
        torch.manual_seed(number)
        PeftModel(model, config, adapter_name="alone", autocast_adapter_dtype=False)
        theirs = {name.replace(".alone", ""): each for name, each in model.named_parameters() if ".alone" in name}
        assert list(mine.trainable_parameters()) == list(theirs)
        for name, parameter in mine.trainable_parameters().items():
            assert parameter.dtype == theirs[name].dtype and torch.equal(parameter, theirs[name]), name
        expected, found = config.to_dict(), mine.peft_config.to_dict()
        assert found == expected


@pytest.mark.long
def test_no_adapter_changes_what_another_computes(pool: ModelPool, model_path: Path) -> None:
    alone = []
    for number, settings in enumerate(MIXED):
        only = ModelPool({"tiny": str(model_path)})
        alone.append(states(moved(policy(only, number, settings))))
    policies = [moved(policy(pool, number, settings)) for number, settings in enumerate(MIXED)]
    for order in (policies, policies[::-1]):
        assert all(torch.equal(states(each), alone[policies.index(each)]) for each in order)
    for number in (0, 3, 4):
        policies[number].close()
    for number in (7, 6, 5, 2, 1):
        assert torch.equal(states(policies[number]), alone[number])


def test_later_adapters_visit_no_more_modules_than_earlier_ones(pool: ModelPool) -> None:
    creating, using, closing = [], [], []
    policies = []
    for number in range(36):
        settings = MIXED[number % len(MIXED)]
        with visits() as visited:
            policies.append(policy(pool, number, settings))
        creating.append(len(visited))
        with visits() as visited:
            states(policies[-1])
        using.append(len(visited))
    for each in policies[:24]:
        with visits() as visited:
            each.close()
        closing.append(len(visited))
    again = slice(len(MIXED), None)
    assert max(creating[again]) < min(creating[:2])
    for counts in (creating, using):
        assert counts[8:16] == counts[16:24] == counts[24:32]
    assert set(closing) == {0}
    names = [name for name, _ in pool.get("tiny").model.named_modules()]
    assert not any("run-" in name for name in names if not name.startswith("model.embed_tokens"))


@pytest.mark.long
def test_deletion_frees_everything(pool: ModelPool) -> None:
    keeping = policy(pool, 99, {"rank": 4})
    for settings in MIXED:
        gone = policy(pool, 0, settings)
        states(gone)
        parameters = [weakref.ref(each) for each in gone.trainable_parameters().values()]
        gone.close()
        del gone
        gc.collect()
        assert not any(each() is not None for each in parameters), settings
    keeping.close()
    assert pool.get("tiny").adapters is None
    assert not any("base_layer" in name for name, _ in pool.get("tiny").model.named_modules())


def test_an_adapter_that_peft_refuses_leaves_the_others(pool: ModelPool) -> None:
    first = moved(policy(pool, 0, {"rank": 4}))
    before = states(first)
    with pytest.raises(Exception, match="no_such_layer"):
        policy(pool, 1, {"rank": 4, "target_modules": ["no_such_layer"]})
    assert torch.equal(states(first), before)
    assert states(moved(policy(pool, 2, {"rank": 4, "target_modules": ["o_proj"]}))).isfinite().all()


def test_a_subclass_of_linear_that_computes_something_else_has_no_adapter() -> None:
    """DeepSeek-V4's product in groups, whose output is of another shape than a linear layer's."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes))
    attention = model.model.layers[0].self_attn
    attention.o_proj = DeepseekV4GroupedLinear(16, 32, 2)
    config = lora_config(model, LoraSettings(rank=2))
    wrapped = PeftModel(model, config, autocast_adapter_dtype=False)
    adapted = {name.rpartition(".")[2] for name, module in wrapped.named_modules() if hasattr(module, "base_layer")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
