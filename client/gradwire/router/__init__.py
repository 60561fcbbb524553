"""A router that learns which collaboration mode should handle a request, from the request's features.

The policy is linear and needs only numpy, in production as in training:

* ``features``, ``policy``, ``routing``: production.
* ``world``, ``rollouts``, ``environment``: the synthetic requests of the training.
* ``ppo``, ``trainer``, ``adapter``, ``evaluation``: training and evaluation.
* ``settings``, ``settings_file``, ``run_folder``, ``observability``, ``commands``: running it. They need
  ``gradwire[router]``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gradwire.router.features import FeatureSpace
from gradwire.router.policy import LinearPolicy
from gradwire.router.routing import Decision, LoggedDecision, RouterPolicy

if TYPE_CHECKING:
    from gradwire.rl.hicra import build_hicra_from_dict
    from gradwire.router.adapter import RouterPPOAdapter, TrainingDisabledError, TrainingResult
    from gradwire.router.environment import RouterEnvironment
    from gradwire.router.settings import RouterSettings

# Imported on first use, because they need packages that production does not.
_LATER = {
    "RouterEnvironment": ".environment",
    "RouterPPOAdapter": ".adapter",
    "RouterSettings": ".settings",
    "TrainingDisabledError": ".adapter",
    "TrainingResult": ".adapter",
    "build_hicra_from_dict": "..rl.hicra",
}

__all__ = [
    "Decision",
    "FeatureSpace",
    "LinearPolicy",
    "LoggedDecision",
    "RouterEnvironment",
    "RouterPPOAdapter",
    "RouterPolicy",
    "RouterSettings",
    "TrainingDisabledError",
    "TrainingResult",
    "build_hicra_from_dict",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name], __name__), name)
