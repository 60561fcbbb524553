"""The audit log: what was done with checkpoints through this protocol, by which key; :data:`MOST` entries, of which the
key with most loses its oldest first."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime
from typing import Any, Literal

from fastapi import APIRouter
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.doors.http.tinker.store import AuditRecord, TinkerStore
from gradwire_server.errors import ServiceError

MOST = 20_000
DAY_S = 86_400
Event = Literal[
    "checkpoint_save", "checkpoint_export", "checkpoint_upload", "checkpoint_read", "checkpoint_delete",
    "checkpoint_ttl_set", "checkpoint_publish", "checkpoint_unpublish",
]  # fmt: skip


async def note(store: TinkerStore, caller: Caller, event: Event, path: str, **details: Any) -> None:
    """Add an entry; durable when this returns."""
    record = AuditRecord(owner=caller.name, number=store.next_audit_number(), event=event, path=path, details=details)
    await store.put(store.audit, record)
    if (superfluous := len(store.audit) - MOST) > 0:  # who floods the log loses entries of their own
        counts = Counter(each.owner for each in store.audit.values())
        most = max(counts, key=lambda owner: counts[owner])
        await store.delete(store.audit, *[n for n, each in store.audit.items() if each.owner == most][:superfluous])


def routes(core: Core, store: TinkerStore) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.get("/audit")
    async def audit(
        caller: CallerOf,
        event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all",
        day: date | None = None,
    ) -> dict[str, Any]:
        """The entries of one day of UTC, oldest first; of types other than checkpoints there are none."""
        if core.keys.required and caller.role != "admin":
            message = "the audit log is read with an admin key: gradwire keys create NAME --tinker --admin"
            raise ServiceError(pb.ERROR_CODE_PERMISSION_DENIED, message)
        if event_type not in ("all", "checkpoints"):
            return {"entries": []}
        asked = day or datetime.now(UTC).date()
        first = datetime(asked.year, asked.month, asked.day, tzinfo=UTC).timestamp()
        behind = first + DAY_S
        return {"entries": [_entry(each) for each in store.audit.values() if first <= each.created_at < behind]}

    return router


def _entry(record: AuditRecord) -> dict[str, Any]:
    return {
        "timestamp": datetime.fromtimestamp(record.created_at, UTC).isoformat(),
        "event": record.event,
        "event_details": {"user": record.owner or "anyone", "tinker_path": record.path, **record.details},
        "tinker_path": record.path,
    }
