"""Which key may call which RPC: written down here, held to the service's descriptor and to a running server by
`tests/server/security/test_access.py`, and shown in SECURITY.md (`python tests/support/access.py` writes it there),
beside what bounds each RPC (`gradwire_server.access.calls`) and the limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.calls import RPCS
from gradwire_server.limits import Limits

SECURITY = Path(__file__).parents[2] / "SECURITY.md"

KEYS = ("no key", "wrong key", "revoked key", "another's key", "read-only key", "owner's key", "admin's key")

PLACES = {
    "GetServerInfo": "any",
    "ListModels": "any",
    "ListLosses": "any",
    "Encode": "any",
    "Decode": "any",
    "Render": "any",
    "GetTokenizerInfo": "any",
    "CreateRun": "any",
    "ListRuns": "any",
    "WatchRuns": "any",
    "GetRun": "read",
    "DeleteRun": "write",
    "ForkRun": "read",
    "BeginUpload": "any",
    "WriteUpload": "own",
    "FinishUpload": "own",
    "ListUploads": "any",
    "DeleteUpload": "own",
    "ShareRun": "write",
    "GetHistory": "read",
    "ListOperations": "read",
    "ListQueues": "any",
    "ListKeys": "any",
    "GetUsage": "any",
    "ListRecordings": "read",
    "ReadRecording": "read",
    "RecordRollouts": "write",
    "OpenRun": "write",
    "Submit": "write",
    "Results": "read",
    "AckResults": "write",
    "Cancel": "write",
    "DiscardPending": "write",
    "AcceptChanges": "write",
    "MoveRun": "admin",
    "DrainEngine": "admin",
    "Sample": "read",
    "StreamSample": "read",
    "ListCheckpoints": "read",
    "DeleteCheckpoint": "write",
    "Download": "read",
}
"""The right that a call needs: any live key; one that may read or write the run that it names; the key that owns the
upload that it names, which cannot be shared; an admin's."""


def expected(rpc: str, key: str) -> str:
    """Expected result of a call with this key, about a run of the owner's."""
    if key in KEYS[:3]:
        return "unauthenticated"
    if PLACES[rpc] == "any":
        return "yes"
    if PLACES[rpc] == "admin":
        return "yes" if key == "admin's key" else "permission_denied"
    if key == "another's key" or (PLACES[rpc] == "own" and key == "read-only key"):
        return "unknown"
    return "permission_denied" if PLACES[rpc] == "write" and key == "read-only key" else "yes"


def rpcs() -> list[str]:
    """The RPCs of the service, from its descriptor."""
    return [method.name for method in pb.DESCRIPTOR.services_by_name["TrainingService"].methods]


def grouped(header: tuple[str, ...], cells: Callable[[str], tuple[str, ...]]) -> str:
    """A table with one line for all RPCs whose cells are the same."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for rpc in rpcs():
        groups.setdefault(cells(rpc), []).append(f"`{rpc}`")
    rows = [header, ("---",) * len(header), *((", ".join(names), *each) for each, names in groups.items())]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def table() -> str:
    return grouped(("RPC", *KEYS[3:]), lambda rpc: tuple(expected(rpc, key).replace("_", " ") for key in KEYS[3:]))


def bounds() -> str:
    def cells(rpc: str) -> tuple[str, ...]:
        kind = RPCS[rpc]
        number = "`key_streams`" if kind.of_key is None else str(kind.of_key)
        number += f", {kind.beside_others} beside other keys" if kind.beside_others != kind.of_key else ""
        return number, "are refused" if kind.of_key is None else "wait unread", kind.bounds

    return grouped(("RPC", "of one key at a time", "further ones", "besides"), cells)


def limits() -> str:
    rows = [("limit", "default", "of what"), ("---",) * 3]
    rows += [
        (f"`{name}`", f"{field.default:,}", field.description or "") for name, field in Limits.model_fields.items()
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def with_tables(text: str) -> str:
    """Return the text with the tables updated."""
    for name, rows in (("access", table()), ("bounds", bounds()), ("limits", limits())):
        begin, end = f"<!-- {name}: python tests/support/access.py -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{rows}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    SECURITY.write_text(with_tables(SECURITY.read_text()))
