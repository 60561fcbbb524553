"""The audit log: what was done with checkpoints through this protocol, by which key, newest :data:`MOST` entries."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

from fastapi import APIRouter
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.doors.http.tinker.store import AuditRecord, TinkerStore
from gradwire_server.errors import ServiceError

MOST = 20_000
Event = Literal[
    "checkpoint_save", "checkpoint_export", "checkpoint_upload", "checkpoint_read", "checkpoint_delete",
    "checkpoint_ttl_set", "checkpoint_publish", "checkpoint_unpublish",
]  # fmt: skip


async def note(store: TinkerStore, caller: Caller, event: Event, path: str, **details: Any) -> None:
    """Add an entry; durable when this returns."""
    record = AuditRecord(owner=caller.name, number=store.next_audit_number(), event=event, path=path, details=details)
    await store.put(store.audit, record)
    await store.delete(store.audit, *list(store.audit)[: len(store.audit) - MOST])


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
            message = "the audit log is read with an admin key: gradwire keys create NAME --tinker --role admin"
            raise ServiceError(pb.ERROR_CODE_PERMISSION_DENIED, message)
        if event_type not in ("all", "checkpoints"):
            return {"entries": []}
        asked = day or datetime.now(UTC).date()
        start = datetime(asked.year, asked.month, asked.day, tzinfo=UTC)
        first, behind = start.timestamp(), (start + timedelta(days=1)).timestamp()
        return {"entries": [_entry(each) for each in store.audit.values() if first <= each.created_at < behind]}

    return router


def _entry(record: AuditRecord) -> dict[str, Any]:
    return {
        "timestamp": datetime.fromtimestamp(record.created_at, UTC).isoformat(),
        "event": record.event,
        "event_details": {"user": record.owner or "anyone", "tinker_path": record.path, **record.details},
        "tinker_path": record.path,
    }
