"""The server's certificate and key, read again when their files change: certificates are renewed while servers run."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from contextlib import ExitStack
from pathlib import Path

from gradwire_server.config import ServerConfig

log = logging.getLogger(__name__)

_Content = tuple[bytes, bytes, bytes | None]


class Certificates:
    """The PEM files of a server that speaks TLS. Thread-safe.

    Raises:
        SystemExit: A file cannot be read.
    """

    def __init__(self, config: ServerConfig) -> None:
        assert config.tls_cert is not None and config.tls_key is not None
        self.cert, self.key, self.client_ca = config.tls_cert, config.tls_key, config.tls_client_ca
        self._lock = threading.Lock()
        try:
            self._seen, self._content = self._state(), self._read()
        except OSError as error:
            raise SystemExit(f"gradwire: {error.filename} cannot be read: {error.strerror}") from error

    def pem(self) -> tuple[bytes, bytes, bytes | None]:
        """Key, certificates and the clients' authority, as they were when :meth:`changed` last found them to fit."""
        return self._content

    def load_into(self, context: ssl.SSLContext) -> None:
        """Give a context that serves connections the certificates of :meth:`pem`, and never half of them."""
        _load(context, self._content)

    def changed(self) -> bool:
        """Whether the files have changed since this was asked last, and fit each other."""
        with self._lock:
            try:
                state = self._state()
                if state == self._seen:
                    return False
                content, context = self._read(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                _load(context, content)
                if content[2] is not None:
                    context.load_verify_locations(cadata=content[2].decode())
            except (OSError, ValueError, ssl.SSLError) as error:  # being written; or wrong, and the old ones serve
                log.warning("the TLS files have changed and cannot be used yet: %s", error)
                return False
            self._seen, self._content = state, content
        log.info("the TLS files have changed: new connections are given %s", self.cert)
        return True

    def _read(self) -> _Content:
        authority = None if self.client_ca is None else self.client_ca.read_bytes()
        return self.key.read_bytes(), self.cert.read_bytes(), authority

    def _state(self) -> tuple[tuple[int, int], ...]:
        files: tuple[Path | None, ...] = (self.cert, self.key, self.client_ca)
        stats = [file.stat() for file in files if file is not None]
        return tuple((each.st_mtime_ns, each.st_ino) for each in stats)


def _load(context: ssl.SSLContext, content: _Content) -> None:
    """Give a context a key and its certificates, which ``ssl`` reads from files only: from some in memory."""
    with ExitStack() as stack:

        def file(text: bytes) -> str:
            opened = stack.enter_context(os.fdopen(os.memfd_create("tls"), "wb"))
            opened.write(text)
            opened.flush()
            return f"/proc/self/fd/{opened.fileno()}"

        context.load_cert_chain(file(content[1]), file(content[0]))
