"""API keys: created, listed and revoked; only their SHA-256 is stored.

A key is 256 random bits, so it needs neither a salt nor a slow hash.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import sqlalchemy as sa
from sqlalchemy.orm import Session

from gradwire_feedback.database.tables import Key, now
from gradwire_feedback.store.problems import ConflictError, NotFoundError, UnauthenticatedError, UnprocessableError

Role = Literal["rate", "train", "read"]
ROLES: tuple[Role, ...] = get_args(Role)
ALLOWS: dict[Role, frozenset[Role]] = {
    "rate": frozenset({"rate"}),
    "read": frozenset({"read"}),
    "train": frozenset(ROLES),
}
"""Permissions of the roles: ``train`` includes the other two; a rater cannot read results, to stay blind."""

KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
PREFIX_CHARS = 9


@dataclass(frozen=True)
class Caller:
    """The sender of a request; ``name`` is empty on a service without keys."""

    name: str
    role: Role

    def may(self, role: Role) -> bool:
        return role in ALLOWS[self.role]


ANYONE = Caller("", "train")


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


def create_key(session: Session, name: str, role: str, *, replace: bool = False) -> str:
    """Create a key and return its secret, which cannot be shown again.

    Raises:
        UnprocessableError: The name or the role is invalid.
        ConflictError: The name already has a key and ``replace`` is not set.
    """
    if not KEY_NAME.fullmatch(name):
        raise UnprocessableError(f"{name[:100]!r} is not a name: letters, digits, '.', '_', '@', '-', 100 at most")
    if role not in ROLES:
        raise UnprocessableError(f"{role[:100]!r} is not a role: {', '.join(ROLES)}")
    for key in session.scalars(sa.select(Key).where(Key.name == name, Key.revoked_at.is_(None))):
        if not replace:
            raise ConflictError(f"{name} already has a key; --replace revokes it and creates another")
        key.revoked_at = now()
    secret = "gwf_" + secrets.token_urlsafe(32)
    session.add(Key(name=name, role=role, prefix=secret[:PREFIX_CHARS], sha256=digest_of(secret)))
    return secret


def list_keys(session: Session) -> Sequence[Key]:
    return session.scalars(sa.select(Key).order_by(Key.created_at, Key.name)).all()


def revoke_key(session: Session, name: str) -> None:
    """Revoke the key of a name.

    Raises:
        NotFoundError: The name has no key.
    """
    keys = session.scalars(sa.select(Key).where(Key.name == name, Key.revoked_at.is_(None))).all()
    if not keys:
        raise NotFoundError(f"{name[:100]!r} has no key")
    for key in keys:
        key.revoked_at = now()


def keys_required(session: Session) -> bool:
    """Whether requests need a key: true once the first key was created, even if all are revoked."""
    return session.scalar(sa.select(sa.func.count()).select_from(Key)) != 0


def caller_of(session: Session, digest: str | None) -> Caller:
    """Return the owner of the key with this digest.

    Raises:
        UnauthenticatedError: The key is missing, unknown or revoked.
    """
    if not keys_required(session):
        return ANYONE
    key = session.scalar(sa.select(Key).where(Key.sha256 == (digest or ""), Key.revoked_at.is_(None)))
    if key is None:
        raise UnauthenticatedError("this service needs a valid API key: Authorization: Bearer KEY")
    return Caller(key.name, key.role)  # type: ignore[arg-type]  # only create_key writes it
