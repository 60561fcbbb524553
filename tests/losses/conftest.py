from __future__ import annotations

import os

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(os.environ.get("GRADWIRE_TEST_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"GRADWIRE_TEST_SEED={seed}")
    return np.random.default_rng(seed)
