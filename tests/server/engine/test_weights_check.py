"""Broken weights are found when the engine starts, before anybody is told that it is ready."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gradwire_server.engine.errors import OperationError
from safetensors.torch import load, save
from support.engine import LocalEngine

TENSOR = "model.layers.1.self_attn.v_proj.weight"


def missing(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def other_shape(file: Path) -> None:
    file.write_bytes(save(load(file.read_bytes()) | {TENSOR: torch.zeros(3, 3)}, {"format": "pt"}))


def without_a_tensor(file: Path) -> None:
    tensors = load(file.read_bytes())
    del tensors[TENSOR]
    file.write_bytes(save(tensors, {"format": "pt"}))


@pytest.mark.parametrize(("change", "reason"), [
    (missing, "no file named model.safetensors found in its folder$"),
    (cut, "a file of its weights is cut short or damaged"),
    (other_shape, rf"do not fit its config.json: {TENSOR} has the shape \[3, 3\], not \[32, 32\]"),
    (without_a_tensor, f"lack weights that its config.json asks for: {TENSOR}"),
])  # fmt: skip
def test_a_start_says_what_is_wrong_with_a_models_weights(
    tiny_model_path: Path, tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_path, folder)
    change(folder / "model.safetensors")
    with pytest.raises(OperationError, match=reason) as caught:
        LocalEngine({"broken": folder}, tmp_path / "state").engine.hello()
    assert "'broken'" in str(caught.value) and str(tmp_path) not in str(caught.value)
    later = LocalEngine({"tiny": tiny_model_path}, tmp_path / "later", allow_models={"broken": str(folder)})
    assert later.engine.hello()
    assert "with safetensors weights: " in later.create("run-a", base_model="broken").error.message


def test_a_folder_named_as_part_of_a_file_is_named_once(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model_path, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OperationError, match=r"no file named model.safetensors found in its folder$"):
        LocalEngine({"broken": Path("model")}, tmp_path / "state").engine.hello()
