"""One name, one class: no two public classes of the server, the client and the losses share a name without a reason."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("server/gradwire_server", "client/gradwire", "losses/gradwire_losses")

SAME_INTERFACE = {
    "ServiceClient": "client/gradwire/sync.py is the blocking form of client/gradwire/service.py",
    "TrainingClient": "client/gradwire/sync.py is the blocking form of client/gradwire/training.py",
}
"""Classes that users choose between by module: the same interface twice."""
INTERFACES = "client/gradwire/rl/primitives/"
"""The interfaces that the toolkit's requirements name; the toolkit's own classes of these names implement them."""
OTHER_PROCESS = {
    "Batch", "Decision", "Metrics", "OperationError", "Outcome", "Request", "Sample", "SamplingParams", "SettingsError",
    "Tokens", "Tracing", "Training",
}  # fmt: skip
"""Classes of the server's inside whose names the client or the losses use on their side of the wire. None of them is
imported where the other is."""
OTHER_SUBJECT = {
    "AdaptiveKL",
    "Estimate",
    "Part",
    "PrometheusLogger",
    "RewardModel",
    "Rollout",
    "Scorer",
    "TrainingResult",
}
"""Classes of the router, the recipes, the RL toolkit and the RLHF stages, public under their own package's name."""


def classes() -> dict[str, list[str]]:
    """The files of each public class, by name; private modules and the interfaces are left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            if "/_" in path.removesuffix("__init__.py") or path.startswith(INTERFACES):
                continue
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(path)
    return found


def shared() -> dict[str, list[str]]:
    return {name: files for name, files in classes().items() if len(files) > 1}


def test_no_two_public_classes_share_a_name() -> None:
    allowed = SAME_INTERFACE.keys() | OTHER_PROCESS | OTHER_SUBJECT
    assert {name: files for name, files in shared().items() if name not in allowed} == {}
    assert allowed - shared().keys() == set(), "allowed, and no longer needed"


def test_the_server_and_the_losses_share_no_name_within_themselves() -> None:
    for name, files in shared().items():
        for package in ("server/", "losses/"):
            assert sum(file.startswith(package) for file in files) < 2, (name, files)
