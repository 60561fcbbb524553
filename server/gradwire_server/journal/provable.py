"""The record of a run as files: its operations with their batches and what they gave, to be executed again elsewhere.

``record.json`` says what the run is and was computed with, and holds the digest of every other file: ``journal/`` has
the operations in order, as segments (:mod:`.segments`), and ``runs/`` the checkpoints that they begin with and read.
``signature.json`` signs ``record.json``, and so all of it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from gradwire_proto.v1 import engine_pb2, journal_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.signing import BadSignature, sign, signer
from gradwire_server.checkpoint_files import (
    MANIFEST,
    NAME,
    DamagedCheckpoint,
    StoredFile,
    read_manifest,
    read_sealed,
    sealed,
)
from gradwire_server.durable_files import link_or_copy
from gradwire_server.errors import ServiceError
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.rows import JournalEntry, parse_outcome, uses
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.segments import Buffer, CorruptRecord, Location, Segments
from gradwire_server.journal.state_folder import RUNS, SEGMENTS
from gradwire_server.stores.store import CHECKPOINTS, Place, Store, StoreError, saved_place

RECORD, SIGNATURE = "record.json", "signature.json"
FORMAT = 1
PAGE = 256
"""Operations read from the database at a time."""


class BadRecord(Exception):
    """A record is damaged, changed or none; the message says what is wrong with it."""


def _lacks(run_id: str, reason: str) -> ServiceError:
    return ServiceError(pb.ERROR_CODE_UNSUPPORTED, f"the run {run_id} cannot be recorded: {reason}", field="record")


# ---- writing ----


async def write_record(
    journal: Journal,
    run: RunRecord,
    store: Store,
    folder: Path,
    readable: Callable[[str], Place],
    sign_with: Path | None = None,
) -> None:
    """Write the record of a run's operations that have results and whose batches are kept.

    Args:
        folder: An empty folder.
        readable: The place of a checkpoint ``"RUN_ID/NAME"`` of another run, if the record's reader may read it.
        sign_with: The state folder with the key to sign it with; None for no signature.

    Raises:
        ServiceError: UNSUPPORTED if a batch is not kept, an operation read a checkpoint that is gone, or the journal is
            damaged; what ``readable`` raises.
    """
    up_to_seq, base, origin = run.applied_seq, _beginning(run), run.origin
    after = base.seq if base is not None else 0
    first = base.path if base is not None else origin.checkpoint
    if not journal.keep_payloads:
        raise _lacks(run.run_id, "the server keeps no batches (--durability checkpoint)")
    wanted = {first} if first else set[str]()
    segments = Segments(folder / SEGMENTS)
    for start in range(after, up_to_seq, PAGE):
        entries = await journal.entries(run.run_id, start, min(start + PAGE, up_to_seq))
        if len(entries) != min(PAGE, up_to_seq - start):
            raise _lacks(run.run_id, "operations left the journal meanwhile; ask again")
        for entry in entries:
            await _write_entry(journal, segments, run.run_id, entry)
            wanted |= set(_used(run, entry))
    await asyncio.to_thread(segments.close)
    for path in sorted(wanted):
        run_id, _, name = path.partition("/")
        own = run_id == run.run_id
        if own and path != first and name in run.checkpoints and run.checkpoints[name].seq > after:
            continue  # verifying saves it again
        source = saved_place(run_id, CHECKPOINTS, name) if own else readable(path)
        try:
            await store.in_thread(_link, store, source, folder / RUNS / run_id / "checkpoints" / name)
        except FileNotFoundError:
            raise _lacks(run.run_id, f"the checkpoint {path}, which it reads, is gone") from None
        except (StoreError, DamagedCheckpoint) as error:
            raise _lacks(run.run_id, f"the checkpoint {path}, which it reads, cannot be read: {error}") from error
    facts = await journal.facts.of(run.run_id)
    content = {
        "format": FORMAT,
        "run_id": run.run_id,
        "config": json_format.MessageToDict(run.config, preserving_proto_field_name=True),
        "origin": json_format.MessageToDict(origin, preserving_proto_field_name=True),
        "forked_from": run.forked_from,
        "created_at": run.created_at,
        "begins_with": first,
        "after_seq": after,
        "up_to_seq": up_to_seq,
        "computed_with": [{"after_seq": seq, "at": at, "facts": known, "note": note} for seq, at, known, note in facts],
        "checkpoints": await store.in_thread(_saved, run, store, after),
    }
    await asyncio.to_thread(_seal, folder, content, sign_with)


def _beginning(run: RunRecord) -> pb.Checkpoint | None:
    """The checkpoint after which the journal holds every operation; None if it does from the run's creation on."""
    if not run.trimmed_seq:
        return None
    usable = [saved for saved in run.complete_checkpoints if saved.seq >= run.trimmed_seq]
    if not usable:
        raise _lacks(run.run_id, "no checkpoint is left that its journal goes on from")
    return min(usable, key=lambda saved: saved.seq)


async def _write_entry(journal: Journal, segments: Segments, run_id: str, entry: JournalEntry) -> None:
    header = entry.header
    if entry.damaged:
        raise _lacks(run_id, f"its operation {header.seq} is damaged on disk")
    outcome = parse_outcome(entry.outcome)
    record = journal_pb2.JournalRecord(run_id=run_id, seq=header.seq, at=entry.accepted_at, operation=header)
    record.status = entry.status
    payload: Buffer = b""
    if outcome is not None:
        if header.payload_bytes and entry.location is None:
            raise _lacks(run_id, f"the batch of its operation {header.seq} is not kept; ask again")
        record.outcome.CopyFrom(outcome)
        try:
            payload = await journal.payload(entry.location) if entry.location else b""
        except CorruptRecord as error:
            raise _lacks(run_id, f"the batch of its operation {header.seq} is damaged on disk: {error}") from error

    def append() -> None:
        segments.append([payload], record.SerializeToString())
        segments.write()

    await asyncio.to_thread(append)


def _used(run: RunRecord, entry: JournalEntry) -> Iterator[str]:
    if entry.status == pb.STATUS_SUCCEEDED:
        for name in uses(entry.header.operation):
            yield name if "/" in name else f"{run.run_id}/{name}"


def _saved(run: RunRecord, store: Store, after: int) -> dict[str, dict[str, object]]:
    """Number and digests of tensors of each checkpoint that the recorded operations saved, if it is still there."""
    by_name: dict[str, dict[str, object]] = {}
    for saved in run.checkpoints.values():
        if saved.seq > after:
            try:
                with store.reading(saved_place(run.run_id, CHECKPOINTS, saved.name), MANIFEST) as folder:
                    manifest = read_manifest(folder)
            except Exception as error:  # damaged, or deleted meanwhile: nothing can be said of it
                by_name[saved.name] = {"seq": saved.seq, "damaged": str(error)}
                continue
            by_name[saved.name] = {"seq": manifest.seq, "files": tensor_files(manifest.files)}
    return by_name


def tensor_files(files: Mapping[str, StoredFile]) -> dict[str, str]:
    """The digests of a checkpoint's files of tensors, by name."""
    return {name: file.blake2b for name, file in files.items() if name.endswith(".safetensors")}


def _seal(folder: Path, content: dict[str, object], key_of: Path | None) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content["files"] = {path.relative_to(folder).as_posix(): asdict(StoredFile.of(path)) for path in files}
    text = sealed(content)
    (folder / RECORD).write_text(text)
    if key_of is not None:
        (folder / SIGNATURE).write_text(json.dumps(sign(key_of, text.encode()), indent=1))


def _link(store: Store, source: Place, to: Path) -> None:
    with store.reading(source) as folder:
        shutil.copytree(folder, to, copy_function=link_or_copy)


# ---- reading ----


@dataclass(frozen=True)
class Record:
    """A record whose every byte was compared with its digests.

    Attributes:
        create: The request that puts an engine into the state in which the record begins.
        after_seq, up_to_seq: The operations in it have the numbers ``(after_seq, up_to_seq]``.
        facts: The facts that the run was computed with when the record was made.
        changes: Accepted changes under the run, in words.
        checkpoints: Digests of the files of tensors of its checkpoints, by name and file, with the checkpoint's number.
        signed_by: Fingerprint of the key that signed it; empty if nobody did.
    """

    folder: Path
    run_id: str
    config: pb.RunConfig
    create: engine_pb2.EngineCreateRun
    after_seq: int
    up_to_seq: int
    facts: Mapping[str, str]
    changes: list[str]
    checkpoints: Mapping[str, tuple[int, Mapping[str, str]]]
    signed_by: str

    def operations(self) -> Iterator[tuple[journal_pb2.JournalRecord, bytearray]]:
        """The operations with their batches, in order.

        Raises:
            BadRecord: One is missing or damaged.
        """
        segments, seq = Segments(self.folder / SEGMENTS), self.after_seq
        try:
            for number in segments.numbers():
                for stored in segments.records(number):
                    record = journal_pb2.JournalRecord.FromString(stored.description)
                    seq += 1
                    if record.seq != seq:
                        raise BadRecord(f"operation {seq} is missing")
                    yield record, segments.read(Location(number, stored.location.offset))
        except (CorruptRecord, DecodeError) as error:
            raise BadRecord(f"the operations after {seq} cannot be read: {error}") from error
        if seq != self.up_to_seq:
            raise BadRecord(f"operation {seq + 1} is missing")


def read_record(folder: Path) -> Record:
    """Read a record, and compare every file with its digest, and the signature with the whole.

    Raises:
        BadRecord: It is damaged, changed or none.
    """
    try:
        content = read_sealed(folder / RECORD)
        if content["format"] != FORMAT:
            raise BadRecord(f"it is of format {content['format']}, and this gradwire reads format {FORMAT}")
        _check_files(folder, {name: StoredFile(**stored) for name, stored in content["files"].items()})
        signed_by = ""
        if (folder / SIGNATURE).exists():
            signed_by = signer((folder / RECORD).read_bytes(), json.loads((folder / SIGNATURE).read_bytes()))
        create = json_format.ParseDict(content["origin"], engine_pb2.EngineCreateRun())
        config = json_format.ParseDict(content["config"], pb.RunConfig())
        if content["after_seq"]:
            create = engine_pb2.EngineCreateRun(
                run_id=content["run_id"], config=config, checkpoint=content["begins_with"]
            )
        if not NAME.fullmatch(content["run_id"]) or create.run_id != content["run_id"]:
            raise BadRecord(f"{str(content['run_id'])[:100]!r} is no id of a run, or not of the run that it makes")
        computed_with = content["computed_with"]
        return Record(
            folder=folder,
            run_id=content["run_id"],
            config=config,
            create=create,
            after_seq=content["after_seq"],
            up_to_seq=content["up_to_seq"],
            facts=computed_with[-1]["facts"] if computed_with else {},
            changes=[f"after operation {each['after_seq']}: {each['note']}" for each in computed_with if each["note"]],
            checkpoints={
                name: (saved["seq"], saved["files"])
                for name, saved in content["checkpoints"].items()
                if "files" in saved
            },
            signed_by=signed_by,
        )
    except FileNotFoundError as error:
        raise BadRecord(f"it lacks {Path(str(error.filename)).name}: this is no record of a run") from error
    except BadSignature as error:
        raise BadRecord(f"{error}: it was changed after it was signed, or signed for another record") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, json_format.ParseError) as error:
        raise BadRecord(f"{RECORD} is not what was written: {error}") from error


def _check_files(folder: Path, files: Mapping[str, StoredFile]) -> None:
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if strange := sorted(there - files.keys() - {RECORD, SIGNATURE}):
        raise BadRecord(f"{strange[0]} is not part of it")
    for name, stored in files.items():
        if name not in there:
            raise BadRecord(f"{name} is missing")
        if StoredFile.of(folder / name) != stored:
            raise BadRecord(f"{name} is not the file that was recorded: its digest does not match")
