"""Placement of a fleet's engines on nodes, computed from the plan and the nodes alone."""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.fleet.plan import Group, Plan

Resources = Mapping[str, float]
EVERYWHERE = 10_000
"""More engines than a group with ``engines: all`` can have."""


def place(plan: Plan, nodes: Mapping[str, Resources], placed: Mapping[str, str]) -> dict[str, str]:
    """Choose a node for each engine of a plan.

    An engine stays where it is, if there is room. The others go where fewest engines are, in the order of the plan;
    those for which there is no room are left out.

    Args:
        nodes: Resources for engines of each node that takes them, by node.
        placed: The node of each engine that is running; those on other nodes are placed again.
    """
    free = {node: dict(resources) for node, resources in nodes.items()}
    chosen: dict[str, str] = {}
    for engine, node in placed.items():
        group = plan.group_of(engine)
        if group is not None and node in free and _is_wanted(group, engine) and _fits(free[node], group):
            _take(free[node], group)
            chosen[engine] = node
    for group in plan.groups:
        for number in range(EVERYWHERE if group.engines == "all" else group.engines):
            engine = f"{group.name}-{number}"
            if engine in chosen:
                continue
            able = [node for node in free if _fits(free[node], group)]
            if not able:
                break
            node = min(able, key=lambda each: (list(chosen.values()).count(each), each))
            _take(free[node], group)
            chosen[engine] = node
    return chosen


def _is_wanted(group: Group, engine: str) -> bool:
    return group.engines == "all" or int(engine.rpartition("-")[2]) < group.engines


def _fits(free: Resources, group: Group) -> bool:
    return bool(group.bundle) and all(free.get(name, 0) >= amount for name, amount in group.bundle.items())


def _take(free: dict[str, float], group: Group) -> None:
    for name, amount in group.bundle.items():
        free[name] = free.get(name, 0) - amount
