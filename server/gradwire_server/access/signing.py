"""The server's secrets for signatures, each a file for its user alone, made when it is first needed.

Runs' records are signed with Ed25519, and URLs that work without a key with 256 random bits.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gradwire_server.durable_files import replace_text

SIGNING_KEY = "signing_key.pem"
"""File in the state folder with the private key of records."""
URL_SECRET = "url_secret"
"""File in the state folder with the secret of URLs."""
_SECRET = re.compile(r"[0-9a-f]{64}")
RAW = serialization.Encoding.Raw, serialization.PublicFormat.Raw


class BadSignature(Exception):
    """A signature is invalid, or is of other content; the message says which."""


def sign(state_dir: Path, content: bytes) -> dict[str, str]:
    """Sign a content with the key of a state folder; the key is made if there is none.

    Returns:
        The signature as :func:`signer` reads it.
    """
    file = state_dir / SIGNING_KEY
    if not file.exists():
        _make_key(state_dir)
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), None)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"{file} is not an Ed25519 key; move it away, and a new one is made")
    public = key.public_key().public_bytes(*RAW)
    return {
        "algorithm": "ed25519",
        "public_key": base64.b64encode(public).decode(),
        "signature": base64.b64encode(key.sign(content)).decode(),
    }


def rotate(state_dir: Path) -> None:
    """Make both secrets anew; a running server uses them at once, and refuses the URLs that it has signed.

    A folder without a secret of URLs gets none: it is made when it is first needed.
    """
    _make_key(state_dir)
    if UrlSecret(state_dir).exists:
        _make_url_secret(state_dir)


class UrlSecret:
    """The secret of URLs of a state folder; follows changes of its file."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir, self._file = state_dir, state_dir / URL_SECRET
        self._seen: tuple[int, int] | None = None
        self._secret = ""

    @property
    def exists(self) -> bool:
        """Whether one was made."""
        return self._file.exists()

    @property
    def value(self) -> str:
        """The secret as it is now; a new one where there is none, or what is there is none."""
        if not self.exists:
            _make_url_secret(self._state_dir)
        status = self._file.stat()
        if (seen := (status.st_ino, status.st_mtime_ns)) != self._seen:
            self._secret, self._seen = self._file.read_bytes().decode(errors="replace"), seen
            if not _SECRET.fullmatch(self._secret):
                _make_url_secret(self._state_dir)
                return self.value
        return self._secret


def _make_key(state_dir: Path) -> None:
    made = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    replace_text(state_dir / SIGNING_KEY, made.decode(), 0o600)


def _make_url_secret(state_dir: Path) -> None:
    replace_text(state_dir / URL_SECRET, secrets.token_hex(32), 0o600)


def signer(content: bytes, signature: object) -> str:
    """The fingerprint of the key that signed a content: ``"ed25519:"`` and 32 hexadecimal digits.

    Raises:
        BadSignature: The signature is not of this content.
    """
    try:
        if not isinstance(signature, dict) or signature["algorithm"] != "ed25519":
            raise ValueError("not an ed25519 signature")
        public = base64.b64decode(signature["public_key"], validate=True)
        given = base64.b64decode(signature["signature"], validate=True)
        Ed25519PublicKey.from_public_bytes(public).verify(given, content)
    except (InvalidSignature, ValueError, KeyError, TypeError) as error:
        raise BadSignature("the signature is not of this content") from error
    return f"ed25519:{hashlib.blake2b(public, digest_size=16).hexdigest()}"
