"""The agreement of an engine of several ranks: collectives of ``torch.distributed``.

Every rank executes the same decisions in the same order, so all of them come to the same agreements in the same order.
An agreement on a piece of work (:meth:`GroupAgreement.together`) exchanges three numbers: how deep the piece is nested,
its name, and whether it failed. If all are the same, all go on, or all raise rank 0's error. Anything else ends the
group, which starts again from the journal: a rank may have changed its run where another one failed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from gradwire_proto.v1 import engine_pb2, training_pb2

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import GroupBroken, OperationError
from gradwire_server.engine.failures import is_fatal, is_out_of_memory, to_error
from gradwire_server.engine_link.crash_marks import CrashMarks

T = TypeVar("T")
PATIENCE = timedelta(days=7)
"""How long a collective may wait. Long, because a rank may compute for long; the watch ends a group that is stuck."""
_COMPARED = ("loss", "optim_step", "train_step", "sample")
"""Kinds of results that every rank computes."""


class GroupAgreement(Agreement):
    """The agreement of one rank with the others.

    Args:
        rank: This process's number.
        ranks: Number of processes.
        marks: The front's page of marks, of rank 0.

    Attributes:
        collective: Number of the newest collective.
        inside: Whether this rank waits in it.
    """

    def __init__(self, rank: int, ranks: int, marks: CrashMarks | None = None) -> None:
        super().__init__(marks)
        self._rank, self._ranks = rank, ranks
        self._depth = 0
        self._agreed: Exception | None = None  # the newest error that all raise
        self.collective, self.inside = 0, False

    def join(self, store: Path) -> None:
        """Wait for the other ranks.

        Args:
            store: A file that all ranks know, in a folder that exists.
        """
        dist.init_process_group(
            "gloo",
            init_method=store.as_uri(),
            rank=self._rank,
            world_size=self._ranks,
            timeout=PATIENCE,
        )

    def check(self, request: engine_pb2.EngineRequest) -> None:
        """See :class:`.agreement.Agreement`: rank 0 checks, for a decision. What is being executed goes on."""
        if self._rank == 0 and self._depth == 0:
            super().check(request)

    def free_memory(self, device: torch.device) -> int:
        """See :class:`.agreement.Agreement`: the least of all ranks."""
        return int(self._gathered([super().free_memory(device)])[:, 0].min())

    def seconds_on(self, device: torch.device, work: Callable[[], object]) -> float:
        """See :class:`.agreement.Agreement`: the most of all ranks."""
        return int(self._gathered([int(super().seconds_on(device, work) * 1e9)])[:, 0].max()) / 1e9

    def once(self, work: Callable[[], T]) -> T | None:
        """See :class:`.agreement.Agreement`: rank 0 works."""
        return work() if self._rank == 0 else None

    def confirm(self, answer: engine_pb2.EngineReply) -> None:
        """See :class:`.agreement.Agreement`.

        Raises:
            GroupBroken: The ranks have different answers.
        """
        found = self._gathered([zlib.crc32(_compared(answer))])[:, 0]
        if (found != found[0]).any():
            raise GroupBroken(f"the ranks have different answers to request {answer.id}; rank {self._rank}: {answer}")

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """See :class:`.agreement.Agreement`.

        Raises:
            GroupBroken: The ranks are in different places.
        """
        self._depth += 1
        failure: Exception | None = None
        try:
            try:
                yield
            except Exception as error:
                if is_fatal(error) or error is self._agreed:
                    raise
                failure = error
            self._share(what, failure)
        finally:
            self._depth -= 1

    def _share(self, what: str, failure: Exception | None) -> None:
        places = self._gathered([self._depth, zlib.crc32(what.encode()), int(failure is not None)])
        if (places != places[0]).any():
            raise GroupBroken(f"rank {self._rank} ended {what!r} with {failure!r}, and another one otherwise")
        if failure is not None:
            self._agreed = _from_the_wire(self._objects(_on_the_wire(failure, self._rank))[0])
            raise self._agreed from failure

    def _gathered(self, numbers: list[int]) -> torch.Tensor:
        """``[ranks, numbers]`` every rank's numbers."""
        own = torch.tensor(numbers)
        found = torch.empty(self._ranks, len(numbers), dtype=torch.int64)
        self._collective(lambda: dist.all_gather(list(found), own))
        return found

    def _objects(self, own: Any) -> list[Any]:
        """Every rank's object: bytes and numbers."""
        found: list[Any] = [None] * self._ranks
        self._collective(lambda: dist.all_gather_object(found, own))
        return found

    def _collective(self, work: Callable[[], object]) -> None:
        self.collective += 1
        self.inside = True
        try:
            work()
        except RuntimeError as error:
            raise GroupBroken(f"rank {self._rank} lost the others: {error}") from error
        finally:
            self.inside = False


def _compared(answer: engine_pb2.EngineReply) -> bytes:
    """What every rank's answer has in common."""
    result = answer.result
    kind, of_result = answer.WhichOneof("kind"), result.WhichOneof("kind")
    text = f"{answer.id} {kind} {result.status} {result.error.code} {answer.error.code} {result.payload_bytes} "
    own = getattr(result, of_result).SerializeToString(deterministic=True) if of_result in _COMPARED else b""
    return text.encode() + bytes(own)


def _on_the_wire(error: Exception, rank: int) -> tuple[bool, bytes]:
    """Whether memory ran out, and the error for the person who asked."""
    if is_out_of_memory(error):
        return True, f"rank {rank}: {error}".encode()
    return False, to_error(error, f"the work of rank {rank}").SerializeToString()


def _from_the_wire(told: tuple[bool, bytes]) -> Exception:
    out_of_memory, text = told
    if out_of_memory:
        return torch.OutOfMemoryError(text.decode())
    return OperationError.from_proto(training_pb2.Error.FromString(text))
