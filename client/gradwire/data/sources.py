"""Rows of a data set, each with its location: files, folders of files, Hugging Face data sets, any iterable."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from gradwire.extras import require

Row = Mapping[str, Any]
Source = str | Path | Iterable[Row]
"""The path of a ``.jsonl``, ``.json``, ``.csv``, ``.parquet``, ``.txt`` or ``.md`` file, also as ``.gz`` or ``.zst``.
The path of a folder of such files, or of one that ``save_to_disk`` wrote. The name of a data set for
``datasets.load_dataset`` (needs ``gradwire[data]``). Or an iterable of rows."""
LARGE_BYTES = 1 << 29
"""Rows of so many bytes are not held in memory, but read from disk when they are used."""
BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
TEXT_CHARS = 8_000
"""Files of text become rows of about so many characters, cut between paragraphs."""


class DataError(ValueError):
    """A row that cannot be used.

    Attributes:
        place: Where the row is: a file and its line, or a data set and its row.
        reason: The row's fault.
        unnamed: Fields whose columns were not recognised, and which a mapping can name.
        skipped: The errors of all rows, if none can be used.
    """

    def __init__(self, place: str, reason: str, unnamed: Sequence[str] = (), skipped: Sequence[DataError] = ()) -> None:
        self.place, self.reason, self.unnamed, self.skipped = place, reason, tuple(unnamed), tuple(skipped)
        columns = ", ".join(f'"{field}": "COLUMN"' for field in unnamed)
        super().__init__(f"{self.where}: name its columns, mapping={{{columns}}}" if unnamed else self.where)

    @property
    def where(self) -> str:
        """The place and the reason, without advice on a mapping."""
        return f"{self.place}: {self.reason}"


class JsonError(ValueError):
    """Error for a text that is no JSON; the message says why in words for people.

    Attributes:
        line: Line of the text; 0 if it is not known.
    """

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


def parsed_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        JsonError: The text is not valid JSON, or Python cannot read it.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise JsonError(f"not valid JSON: {error.msg}, column {error.colno}", error.lineno) from None
    except UnicodeDecodeError as error:
        reason = f"not valid UTF-8: {error}"
    except RecursionError:
        reason = "not valid JSON here: its brackets are nested too deeply"
    except ValueError:  # Python's limit of digits
        reason = f"not valid JSON here: an integer of more than {sys.get_int_max_str_digits()} digits; write it as text"
    raise JsonError(reason)


def read(source: Source, *, split: str = "train", **options: Any) -> Iterator[tuple[str, Row | DataError]]:
    """Yield the rows of a source, each with its location. A row that cannot be read comes as its error.

    Args:
        source: See :data:`Source`.
        split: Split of a named data set.
        options: Options of ``datasets.load_dataset``, such as ``name``.

    Raises:
        FileNotFoundError: The source is the path of a file that does not exist.
        DataError: The source is a file of a kind that is not read.
    """
    if not isinstance(source, str | Path):
        of_arrow = type(source).__module__.partition(".")[0] == "datasets"
        for number, row in enumerate(source):
            place = f"row {number}"
            yield place, (_no_row(place, row) if not isinstance(row, Mapping) else of_structs(row) if of_arrow else row)
        return
    path = Path(source)
    if path.is_dir():
        yield from _folder(path, split)
        return
    if _kind(path) in (*READERS, *UNREAD) or path.is_file():
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        if _kind(path) in UNREAD:
            raise DataError(str(path), f"{_kind(path)} files are not read; {UNREAD[_kind(path)]}")
        yield from read_file(path, _kind(path))
        return
    why = f"{source}, which is no file and so names a data set,"
    dataset = require("datasets", "data", why).load_dataset(str(source), split=split, **options)
    for number, row in enumerate(dataset):
        yield f"{source}/{split}, row {number}", of_structs(row)


def read_file(path: Path, kind: str) -> Iterator[tuple[str, Row | DataError]]:
    """Yield the rows of a file.

    Args:
        kind: A suffix of :data:`READERS`; any other is read as JSONL.

    Raises:
        DataError: It is no file of this kind.
    """
    try:
        if kind != ".parquet":
            with _opened(path) as file:
                begin = file.read(4)
            if begin.startswith(BOMS) or b"\0" in begin:
                raise DataError(str(path), "it is in UTF-16 or UTF-32, or no text; save it as UTF-8")
        yield from READERS.get(kind, _json)(path)
    except _broken_archive(path) as error:
        raise DataError(str(path), f"not a whole {path.suffix} archive: {error}") from None


def of_structs(row: Row) -> Row:
    """A row of Arrow without the null fields in its lists and structs: all structs of a column have the same fields
    there, those of a row's own call and of every other row's."""
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def is_large(path: Path) -> bool:
    """Whether a file's rows can stay in it: a JSONL file of at least LARGE_BYTES, a row a line."""
    if path.suffix.lower() != ".jsonl" or not path.is_file() or path.stat().st_size < LARGE_BYTES:
        return False
    with path.open("rb") as file:
        return not _begin(file)[1].startswith(b"[")


def _kind(path: Path) -> str:
    """The suffix of a file, that of its compression left out."""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix.lower()


def _folder(path: Path, split: str) -> Iterator[tuple[str, Row | DataError]]:
    """Read a folder of files by their names, or one that ``datasets.save_to_disk`` wrote."""
    if any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
        dataset = require("datasets", "data", f"the folder {path}, which save_to_disk wrote,").load_from_disk(str(path))
        if isinstance(dataset, Mapping):  # its splits
            if split not in dataset:
                raise DataError(str(path), f"it has no split {split!r}; it has {', '.join(dataset)}")
            dataset = dataset[split]
        for number, row in enumerate(dataset):
            yield f"{path}/{split}, row {number}", of_structs(row)
        return
    files = sorted(each for each in path.rglob("*") if each.is_file() and _kind(each) in READERS)
    if not files:
        raise DataError(str(path), f"the folder has no file of a known kind: {', '.join(READERS)}")
    for file in files:
        yield from read(file)


class _Zstandard(io.RawIOBase):
    """A decompressed file; one that is cut off is an error, as it is not of ``zstandard.open``."""

    def __init__(self, path: Path) -> None:
        self._begin = require("zstandard", "data", f"the file {path}").ZstdDecompressor().decompressobj
        self._file, self._frame, self._text = path.open("rb"), self._begin(), memoryview(b"")
        self._fresh = True

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, into: Any) -> int:
        while not self._text:
            packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._fresh = self._begin(), True
            packed = packed or self._file.read(1 << 17)
            if not packed:
                if not self._fresh:
                    raise EOFError("it ends within a frame")
                return 0
            self._fresh = False
            self._text = memoryview(self._frame.decompress(packed))
        count = min(len(into), len(self._text))
        into[:count], self._text = self._text[:count], self._text[count:]
        return count


def _opened(path: Path) -> IO[bytes]:
    """Open a file, decompressed as its name says."""
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if path.suffix == ".zst":
        return cast("IO[bytes]", io.BufferedReader(_Zstandard(path), 1 << 16))
    return path.open("rb")


def _begin(file: IO[bytes]) -> tuple[bytes, bytes]:
    """The first bytes of a file, and the same without a mark of UTF-8 and blanks."""
    read = file.read(4096)
    return read, read.removeprefix(codecs.BOM_UTF8).lstrip()


def _json(path: Path) -> Iterator[tuple[str, Row | DataError]]:
    """Read one list of rows, or a row a line."""
    with _opened(path) as file:
        read, begin = _begin(file)
        first, _, rest = begin.partition(b"\n")
        text = read + file.read(LARGE_BYTES + 1) if begin.startswith(b"[") else b""
    if rest and (first.strip() == b"{" or (_is_json(path) and first.startswith(b"{"))):
        try:
            parsed_json(first)
        except JsonError:
            raise DataError(
                str(path), "one JSON object over several lines; rows are a list of objects, or one a line"
            ) from None
    if len(text) > LARGE_BYTES:
        raise DataError(
            str(path), f"a list of {LARGE_BYTES >> 20} MiB is not read whole; make a .jsonl of it, a row a line"
        )
    try:
        rows = parsed_json(text) if text else None
    except JsonError as error:
        if _is_json(path) or first.strip() == b"[" or not rest:
            raise DataError(f"{path}, line {error.line}" if error.line else str(path), str(error)) from None
        rows = None  # lines, of which the first is a list
    if rows is None:
        with _opened(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield place, json_row(line, place)
        return
    for number, row in enumerate(rows):
        place = f"{path}, row {number}"
        yield place, row if isinstance(row, dict) else _no_row(place, row)


def _is_json(path: Path) -> bool:
    return _kind(path) == ".json"


def _broken_archive(path: Path) -> tuple[type[Exception], ...]:
    """The errors of a compressed file that is cut off or none."""
    if path.suffix == ".zst":
        return (require("zstandard", "data", f"the file {path}").ZstdError, EOFError)
    return (EOFError, gzip.BadGzipFile, zlib.error) if path.suffix == ".gz" else ()


def json_row(line: bytes, place: str) -> Row | DataError:
    """Read the row of one line."""
    try:
        row = parsed_json(line.rstrip())
    except JsonError as error:
        return DataError(place, str(error))
    return row if isinstance(row, dict) else _no_row(place, row)


def _csv(path: Path) -> Iterator[tuple[str, Row | DataError]]:
    with io.TextIOWrapper(_opened(path), encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        csv.field_size_limit(1 << 29)  # of the process; 131,072 otherwise
        try:
            if len(names := list(reader.fieldnames or ())) == 1 and (other := re.search("[;\t|]", names[0])):
                raise DataError(f"{path}, line 1", f"its columns stand between {other[0]!r}: save it with commas")
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
    for batch in file.iter_batches(batch_size=128):
        for row in batch.to_pylist():
            yield f"{path}, row {number}", of_structs(row)
            number += 1


def _text(path: Path) -> Iterator[tuple[str, Row | DataError]]:
    """Read a text as rows ``{"text": ...}`` of whole paragraphs, a longer paragraph as one row."""
    part, first, size = list[str](), 1, 0
    try:
        with io.TextIOWrapper(_opened(path), encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if size > TEXT_CHARS and not line.strip():
                    yield f"{path}, line {first}", {"text": "".join(part)}
                    part, first, size = [], number + 1, 0
                    continue
                part.append(line)
                size += len(line)
    except UnicodeDecodeError as error:
        raise DataError(str(path), f"not valid UTF-8: {error}") from None
    if "".join(part).strip():
        yield f"{path}, line {first}", {"text": "".join(part)}


def _no_row(place: str, row: Any) -> DataError:
    return DataError(place, f"a row is a mapping from column to value; this is {type(row).__name__}")


READERS = {".jsonl": _json, ".json": _json, ".csv": _csv, ".parquet": _parquet, ".txt": _text, ".md": _text}
COMPRESSED = (".gz", ".zst")
UNREAD = {
    ".xlsx": "save the sheet as .csv", ".xls": "save the sheet as .csv", ".ods": "save the sheet as .csv",
    ".tsv": "save it with commas, as .csv", ".zip": "unpack it", ".tar": "unpack it", ".7z": "unpack it",
    ".pdf": "save its text as .txt", ".docx": "save its text as .txt", ".arrow": "name the folder of save_to_disk",
    ".yaml": "save the rows as .jsonl", ".yml": "save the rows as .jsonl", ".pkl": "save the rows as .jsonl",
    ".pt": "save the rows as .jsonl",
}  # fmt: skip
"""Suffix of files that people try -> what to do."""
