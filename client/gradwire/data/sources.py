"""Rows of a data set, each with its location: JSONL, CSV and Parquet files, Hugging Face data sets, any iterable."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.extras import require

Row = Mapping[str, Any]
Source = str | Path | Iterable[Row]
"""The path of a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, the name of a data set for
``datasets.load_dataset`` (needs ``gradwire[data]``), or an iterable of rows."""


class DataError(ValueError):
    """A row that cannot be used.

    Attributes:
        place: Where the row is: a file and its line, or a data set and its row.
        reason: What is wrong with it.
        unnamed: Fields whose columns were not recognised, and which a mapping can name.
    """

    def __init__(self, place: str, reason: str, unnamed: Sequence[str] = ()) -> None:
        self.place, self.reason, self.unnamed = place, reason, tuple(unnamed)
        columns = ", ".join(f'"{field}": "COLUMN"' for field in unnamed)
        super().__init__(f"{self.where}: name its columns, mapping={{{columns}}}" if unnamed else self.where)

    @property
    def where(self) -> str:
        """The place and the reason, without advice on a mapping."""
        return f"{self.place}: {self.reason}"


def read(source: Source, *, split: str = "train", **options: Any) -> Iterator[tuple[str, Row | DataError]]:
    """Yield the rows of a source, each with its location. A row that cannot be read comes as its error.

    Args:
        source: See :data:`Source`.
        split: Split of a named data set.
        options: Options of ``datasets.load_dataset``, such as ``name``.

    Raises:
        FileNotFoundError: The source is the path of a file that does not exist.
    """
    if not isinstance(source, str | Path):
        for number, row in enumerate(source):
            yield f"row {number}", row if isinstance(row, Mapping) else _no_row(f"row {number}", row)
        return
    path = Path(source)
    if path.suffix in READERS or path.is_file():
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        yield from READERS.get(path.suffix, _json_lines)(path)
        return
    why = f"{source}, which is no file and so names a data set,"
    dataset = require("datasets", "data", why).load_dataset(str(source), split=split, **options)
    for number, row in enumerate(dataset):
        yield f"{source}/{split}, row {number}", row


def _json(path: Path) -> Iterator[tuple[str, Row | DataError]]:
    """Read one list of rows, or a row a line."""
    text = path.read_bytes()
    if not text.lstrip().startswith(b"["):
        yield from _json_lines(path)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}", f"not valid JSON: {error.msg}, column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise DataError(str(path), f"not valid UTF-8: {error}") from None
    for number, row in enumerate(rows):
        place = f"{path}, row {number}"
        yield place, row if isinstance(row, dict) else _no_row(place, row)


def _json_lines(path: Path) -> Iterator[tuple[str, Row | DataError]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line.rstrip())
            except json.JSONDecodeError as error:
                yield place, DataError(place, f"not valid JSON: {error.msg}, column {error.colno}")
                continue
            except UnicodeDecodeError as error:
                yield place, DataError(place, f"not valid UTF-8: {error}")
                continue
            yield place, row if isinstance(row, dict) else _no_row(place, row)


def _csv(path: Path) -> Iterator[tuple[str, Row | DataError]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                place = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    columns = len(reader.fieldnames or ())
                    yield place, DataError(place, f"this line has not the {columns} columns of the first")
                    continue
                yield place, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}, after line {reader.line_num}", f"not valid CSV: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[str, Row | DataError]]:
    try:
        file = require("pyarrow.parquet", "data", f"the file {path}").ParquetFile(path)
    except ValueError as error:
        raise DataError(str(path), f"not a Parquet file: {str(error).splitlines()[0]}") from None
    number = 0
    for batch in file.iter_batches():
        for row in batch.to_pylist():
            yield f"{path}, row {number}", row
            number += 1


def _no_row(place: str, row: Any) -> DataError:
    return DataError(place, f"a row is a mapping from column to value; this is {type(row).__name__}")


READERS = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
