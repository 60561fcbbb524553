"""``gradwire estimate`` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire_server.cli.estimate import app
from support.tiny import tiny_model
from typer.testing import CliRunner

pytestmark = pytest.mark.long

PARTS = {
    "weights", "references", "adapters", "masters", "gradients", "moments", "activations", "logits", "passing",
    "key_values", "known", "libraries", "images", "gathered", "panels",
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
    words = ["--model", str(alone), "--lora-rank", "4", "--tokens", "64", "--rows", "3", "--runs", "2"]
    done = CliRunner().invoke(app, [*words, "--reference", "base", "--device", "1 GiB", "--json"])
    assert done.exit_code == 1, done.stderr  # it does not fit
    found = json.loads(done.stdout)
    assert set(found["bytes"]) == PARTS
    assert found["total_bytes"] == sum(found["bytes"].values()) > 0
    assert found["bytes"]["weights"] == 2 * found["parameters"]
    assert found["bytes"]["references"] == 0 and found["device_bytes"] == 1 << 30
    assert found["fits"] is False and "does not fit" in found["advice"][0]  # the engine itself takes 1 GiB of a GPU


def test_runs_are_spread_over_engines(model: Path) -> None:
    words = ["--model", str(model), "--lora-rank", "4", "--tokens", "64", "--device", "cpu 8 GiB"]
    each, alone = [
        json.loads(CliRunner().invoke(app, [*words, *more, "--json"]).stdout)
        for more in (("--runs", "7", "--engines", "3"), ("--runs", "3"))
    ]
    assert (each.pop("engines"), alone.pop("engines")) == (3, 1)
    assert each == alone and each["runs"] == 3
    said = CliRunner().invoke(app, [*words, "--runs", "7", "--engines", "3"]).stdout
    assert said.startswith("Each of 3 engines, which has 3 of the 7 runs at most:")


@pytest.mark.slow
def test_vllm_is_awake_while_samples_are_in_progress(model: Path) -> None:
    words = ["--model", str(model), "--lora-rank", "4", "--tokens", "64", "--device", "8 GiB", "--sampler", "vllm"]
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    held = sum(found["bytes"][name] for name in ("weights", "adapters", "masters", "gradients", "moments"))
    assert found["vllm_bytes"] == int(0.35 * (8 << 30)) and found["vllm_weight_bytes"] == 2 * found["parameters"]
    assert found["sampling_bytes"] == held + found["vllm_bytes"] > found["total_bytes"]
    assert found["needed_bytes"] == found["sampling_bytes"] + (1 << 30) and found["fits"]
    room = (found["vllm_bytes"] - found["vllm_weight_bytes"]) // found["key_value_bytes_per_token"]
    said = " ".join(CliRunner().invoke(app, words).stdout.split())
    assert f"keys and values of {room:,} tokens." in said and "vLLM reserves 2.8 GiB (35% of the device)" in said


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
        (
            ("--model", "{model}", "--sampler", "vllm", "--device", "cpu 8 GiB"),
            "--sampler vllm is estimated for one GPU",
        ),
        (
            ("--model", "{model}", "--sampler", "vllm", "--device", "8 GiB", "--samples", "2"),
            "--samples: vLLM reserves",
        ),
        (("--model", "{model}", "--device", "large"), '--device large: give the memory of a GPU ("80 GiB")'),
        (("--model", "{model}", "--reference", "/no/such"), "--reference /no/such: there is no such folder"),
    ],
)
def test_a_mistake_is_one_sentence(model: Path, words: tuple[str, ...], sentence: str) -> None:
    assert_one_sentence([word.format(model=model) for word in words], "gradwire: ", sentence)


def test_a_configuration_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert_one_sentence(["--model", str(tmp_path)], f"gradwire: --model {tmp_path}: ", "")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("null", "its config.json holds no JSON object: take the file that the model came with"),
        ("[]", "its config.json holds no JSON object: take the file that the model came with"),
        ("{", "its config.json is not valid JSON: Expecting property name"),
        ({"hidden_size": -4}, "its config.json gives hidden_size as -4, and it is at least 1"),
        ({"hidden_size": "x"}, "Field 'hidden_size' expected int, got str (value: 'x')"),
        ({"hidden_size": 33}, "The hidden size (33) is not a multiple of the number of attention heads (4)."),
        ({"vocab_size": 0}, "its config.json gives vocab_size as 0, and it is at least 1"),
        ({"vocab_size": -3}, "its config.json gives vocab_size as -3, and it is at least 1"),
        ({"num_attention_heads": 0}, "its config.json gives num_attention_heads as 0, and it is at least 1"),
        ({"intermediate_size": None}, "Field 'intermediate_size' expected int, got NoneType (value: None)"),
        ({"head_dim": 0}, "its config.json gives head_dim as 0, and it is at least 1"),
        ({"num_hidden_layers": 0}, "its config.json gives num_hidden_layers as 0, and it is at least 1"),
        ({"num_hidden_layers": -1}, "its config.json gives num_hidden_layers as -1, and it is at least 1"),
        ({"max_position_embeddings": 0}, "its config.json gives max_position_embeddings as 0, and it is at least 1"),
        ({"max_position_embeddings": 1}, "a row has at least 2 tokens"),
        (
            {"pad_token_id": 1000},
            "transformers cannot make a causal LM of its config.json: AssertionError: Padding_idx",
        ),
        ('{"model_type": "gpt2", "n_layer": 0}', "its config.json gives num_hidden_layers as 0, and it is at least 1"),
        ('{"model_type": "bert"}', "its tokens attend to later ones, so it is no model that predicts the next token"),
        ('{"model_type": "t5"}', "transformers cannot make a causal LM of its config.json: Unrecognized configuration"),
    ],
)
def test_a_configuration_of_no_model_is_one_sentence(
    model: Path, tmp_path: Path, given: str | dict[str, object], sentence: str
) -> None:
    valid = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(given if isinstance(given, str) else json.dumps(valid | given))
    assert_one_sentence(["--model", str(tmp_path)], f"gradwire: --model {tmp_path}: ", sentence)
    if "tokens" not in sentence:  # a reference scores by the model's weights alone, which there are
        words = ["--model", str(model), "--reference", "base", "--reference", str(tmp_path), "--device", "1 GiB"]
        assert_one_sentence(words, f"gradwire: --reference {tmp_path}: ", sentence)


@pytest.mark.slow
def test_a_model_whose_code_loops_over_tokens_is_estimated_in_proportion(tmp_path: Path) -> None:
    given = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(given))

    def activations(tokens: int) -> int:
        words = ["--model", str(tmp_path), "--device", "1 GiB", "--rows", "1", "--tokens", str(tokens), "--json"]
        result = CliRunner().invoke(app, words)
        assert result.exit_code in (0, 1), result.output
        return int(json.loads(result.stdout)["bytes"]["activations"])

    short, longer = activations(12), activations(24)  # computed to their end
    assert activations(4096) == pytest.approx(short + (longer - short) * (4096 - 12) / 12, rel=0.01)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--tokens", "1"), "--tokens 1: a row has at least 2 tokens: each token but the first is scored by those"),
        (("--device", f"{'9' * 400} GiB"), f"--device {'9' * 40}…: the memory of a device is between 1 MiB and"),
        (("--device", "cpu 0.0000001 MiB"), "--device cpu 0.0000001 MiB: the memory of a device is between 1 MiB and"),
        (("--device", " "), '--device  : give the memory of a GPU ("80 GiB"), "cpu" or "cpu 16 GiB"'),
        (("--ranks", "3"), "--ranks 3: the work is divided in halves; give a power of two"),
    ],
)
def test_a_size_that_nothing_has_is_one_sentence(model: Path, words: tuple[str, ...], sentence: str) -> None:
    assert_one_sentence(["--model", str(model), *words], "gradwire: ", sentence)


@pytest.mark.parametrize("flag", ["--lora-rank", "--rows", "--runs", "--samples"])
def test_a_number_beyond_the_wire_is_refused_with_its_range(model: Path, flag: str) -> None:
    found = CliRunner().invoke(app, ["--model", str(model), flag, str(10**21)])
    assert found.exit_code == 2 and isinstance(found.exception, SystemExit)
    assert f"Invalid value for '{flag}'" in found.stderr and "x<=2147483647" in found.stderr


def assert_one_sentence(words: list[str], beginning: str, sentence: str) -> None:
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2 and isinstance(found.exception, SystemExit), found.exception
    assert found.stdout == ""
    assert found.stderr.startswith(beginning) and sentence in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
