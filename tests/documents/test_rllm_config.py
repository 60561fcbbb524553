"""The seed document on router training (RLLM, HICRA): its paths, commands, settings and names, typed as it has them."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from gradwire.router import build_hicra_from_dict


@pytest.fixture
def shipped(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((request.config.rootpath / "configs/policy/rllm.yaml").read_text())
    return found


def test_it_ships_disabled(shipped: dict[str, Any]) -> None:
    for block in ("rllm", "trainer", "experiment", "evaluation"):
        assert shipped[block]["enabled"] is False, block
    for sink in ("logging", "tracing"):
        assert shipped["observability"][sink]["enabled"] is False, sink
    assert shipped["observability"]["metrics"]["backend"] == "none"
    assert shipped["experiment"]["output_dir"].rstrip("/") == "outputs/rllm"


def test_the_command_runs_as_written_and_trains_nothing(request: pytest.FixtureRequest) -> None:
    words = ["scripts/run_router_ppo.py", "--config", "configs/policy/rllm.yaml", "--updates", "8", "--seed", "42"]
    done = subprocess.run(
        [sys.executable, *words], cwd=request.config.rootpath, capture_output=True, text=True, timeout=120, check=False
    )
    assert "rllm.enabled" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_hicra_from_its_file_and_by_its_aliases(request: pytest.FixtureRequest) -> None:
    block = yaml.safe_load((request.config.rootpath / "configs/training/hicra.yaml").read_text())
    assert build_hicra_from_dict(block).enabled
    nested = {"trainer": {"hicra": {"planner_weight": 2.0, "eps": 1e-4}}}
    assigner = build_hicra_from_dict(nested)
    assert (assigner.multiplier, assigner.normalization_eps) == (2.0, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_hicra_of_tensors_is_a_tensor(dtype: torch.dtype) -> None:
    rewards = torch.tensor([[1, 0, 2], [3, 1, 9]], dtype=dtype)
    if dtype.is_floating_point:
        rewards.requires_grad_()
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assigner = build_hicra_from_dict({"planner_weight": 2.0})
    found = assigner(rewards, mask)
    assert isinstance(found, torch.Tensor) and not found.requires_grad
    assert found.dtype == (dtype if dtype.is_floating_point else torch.float32)
    expected = assigner(rewards.detach().numpy().tolist(), mask.numpy())
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert isinstance(expected, np.ndarray)


def test_hicra_switched_off_gives_zeros() -> None:
    assert not build_hicra_from_dict({"enabled": False})(torch.ones(2, 3)).any()


def test_what_the_page_of_paths_names_is_there(request: pytest.FixtureRequest) -> None:
    page = (request.config.rootpath / "docs/plan_paths.md").read_text()
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([^` ]+)`", row)]
    assert len(rows) == 15 and len(names) >= len(rows)
    for name in names:
        if name.startswith("gradwire."):
            assert pkgutil.resolve_name(name) is not None
        else:
            assert (request.config.rootpath / name).is_file(), name
