"""A router that learns who should work on a request: features of the request in, a collaboration mode out.

The policy is linear and needs numpy alone, in production as in training. Settings files need ``gradwire[router]``.
"""

from gradwire.router.features import FeatureSpace
from gradwire.router.policy import LinearPolicy
from gradwire.router.records import LoggedDecision

__all__ = ["FeatureSpace", "LinearPolicy", "LoggedDecision"]
