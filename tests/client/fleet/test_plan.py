"""The file of a fleet, and which engine is on which node; without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from gradwire.fleet.placing import place
from gradwire.fleet.plan import Plan, PlanError, read_plan
from hypothesis import given
from hypothesis import strategies as st


def plan(*groups: dict[str, Any]) -> Plan:
    return Plan.model_validate({"front": "https://front:50051", "groups": groups})


def test_engines_stay_fill_nodes_and_move_when_their_node_is_gone() -> None:
    wanted = plan({"name": "a", "engines": "all", "cpus": 2}, {"name": "b", "engines": 1, "cpus": 1})
    first = place(wanted, {"x": {"CPU": 5}, "y": {"CPU": 2}}, {})
    assert first == {"a-0": "x", "a-1": "y", "a-2": "x", "b-0": "x"}
    later = place(wanted, {"x": {"CPU": 5}, "z": {"CPU": 4}}, first)
    assert later == {"a-0": "x", "a-2": "x", "b-0": "x", "a-1": "z", "a-3": "z"}
    assert place(wanted, {"y": {"CPU": 1}}, first) == {"b-0": "y"}, "no room for the others"
    assert place(plan({"name": "a", "engines": 1, "cpus": 2}), {"x": {"CPU": 5}}, first) == {"a-0": "x"}


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=3),
    st.dictionaries(st.sampled_from("wxyz"), st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=4),
    st.dictionaries(st.sampled_from("wxyz"), st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=4),
)
def test_no_node_has_more_engines_than_it_has_room_for(
    groups: list[tuple[int, int, int]], before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]
) -> None:
    wanted = plan(
        *({"name": f"g{n}", "engines": count, "cpus": c, "gpus": g} for n, (count, c, g) in enumerate(groups))
    )
    placed: dict[str, str] = {}
    for nodes in (before, after):
        resources = {node: {"CPU": float(cpus), "GPU": float(gpus)} for node, (cpus, gpus) in nodes.items()}
        placed = place(wanted, resources, placed)
        for node, (cpus, gpus) in nodes.items():
            here = [wanted.group_of(engine) for engine, on in placed.items() if on == node]
            assert sum(group.cpus for group in here if group) <= cpus
            assert sum(group.gpus for group in here if group) <= gpus
        assert place(wanted, resources, placed) == placed, "it is where it is to be"


def test_a_plan_becomes_the_commands_of_its_agents() -> None:
    wanted = plan({"name": "big", "gpus": 2, "options": {"model": ["m=/m"], "state_dir": "/scratch"}})
    words = " ".join(wanted.command("big-3"))
    assert words == (
        "engine --front https://front:50051 --name big-3 --ranks 2 --model m=/m --state-dir /scratch --die-with-parent"
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"front": "front:50051", "groups": [{"name": "a"}]}, "https://HOST:PORT"),
        ({"front": "https://f:1", "groups": [{"name": "a"}, {"name": "a"}]}, "two groups are called a"),
        (
            {"front": "https://f:1", "groups": [{"name": "a", "engine": 3}]},
            "engine: there is no such field (did you mean 'engines'?)",
        ),
        ({"frnt": "https://f:1", "groups": [{"name": "a"}]}, "frnt: there is no such field (did you mean 'front'?)"),
        ({"groups": [{"name": "a"}]}, "front: this field is missing"),
        ({"front": "https://f:1", "groups": [{"name": "A_1"}]}, "groups.0.name: must be of a-z, 0-9 and hyphens"),
        (
            {"front": "https://f:1", "groups": [{"name": "a", "engines": "two"}]},
            "engines: must be a number",
        ),
        (
            {"front": "https://f:1", "groups": [{"name": "a", "options": {"b": {}}}]},
            "options.b: must be a text",
        ),
        ({"front": "https://f:1", "groups": ["a"]}, "groups.0: must have fields, as `name: far`"),
        ("- a", "the file: must have fields"),
        ({"front": "https://f:1", "groups": []}, "groups"),
        ("[", "not YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(given: Any, says: str, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    if given is not None:
        file.write_text(given if isinstance(given, str) else yaml.safe_dump(given))
    with pytest.raises(PlanError) as refused:
        read_plan(file)
    assert says in str(refused.value)
