"""Rows on disk: those of a JSONL file in their place, others in a temporary file; and views of such rows."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from gradwire.data.sources import DataError, Row, json_row

T = TypeVar("T")
U = TypeVar("U")
Indices = npt.NDArray[np.int64]


class Lines(Sequence[T], Generic[T]):
    """Rows of a JSONL file, each read when it is used.

    Args:
        path: The file, which must not change.
        row_of: A line's row, or why there is none, and its place -> the row of the data set.
    """

    def __init__(self, path: Path, row_of: Callable[[Row | DataError, str], T]) -> None:
        self._path, self._row_of = path, row_of
        self._starts, self._numbers = array("q"), array("q")
        self._file = path.open("rb")
        self._lock = threading.Lock()
        self._reading = (0, 0)

    def read(self) -> Iterator[tuple[str, Row | DataError]]:
        """Yield each row with its place; :meth:`append` then keeps the row that was yielded last."""
        start = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                self._reading = start, number
                start += len(line)
                if line.strip():
                    yield self._place(number), json_row(line, self._place(number))

    def append(self, row: T) -> None:
        self._starts.append(self._reading[0])
        self._numbers.append(self._reading[1])

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        with self._lock:
            self._file.seek(self._starts[index])
            line = self._file.readline()
        place = self._place(self._numbers[index])
        return self._row_of(json_row(line, place), place)

    def _place(self, number: int) -> str:
        return f"{self._path}, line {number}"


class Copied(Sequence[T], Generic[T]):
    """Rows in a temporary file, which ends with the process; eight bytes of memory a row.

    Args:
        rows: The first of them.
    """

    def __init__(self, rows: Iterable[T]) -> None:
        disk = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None  # /tmp is memory on many machines
        self._folder = os.environ.get("TMPDIR") or disk or tempfile.gettempdir()
        self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - as long as the rows
        self._ends = array("q", [0])
        for row in rows:
            self.append(row)

    def append(self, row: T) -> None:
        """Write a row.

        Raises:
            DataError: There is no room for it.
        """
        data = pickle.dumps(row, pickle.HIGHEST_PROTOCOL)
        try:
            self._file.write(data)
        except OSError as error:
            reason = f"rows that memory does not hold are copied there: {error.strerror}; TMPDIR names another folder"
            raise DataError(self._folder, reason) from None
        self._ends.append(self._ends[-1] + len(data))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        self._file.flush()
        start = self._ends[index]
        return pickle.loads(os.pread(self._file.fileno(), self._ends[index + 1] - start, start))


class Joined(Sequence[T], Generic[T]):
    """Chosen rows of one or several sequences, one after the other.

    Args:
        parts: The sequences.
        chosen: The indices of each one's rows; a row may be chosen more than once.
    """

    def __init__(self, parts: Sequence[Sequence[T]], chosen: Sequence[Indices]) -> None:
        self._parts, self._chosen = parts, chosen
        self._ends = np.cumsum([len(each) for each in chosen])

    @property
    def in_memory(self) -> bool:
        """Whether all the sequences are."""
        return all(isinstance(each, list) or (isinstance(each, Joined) and each.in_memory) for each in self._parts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        part = int(np.searchsorted(self._ends, index, side="right"))
        within = index - (int(self._ends[part - 1]) if part else 0)
        return self._parts[part][int(self._chosen[part][within])]


class Viewed(Sequence[U], Generic[T, U]):
    """Rows as a function makes them of others, each when it is used.

    Args:
        rows: The others.
        of: The function.
    """

    def __init__(self, rows: Sequence[T], of: Callable[[T], U]) -> None:
        self._rows, self._of = rows, of

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return self._of(self._rows[index])
