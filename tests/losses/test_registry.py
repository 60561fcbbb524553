"""One's own loss: a decorated function in a file or in an installed package is all that it takes."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gradwire_losses import registry
from gradwire_losses.batch import Scores
from gradwire_losses.registry import get_loss, load_loss_file, load_plugin_losses
from support.losses import read

MY_LOSSES = '''
"""Unlikelihood of what a row says."""
from gradwire_losses.batch import Batch, Scores
from gradwire_losses.fields import INPUT_IDS
from gradwire_losses.outputs import LossOutput, Mean, Term
from gradwire_losses.registry import LossConfig, register_loss
from pydantic import Field


class Config(LossConfig):
    weight: float = Field(1.0, ge=0, description="of it all")


@register_loss(
    "unlikelihood",
    config=Config,
    fields=(INPUT_IDS,),
    metrics={"unlikely": "mean log-probability"},
    reference="Welleck et al. 2019",
    formula="w/T sum log p",
    streams=True,
)
def unlikelihood(batch: Batch, scores: Scores, config: Config) -> LossOutput:
    """Takes back what it said.

    Token by token.
    """
    lp = scores.logprobs
    return LossOutput({"all": Term(config.weight * lp.sum(), len(lp), "tokens")}, {"unlikely": Mean.of(lp)})
'''


@pytest.fixture(autouse=True)
def same_registry_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_losses.py"
    path.write_text(MY_LOSSES)
    return path


def works() -> None:
    spec = get_loss("unlikelihood")
    batch = read(spec, {"input_ids": [[1, 2, 3], [4]]})
    output = spec.function(batch, Scores({"logprobs": torch.tensor([-1.0, -2.0])}), spec.config(weight=2.0))
    assert output.loss().item() == -3.0
    assert output.metrics["unlikely"].value() == -1.5
    assert spec.summary == "Takes back what it said."
    assert spec.scores(spec.config(), frozenset()) == {"logprobs"}
    assert spec.config.model_json_schema()["properties"]["weight"]["description"] == "of it all"


def test_a_file_registers_its_losses(file: Path) -> None:
    load_loss_file(file)
    works()


def test_an_installed_package_offers_its_losses(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(file.parent)
    entry = importlib.metadata.EntryPoint("mine", "my_losses", "gradwire.losses")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == "gradwire.losses" else [])
    load_plugin_losses()
    works()


def test_the_guides_example_is_copied_to_a_file_of_ones_own(tmp_path: Path) -> None:
    """As docs/guide.md says: copied, with a name of its own; two files may have one name."""
    root = Path(__file__).parents[2]
    [named] = re.findall(r"--losses my_losses\.py`\. Copy\n`(losses/\S+\.py)`", (root / "docs/guide.md").read_text())
    for number in range(2):
        copy = tmp_path / str(number) / "my_losses.py"
        copy.parent.mkdir()
        copy.write_text((root / named).read_text().replace('"causal_lm",', f'"mine_{number}",'))
        load_loss_file(copy)
        spec = get_loss(f"mine_{number}")
        assert spec.config.model_json_schema()["properties"]["loss_type"]["enum"] == ["nll", "dft"]
        assert spec.config(loss_type="dft").loss_type == "dft"


def test_a_name_is_taken_once(file: Path) -> None:
    load_loss_file(file)
    with pytest.raises(ValueError, match=r"'unlikelihood' is already registered by gradwire_user_losses_my_losses"):
        load_loss_file(file)


def test_an_unknown_loss_is_told_which_there_are() -> None:
    with pytest.raises(KeyError, match=r"no loss named 'casual_lm'; there are: .*causal_lm, "):
        get_loss("casual_lm")


def test_unknown_and_infinite_arguments_are_refused(file: Path) -> None:
    load_loss_file(file)
    config = get_loss("unlikelihood").config
    for kwargs in ({"wieght": 1.0}, {"weight": float("inf")}, {"weight": 1e308}, {"weight": -1.0}):
        with pytest.raises(ValueError, match=r"wieght|weight"):
            config(**kwargs)


def test_what_is_no_python_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "losses.txt").write_text("")
    with pytest.raises(ValueError, match="is not a Python file"):
        load_loss_file(tmp_path / "losses.txt")


def test_every_loss_says_what_it_is() -> None:
    for spec in registry.all_losses():
        assert spec.summary and spec.formula and spec.reference and spec.metrics, spec.name
        assert all(field.description.endswith(".") for field in spec.fields), spec.name
        for name, schema in spec.config.model_json_schema().get("properties", {}).items():
            assert schema.get("description"), f"{spec.name}: {name}"
        ids = {field.name for field in spec.fields if field.ids}
        for field in spec.fields:
            per_token = any("tokens" in shape for shape in field.shapes)
            assert field.name in ids or not per_token or field.aligned_with in ids, f"{spec.name}: {field.name}"


ASKED_FOR: dict[str, list[dict[str, object]]] = {
    "causal_lm": [{"label_smoothing": 0.1}, {"loss_type": "dft"}],
    "cross_entropy": [{}],
    "score_regression": [{"score_min": 1, "score_max": 5}, {"score_mean": 3, "score_std": 1}],
    "reward_regression": [{"score_mean": 0.7, "score_std": 0.2}],
    "token_classification": [{}],
    "sequence_classification": [{}],
    "dpo": [
        *({"loss_type": kind} for kind in ("sigmoid", "robust", "ipo", "hinge", "nca_pair", "sppo_hard", "aot",
                                           "aot_pair", "apo_zero", "apo_down", "discopop", "sigmoid_norm")),
        {"loss_type": "exo_pair", "label_smoothing": 1e-3},
        {"loss_type": "sigmoid", "label_smoothing": 0.1},  # cDPO
        *({"f_divergence_type": kind} for kind in ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")),
        {"use_weighting": True},
        {"ld_alpha": 0.5},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.1]},
    ],
    "simpo": [{}],
    "orpo": [{}],
    "cpo": [{}],
    "kto": [{}],
    "bco": [{}],
    "reward_modeling": [{"margin": 0.5, "temperature": 2.0, "center_coef": 0.01}],
    "process_reward": [{}],
    "plackett_luce": [{}],
    "importance_sampling": [{}],
    "ppo": [{"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}],
    "cispo": [{}],
    "dro": [{"beta": 0.05}],
    "gspo": [{}],
    "group_gspo": [{}],
    "enhanced_ppo": [
        {"use_gae": True, "clip_value_loss": True, "dual_clip": 3.0, "entropy_coef": 0.01, "kl_target": 0.1},
        {"whiten_rewards": True, "whiten_advantages": True},
        *({"kl_estimator": kind, "kl_in_reward": where} for kind in ("k1", "k2", "k3") for where in (True, False)),
    ],
    "conservative_ppo": [{"max_kl_divergence": 0.01}],
    "value_only": [{}],
    "grpo": [
        *({"sampler_correction": f"{level}_{way}"} for level in ("token", "sequence") for way in ("truncate", "mask")),
        {"sampler_rejection": "seq_mean_k1", "sampler_rejection_max": 1.001},
        {"sampler_rejection": "seq_mean_k3", "sampler_rejection_max": 0.005},
        {"sampler_correction": "sequence_truncate", "sampler_normalize": True},
        {"top_entropy_quantile": 0.2},
        {"dual_clip": 4.0},  # two-sided clip
    ],
    "dr_grpo": [{"reduction_divisor": 512}],
    "dapo": [{"clip_epsilon": 0.2, "clip_epsilon_high": 0.28, "mask_truncated": True, "mask_zero_spread": True}],
    "gspo_token": [{}],
    "gmpo": [{}],
    "sapo": [{}],
    "group_cispo": [{}],
    "gigpo": [{}],
    "reinforce": [{}],
    "rloo": [{}],
    "reinforce_plus_plus": [{}],
    "reinforce_plus_plus_baseline": [{}],
    "remax": [{}],
    "opo": [{}],
    "gpg": [{}, {"mask_zero_spread": False, "advantage_scale": "nonzero"}],
    "vespo": [{}],
    "dppo_tv": [{}],
    "dppo_kl": [{}],
    "clip_cov": [{}],
    "topr": [{}],
    "kl_cov": [{}],
    "gkd": [{"reference_model": "base", "beta": beta} for beta in (0.0, 0.5, 1.0)],
    "on_policy_distillation": [{"reference_model": "base"}],
    "top_k_distillation": [{}],
    "gold": [{}, {"own_weight": 0.0, "beta": 0.0}],
}  # fmt: skip


def test_what_the_field_uses_can_be_asked_for_by_name() -> None:
    """Every row of the table, with the variants that are options."""
    for name, calls in ASKED_FOR.items():
        for kwargs in calls:
            get_loss(name).config(**kwargs)
