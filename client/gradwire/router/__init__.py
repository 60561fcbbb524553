"""A router that learns who should work on a request: features of the request in, a collaboration mode out.

The policy is linear and needs numpy alone, in production as in training:

* ``features``, ``policy``, ``routing``, ``records``: what production needs.
* ``logs``, ``offline``, ``offline_training``: logged decisions, to judge policies on and to learn from.
* ``world``, ``rollouts``, ``environment``: the synthetic requests that it learns from.
* ``ppo``, ``trainer``, ``adapter``, ``evaluation``: the training, and what it is worth.
* ``settings``, ``settings_file``, ``run_folder``, ``observability``, ``commands``: how it is run. They need
  ``gradwire[router]``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gradwire.router.features import FeatureSpace
from gradwire.router.logs import LogError, read_log
from gradwire.router.offline import Estimate, OfflineReport, evaluate_offline
from gradwire.router.offline_training import train_offline
from gradwire.router.policy import LinearPolicy
from gradwire.router.records import LoggedDecision
from gradwire.router.routing import Decision, RouterPolicy

if TYPE_CHECKING:
    from gradwire.router.adapter import RouterPPOAdapter, TrainingDisabledError, TrainingResult
    from gradwire.router.environment import RouterEnvironment
    from gradwire.router.settings import RouterSettings

# Imported when they are first asked for: they need packages that production does not.
_LATER = {
    "RouterEnvironment": "environment",
    "RouterPPOAdapter": "adapter",
    "RouterSettings": "settings",
    "TrainingDisabledError": "adapter",
    "TrainingResult": "adapter",
}

__all__ = [
    "Decision",
    "Estimate",
    "FeatureSpace",
    "LinearPolicy",
    "LogError",
    "LoggedDecision",
    "OfflineReport",
    "RouterEnvironment",
    "RouterPPOAdapter",
    "RouterPolicy",
    "RouterSettings",
    "TrainingDisabledError",
    "TrainingResult",
    "evaluate_offline",
    "read_log",
    "train_offline",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
