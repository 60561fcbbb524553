"""How many ranks are taken where nobody says, and whether they divide the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradwire_server.config import EngineSettings
from gradwire_server.engine.process.ranks_choice import choice
from gradwire_server.engine.sizing.advice import advice
from gradwire_server.engine.sizing.estimate import Device, Workload, estimate, on_ranks
from gradwire_server.engine.sizing.parts import GIB
from gradwire_server.engine_client.launcher import environment, ways
from pydantic import ValidationError
from transformers import LlamaConfig


@pytest.fixture(scope="module")
def seven_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a model of 7 billion parameters, 12.6 GiB in bfloat16."""
    folder = tmp_path_factory.mktemp("seven")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 30, "num_key_value_heads": 8}
    sizes |= {"max_position_embeddings": 8192, "vocab_size": 32000, "num_attention_heads": 32}
    config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_fewest_ranks_on_which_the_models_fit(seven_b: Path) -> None:
    settings = EngineSettings(models={"seven": str(seven_b)})

    def found(gib: int, gpus: int, **given: object) -> tuple[object, str, str]:
        chosen, note = choice(settings.model_copy(update=given), Device("cuda", gib * GIB), gpus)
        return chosen.ranks, chosen.shard, note

    assert found(80, 8) == (1, "off", "") and found(14, 1) == (1, "off", "") and found(14, 0) == (1, "off", "")
    ranks, shard, note = found(14, 8)
    assert ranks in (2, 4) and shard == "on"
    assert note.startswith(f"{ranks} ranks, among which the weights are divided: {seven_b} does not fit")
    assert found(14, 8, quantize="nf4")[:2] == (1, "off")
    assert found(80, 8, ranks=4) == (4, "off", "") == found(14, 8, ranks=4, shard="off")


@pytest.mark.slow
def test_ranks_that_are_named_divide_what_does_not_fit(seven_b: Path) -> None:
    settings = EngineSettings(models={"seven": str(seven_b)}, ranks=4)
    chosen, _ = choice(settings, Device("cuda", 14 * GIB), 8)
    assert (chosen.ranks, chosen.shard) == (4, "on")


@pytest.mark.slow
def test_the_estimate_of_ranks(seven_b: Path) -> None:
    workload, device = Workload(str(seven_b), tokens=4096), Device("cuda", 14 * GIB)
    alone, four = estimate(workload, device), on_ranks(workload, device, 4)
    assert not alone.fits and four.fits and four.workload.divided
    assert (
        four.parts["weights"] == -(-alone.parts["weights"] // 4) and four.parts["adapters"] == alone.parts["adapters"]
    )
    layer = alone.parts["weights"] / 30
    assert 2 * layer * 0.9 < four.parts["gathered"] < 5 * layer
    assert any("such devices on (--ranks" in sentence for sentence in advice(alone))
    assert "which divide the weights" in " ".join(advice(four))
    whole = on_ranks(workload, Device("cuda", 80 * GIB), 4)
    assert not whole.workload.divided and whole.parts == estimate(workload, Device("cuda", 80 * GIB)).parts
    full, shared = (on_ranks(Workload(str(seven_b), 0, 4096), Device("cuda", 80 * GIB), n) for n in (1, 8))
    assert not full.fits and shared.parts["moments"] * 8 == full.parts["moments"]


def test_fewer_ranks_are_tried_where_all_do_not_start() -> None:
    settings = EngineSettings(models={}, ranks=8, min_ranks=2)
    assert ways(settings) == [(8, 0), (8, 0), (4, 0), (4, 4), (2, 0), (2, 2), (2, 4), (2, 6)]
    assert ways(settings.model_copy(update={"device": "cpu"})) == [(8, 0), (8, 0), (4, 0), (2, 0)]
    assert ways(settings.model_copy(update={"min_ranks": 0})) == [(8, 0)]
    for ranks, fewest in (("auto", 1), (4, 8), (8, 3)):
        with pytest.raises(ValidationError, match="--min-ranks"):
            EngineSettings(models={}, ranks=ranks, min_ranks=fewest)


def test_fewer_ranks_see_their_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in environment()
    assert environment(range(2, 4))["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert environment(range(2, 4))["CUDA_VISIBLE_DEVICES"] == "6,7"
