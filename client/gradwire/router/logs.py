"""Decision logs as JSON Lines and CSV files, in the formats that ``gradwire.router.records`` describes."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.router.records import CSV_COLUMNS, EVENTS, LoggedDecision

Log = Path | str | Iterable[LoggedDecision]
"""A file of logged decisions, or the decisions themselves."""


class LogError(ValueError):
    """A decision log breaks a rule; the message names file, line and field."""


def read_log(
    log: Path | str, *, columns: Mapping[str, str] | None = None, features: Sequence[str] | None = None
) -> list[LoggedDecision]:
    """Yield the decisions of a file.

    Args:
        log: ``.csv``; any other ending is read as JSON Lines.
        columns: For a CSV file with other column names: its names of ``mode``, ``propensity``, ``reward`` (or
            ``value``, ``time``, ``event``): ``{"mode": "item_id", "reward": "click"}``.
        features: For a CSV file, the feature columns; by default all columns without another meaning.

    Raises:
        LogError: A line is not a valid decision; names file, line and field.
        FileNotFoundError: There is no such file.
    """
    path = Path(log)
    if path.suffix.lower() == ".csv":
        return list(_from_csv(path, columns or {}, features))
    if columns is not None or features is not None:
        raise ValueError(f"columns and features apply to CSV files; {path} is read as JSON Lines")
    return list(_from_jsonl(path))


def decisions_of(log: Log) -> list[LoggedDecision]:
    """Return the decisions of a file, or those given, whose propensities and rewards have to be right as well.

    Raises:
        LogError: A decision is not valid; names it and the field.
    """
    if isinstance(log, Path | str):
        return read_log(log)
    decisions = list(log)
    for number, each in enumerate(decisions, 1):
        _propensity(f"decision {number}", each.propensity)
        _number(f"decision {number}", "reward", each.reward)
    return decisions


def _from_jsonl(path: Path) -> Iterator[LoggedDecision]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                fields = json.loads(line)
            except json.JSONDecodeError as error:
                raise LogError(f"{where}: not a JSON object: {error}") from None
            if not isinstance(fields, dict):
                raise LogError(f"{where}: a decision must be a JSON object, got {line.strip():.60}")
            if not isinstance(fields.get("features"), dict):
                raise LogError(f"{where}: features must be an object of names and values")
            for name, value in fields["features"].items():
                if isinstance(value, bool) or not isinstance(value, str | int | float):
                    raise LogError(f"{where}: the feature {name!r} is {value!r}; a feature must be a number or a text")
            yield _decision(where, fields["features"], fields)


def _from_csv(path: Path, columns: Mapping[str, str], features: Sequence[str] | None) -> Iterator[LoggedDecision]:
    unknown = set(columns) - set(CSV_COLUMNS)
    if unknown:
        raise ValueError(f"columns: unknown names {', '.join(sorted(unknown))}; the names are {', '.join(CSV_COLUMNS)}")
    named = {name: columns.get(name, name) for name in CSV_COLUMNS}
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        chosen = [name for name in header if name and name not in named.values()] if features is None else features
        missing = [named[name] for name in ("mode", "propensity", "reward") if named[name] not in header]
        missing += [name for name in chosen if name not in header]
        if missing:
            raise LogError(f"{path}: there is no column {', '.join(missing)}; the columns are {', '.join(header)}")
        for row in rows:
            if not row:
                continue
            where = f"{path}, line {rows.line_num}"
            if len(row) != len(header):
                raise LogError(f"{where}: {len(row)} entries but the header has {len(header)} columns")
            cells = dict(zip(header, row))
            fields = {name: cells[column] for name, column in named.items() if cells.get(column)}
            yield _decision(where, {name: _cell(cells[name]) for name in chosen}, fields)


def _cell(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _decision(where: str, features: Mapping[str, float | str], fields: Mapping[str, Any]) -> LoggedDecision:
    mode, event = fields.get("mode"), fields.get("event", "outcome")
    if not isinstance(mode, str) or not mode:
        raise LogError(f"{where}: mode is {mode!r}; it must be the name of a mode")
    if event not in EVENTS:
        raise LogError(f"{where}: event is {event!r}; it must be one of {', '.join(EVENTS)}")
    propensity = _propensity(where, fields.get("propensity"))
    reward, value, time = (_number(where, name, fields.get(name)) for name in ("reward", "value", "time"))
    return LoggedDecision(features, mode, propensity, reward, event, value, fields.get("probabilities") or {}, time)


def _propensity(where: str, value: Any) -> float:
    number = _number(where, "propensity", value)
    if number is None or not 0.0 < number <= 1.0:
        raise LogError(f"{where}: propensity is {number}; it must be above 0 and at most 1")
    return number


def _number(where: str, name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise LogError(f"{where}: {name} is {value!r}; it must be a finite number")
    return number
