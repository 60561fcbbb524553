"""The choice among several GPUs; torch's own answers are replaced, because no test machine has several."""

from __future__ import annotations

import pytest
import torch
from gradwire_server.engine import generators
from gradwire_server.engine.generators import generator_states, preserved_rng
from gradwire_server.engine.model.placement import Placement


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The indices of GPUs whose generators are read."""
    read: list[int] = []

    def state(index: int) -> torch.Tensor:
        read.append(index)
        return torch.zeros(16, dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_rng_state", state)
    monkeypatch.setattr(generators, "_gpus", set())
    return read


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:2", 2)])
def test_one_of_several_is_used(four_gpus: list[int], device: str, index: int) -> None:
    placement = Placement(device)
    assert placement.device == torch.device("cuda", index)
    assert placement.loading_arguments() == {"device_map": {"": f"cuda:{index}"}}
    assert sorted(generator_states()) == ["cpu", f"cuda:{index}"] and set(four_gpus) == {index}
    said = "has 4 GPUs, and the engine uses one, cuda:0" in placement.note
    assert said == (device == "cuda")  # who names one needs no hint


def test_no_generator_of_a_gpu_is_touched_by_an_engine_on_the_cpu(four_gpus: list[int]) -> None:
    placement = Placement("cpu")
    assert placement.note == "" and placement.loading_arguments() == {}
    with preserved_rng():
        assert list(generator_states()) == ["cpu"]
    assert four_gpus == []
