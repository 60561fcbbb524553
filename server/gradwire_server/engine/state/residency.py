"""Where the tensors of each LoRA run are: on the device, in host memory, or on disk.

A run that is used is on the device. When the runs there exceed their bytes, the least recently used one moves to host
memory (:mod:`.packed`), and from there, by the same rule, to a file. A thread of its own writes and reads the files; a
run is read as soon as an operation of it arrives, so that the operation need not wait for the disk. All of this is a
cache: a file that remains of another process is deleted unread, because a run is restored from its checkpoint and the
journal.

On a CPU the device's memory is the host's. A run in host memory is then one piece instead of many tensors, and takes as
many bytes: two budgets bound the sum, and only the disk makes room.

Runs that train all weights stay on the device, and so do those in use: by the operations being executed, by a kept
graph, by samples in progress.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gradwire_server.engine.model.policy import LoraPolicy
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.packed import Packed, PackedLayout

logger = logging.getLogger(__name__)

PLACES = ("device", "host", "disk")
RETRY_MOVES = 64
"""Moves to host memory for which nothing is written after the disk has refused a file."""


@dataclass
class Held:
    """The runs in one place."""

    runs: int = 0
    nbytes: int = 0

    def add(self, nbytes: int, runs: int = 1) -> None:
        self.runs += runs
        self.nbytes += nbytes


@dataclass
class Moves:
    """Moves of one kind since the start. ``seconds``: duration of the copies, whoever made them."""

    runs: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, began: float) -> None:
        self.runs += 1
        self.nbytes += nbytes
        self.seconds += time.perf_counter() - began


@dataclass(eq=False)
class _Away:
    """A run that is not on the device.

    Attributes:
        place: "host" or "disk"; a run that is being read is in the host memory that it is read into.
        packed: Its tensors, unless they are only in the file.
        checksum: The file's, once it is written.
        reading: The file being read, from the beginning of the read until the run is used or dropped again.
        gone: Whether the run was used or removed meanwhile.
    """

    run_id: str
    layout: PackedLayout
    packed: Packed | None
    place: str = "host"
    checksum: int | None = None
    reading: Future[None] | None = None
    gone: bool = False

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes


class Residency:
    """Keep the runs' tensors within budgets.

    All methods but :meth:`prefetch` and :meth:`held` belong to one thread.

    Args:
        folder: Folder of the files; whatever it holds is deleted.
        device_bytes: Bytes of runs on the device.
        host_bytes: Bytes of runs in host memory beside it.
        in_use: Whether samples or others use a run's tensors.

    Attributes:
        moves: ``"to_host"``, ``"to_device"``, ``"to_disk"``, ``"from_disk"`` -> the moves since the start.
        read_ahead: Number of uses of a run on disk for which reading had begun before.
        waited_s: Seconds for which uses waited for the disk.
    """

    def __init__(
        self, folder: Path, device_bytes: int, host_bytes: int, in_use: Callable[[EngineRun], bool] = lambda run: False
    ) -> None:
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        self._budgets = {"device": device_bytes, "host": host_bytes}
        self._in_use = in_use
        self._executing: Collection[str] = ()
        self._resident: OrderedDict[str, EngineRun] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._away: dict[str, _Away] = {}
        self._idle: OrderedDict[str, _Away] = OrderedDict()  # in host memory, least recently used first
        self._writing: dict[str, _Away] = {}
        self._ahead: dict[str, _Away] = {}  # read, or being read, before its use
        self._held = {place: Held() for place in PLACES}
        self._lock = threading.Condition()
        self._mover = ThreadPoolExecutor(1, "run-mover")
        self._moves_until_retry = 0
        self.moves = {kind: Moves() for kind in ("to_host", "to_device", "to_disk", "from_disk")}
        self.read_ahead = 0
        self.waited_s = 0.0

    def held(self) -> dict[str, Held]:
        """Place -> the runs there."""
        with self._lock:
            return {place: Held(held.runs, held.nbytes) for place, held in self._held.items()}

    def place(self, run_id: str) -> str:
        """Where a run is: "device", "host" or "disk"."""
        with self._lock:
            return self._away[run_id].place if run_id in self._away else "device"

    def add(self, run: EngineRun) -> None:
        """Manage a new run, which is on the device."""
        self._arrived(run, run.nbytes)
        self._settle((run.run_id,))

    def remove(self, run_id: str) -> None:
        """Forget a run."""
        with self._lock:
            if run_id in self._resident:
                self._leaves(run_id)
            if run_id in self._away:
                self._forget(self._away[run_id])

    def use(self, run: EngineRun) -> None:
        """Bring a run onto the device, if it is elsewhere.

        Raises:
            DamagedFile: Its file is damaged, and with it this process's copy of the run.
        """
        if run.run_id in self._resident:
            self._resident.move_to_end(run.run_id)
            return
        away = self._away[run.run_id]
        packed = self._in_memory(away)
        self._make_room(away.nbytes)
        began = time.perf_counter()
        run.put_tensors(packed.unpacked())
        with self._lock:
            self.moves["to_device"].add(away.nbytes, began)
            self._forget(away)
        self._arrived(run, run.nbytes)

    @contextmanager
    def executing(self, run_ids: Collection[str]) -> Iterator[None]:
        """Keep these runs on the device once they are there; afterwards move what exceeds the budgets."""
        before, self._executing = self._executing, {*self._executing, *run_ids}
        try:
            yield
        finally:
            self._executing = before
            self._settle(run_ids)

    def prefetch(self, run_id: str) -> None:
        """Begin to read a run that is on disk, in another thread; may be called in any thread."""
        with self._lock:
            away = self._away.get(run_id)
            if away is None or run_id in self._ahead or away.reading is not None:  # its use waits for the file
                return
            if run_id in self._idle:
                self._idle.move_to_end(run_id)
            elif run_id in self._writing:  # it stays in memory when it is written
                self._ahead[run_id] = away
            elif self._has_room_ahead(away.nbytes):
                self._read(away)

    def close(self) -> None:
        """Delete the files."""
        self._mover.shutdown(cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---------------------------------------------------------------- device

    def _arrived(self, run: EngineRun, nbytes: int) -> None:
        with self._lock:
            self._resident[run.run_id] = run
            self._sizes[run.run_id] = nbytes
            self._held["device"].add(nbytes)

    def _leaves(self, run_id: str) -> None:
        del self._resident[run_id]
        self._held["device"].add(-self._sizes.pop(run_id), -1)

    def _settle(self, run_ids: Collection[str]) -> None:
        for run_id in run_ids:
            run = self._resident.get(run_id)
            if run is not None:
                grown = run.nbytes - self._sizes[run_id]
                with self._lock:
                    self._sizes[run_id] += grown
                    self._held["device"].add(grown, 0)
        self._make_room(0)

    def _make_room(self, needed: int) -> None:
        """Move the least recently used runs off the device until ``needed`` more bytes are within the budget."""
        excess = self._held["device"].nbytes + needed - self._budgets["device"]
        if excess <= 0:
            return
        for run_id, run in list(self._resident.items()):
            if excess <= 0:
                return
            if self._may_leave(run):
                excess -= self._sizes[run_id]
                self._evict(run)

    def _may_leave(self, run: EngineRun) -> bool:
        in_use = run.run_id in self._executing or bool(run.kept) or self._in_use(run)
        return isinstance(run.policy, LoraPolicy) and not in_use

    def _evict(self, run: EngineRun) -> None:
        began = time.perf_counter()
        packed = Packed.of(run.tensors())
        run.release_tensors()
        away = _Away(run.run_id, packed.layout, packed)
        with self._lock:
            self.moves["to_host"].add(away.nbytes, began)
            self._leaves(run.run_id)
            self._away[run.run_id] = self._idle[run.run_id] = away
            self._held["host"].add(away.nbytes)
            self._trim_host()
            # The disk sets the pace: no more than this run is in memory beyond the budget.
            while self._writing and self._held["host"].nbytes > self._budgets["host"] + away.nbytes:
                self._lock.wait()

    # --------------------------------------------------- host memory and disk

    def _trim_host(self) -> None:
        """Begin to write the least recently used runs in host memory that exceed its budget."""
        excess = self._held["host"].nbytes - self._budgets["host"] - sum(each.nbytes for each in self._writing.values())
        if self._moves_until_retry:
            self._moves_until_retry -= 1
            return
        while excess > 0 and self._idle:
            run_id, away = self._idle.popitem(last=False)
            excess -= away.nbytes
            self._writing[run_id] = away
            self._mover.submit(self._write, away)

    def _has_room_ahead(self, nbytes: int) -> bool:
        """Whether a run may be read before its use; drop the first of those that were read and never used."""
        ahead = sum(each.nbytes for each in self._ahead.values())
        for away in list(self._ahead.values()):
            if ahead + nbytes <= self._budgets["host"]:
                break
            if away.packed is not None and away.checksum is not None:
                ahead -= away.nbytes
                del self._ahead[away.run_id]
                away.packed = away.reading = None
                self._moves_to("disk", away)
        return not ahead or ahead + nbytes <= self._budgets["host"]

    def _read(self, away: _Away) -> None:
        self._moves_to("host", away)
        self._ahead[away.run_id] = away
        self._trim_host()  # the writes are made before the read
        away.reading = self._mover.submit(self._fetch, away)

    def _in_memory(self, away: _Away) -> Packed:
        with self._lock:
            if away.reading is not None:
                self.read_ahead += 1
            elif away.packed is None:
                self._read(away)
            self._ahead.pop(away.run_id, None)  # or it could be dropped before it is used
            packed, reading = away.packed, away.reading
        if packed is not None:  # the mover may be about to leave it in its file only
            return packed
        assert reading is not None
        began = time.perf_counter()
        reading.result()
        self.waited_s += time.perf_counter() - began
        with self._lock:
            assert away.packed is not None
            self._idle[away.run_id] = away
            return away.packed

    def _moves_to(self, place: str, away: _Away) -> None:
        self._held[away.place].add(-away.nbytes, -1)
        self._held[place].add(away.nbytes)
        away.place = place

    def _forget(self, away: _Away) -> None:
        """Forget a run that is used or removed, and have its file deleted."""
        away.gone = True
        self._held[away.place].add(-away.nbytes, -1)
        for known in (self._away, self._idle, self._writing, self._ahead):
            known.pop(away.run_id, None)
        if away.checksum is not None:
            self._mover.submit(self._file(away).unlink, missing_ok=True)

    def _file(self, away: _Away) -> Path:
        return self._folder / away.run_id

    # ------------------------------------------------------- the mover's thread

    def _write(self, away: _Away) -> None:
        packed, checksum, began = away.packed, None, time.perf_counter()
        if away.gone or packed is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            checksum = packed.write(self._file(away))
        except OSError as error:
            if not self._moves_until_retry:
                logger.error("runs exceed --run-host-memory, because %s cannot be written: %s", self._folder, error)
            self._moves_until_retry = RETRY_MOVES
        with self._lock:
            if self._writing.get(away.run_id) is away:
                del self._writing[away.run_id]
            if checksum is None or away.gone:
                self._file(away).unlink(missing_ok=True)
            if checksum is not None:
                self.moves["to_disk"].add(away.nbytes, began)
            away.checksum = checksum
            if not away.gone and away.run_id not in self._ahead:
                if checksum is None:
                    self._idle[away.run_id] = away
                else:
                    away.packed = None
                    self._moves_to("disk", away)
            self._lock.notify_all()

    def _fetch(self, away: _Away) -> None:
        began = time.perf_counter()
        if away.gone:
            return
        assert away.checksum is not None
        packed = Packed.read(self._file(away), away.layout, away.checksum)
        with self._lock:
            away.packed = packed
            self.moves["from_disk"].add(away.nbytes, began)
