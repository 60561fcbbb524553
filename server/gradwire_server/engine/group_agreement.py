"""The agreement of an engine of several ranks: messages that each tells all others.

Every rank executes the same decisions in the same order, so all of them come to the same agreements in the same order.
A piece of work that changes nothing (:meth:`GroupAgreement.together`) may fail on one rank: all raise its error then.
Anything else that differs, such as answers or the place of a rank, ends the group, which starts again from the journal,
because a rank may have changed its run where another one has not.

All ranks are on one machine, and a message is mostly a number: a round over Unix sockets takes a tenth of the time of a
collective of gloo, which passes it through threads of its own and TCP. A message is: uint32 place, int64 number and
uint32 length of the bytes behind it (little-endian); rank 0 sends uint64 length of its message or of all, and these."""

from __future__ import annotations

import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from gradwire_proto.v1 import engine_pb2, training_pb2
from torch import Tensor

from gradwire_server.engine.agreement import Agreement, Failure
from gradwire_server.engine.errors import GroupBroken, OperationError
from gradwire_server.engine.failures import is_fatal, is_out_of_memory, to_error
from gradwire_server.engine.group_buffers import BUFFER_BYTES, GroupBuffers
from gradwire_server.engine_link.crash_marks import CrashMarks
from gradwire_server.engine_link.pulses import PLACE_BITS

_HEAD = struct.Struct("<IqI")
_LENGTH = struct.Struct("<Q")


class Told(NamedTuple):
    """A message of a rank to all others.

    Attributes:
        place: Names the place where it does, which is the same in all ranks.
    """

    place: int
    number: int
    content: bytes


class GroupMessages:
    """The messages, as one rank sees them.

    Args:
        sockets: Rank 0 has one to each other rank in their order; any other rank has one to rank 0.
    """

    def __init__(self, rank: int, sockets: Sequence[socket.socket]) -> None:
        self._rank, self._sockets = rank, sockets
        self._patience_s: float | None = None

    def all_told(self, own: Told, patience_s: float | None = None) -> list[Told]:
        """Tell all ranks a message, and wait for those of all, by rank.

        Args:
            patience_s: How long to wait for each; by default until it comes.

        Raises:
            OSError: A rank is gone, or too late.
        """
        self._wait_at_most(patience_s)
        if self._rank:
            self._sockets[0].sendall(_packed(own))
            return _received(self._sockets[0])
        everything = self._gathered(own)
        self._send(everything)
        return _read(everything)

    def told_first(self, own: Told) -> list[Told]:
        """Tell rank 0 a message; it waits for those of all, and returns them by rank. The others wait for nobody.

        Raises:
            OSError: A rank is gone.
        """
        self._wait_at_most(None)
        if self._rank:
            self._sockets[0].sendall(_packed(own))
            return [own]
        return _read(self._gathered(own))

    def first_told(self, own: Told) -> Told:
        """Rank 0's message; it waits for nobody.

        Raises:
            OSError: A rank is gone.
        """
        self._wait_at_most(None)
        if not self._rank:
            self._send(_packed(own))
            return own
        return _received(self._sockets[0])[0]

    def _wait_at_most(self, patience_s: float | None) -> None:
        if patience_s != self._patience_s:
            self._patience_s = patience_s
            for each in self._sockets:
                each.settimeout(patience_s)

    def _gathered(self, own: Told) -> bytes:
        everything = bytearray(_packed(own))
        for each in self._sockets:
            head = _exactly(each, _HEAD.size)
            everything += head + _exactly(each, _HEAD.unpack(head)[2])
        return bytes(everything)

    def _send(self, messages: bytes | bytearray) -> None:
        for each in self._sockets:
            each.sendall(_LENGTH.pack(len(messages)) + messages)


def _packed(told: Told) -> bytes:
    return _HEAD.pack(told.place, told.number, len(told.content)) + told.content


def _received(first: socket.socket) -> list[Told]:
    (length,) = _LENGTH.unpack(_exactly(first, _LENGTH.size))
    return _read(_exactly(first, length))


def _read(everything: bytes) -> list[Told]:
    told, start = [], 0
    while start < len(everything):
        place, number, length = _HEAD.unpack_from(everything, start)
        start += _HEAD.size + length
        told.append(Told(place, number, everything[start - length : start]))
    return told


def _exactly(sock: socket.socket, count: int) -> bytes:
    content = bytearray(count)
    room = memoryview(content)
    while room:
        received = sock.recv_into(room)
        if not received:
            raise ConnectionResetError("the other end is closed")
        room = room[received:]
    return bytes(content)


T = TypeVar("T")
PATIENCE = timedelta(days=7)
"""How long a collective may wait. Long, because a rank may compute for long; the watch ends a group that is stuck."""
LAYER_PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others to make a layer whole. They compute the same, so none is late by much."""
LATEST_S = 20.0
"""How long a rank that failed waits for the others in lock step; one that is later waits for its part of a layer."""
_COMPARED = ("loss", "optim_step", "train_step", "sample")
"""Kinds of results that every rank computes."""
_FAILED, _OUT_OF_MEMORY = 1, 2


class GroupAgreement(Agreement):
    """The agreement of one rank with the others.

    Args:
        marks: The front's page of marks, of rank 0.
        divides: The device of this rank, if models are divided among the ranks, which are in lock step then.

    Attributes:
        collective: The newest collective: its number, and in the lower 32 bits what names its place.
        inside: Whether this rank waits in it.
        waited_s: Seconds spent in collectives.
        models: The group in which layers are made whole, once the ranks have joined; None if models are not divided.
    """

    def __init__(
        self, rank: int, ranks: int, marks: CrashMarks | None = None, *, divides: torch.device | None = None
    ) -> None:
        super().__init__(marks)
        self.rank, self.ranks, self.lock_step = rank, ranks, divides is not None
        self._device = divides
        self.models: dist.ProcessGroup | None = None
        self._messages, self._buffers = GroupMessages(rank, ()), GroupBuffers(())
        self._apart = False  # within a piece of work, in which ranks do different things
        self._error: Exception | None = None
        self.collective, self.inside = 0, False
        self.waited_s = 0.0

    def join(self, store: Path, sockets: Sequence[socket.socket], buffers: Sequence[int]) -> None:
        """Wait until all ranks have joined.

        Args:
            store: A file that all ranks can open until this returns; empty before.
            sockets: As for :class:`.group_messages.GroupMessages`.
            buffers: As for :class:`.group_buffers.GroupBuffers`.
        """
        self._messages, self._buffers = GroupMessages(self.rank, sockets), GroupBuffers(buffers)
        dist.init_process_group(
            "gloo",
            init_method=store.as_uri(),
            rank=self.rank,
            world_size=self.ranks,
            timeout=PATIENCE,
        )
        if self._device is not None:
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            self.models = dist.new_group(timeout=LAYER_PATIENCE, backend=backend)
            dist.all_reduce(torch.zeros(1, device=self._device), group=self.models)
        dist.all_reduce(torch.zeros(1))  # until all have joined: the store, which they join through, is gone after this

    def check(self, request: engine_pb2.EngineRequest) -> None:
        """See :class:`.agreement.Agreement`: rank 0 looks, and the others learn it at the end of a piece of work."""
        if self._apart and not self.lock_step:
            if self.rank == 0:
                super().check(request)
            return
        error = self.ended(request) if self.rank == 0 else None
        told = self._first_told("check", b"" if error is None else error.to_proto().SerializeToString())
        if told:
            raise OperationError.from_proto(training_pb2.Error.FromString(told))

    def defer(self, error: Exception) -> bool:
        """Take note that memory ran out within a layer, to be raised at the end of the piece of work.

        Until then this rank goes on with results that mean nothing, because the others need its parts of the layers.

        Returns:
            False for any other error, which is not deferred.
        """
        if not is_out_of_memory(error):
            return False
        self._error = self._error or error
        return True

    def _deferred(self) -> Exception | None:
        error, self._error = self._error, None
        return error

    def free_memory(self, device: torch.device) -> int:
        """See :class:`.agreement.Agreement`: the least of all ranks."""
        return min(self._numbers("memory", super().free_memory(device)))

    def seconds_on(self, device: torch.device, work: Callable[[], object]) -> float:
        """See :class:`.agreement.Agreement`: the most of all ranks."""
        return max(self._numbers("seconds", int(super().seconds_on(device, work) * 1e9))) / 1e9

    def once(self, work: Callable[[], T]) -> T | None:
        """See :class:`.agreement.Agreement`: rank 0 works."""
        with self.together("once"):
            return work() if self.rank == 0 else None

    def confirm(self, answer: engine_pb2.EngineReply) -> None:
        """See :class:`.agreement.Agreement`.

        Raises:
            GroupBroken: The ranks have different answers.
        """
        if self._differs("answer", zlib.crc32(_compared(answer))):
            raise GroupBroken(f"the ranks have different answers to request {answer.id}; that of rank 0: {answer}")

    def alike(self, what: str, digest: Callable[[], int]) -> None:
        """See :class:`.agreement.Agreement`.

        Raises:
            GroupBroken: The ranks have different digests.
        """
        if self._differs(what, digest()):
            raise GroupBroken(f"the ranks have different {what}; all runs are restored")

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """See :class:`.agreement.Agreement`. The error is that of the first rank, or one that memory ran out.

        Raises:
            GroupBroken: The ranks are in different places.
        """
        failure: Exception | None = None
        self._apart = True
        try:
            yield
        except Exception as error:
            if is_fatal(error):
                raise
            failure = error
        finally:
            self._apart = False
        failure = self._deferred() or failure
        states = self._numbers(what, _state(failure), failure)
        if not any(states):
            return
        first = states.index(_OUT_OF_MEMORY if _OUT_OF_MEMORY in states else _FAILED)
        told = self.gathered(b"" if failure is None else _on_the_wire(failure, self.rank))
        shared = _from_the_wire(told[first], out_of_memory=states[first] == _OUT_OF_MEMORY)
        if is_out_of_memory(shared):
            raise shared  # without its cause, whose traceback keeps the computed tensors alive
        raise shared from failure

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See :class:`.agreement.Agreement`."""
        before, (self._apart, self._error) = (self._apart, self._error), (False, None)
        try:
            yield
        finally:
            self._apart, self._error = before

    def _confirm_failure(self, failure: Failure | None) -> None:
        error = None if failure is None else failure.error
        states = self._numbers("attempt", _state(error), error)
        if len(set(states)) > 1:
            raise GroupBroken(f"an attempt failed on some of the ranks only; on rank {self.rank}: {failure}")

    def greatest(self, own: int, after: Exception | None = None) -> int:
        """See :class:`.agreement.Agreement`."""
        return max(self._numbers("greatest", own, after))

    def gathered(self, own: bytes) -> list[bytes]:
        """See :class:`.agreement.Agreement`."""
        return [each.content for each in self._told("bytes", 0, own)]

    def exchanged(self, peer: int, own: Tensor, theirs: Tensor, longest: int) -> Tensor:
        """See :class:`.agreement.Agreement`."""
        at_once = BUFFER_BYTES // own.itemsize
        for start in range(0, longest, at_once):
            going, coming = own[start : start + at_once], theirs[start : start + at_once]
            self._buffers.of(self.rank, going).copy_(going)
            self._numbers("written", 0)
            coming.copy_(self._buffers.of(peer, coming))
            self._numbers("read", 0)
        return theirs

    def _numbers(self, what: str, own: int, error: Exception | None = None) -> list[int]:
        """Every rank's number.

        Args:
            what: Names the place, which is the same in all ranks.
            error: This rank's error, for the message.

        Raises:
            GroupBroken: The ranks are in different places.
        """
        return [each.number for each in self._told(what, own, error=error)]

    def _differs(self, what: str, own: int) -> bool:
        """Whether the ranks have different numbers; only rank 0 learns it, which ends the group."""
        mine = Told(_place(what), own, b"")
        told = self._collective(mine.place, lambda: self._messages.told_first(mine))
        return self.rank == 0 and len({each.number for each in self._in_step(what, told)}) > 1

    def _told(self, what: str, number: int, content: bytes = b"", error: Exception | None = None) -> list[Told]:
        mine = Told(_place(what), number, content)
        patience = LATEST_S if self.lock_step and error is not None else None
        told = self._collective(mine.place, lambda: self._messages.all_told(mine, patience))
        return self._in_step(what, told, error)

    def _in_step(self, what: str, told: list[Told], error: Exception | None = None) -> list[Told]:
        if len(told) < self.ranks or len({each.place for each in told}) > 1:
            raise GroupBroken(f"the ranks are out of step; rank {self.rank} is in {what!r}, after {error!r}") from error
        return told

    def _first_told(self, what: str, content: bytes) -> bytes:
        """Exchange rank 0's content: returns it on every rank."""
        mine = Told(_place(what), 0, content)
        told = self._collective(mine.place, lambda: self._messages.first_told(mine))
        if told.place != mine.place:
            raise GroupBroken(f"the ranks are out of step; rank {self.rank} is in {what!r}")
        return told.content

    def _collective(self, place: int, work: Callable[[], T]) -> T:
        self.collective = (self.collective >> PLACE_BITS) + 1 << PLACE_BITS | place
        self.inside = True
        since = time.perf_counter()
        try:
            return work()
        except (OSError, RuntimeError) as error:
            raise GroupBroken(f"rank {self.rank} lost the others: {error}") from error
        finally:
            self.inside = False
            self.waited_s += time.perf_counter() - since


def _place(what: str) -> int:
    return zlib.crc32(what.encode())


def _compared(answer: engine_pb2.EngineReply) -> bytes:
    """The bytes of a reply that must be equal on every rank."""
    result = answer.result
    kind, of_result = answer.WhichOneof("kind"), result.WhichOneof("kind")
    text = f"{answer.id} {kind} {result.status} {result.error.code} {answer.error.code} {result.payload_bytes} "
    own = getattr(result, of_result).SerializeToString(deterministic=True) if of_result in _COMPARED else b""
    return text.encode() + bytes(own)


def _state(failure: Exception | None) -> int:
    if failure is None:
        return 0
    return _OUT_OF_MEMORY if is_out_of_memory(failure) else _FAILED


def _on_the_wire(error: Exception, rank: int) -> bytes:
    if is_out_of_memory(error):
        return f"rank {rank}: {error}".encode()
    return to_error(error, f"the work of rank {rank}").SerializeToString()


def _from_the_wire(told: bytes, *, out_of_memory: bool) -> Exception:
    if out_of_memory:
        return torch.OutOfMemoryError(told.decode())
    return OperationError.from_proto(training_pb2.Error.FromString(told))
