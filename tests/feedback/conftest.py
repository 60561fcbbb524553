"""One service, on the tests' server, for all tests that do not end it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.feedback import FeedbackService, postgres, postgres_programs
from support.server import Server


@pytest.fixture(scope="session")
def service(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FeedbackService]:
    """On SQLite, without keys."""
    folder = tmp_path_factory.mktemp("service")
    with FeedbackService(folder, "tiny", "--service", server.address) as service:
        yield service


@pytest.fixture
def api(service: FeedbackService) -> Iterator[httpx.Client]:
    with service.client() as client:
        yield client


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if postgres_programs() is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with postgres(tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each of the two databases, empty but for what other tests left in PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'feedback.db'}"
    return str(request.getfixturevalue("postgres_url"))
