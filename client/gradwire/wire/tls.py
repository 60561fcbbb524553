"""Certificates of a connection."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gradwire.errors import InvalidArgumentError

SECURE_SCHEMES = ("https://", "grpcs://")


@dataclass(frozen=True)
class Tls:
    """Certificates as PEM files. ``ca_cert`` None uses the system's roots. The client certificate is for mTLS."""

    ca_cert: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        def read(path: Path | None) -> bytes | None:
            return path.read_bytes() if path else None

        return grpc.ssl_channel_credentials(read(self.ca_cert), read(self.client_key), read(self.client_cert))


def checked_tls(ca_cert: Any, client_cert: Any, client_key: Any) -> Tls | None:
    """Build TLS settings from the user's arguments; None if none was given."""
    if (client_cert is None) != (client_key is None):
        raise InvalidArgumentError(
            "client_cert and client_key must be given together",
            field="client_key" if client_key is None else "client_cert",
        )
    if ca_cert is None and client_cert is None:
        return None
    return Tls(*(Path(path) if path is not None else None for path in (ca_cert, client_cert, client_key)))
