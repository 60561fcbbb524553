"""API keys with their roles and quotas.

A key is 256 random bits, shown once when it is created; the state folder keeps its SHA-256. There is no salt and no
slow hash, because those protect secrets chosen by people: 256 random bits can be neither guessed nor tabulated.

A name has one key at a time, and runs belong to the name, so a new key that replaces a lost one reaches the same runs.
``keys.json`` is replaced atomically. A running server checks whether the file has changed before every call, and at
most every ``LOOK_AGAIN_S`` seconds for the messages of a stream; a revoked key is then refused, open streams included.
Calls that wait are told within ``WATCH_S``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.key_file import Key, KeyFile, Quota, Role, digest_of
from gradwire_server.errors import ServiceError

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.02
"""Seconds between two checks of the file for open streams: the longest time that a revoked key still works there."""
WATCH_S = 0.5
"""Seconds between two checks of the keys of all calls under way: one that waits has no message for a long time."""


SESSION_KEY = "gws-"
"""Prefix of the keys of rollout sessions."""
ALONE = Quota(memory_percent=100)
"""Quota of the callers of a server without keys."""


@dataclass(frozen=True)
class SessionCall:
    """A call under the URL of a rollout session.

    Attributes:
        path: The path of the call, without the session's.
        body: Digest of its body; empty before that was read.
        idempotency_key: The client's key of a call that it may repeat.
        repeated: Whether the client says that it repeats a call.
    """

    session_id: str
    path: str
    body: bytes = b""
    idempotency_key: str = ""
    repeated: bool = False


@dataclass(frozen=True)
class Caller:
    """The name and role behind a call.

    An admin reads and writes every run; a viewer reads every run and changes nothing; an engine may only lend itself.

    Attributes:
        lent: Whether it is a process that this server started, which works in the name of the key's owner.
        session: The call, of an agent in a rollout session of this key.
    """

    name: str
    role: Role = "user"
    sha256: str = ""
    lent: bool = dataclasses.field(default=False, compare=False)
    session: SessionCall | None = dataclasses.field(default=None, compare=False)

    @property
    def sees_all(self) -> bool:
        """Whether it reads what belongs to other keys."""
        return self.role in ("admin", "viewer") and self.session is None

    @property
    def space(self) -> str:
        """The name under which a door keeps its conversations: the key's name; a rollout session has its own."""
        return self.name if self.session is None else f"{self.name}/{self.session.session_id}"

    def check_may_change(self) -> None:
        """Check that it may call something other than what reads.

        Raises:
            ServiceError: PERMISSION_DENIED for a viewer.
        """
        if self.role == "viewer":
            message = f"the key of {self.name} is a viewer's: it reads everything and changes nothing"
            raise ServiceError(pb.ERROR_CODE_PERMISSION_DENIED, message)


ANYONE = Caller("")
"""The caller of every call to a server without keys."""


class Keys:
    """The keys of a running server; follows changes of the file.

    Args:
        state_dir: Folder of ``keys.json``.
        open_door: Whether calls need no key as long as no key was ever created.
        own_key: Secret of the program that started the server, which nobody else knows and no file holds: its caller
            has the name of the callers of a server without keys. Empty for none.

    Attributes:
        check_session: Called with each check of a call in a rollout session; raises if that has ended.
    """

    def __init__(self, state_dir: Path, *, open_door: bool, own_key: str = "") -> None:
        self._path, self._file = state_dir / "keys.json", KeyFile(state_dir)
        self._own = Caller("", sha256=digest_of(own_key)) if own_key else None
        self._open = open_door and self._own is None
        self._seen: tuple[int, int, int] | None = None
        self._refreshed = float("-inf")
        self._live: dict[str, Key] = {}
        self._all: tuple[Key, ...] = ()
        self._lent: dict[str, str] = {}
        self._quotas_alone: dict[str, Quota] = {}
        self._are_several = False
        self.check_session: Callable[[SessionCall], object] = lambda call: None
        self._watched: dict[object, tuple[Caller, Callable[[], object]]] = {}
        self._watching = False
        self._refresh()

    @property
    def required(self) -> bool:
        """Whether calls need a key: true from the first key on, even if all are revoked or the file is deleted."""
        return not self._open

    @property
    def any(self) -> bool:
        """Whether there is a valid key."""
        self._refresh()
        return bool(self._live)

    def caller(self, secret: str, *, engine: bool = False) -> Caller:
        """Return the caller to whom a secret belongs. The comparison takes constant time, whichever key matches.

        Args:
            engine: Whether the call is an engine's, for which an engine's key is needed; it is good for nothing else.

        Raises:
            ServiceError: UNAUTHENTICATED for a missing, unknown or revoked key alike; PERMISSION_DENIED.
        """
        caller = self._caller(secret)
        if self.required and engine != (caller.role == "engine"):
            message = "it takes an engine's key to lend an engine: `gradwire keys create NAME --engine`"
            if not engine:
                message = f"the key of {caller.name} is an engine's: it may call nothing else"
            raise ServiceError(pb.ERROR_CODE_PERMISSION_DENIED, message)
        return caller

    def _caller(self, secret: str) -> Caller:
        self._refresh()
        if secret.startswith(SESSION_KEY):  # it opens its session alone, also on a server without keys
            raise _unauthenticated()
        if not self.required:
            return ANYONE
        digest = digest_of(secret)
        if self._own is not None and hmac.compare_digest(self._own.sha256, digest):
            return self._own
        found = [key for key in self._live.values() if hmac.compare_digest(key.sha256, digest)]
        if found:
            return Caller(found[0].name, found[0].role, digest)
        lent = [name for known, name in self._lent.items() if hmac.compare_digest(known, digest)]
        owner = self._of(lent[0]) if lent else None
        if owner is None:
            raise _unauthenticated()
        return dataclasses.replace(owner, lent=True)

    @contextmanager
    def lent(self, name: str) -> Iterator[str]:
        """Provide a secret that stands for the key of a name until the context ends, or the key is revoked.

        It is for a process that this server starts to work for the key's owner; it is in no file.
        """
        secret = secrets.token_urlsafe(32)
        digest = digest_of(secret)
        self._lent[digest] = name
        try:
            yield secret
        finally:
            del self._lent[digest]

    def of(self, name: str) -> Caller:
        """The caller of this name.

        Raises:
            ServiceError: UNAUTHENTICATED if calls in this name are not let in.
        """
        self._refresh()
        caller = self._of(name) if self.required else ANYONE
        if caller is None:
            raise _unauthenticated()
        return caller

    def may_call(self, name: str) -> bool:
        """Whether calls in this name are let in: it has a valid key, or calls need none."""
        self._refresh()
        return not self.required or self._of(name) is not None

    def check(self, caller: Caller) -> None:
        """Check that an accepted call may continue.

        This runs for each message of a stream, so the file is checked at most every ``LOOK_AGAIN_S`` seconds.

        Raises:
            ServiceError: UNAUTHENTICATED if its key was revoked, or if keys have become required since.
        """
        self._refresh(LOOK_AGAIN_S)
        if self.required and caller != self._of(caller.name):
            raise _unauthenticated()
        if caller.session is not None:
            self.check_session(caller.session)

    @contextmanager
    def watched(self, caller: Caller, revoked: Callable[[], object]) -> Iterator[None]:
        """Call ``revoked`` once the caller's key is not valid any more, unless the context has ended."""
        token = object()
        self._watched[token] = caller, revoked
        if not self._watching:
            self._watching = True
            asyncio.get_running_loop().call_later(WATCH_S, self._watch)
        try:
            yield
        finally:
            self._watched.pop(token, None)

    @contextmanager
    def until_revoked(self, caller: Caller) -> Iterator[None]:
        """Cancel the current task, which may wait for long, once the caller's key is revoked.

        Raises:
            ServiceError: UNAUTHENTICATED, in place of that cancellation.
        """
        task, ended = asyncio.current_task(), False
        assert task is not None

        def end() -> None:
            nonlocal ended
            ended = True
            task.cancel()

        with self.watched(caller, end):
            try:
                yield
            finally:
                if ended:
                    task.uncancel()
                    self.check(caller)

    def _watch(self) -> None:
        for token, (caller, revoked) in list(self._watched.items()):
            try:
                self.check(caller)
            except ServiceError:
                del self._watched[token]
                revoked()
        self._watching = bool(self._watched)
        if self._watching:
            asyncio.get_running_loop().call_later(WATCH_S, self._watch)

    def has(self, name: str) -> bool:
        """Whether a name has a valid key."""
        self._refresh()
        return name in self._live

    def listed(self, caller: Caller) -> list[pb.KeyInfo]:
        """The keys that a caller may know of, the newest first: all for one that sees all, else its own."""
        self._refresh()
        return [
            pb.KeyInfo(
                name=key.name, role=key.role, created_at=key.created_at, revoked_at=key.revoked_at or 0.0,
                quota=key.quota.given,
            )
            for key in sorted(self._all, key=lambda key: -key.created_at)
            if caller.sees_all or key.name == caller.name
        ]  # fmt: skip

    def quota(self, name: str) -> Quota:
        """The quota of a name; the server's limits for one without a key.

        A name that shares the server with no other may take all of its memory.
        """
        self._refresh(LOOK_AGAIN_S)
        if self._are_several:
            return self._live[name].quota if name in self._live else Quota()
        return self._quotas_alone.get(name, ALONE)

    def _of(self, name: str) -> Caller | None:
        if self._own is not None and name == self._own.name:
            return self._own
        key = self._live.get(name)
        return Caller(key.name, key.role, key.sha256) if key else None

    def _refresh(self, after_s: float = 0.0) -> None:
        now = time.monotonic()
        if now - self._refreshed < after_s:
            return
        self._refreshed = now
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            self._live, self._all, self._seen, self._are_several = {}, (), None, False
            if self._open and self._file.is_lost:
                self._open = False
                log.error("nobody is let in: %s", self._file.how_lost)
            return
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == self._seen:
            return
        self._open, self._seen = False, seen
        try:
            self._all = self._file.read()
            self._live = {key.name: key for key in self._all if key.revoked_at is None}
            self._quotas_alone = {
                name: dataclasses.replace(key.quota, memory_percent=key.quota.memory_percent or ALONE.memory_percent)
                for name, key in self._live.items()
            }
            self._are_several = sum(key.role != "engine" for key in self._live.values()) > 1
        except (ValueError, OSError) as error:
            self._live, self._all, self._are_several = {}, (), False
            log.error("nobody is let in: %s cannot be read: %s", self._path, type(error).__name__)


def _unauthenticated() -> ServiceError:
    message = "this server needs a valid API key: connect(api_key=...), or the key of your HTTP client"
    return ServiceError(pb.ERROR_CODE_UNAUTHENTICATED, message)
