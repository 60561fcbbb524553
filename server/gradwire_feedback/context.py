"""What one running service consists of."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire_feedback.database.connection import Database
from gradwire_feedback.settings import Settings
from gradwire_feedback.training.jobs import Jobs
from gradwire_feedback.training.server import TrainingServer


@dataclass(frozen=True)
class Context:
    """Made once by the application; the API and the pages read it."""

    settings: Settings
    database: Database
    server: TrainingServer
    jobs: Jobs
