"""The file of keys, and what each key is and may use."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gradwire_server.durable_files import make_folder, replace_text

Role = Literal["admin", "user", "viewer", "engine"]
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
PREFIX_CHARS = 9
"""Characters of a key that are stored so that people can tell keys apart; they hold 36 of its 256 bits."""


@dataclass(frozen=True)
class Quota:
    """Quota of one key; None stands for the server's limit.

    Raises:
        ValueError: A value is out of its range.
    """

    runs: int | None = None
    upload_bytes: int | None = None
    queued_operations: int | None = None
    queued_bytes: int | None = None
    tokens_per_minute: int | None = None
    memory_percent: int | None = None
    file_bytes: int | None = None
    running_jobs: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            least, most = (
                0 if name in ("runs", "upload_bytes", "file_bytes") else 1,
                100 if name == "memory_percent" else math.inf,
            )
            if type(value) is not int or not least <= value <= most:
                span = f"at least {least}" if most is math.inf else f"from {least} to {most}"
                raise ValueError(f"the quota {name} is {value!r}; it must be a whole number, {span}")

    @property
    def given(self) -> dict[str, int]:
        """The values that are not the server's."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Key:
    """A key as stored in the state folder. Times are Unix seconds.

    Raises:
        ValueError: A field is not what it should be.
    """

    name: str
    role: Role
    prefix: str
    sha256: str
    created_at: float
    revoked_at: float | None = None
    quota: Quota = Quota()

    def __post_init__(self) -> None:
        times = (self.created_at, 0.0 if self.revoked_at is None else self.revoked_at)
        right = (
            all(isinstance(text, str) for text in (self.name, self.prefix, self.sha256))
            and self.role in get_args(Role)
            and all(isinstance(time, float | int) for time in times)
        )
        if not right:
            raise ValueError(f"this is not a key: {str(self.name)[:100]}")


class KeyFile:
    """The file ``keys.json`` of a state folder; creates and revokes keys.

    ``keys.lock`` beside it is not empty once there were keys: a lost file does not open the server to everybody.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path, self._lock = state_dir / "keys.json", state_dir / "keys.lock"

    @property
    def is_lost(self) -> bool:
        """Whether the file is missing though there were keys."""
        return not self._path.exists() and self._lock.exists() and self._lock.stat().st_size > 0

    @property
    def how_lost(self) -> str:
        return (
            f"{self._path} is missing, and there were keys: copy it from a backup, or delete {self._lock} to begin"
            " without keys"
        )

    def read(self) -> tuple[Key, ...]:
        """Read every key, revoked ones included.

        Raises:
            ValueError, OSError: The file cannot be read.
        """
        try:
            content = json.loads(self._path.read_bytes())
            if set(content) - {"keys", "checksum"}:
                raise ValueError(f"{self._path} is not a file of keys")
            if "checksum" in content and content["checksum"] != _checksum(content["keys"]):
                raise ValueError(f"{self._path} is damaged: its checksum does not match")
            return tuple(Key(**{**key, "quota": Quota(**key.get("quota", {}))}) for key in content.get("keys", ()))
        except FileNotFoundError:
            if self.is_lost:
                raise ValueError(self.how_lost) from None
            return ()
        except (TypeError, AttributeError) as error:  # another shape, a field too many or too few
            raise ValueError(f"{self._path} is not a file of keys: {error}") from None

    def create(
        self,
        name: str,
        role: Role = "user",
        quota: Quota | None = None,
        *,
        replace: bool = False,
        prefix: str = "gw_",
    ) -> str:
        """Create a key and return its secret, which is not stored and cannot be shown again.

        Args:
            replace: Whether to revoke a key that the name has.
            prefix: Beginning of the secret.

        Raises:
            ValueError: The name is invalid, or has a key already and ``replace`` is not set.
        """
        if not KEY_NAME.fullmatch(name):
            raise ValueError(f"{name[:100]!r} is not a name: letters, digits, '.', '_', '@', '-', 100 at most")
        secret = prefix + secrets.token_urlsafe(32)
        with self._changing() as keys:
            if any(key.name == name and key.revoked_at is None for key in keys) and not replace:
                raise ValueError(f"{name} has a key already; --replace revokes it and makes another for the same runs")
            keys[:] = [key for key in keys if key.name != name]
            keys.append(
                Key(
                    name=name, role=role, prefix=secret[:PREFIX_CHARS], sha256=digest_of(secret),
                    created_at=time.time(), quota=quota or Quota(),
                )
            )  # fmt: skip
        return secret

    def revoke(self, name: str) -> None:
        """Revoke the key of a name.

        Raises:
            ValueError: The name has no key.
        """
        with self._changing() as keys:
            valid = [key for key in keys if key.name == name and key.revoked_at is None]
            if not valid:
                raise ValueError(f"{name[:100]!r} has no key")
            keys[keys.index(valid[0])] = dataclasses.replace(valid[0], revoked_at=time.time())

    @contextmanager
    def _changing(self) -> Iterator[list[Key]]:
        make_folder(self._path.parent, 0o700)
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = list(self.read())
            yield keys
            told = [asdict(key) for key in keys]
            replace_text(self._path, json.dumps({"keys": told, "checksum": _checksum(told)}, indent=1), 0o600)
            os.pwrite(lock, b"there were keys\n", 0)
        finally:
            os.close(lock)


def _checksum(keys: Any) -> str:
    return hashlib.blake2b(json.dumps(keys, sort_keys=True).encode(), digest_size=16).hexdigest()


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
