"""Settings of `gradwire feedback serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """Size limits; larger requests are refused."""

    prompt_chars: int = 32_768
    response_chars: int = 32_768
    notes_chars: int = 4_000
    run_id_chars: int = 200
    name_chars: int = 500
    batch_rows: int = 10_000
    body_bytes: int = 32 << 20
    versions_in_deployment: int = 10
    raters_per_item: int = 20
    answers_per_item: int = 6
    listed_rows: int = 1_000


LIMITS = Limits()


@dataclass(frozen=True)
class Settings:
    """Settings of one service.

    Attributes:
        host: Address to listen on.
        port: Its port; 0 picks a free one.
        database_url: SQLAlchemy URL of SQLite or PostgreSQL.
        models_dir: Folder of the trained versions, and of the embedded server's state.
        base_model: Model that the first version of an agent starts from, under the training server's name.
        embedded_model: That model as an argument of the embedded server: its name, or ``NAME=FOLDER``.
        service: Address of the gradwire server; None starts an embedded one.
        service_ca_cert: PEM file with the authority that signed that server's certificate.
        raters_per_item: Number of raters who see each generated answer on the rating page.
        host_names: Further names by which a service on loopback is asked, as behind a proxy.
        server_args: Further arguments of the embedded `gradwire serve`.
    """

    host: str
    port: int
    database_url: str
    models_dir: Path
    base_model: str
    embedded_model: str
    service: str | None = None
    service_ca_cert: Path | None = None
    raters_per_item: int = 1
    host_names: tuple[str, ...] = field(default=())
    server_args: tuple[str, ...] = field(default=())

    @property
    def loopback(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")
