"""LoRA on mixtures of experts: every linear layer and the experts, and the router only where it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import LoraPolicy
from gradwire_server.engine.model.policy_from_config import make_policy
from gradwire_server.engine.scoring.memory import ActivationMeter
from gradwire_server.engine.state.exports import save_adapter
from peft.tuners.lora.layer import ParamWrapper
from support.mixtures import CONFIGS, mixture
from support.plain_peft import with_adapter
from torch import nn


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return mixture(tmp_path / "model", request.param)


def make(model: Path, *targets: str, pool: ModelPool | None = None, run: str = "run-1", rank: int = 4) -> LoraPolicy:
    config = pb.RunConfig(base_model="m")
    config.lora.rank = rank
    config.lora.target_modules.extend(targets)
    policy = make_policy(pool or ModelPool({"m": str(model)}), config, run)
    assert isinstance(policy, LoraPolicy)
    return policy


def test_the_router_is_left_out_unless_it_is_named(model: Path) -> None:
    names = list(make(model).trainable_parameters())
    assert any(".experts." in name for name in names) and any(".self_attn." in name for name in names)
    assert not any(".gate." in name for name in names)
    named = list(make(model, "gate").trainable_parameters())
    assert named and all(".gate." in name for name in named)


def test_every_linear_layer_beside_the_experts_has_an_adapter(model: Path) -> None:
    pool = ModelPool({"m": str(model)})
    policy = make(model, pool=pool)
    head = policy.model.get_output_embeddings()
    linear = {name for name, layer in policy.model.named_modules() if type(layer) is nn.Linear and layer is not head}
    adapted = {name.partition(".lora_")[0] for name in policy.trainable_parameters()}
    bare = {name.removesuffix(".base_layer") for name in linear if ".lora_" not in name}
    assert bare and bare <= adapted
    assert list(make(model, pool=pool, run="run-2").trainable_parameters()) == list(policy.trainable_parameters())


def test_an_adapter_on_experts_trains_and_loads_in_plain_peft(model: Path, tmp_path: Path) -> None:
    policy, ids = make(model), torch.arange(24) % 64
    for name, parameter in policy.trainable_parameters().items():
        if "lora_B" in name:
            parameter.data.copy_(0.1 * torch.sin(torch.arange(parameter.numel())).view_as(parameter))
    states = policy.hidden(ids, torch.tensor([24]), training=True)
    states.square().mean().backward()
    assert all(each.grad is not None and each.grad.abs().max() > 0 for each in policy.trainable_parameters().values())
    (tmp_path / "adapter").mkdir()
    save_adapter(policy, tmp_path / "adapter")
    plain = with_adapter(model, tmp_path / "adapter")
    with torch.no_grad():
        expected = plain.base_model.model.model(input_ids=ids[None]).last_hidden_state[0]
    assert torch.allclose(states.detach(), expected, atol=1e-4)


def test_experts_are_computed_with_the_factors_and_not_with_changed_weights(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against peft's own way, in float64, where transformers computes one expert after the other."""
    exact = make(model, pool=ModelPool({"m": str(model)}, dtype=torch.float64))
    changed: list[str] = []
    whole = ParamWrapper._activate_lora

    def recorded(self: Any, adapters: list[str]) -> Any:
        changed.append(self.parameter_name)
        return whole(self, adapters)

    monkeypatch.setattr(ParamWrapper, "_activate_lora", recorded)
    gradient, states = differentiated(make(model))
    assert not {"gate_up_proj", "down_proj"} & set(changed)
    expected, exact_states = differentiated(exact)
    assert {"gate_up_proj", "down_proj"} <= set(changed)
    torch.testing.assert_close(states.double(), exact_states, atol=1e-5, rtol=1e-4)
    assert gradient.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(gradient[name].double(), each, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_that_the_kernels_do_not_take_is_computed_in_another_way(model: Path, rank: int) -> None:
    gradient, states = differentiated(make(model, rank=rank))
    expected, exact = differentiated(make(model, rank=rank, pool=ModelPool({"m": str(model)}, dtype=torch.float64)))
    torch.testing.assert_close(states.double(), exact, atol=1e-5, rtol=1e-4)
    for name, each in expected.items():
        torch.testing.assert_close(gradient[name].double(), each, atol=1e-6, rtol=1e-3)


def differentiated(policy: LoraPolicy) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Gradients of an adapter that is not zero, and the states that they are of."""
    for name, parameter in policy.trainable_parameters().items():
        if "lora_B" in name:
            parameter.data.copy_(0.1 * torch.sin(torch.arange(parameter.numel())).view_as(parameter))
    parameters = policy.trainable_parameters()
    states = policy.hidden(torch.arange(24) % 64, torch.tensor([24]), training=True)
    found = torch.autograd.grad(states.square().mean(), list(parameters.values()))
    return dict(zip(parameters, found, strict=True)), states.detach()


def test_what_an_adapter_adds_to_experts_is_proportional_to_the_tokens(model: Path) -> None:
    """Nothing as large as the experts' weights is kept for the backward."""
    policy = make(model)
    saved = []
    for tokens in (1, 2):
        meter = ActivationMeter(policy)
        with meter:
            policy.hidden(torch.arange(tokens), torch.tensor([tokens]), training=True)
        saved.append(meter.bytes)
    fixed = 2 * saved[0] - saved[1]
    factors = sum(each.nbytes for each in policy.trainable_parameters().values())
    assert fixed <= factors + 1024 * policy.facts.num_layers
