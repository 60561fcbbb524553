"""That the committed goldens are what verl and TRL compute."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradwire.rl.advantages import filtration_weights

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
pytest.importorskip("trl")
from parity.goldens import PATH, goldens  # noqa: E402


def test_the_committed_goldens_are_the_libraries() -> None:
    committed, computed = json.loads(PATH.read_text()), goldens()
    assert committed.keys() == computed.keys()
    for name, golden in computed.items():
        assert committed[name]["expected"] == pytest.approx(golden["expected"], rel=1e-9), name
        assert {k: v for k, v in committed[name].items() if k != "expected"} == json.loads(
            json.dumps({k: v for k, v in golden.items() if k != "expected"})
        ), name


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_pf_ppo_has_verls_weights(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards, seen = torch.tensor([[-2.0], [0.1], [0.0], [2.0], [1.0]]), []

    def drawn(weights: torch.Tensor, count: int, replacement: bool) -> torch.Tensor:
        assert replacement
        seen.append(weights)
        return torch.arange(count)

    monkeypatch.setattr(torch, "multinomial", drawn)
    batch = type("Rows", (dict,), {"batch_size": None})(token_level_scores=rewards)
    core_algos.compute_pf_ppo_reweight_data(SimpleNamespace(batch=batch, non_tensor_batch={}, meta_info={}), method)
    np.testing.assert_allclose(filtration_weights(rewards[:, 0].numpy(), method=method), seen[0], rtol=1e-5)
