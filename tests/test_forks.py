"""Which servers of the suite are forks, and which start for real."""

from __future__ import annotations

import os
import platform
import sys

import pytest
from support import forks

SERVE = [sys.executable, "-m", "gradwire_server.cli", "serve"]


@pytest.mark.skipif(
    platform.machine() not in forks.MACHINES or "GRADWIRE_TEST_REAL_START" in os.environ,
    reason="servers are not forked",
)
def test_what_was_imported_for_the_suite_leaves_servers_alike() -> None:
    """A variable that some module sets as it is imported would start every server for real."""
    assert not forks.changed(os.environ | {"OMP_NUM_THREADS": "1"})
    assert forks.forkable(SERVE, os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "GRADWIRE_CRASH_FILE", "HF_HOME"])
def test_what_is_read_at_an_import_starts_a_server_for_real(name: str) -> None:
    assert not forks.forkable(SERVE, os.environ | {name: "7"})
