"""``gradwire estimate`` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny import tiny_model

PARTS = {
    "weights", "references", "adapters", "masters", "gradients", "moments", "activations", "logits", "passing",
    "key_values", "libraries", "images",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("estimate") / "model")


def gradwire(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradwire.cli", "estimate", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def test_json_has_bytes_by_part_from_a_configuration_without_weights(model: Path, tmp_path: Path) -> None:
    alone = tmp_path / "config.json"
    alone.write_text((model / "config.json").read_text())
    done = gradwire(
        "--model", str(alone), "--lora-rank", "4", "--tokens", "64", "--rows", "3", "--runs", "2",
        "--reference", "base", "--device", "1 GiB", "--json",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr  # it does not fit
    found = json.loads(done.stdout)
    assert set(found["bytes"]) == PARTS
    assert found["total_bytes"] == sum(found["bytes"].values()) > 0
    assert found["bytes"]["weights"] == 2 * found["parameters"]
    assert found["bytes"]["references"] == 0 and found["device_bytes"] == 1 << 30
    assert found["fits"] is False and "does not fit" in found["advice"][0]  # the engine itself takes 1 GiB of a GPU


def test_a_person_reads_a_table_and_what_to_do(model: Path) -> None:
    done = gradwire("--model", str(model), "--full", "--tokens", "100", "--device", "cpu 8 GiB")
    assert done.returncode == 0, done.stderr
    for words in ("the model's weights", "AdamW's moments", "total", "It fits", "with gradient checkpointing"):
        assert words in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--model", "nobody/nothing-of-this-name"), "--model nobody/nothing-of-this-name: there is n"),
        (("--model", "/no/such/folder"), "--model /no/such/folder: there is no such folder"),
        (("--model", "{model}", "--full", "--quantize", "nf4"), "cannot be trained"),
        (("--model", "{model}", "--full", "--lora-rank", "8"), "--lora-rank is of an adapter"),
        (("--model", "{model}", "--target-module", "nothing"), "--target-module nothing: "),
        (("--model", "{model}", "--device", "large"), '--device large: give the memory of a GPU ("80 GiB")'),
        (("--model", "{model}", "--reference", "/no/such"), "--reference /no/such: there is no such folder"),
    ],
)
def test_a_mistake_is_one_sentence(model: Path, words: tuple[str, ...], sentence: str) -> None:
    done = gradwire(*(word.format(model=model) for word in words))
    assert done.returncode == 2 and done.stdout == ""
    assert sentence in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_configuration_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = gradwire("--model", str(tmp_path))
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert f"--model {tmp_path}: " in done.stderr
