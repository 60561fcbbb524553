"""The components of one running service."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire_feedback.database.connection import Database
from gradwire_feedback.settings import Settings
from gradwire_feedback.training.jobs import JobRunner
from gradwire_feedback.training.server import TrainingServer


@dataclass(frozen=True)
class Context:
    """Created once by the application; read by the API and the pages."""

    settings: Settings
    database: Database
    server: TrainingServer
    jobs: JobRunner
