"""The seed of a test session: the same one every time, or another on request."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FIXED = 1
# What torch's generator starts with when nobody seeds it: default_rng_seed_val of c10/core/GeneratorImpl.h.
UNSEEDED_TORCH = 67280421310721


def choose_seed() -> None:
    """Settle ``GRADWIRE_SEED``, before worker processes inherit it; ``random`` becomes a number.

    Without it, :func:`session_seed` and hypothesis draw the same in every session.
    """
    if os.environ.get("GRADWIRE_SEED") == "random":
        os.environ["GRADWIRE_SEED"] = str(int.from_bytes(os.urandom(4), "little"))
    busy = [HealthCheck.too_slow]  # a busy machine is no fault
    calm = settings(deadline=None, print_blob=True, suppress_health_check=busy)
    settings.register_profile("repeatable", calm, derandomize=True)
    settings.register_profile("drawn", calm)
    settings.load_profile("drawn" if "GRADWIRE_SEED" in os.environ else "repeatable")


def session_seed() -> int:
    return int(os.environ.get("GRADWIRE_SEED", FIXED))


def torch_seed() -> int:
    return int(os.environ.get("GRADWIRE_SEED", UNSEEDED_TORCH))
