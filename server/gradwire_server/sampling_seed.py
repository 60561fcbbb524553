"""The seed of a run's sample that was given none; front and engine agree on it, and neither draws it."""

from __future__ import annotations

import hashlib


def own_seed(run_seed: int, seq: int) -> int:
    """Seed of the sample that is a run's operation ``seq``; it follows from these two and takes nothing else."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{seq}".encode(), digest_size=8).digest()) >> 2
