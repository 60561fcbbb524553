"""The settings: everything off as shipped, every mistake named with its line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gradwire.rl import build_hicra_from_dict
from gradwire.router.settings import RouterSettings, Section
from gradwire.router.settings_file import SettingsError, load_settings, parse_settings, render

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "configs/policy/rllm.yaml"


def switches(section: Section, place: str = "") -> Iterator[tuple[str, bool]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from switches(value, f"{place}{name}.")
        elif name == "enabled":
            yield f"{place}{name}", value


def test_the_shipped_file_has_every_switch_off() -> None:
    settings = load_settings(SHIPPED)
    found = dict(switches(settings))
    assert set(found) == {
        "rllm.enabled",
        "trainer.enabled",
        "evaluation.enabled",
        "autopilot.enabled",
        "experiment.enabled",
        "observability.logging.enabled",
        "observability.tracing.enabled",
        "hicra.enabled",
    }
    assert not any(found.values())
    assert settings.observability.metrics.backend == "none"
    assert settings.experiment.output_dir == "outputs/rllm/"
    assert settings.observability.logging.destination == "logs/rllm.log"


def test_the_shipped_file_is_the_defaults_as_printed() -> None:
    assert SHIPPED.read_text() == render()
    assert load_settings(SHIPPED) == RouterSettings()


def test_what_is_written_is_read_back() -> None:
    settings = parse_settings(
        "trainer: {learning_rate: 1e-3, target_kl: null}\nobservability: {metrics: {tags: [a, 'b: c'], entity: me}}\n"
        "experiment: {output_dir: 'a #b'}"
    )
    assert settings.trainer.learning_rate == 0.001
    assert parse_settings(render(settings)) == settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rllm:\n  enabled: 'yes'\n", "f.yaml, line 2: rllm.enabled: input should be a valid boolean, not 'yes'"),
        ("rllm:\n  enabled: 1\n", "f.yaml, line 2: rllm.enabled: input should be a valid boolean, not 1"),
        ("\n\nrlm:\n  enabled: true\n", "f.yaml, line 3: rlm: there is no such setting; a file takes rllm, rollout"),
        ("trainer:\n  epochs: 2\n  lr: 1\n", "f.yaml, line 3: trainer.lr: there is no such setting; trainer takes"),
        ("trainer:\n  reward_weights:\n    cost: -1", "f.yaml, line 3: trainer.reward_weights.cost: input should be"),
        ("trainer: {learning_rate: .inf}", "f.yaml, line 1: trainer.learning_rate: input should be a finite number"),
        (
            "evaluation:\n  seeds:\n  - 1\n  - x\n",
            "f.yaml, line 4: evaluation.seeds.1: input should be a valid integer",
        ),
        ("rllm:\n  enabled: true\nrllm: {}\n", "f.yaml, line 3: 'rllm' is also on line 1; keep one"),
        ("rllm: [\n", "f.yaml, line 2: not valid YAML"),
        ("- rllm\n", "f.yaml, line 1: settings must be a mapping"),
        ("rollout: 3\n", "f.yaml, line 1: rollout: this is a section, with settings of its own, not 3"),
        ("observability:\n  metrics:\n    backend: grafana\n", "f.yaml, line 3: observability.metrics.backend: input"),
        ("hicra:\n  eps: 1e-3\n  epsilon: 2e-3\n", "f.yaml, line 1: hicra: epsilon is 0.002 and eps is 0.001"),
        ("hicra:\n  weight: 1\n", "f.yaml, line 2: hicra.weight: there is no such setting"),
        ("autopilot: {enabled: true}", "autopilot.enabled needs evaluation.enabled"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, says: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse_settings(text, name="f.yaml")
    assert says in str(error.value)


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(SettingsError) as error:
        parse_settings("trainer:\n  epochs: 0\n  gamma: 2\n", name="f.yaml")
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == ["f.yaml, line 2", "f.yaml, line 3"]


def test_overrides_have_the_last_word_and_are_checked_like_the_file() -> None:
    text = "trainer:\n  learning_rate: 0.5\n"
    assert parse_settings(text, ["trainer.learning_rate=1e-3"]).trainer.learning_rate == 0.001
    assert parse_settings("", ["evaluation.seeds=[4, 5]"]).evaluation.seeds == [4, 5]
    for override, says in (
        ("trainer.learning_rate=fast", "--set trainer.learning_rate: input should be a valid number, not 'fast'"),
        ("trainer.learning=1", "--set trainer.learning: there is no such setting; trainer takes"),
        ("trainer.learning_rate=[1", "--set trainer.learning_rate: input should be a valid number, not '[1'"),
        ("trainer", "--set trainer: write SECTION.NAME=VALUE"),
        ("trainer.learning_rate.x=1", "--set trainer.learning_rate.x=1: learning_rate is a single value"),
    ):
        with pytest.raises(SettingsError) as error:
            parse_settings(text, [override])
        assert says in str(error.value)


def test_hicras_aliases_are_understood() -> None:
    hicra = parse_settings("hicra: {enabled: true, planner_weight: 2, eps: 1e-6, epsilon: 1e-6}").hicra
    assert (hicra.multiplier, hicra.normalization_eps) == (2.0, 1e-6)


def test_hicras_own_file_builds_an_assigner() -> None:
    import yaml

    assigner = build_hicra_from_dict(yaml.safe_load((ROOT / "configs/training/hicra.yaml").read_text()))
    assert assigner.enabled
    assert (assigner.multiplier, assigner.normalize, assigner.normalization_eps) == (1.0, True, 1e-8)


def test_a_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no settings file .*none\.yaml; `gradwire router config >"):
        load_settings(tmp_path / "none.yaml")
