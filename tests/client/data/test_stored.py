"""Data sets that stay in their files, and several joined by weight."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from gradwire.data import DataError, Dataset, conversations, sources, stored
from gradwire.recipes.rows import rows_of
from gradwire.recipes.settings import SettingsError
from gradwire.recipes.sft import SFT


def file_of(path: Path, count: int, name: str = "q", answer: str = "yes") -> Path:
    lines = [json.dumps({"prompt": f"{name} {n % 90}?", "completion": answer}) for n in range(count)]
    lines.insert(3, "")
    path.write_text("\n".join(lines) + "\n")
    return path


def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGE_BYTES", 1)


def test_rows_in_a_file_are_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path / "rows.jsonl", 200)
    whole = conversations(file)
    large(monkeypatch)
    stored = conversations(file)
    assert whole.in_memory and not stored.in_memory and list(stored) == list(whole)
    assert [row.place for row in stored] == [row.place for row in whole] and stored[3].place.endswith("line 5")
    ours, theirs = (each.batches(7, seed=3, epochs=2) for each in (stored, whole))
    seen = []
    for batch in ours:
        assert batch == next(theirs)
        seen.append((dict(ours.position), batch))
    again = stored.batches(7, seed=3, epochs=2)  # resumed from the middle of an epoch
    again.position = seen[40][0]
    assert next(again) == seen[41][1]
    assert len(stored.shuffled(1)) == 200 and Counter(map(repr, stored.shuffled(1))) == Counter(map(repr, whole))


def test_a_file_is_split_and_its_unfit_rows_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large(monkeypatch)
    file = file_of(tmp_path / "rows.jsonl", 300)
    file.write_text(file.read_text() + '{"prompt": 1}\n{\n')
    with pytest.raises(DataError, match="line 302: "):
        conversations(file)
    rows = conversations(file, on_error="skip")
    assert len(rows) == 300 and len(rows.skipped) == 2
    kept, held_out = rows.split(0.2, seed=1)
    prompts = [{row.prompt[0]["content"] for row in side} for side in (kept, held_out)]
    assert len(kept) + len(held_out) == 300 and 20 < len(held_out) < 100 and not prompts[0] & prompts[1]
    assert len(conversations(file, limit=5)) == 5


def in_form(name: str, rows: list[dict[str, Any]], folder: Path) -> Path:
    """Rows in a file or a folder of a form."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "folder":
        half = len(rows) // 2
        in_form("a.jsonl", rows[:half], folder / "parts")
        return in_form("b.csv", rows[half:], folder / "parts").parent
    path = folder / f"rows.{name}"
    if name == "parquet":
        pytest.importorskip("pyarrow.parquet", reason="the extra data is not installed").write_table(
            pytest.importorskip("pyarrow").Table.from_pylist(rows), path
        )
        return path
    opened: Any = {".gz": gzip.open, ".zst": zstandard.open}.get(path.suffix, open)
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        if ".csv" in path.name:
            written = csv.DictWriter(file, list(rows[0]))
            written.writeheader()
            written.writerows(rows)
        elif {".txt", ".md"} & set(path.suffixes):
            file.write("\n".join(f"{row['prompt']} {row['completion']}\n" for row in rows))
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


FORMS = ("jsonl", "jsonl.gz", "jsonl.zst", "csv", "csv.gz", "txt", "md.zst", "parquet", "folder")


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_in_bounded_memory(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 26, (1_500, 1_500), np.uint8) + ord("a")
    rows = [{"prompt": f"{n} " + "q" * 500, "completion": each.tobytes().decode()} for n, each in enumerate(noise)]
    file = in_form(form, rows, tmp_path)
    whole = conversations(file)
    expected = [(row.messages, row.text, row.place) for row in whole]
    monkeypatch.setattr(sources, "LARGE_BYTES", 200_000)
    tracemalloc.start()
    read = conversations(file)
    batches = read.batches(16)
    for _ in range(20):
        next(batches)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert whole.in_memory and not read.in_memory and peak < 2_000_000, peak  # of more than 3,000,000
    assert [(row.messages, row.text, row.place) for row in read] == expected
    kept, held_out = read.split(0.1)
    assert len(kept) + len(held_out) == len(read) and len(held_out)


def test_rows_on_disk_are_ordered_by_a_column_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"{n}?", "completion": "yes", "hard": n * 7 % 90} for n in range(90)]
    for form in ("jsonl", "csv.gz"):
        file = in_form(form, rows, tmp_path / form)
        monkeypatch.setattr(sources, "LARGE_BYTES", 1 << 29)
        whole = conversations(file, order_by="hard")
        large(monkeypatch)
        stored = conversations(file, order_by="hard")
        assert not stored.in_memory and list(stored) == list(whole) and stored[1].prompt[0]["content"] == "13?"
        some = stored.batches(8, seed=1)
        for _ in range(17):
            next(some)
        again = conversations(file, order_by="hard").batches(8, seed=1)  # as after a restart
        again.position = some.position
        assert [next(again) for _ in range(5)] == [next(some) for _ in range(5)]


def test_a_full_disk_and_a_long_list_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"{n}?", "completion": "yes " * 99} for n in range(2_000)]
    one = tmp_path / "rows.json"
    one.write_text(json.dumps(rows))
    large(monkeypatch)
    with pytest.raises(DataError, match=r"rows\.json: a list of .* is not read whole; make a \.jsonl of it"):
        conversations(one)
    file = in_form("csv", rows, tmp_path)
    monkeypatch.setattr(stored.tempfile, "TemporaryFile", lambda dir: io.FileIO("/dev/full", "r+"))
    with pytest.raises(DataError, match="copied there: No space left on device; TMPDIR names another folder"):
        conversations(file)


def settings(data: list[Any], **more: Any) -> SFT:
    made = SFT(data=data, **({"held_out": 0.0} | more))
    made.check()
    return made


@pytest.mark.parametrize("stored", [False, True])
def test_several_data_sets_are_mixed_by_weight(stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if stored:
        large(monkeypatch)
    a, b, c = (str(file_of(tmp_path / f"{name}.jsonl", 100, name)) for name in "abc")
    data = [a, {"path": b, "weight": 2.25, "limit": 40}, {"path": c, "weight": 0.5}]

    def counts(rows: Dataset[Any]) -> Counter[str]:
        return Counter(row.prompt[0]["content"][0] for row in rows)

    rows, none = rows_of(conversations, settings(data))
    assert counts(rows) == {"a": 100, "b": 90, "c": 50} and not len(none)
    assert [repr(row) for row in rows_of(conversations, settings(data))[0]] == [repr(row) for row in rows]
    kept, held_out = rows_of(conversations, settings([a, {"path": a, "weight": 3}], held_out=0.2))
    shared = {repr(row.prompt) for row in kept} & {repr(row.prompt) for row in held_out}
    assert not shared and max(Counter(map(repr, held_out)).values()) == 2  # unweighted: each has it once
    assert len(kept) == 2 * (200 - len(held_out)) and 10 <= len(held_out) <= 80


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([3], "data has 3; each is a name, or a mapping with a path and path, weight, limit"),
        ([{"path": "a", "wieght": 2}], "data has a with 'wieght'; it takes path, weight"),
        ([{"path": "a", "weight": -1}], "data has a, whose weight is -1; it must be at least 0"),
        ([{"path": "a", "limit": "x"}], "data has a, whose limit is 'x'; it must be a whole number"),
        ([], "data is empty"),
    ],
)
def test_mistakes_in_a_list_of_data_sets_are_named(data: list[Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settings(data)
