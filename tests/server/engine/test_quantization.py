"""Base models in 4 and 8 bits, and moments in 8: exact against what they hold, and honest about what they lose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.loading.quantization import Quantization, QuantizedLinear
from gradwire_server.engine.model.policy_from_config import make_policy
from gradwire_server.engine.sizing.parts import weight_bytes
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.training import eight_bit
from gradwire_server.engine.training.optimizer import Optimizer
from support.tiny import tiny_model
from support.training import take_step

pytest.importorskip("bitsandbytes", reason="needs gradwire[quantize]")

KINDS: tuple[Quantization, ...] = ("nf4", "int8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), hidden_size=64)


def lora_run(**settings: object) -> pb.RunConfig:
    config = pb.RunConfig(base_model="m", seed=3)
    config.lora.rank = 4
    return config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_a_linear_one_with_its_dequantised_weight(
    model: Path, kind: Quantization, dtype: torch.dtype
) -> None:
    split_model = ModelPool({"m": str(model)}, "cpu", dtype, quantize=kind).get("m")
    layers = [module for module in split_model.model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 2 * 7  # of each layer the four of attention and the three of the MLP
    assert not isinstance(split_model.model.get_output_embeddings(), QuantizedLinear)
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        weight = layer.dequantised().to(dtype)
        assert weight.shape == (layer.out_features, layer.in_features)
        x = torch.randn(5, layer.in_features, generator=generator).to(dtype).requires_grad_()
        gradient = torch.randn(5, layer.out_features, generator=generator).to(dtype)
        found = layer(x)
        (of_x,) = torch.autograd.grad(found, x, gradient)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        for mine, expected in ((found, x @ weight.T), (of_x, gradient @ weight)):
            assert (mine - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_gradients_of_a_run_are_those_of_the_dequantised_model(model: Path, kind: Quantization) -> None:
    quantised = make_policy(ModelPool({"m": str(model)}, quantize=kind), lora_run(), "run")
    plain = make_policy(ModelPool({"m": str(model)}), lora_run(), "run")
    for mine, other in zip(quantised.model.modules(), plain.model.modules(), strict=True):
        if isinstance(mine, QuantizedLinear):
            assert isinstance(other, torch.nn.Linear)
            other.weight.data = mine.dequantised()
    found = []
    for policy in (quantised, plain):
        for name, parameter in policy.trainable_parameters().items():
            if "lora_B" in name:  # zero at first, which would hide the gradient of the other side
                parameter.data.copy_(torch.sin(torch.arange(parameter.numel())).view_as(parameter))
        states = policy.hidden(torch.arange(40) % 100, torch.tensor([24, 16]), training=True)
        states.square().mean().backward()
        found.append((states.detach(), {name: each.grad for name, each in policy.trainable_parameters().items()}))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    for name, gradient in found[0][1].items():
        expected = found[1][1][name]
        assert gradient is not None and expected is not None
        assert (gradient - expected).abs().max() <= 1e-5 * (1 + expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_the_weights_are_computed(model: Path, kind: Quantization) -> None:
    pool = ModelPool({"m": str(model)}, quantize=kind)
    held = 0
    for parameter in pool.get("m").model.parameters():
        held += parameter.nbytes
        state, scale = getattr(parameter, "quant_state", None), getattr(parameter, "SCB", None)
        if state is not None:
            held += state.absmax.nbytes + state.state2.absmax.nbytes
        held += scale.nbytes if scale is not None else 0
    assert weight_bytes(pool.meta_model("m"), torch.float32, kind) == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_of_the_unquantised_weights_is_let_go(tmp_path: Path, kind: Quantization) -> None:
    path = tiny_model(tmp_path / "model", hidden_size=64)
    pool = ModelPool({"m": str(path)}, quantize=kind)
    assert pool.get("m").model is not None
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_run_that_trains_all_weights_has_its_own_in_full(model: Path) -> None:
    run = EngineRun(ModelPool({"m": str(model)}, quantize="nf4"), "run-1", pb.RunConfig(base_model="m"))
    assert not any(isinstance(module, QuantizedLinear) for module in run.policy.model.modules())
    assert run.policy.num_trainable_parameters == run.policy.facts.num_parameters


def test_moments_in_8_bits_follow_adamw_and_survive_a_checkpoint(model: Path) -> None:
    rng = np.random.default_rng(0)
    pool, settings = (
        ModelPool({"m": str(model)}),
        pb.OptimStep(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, optimizer="adamw8bit"),
    )
    plain = pb.OptimStep()
    plain.CopyFrom(settings)
    plain.optimizer = "adamw"
    runs = [EngineRun(pool, f"run-{index}", pb.RunConfig(base_model="m")) for index in range(3)]
    start = {name: master.detach().clone() for name, master in runs[0].policy.masters().items()}
    for step in range(12):
        gradients = {
            name: torch.from_numpy(rng.normal(size=tuple(master.shape)).astype(np.float32))
            for name, master in runs[0].policy.masters().items()
        }
        if step == 6:  # as a checkpoint does
            runs[2].policy.load_state_tensors(runs[0].policy.state_tensors())
            runs[2].optimizer = Optimizer(runs[2].policy)
            runs[2].optimizer.load_state_tensors({k: v.clone() for k, v in runs[0].optimizer.state_tensors().items()})
        for run, call in zip(runs, (settings, plain, settings), strict=True):
            if run is not runs[2] or step >= 6:
                run.accumulator.merge({("l", "t"): {k: v.clone() for k, v in gradients.items()}}, {("l", "t"): 1.0})
                take_step(run, call)
    bits, exact, resumed = (run.policy.masters() for run in runs)
    assert all(torch.equal(bits[name], resumed[name]) for name in bits)
    moved = sum((exact[name] - start[name]).square().sum() for name in exact)
    apart = sum((exact[name] - bits[name]).square().sum() for name in exact)
    assert 0 < apart < 0.01 * moved  # 8 bits of a moment are worth two to three digits
    state = runs[0].optimizer.state_tensors()
    large = max(start, key=lambda name: start[name].numel())
    assert state[f"adamw8bit.state1|{large}"].dtype == torch.uint8
    held = sum(tensor.nbytes for name, tensor in state.items() if name.endswith(large))
    assert held < 2.1 * start[large].numel()


def test_eight_bits_know_no_float64() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(OperationError, match="float64"):
        eight_bit.adamw([{"params": [weight]}])
