"""Data sets as people have them: layouts, mistakes, splits, and an order that can be resumed."""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import zstandard
from gradwire.data import DataError, Dataset, conversations, kind_of, preferences, prompts, ratings, steps
from gradwire.data.rows import Conversation, Prompt

USER = {"role": "user", "content": "2+2?"}
FOUR = {"role": "assistant", "content": "4"}
TALK = [USER, FOUR]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"messages": json.dumps(TALK)},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": [USER], "completion": [FOUR]},
        {"question": "2+2?", "answer": "4"},
        {"instruction": "2+2?", "input": "", "output": "4"},
        {"prompt": "2+2?", "response": "4", "id": 7},
    ],
    ids=str,
)
def test_conversations_in_many_layouts(row: Any) -> None:
    (found,) = conversations([row])
    assert list(found.messages) == TALK and list(found.prompt) == [USER]


def test_a_conversation_keeps_what_templates_read() -> None:
    call = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    row = {
        "system": "be brief", "tools": [{"type": "function"}],
        "conversations": [{"from": "human", "value": "hi"}, {"role": "assistant", "tool_calls": call, "content": None}],
    }  # fmt: skip
    (found,) = conversations([row])
    assert found.messages == (
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": call},
    )  # fmt: skip
    assert found.tools == ({"type": "function"},)
    (alpaca,) = conversations([{"instruction": "add", "input": "2 2", "output": "4"}])
    assert alpaca.messages[0]["content"] == "add\n\n2 2"


def test_arguments_of_calls_in_a_text_are_read_as_objects() -> None:
    """A template writes them as JSON: a text would be encoded twice, and learned so."""
    called = {"name": "add", "arguments": '{"a": "é"}'}
    calls = [{"id": "1", "type": "function", "function": called}, called, {"function": called | {"arguments": ""}}]
    read = called | {"arguments": {"a": "é"}}
    alone = {"type": "function", "function": read}  # as every other
    found = [{"id": "1", "type": "function", "function": read}, alone, {"function": called | {"arguments": {}}}]
    assert "tool_calls" not in conversations([{"messages": [USER, FOUR | {"tool_calls": ""}]}])[0].messages[1]
    for given in (calls, json.dumps(calls)):
        answer = {"role": "assistant", "tool_calls": given}
        (talk,) = conversations([{"messages": [USER, answer]}])
        (pair,) = preferences([{"prompt": "2+2?", "chosen": [answer], "rejected": "5"}])
        (rated,) = ratings([{"messages": [USER, answer], "label": True}])
        (asked,) = prompts([{"prompt": [USER, answer, USER]}])
        for message in (talk.messages[1], pair.chosen[0], rated.completion[0], asked.prompt[1]):
            assert message["tool_calls"] == found


@pytest.mark.parametrize(
    ("said", "learned"),
    [
        ({"weight": 0}, 0), ({"weight": 1.0}, 1), ({"train": False}, 0), ({"train": True}, 1), ({"masked": True}, 0),
        ({"masked": False}, 1), ({"weight": None}, None), ({}, None),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_message_says_of_being_learned_is_kept(said: dict[str, Any], learned: int | None) -> None:
    messages = [USER, FOUR | said, USER, FOUR]
    (found,) = conversations([{"messages": messages, "weight": "0.25", "chat_template_kwargs": '{"a": 1}'}])
    assert found.messages[1] == FOUR | ({} if learned is None else {"weight": learned})
    assert found.weight == 0.25 and found.template_kwargs == {"a": 1}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": [FOUR], "rejected": [{"role": "assistant", "content": "5"}]},
        {"chosen": TALK, "rejected": [USER, {"role": "assistant", "content": "5"}]},
        {"prompt": "2+2?", "chosen": TALK, "rejected": [USER, {"role": "assistant", "content": "5"}]},
        {"conversations": [{"from": "human", "value": "2+2?"}], "chosen": {"from": "gpt", "value": "4"},
         "rejected": {"from": "gpt", "value": "5"}},
    ],
    ids=str,
)  # fmt: skip
def test_preferences_in_many_layouts(row: Any) -> None:
    (found,) = preferences([row])
    assert (list(found.prompt), list(found.chosen)) == ([USER], [FOUR])
    assert found.rejected[0]["content"] == "5"


@pytest.mark.parametrize("place", ["row", "input"])
def test_tools_of_preferences_are_kept(place: str) -> None:
    said = {"preferred_output": [{"role": "assistant", "content": "a"}],
            "non_preferred_output": [{"role": "assistant", "content": "b"}]}  # fmt: skip
    tools, messages = [{"type": "function", "function": {"name": "add"}}], [{"role": "user", "content": "?"}]
    of_input = {"messages": messages} | ({"tools": tools, "parallel_tool_calls": True} if place == "input" else {})
    (found,) = preferences([{"input": of_input, **said} | ({"tools": tools} if place == "row" else {})])
    assert found.tools == tuple(tools) and found.prompt == tuple(messages)


def test_prompts_with_answers_and_a_mapping() -> None:
    assert prompts([{"question": "2+2?", "answer": "4"}])[0] == Prompt((USER,), "4")
    assert prompts([{"messages": TALK}])[0] == Prompt((USER,), None)
    mapping = {"prompt": "q", "answer": lambda row: row["a"] * 2}
    assert prompts([{"q": "2+2?", "a": 2}], mapping=mapping)[0] == Prompt((USER,), 4)
    with pytest.raises(DataError, match="row 0: there is no column 'x' for prompt; the row has q, a"):
        prompts([{"q": "?", "a": 2}], mapping={"prompt": "x"})
    with pytest.raises(ValueError, match="names the field 'promt'; the fields are prompt, answer, system"):
        prompts([{"q": "?"}], mapping={"promt": "q"})


def test_what_other_rows_say_to_the_template_is_kept() -> None:
    said = {"tools": [{"name": "add"}], "chat_template_kwargs": {"enable_thinking": False}}
    (pair,) = preferences([{"prompt": "a", "chosen": "b", "rejected": "c", "weight": 1.0, **said}])
    (rated,) = ratings([{"prompt": "a", "completion": "b", "label": True, "images": [], **said}])
    for each in (pair, rated):
        assert each.tools == ({"type": "function", "function": {"name": "add"}},) and each.template_kwargs == {
            "enable_thinking": False
        }


@pytest.mark.parametrize("history", [[["1+1?", "2"]], '[["1+1?", "2"]]'])
def test_earlier_questions_of_alpacas_rows_come_first(history: Any) -> None:
    asked = {"instruction": "2+2?", "history": history, "system": "add"}
    loads = [(conversations, {"output": "4"}), (preferences, {"chosen": "4", "rejected": "5"}), (prompts, {}),
             (ratings, {"output": "4", "label": True}), (steps, {"steps": ["4"], "labels": [1]})]  # fmt: skip
    for load, more in loads:
        (row,) = load([asked | more])
        assert [each["content"] for each in row.prompt[:2]] == ["add", "1+1?"]
        talk = row.messages if isinstance(row, Conversation) else row.prompt
        assert [each["content"] for each in talk[2:4]] == ["2", "2+2?"]
    assert len(conversations([{"prompt": "a", "completion": "b", "history": "of Rome"}])[0].messages) == 2


MISTAKES: list[tuple[Any, Any, str]] = [
    (
        conversations,
        {"txt": "hi"},
        "as messages, or as prompt and completion; the row has txt",
    ),
    (conversations, {"messages": [USER]}, "no message of the assistant"),
    (conversations, {"messages": [{"role": "alien", "content": "x"}]}, "message 0 of messages has the role 'alien'"),
    (conversations, {"messages": ["hi"]}, "message 0 of messages is no mapping"),
    (conversations, {"messages": [{"role": "user"}]}, "message 0 of messages has no content"),
    (conversations, {"prompt": " ", "completion": "x"}, "prompt is empty"),
    (
        preferences,
        {"prompt": "a", "chosen": "b"},
        'no column is recognised as rejected; the row has prompt, chosen: name .*{"rejected": "COLUMN"}',
    ),
    (
        preferences,
        {"chosen": "b", "rejected": "c"},
        'as prompt; the row has chosen, rejected: name its columns, mapping={"prompt": "COLUMN"}',
    ),
    (
        conversations,
        {"messages": [USER, FOUR | {"weight": 0.5}]},
        "message 1 of messages has the weight 0.5; it is 0 .not learned. or 1",
    ),
    (conversations, {"messages": [USER, FOUR | {"weight": 0}]}, "no message of the assistant is learned: each has the"),
    (conversations, {"messages": [USER, FOUR | {"train": False}]}, "no message of the assistant is learned"),
    (conversations, {"prompt": [USER], "completion": [FOUR | {"weight": 0}]}, "no message of the assistant is learned"),
    (prompts, {"messages": [USER, FOUR | {"weight": 0}]}, "no message of the assistant is learned"),
    (conversations, {"messages": TALK, "weight": "much"}, "weight is a number from 0 on; this is 'much'"),
    (conversations, {"messages": TALK, "images": ["a.png"]}, "there is more than text, in images"),
    (conversations, {"prompt": "a", "completion": "b", "label": False}, "label is False: the completion is a bad one"),
    (conversations, {"messages": TALK, "chat_template_kwargs": {"model": "b"}}, "chat_template_kwargs maps variables"),
    (preferences, {"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
    (preferences, {"prompt": "a", "chosen": "b", "rejected": "c", "weight": 0}, "there is weight, which would be left"),
    (preferences, {"prompt": "a", "chosen": "b", "rejected": "c", "images": ["a.png"]}, "more than text, in images"),
    (ratings, {"prompt": "a", "completion": "b", "label": 1, "image": "a.png"}, "more than text, in image"),
    (steps, {"prompt": "a", "completions": ["b"], "labels": [1], "tools": [{}]}, "there is tools, which would be left"),
    (prompts, {"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}}, "there is chat_template_kwargs"),
    (conversations, {"prompt": "a", "completion": "b", "history": [["c"]]}, "history is a list of pairs"),
    (conversations, {"messages": TALK, "functions": [{"name": "f"}]}, "there is functions, which would be left out"),
    (conversations, {"messages": [USER, FOUR | {"function_call": {"name": "f"}}]}, "not read; write tool_calls"),
    *(
        (
            conversations,
            {"messages": [USER, FOUR | {"tool_calls": [{"function": {"name": "f", "arguments": text}}]}]},
            "message 1 of messages has a tool call whose arguments are no JSON object",
        )
        for text in ('{"a": ', "[1]", "a", '"{}"')
    ),
    (conversations, {"messages": [USER, FOUR | {"tool_calls": "f"}]}, "message 1 of messages has tool_calls that are"),
    (preferences, {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "margin is a number from 0 on"),
    (prompts, ["a"], "a row is a mapping from column to value; this is list"),
]


@pytest.mark.parametrize(
    ("load", "row", "words"), MISTAKES, ids=lambda value: getattr(value, "__name__", str(value))[:40]
)
def test_a_row_that_does_not_fit_is_named(load: Any, row: Any, words: str) -> None:
    with pytest.raises(DataError, match=f"row 0: .*{words}"):
        load([row])


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
ANSWERED = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        # A defect in the first row, or in all, is no other kind.
        ("conversations", [ANSWERED | {"completion": ""}, ANSWERED]),
        ("conversations", [ANSWERED | {"completion": ""}]),
        ("conversations", [{"prompt": "a"}, ANSWERED]),
        ("conversations", [ANSWERED | {"weight": "x"}]),
        ("conversations", [{"messages": [USER, FOUR | {"weight": 2}]}]),
        ("preferences", [PAIR | {"rejected": "b"}]),
        ("preferences", [PAIR | {"rejected": None}, PAIR]),
        ("ratings", [ANSWERED | {"label": "x"}, ANSWERED | {"label": 1}]),
        ("steps", [{"prompt": "a", "completions": ["b"], "labels": [1, 0]}]),
        ("conversations", [[], ANSWERED]),
        ("conversations", [ANSWERED | {"label": "news"}]),
        ("conversations", [{"hi": 1}]),
        ("prompts", [{"prompt": "a"}]),
        ("prompts", [{"prompt": "a", "answer": 4}]),
        ("prompts", [{"prompt": "a", "answer": {"target": 4}}]),
        ("prompts", [{"prompt": "a", "answer": ["4"]}]),
        ("prompts", [{"prompt": "a", "answer": None, "label": False}]),
        ("prompts", [{"messages": [USER], "label": 3}]),
    ],
    ids=str,
)
def test_the_columns_tell_the_kind_of_rows(kind: str, rows: list[Any]) -> None:
    assert kind_of(rows) == kind


def test_a_column_orders_the_rows() -> None:
    rows = [{"prompt": str(hard), "completion": "a", "hard": hard} for hard in (3, 1.5, "2", 1.5)]
    read = conversations(rows, order_by="hard")
    assert [row.messages[0]["content"] for row in read] == ["1.5", "1.5", "2", "3"]
    assert [len(each) for each in read.batches(3, epochs=2, shuffle=False)] == [3, 1, 3, 1]
    assert [row.messages[0]["content"] for row in next(read.batches(3, shuffle=False))] == ["1.5", "1.5", "2"]
    wrong = [*rows, {"prompt": "b", "completion": "a", "hard": "very"}]
    with pytest.raises(DataError, match="order_by: rows have a number as 'hard', and this one has 'very'"):
        conversations(wrong, order_by="hard")
    assert len(conversations(wrong, order_by="hard", on_error="skip")) == 4
    with pytest.raises(DataError, match="this one has no such column"):
        conversations(rows, order_by="harder")


def test_files_name_their_lines_and_skipped_rows_are_counted(tmp_path: Path, caplog: Any) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(
        '{"prompt": "a", "completion": "b"}\n\n{"prompt": "a"}\n{oops\n{"prompt": "c", "completion": "d"}\n'
    )
    with pytest.raises(DataError, match=r"talks.jsonl, line 3: no column is recognised as completion; "):
        conversations(file)
    with caplog.at_level(logging.WARNING, "gradwire.data"):
        found = conversations(file, on_error="skip")
    assert (len(found), len(found.skipped)) == (2, 2)
    assert "2 of 4 rows were skipped: " in caplog.text and "line 4: not valid JSON" in caplog.text
    assert "mapping=" not in caplog.text
    assert found.skipped[1].where == (
        f"{file}, line 4: not valid JSON: Expecting property name enclosed in double quotes, column 2"
    )
    table = tmp_path / "table.csv"
    table.write_text('question,answer\n"what, then?\nhm",4\nno answer\n')
    assert prompts(table, limit=1)[0].prompt[0]["content"] == "what, then?\nhm"
    with pytest.raises(DataError, match=r"table.csv, line 4: this line has not the 2 columns"):
        prompts(table)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        prompts(tmp_path / "gone.jsonl")


@pytest.mark.parametrize("form", [".jsonl", ".csv", ".txt", ".json"])
@pytest.mark.parametrize("archive", [".gz", ".zst"])
def test_an_archive_that_is_cut_off_is_named(form: str, archive: str, tmp_path: Path) -> None:
    text = random.Random(0).randbytes(9_000).hex()  # which no compression makes short
    written = {".jsonl": json.dumps({"text": text}) + "\n", ".json": json.dumps([{"text": text}])}
    body = written.get(form, f"text\n{text}\n").encode()
    packed = gzip.compress(body) if archive == ".gz" else zstandard.compress(body)
    whole = tmp_path / f"whole{form}{archive}"
    whole.write_bytes(packed + packed if form == ".jsonl" else packed)  # archives may be joined
    assert len(conversations(whole)) == (2 if form == ".jsonl" else 1)
    for content in (packed[: len(packed) // 2], b"no archive"):
        (tmp_path / f"rows{form}{archive}").write_bytes(content)
        with pytest.raises(DataError, match=f"rows{form}{archive}: not a whole {archive} archive"):
            conversations(tmp_path / f"rows{form}{archive}")


def test_files_that_are_not_what_their_name_says(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text('[{"prompt": "a", "completion": "b"},\n {"prompt": "c", "completion": "d"}]')
    assert len(conversations(file)) == 2
    for name, content in {
        "marked.json": codecs.BOM_UTF8 + file.read_bytes(), "list.jsonl": file.read_bytes(),
        "long.csv": b"prompt,completion\na," + b"b" * 200_000 + b"\nc,d\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
        assert len(conversations(tmp_path / name)) == 2, name
    cases: list[tuple[str, bytes, str]] = [
        ("cut.json", b'[{"prompt": "a"},\n {"prompt"', r"cut.json, line 2: not valid JSON: .*, column \d+$"),
        ("latin.jsonl", '{"prompt": "a", "completion": "é"}'.encode("latin-1"), "latin.jsonl, line 1: not valid UTF-8"),
        ("latin.json", '[{"prompt": "é"}]'.encode("latin-1"), "latin.json: not valid UTF-8"),
        ("latin.csv", "prompt,completion\na,é\n".encode("latin-1"), "latin.csv, after line .: not valid CSV"),
        ("object.json", b'{\n "data": []\n}', "object.json: one JSON object over several lines"),
        ("utf16.jsonl", '{"prompt": "a", "completion": "b"}'.encode("utf-16"), "utf16.jsonl: it is in UTF-16 or UTF"),
        ("utf16.csv", "prompt,completion\na,b\n".encode("utf-16-le"), "utf16.csv: it is in UTF-16 or UTF-32, or no t"),
        ("digits.jsonl", b'{"prompt": %s}' % (b"7" * 4_301), "digits.jsonl, line 1: .* of more than 4300 digits; wri"),
        ("deep.jsonl", b'{"prompt": %s}' % (b"[" * 100_000), "deep.jsonl, line 1: .* brackets are nested too deeply"),
        ("deep.json", b"[" * 100_000, "deep.json: not valid JSON here: its brackets are nested too deeply"),
        ("list.jsonl", b"[\n{},\n]", "list.jsonl, line 3: not valid JSON: .*, column 1"),
    ]
    for name, content, words in cases:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=words):
            conversations(tmp_path / name)


def test_parquet_and_data_sets_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs gradwire[data]")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs gradwire[data]")
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(5)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "some.parquet")
    assert [each.answer for each in prompts(tmp_path / "some.parquet")] == list("01234")
    with pytest.raises(DataError, match=r"some.parquet, row 0: no column is recognised as completion"):
        conversations(tmp_path / "some.parquet", mapping={"prompt": "question", "completion": lambda row: None})
    (tmp_path / "no.parquet").write_text("text")
    with pytest.raises(DataError, match=r"no.parquet: not a Parquet file: "):
        prompts(tmp_path / "no.parquet")
    datasets = pytest.importorskip("datasets", reason="needs gradwire[data]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    found = prompts("parquet", data_files=str(tmp_path / "some.parquet"), cache_dir=str(tmp_path / "cache"))
    assert [each.answer for each in found] == list("01234")


def talks(count: int) -> Dataset[Conversation]:
    return conversations([{"prompt": f"{n // 3}  ?", "completion": str(n)} for n in range(count)])


def test_a_split_shares_no_prompt() -> None:
    rows = talks(60)
    train, held = rows.split(0.2, seed=3)
    assert (len(train), len(held)) == (48, 12)
    asked = [{row.prompt[0]["content"] for row in part} for part in (train, held)]
    assert not asked[0] & asked[1]
    assert [row.messages for row in rows.split(0.2, seed=3)[1]] == [row.messages for row in held]
    assert [row.messages for row in rows.split(0.2, seed=4)[1]] != [row.messages for row in held]
    with pytest.raises(ValueError, match="3 rows with 1 different prompts cannot be split"):
        talks(3).split(0.5)


def test_batches_go_on_where_they_were() -> None:
    rows = talks(10)
    batches = rows.batches(4, seed=1, epochs=2)
    assert batches.per_epoch == 3
    every = [[row.messages[1]["content"] for row in batch] for batch in batches]
    assert [len(batch) for batch in every] == [4, 4, 2, 4, 4, 2]
    first, second = (sorted(text for batch in epoch for text in batch) for epoch in (every[:3], every[3:]))
    assert first == second and every[:3] != every[3:]
    again = rows.batches(4, seed=1, epochs=2)
    for done in range(5):
        resumed = rows.batches(4, seed=1, epochs=2)
        resumed.position = json.loads(json.dumps(again.position))
        assert [[row.messages[1]["content"] for row in batch] for batch in resumed] == every[done:]
        next(again)
    with pytest.raises(ValueError, match="is no position in 10 rows: is this the same data set"):
        again.position = {"epoch": 0, "row": 11}


def test_batches_by_length_are_filled_and_counted() -> None:
    rows = conversations([{"prompt": f"{n}?", "completion": "a"} for n in range(40)])
    lengths = [1 + n % 7 for n in range(39)] + [50]
    at = {row.prompt[0]["content"]: length for row, length in zip(rows, lengths)}

    def sizes(batches: Any) -> list[list[int]]:
        return [[at[row.prompt[0]["content"]] for row in batch] for batch in batches]

    found = sizes(rows.batches(20, seed=1, epochs=3, lengths=lengths))
    assert len(found) == rows.batches(20, seed=1, lengths=lengths).count(3) and sum(map(len, found)) == 120
    assert all(sum(batch) <= 20 or batch == [50] for batch in found)
    first = sizes(rows.batches(20, seed=1, epochs=1, lengths=lengths))
    assert all(sum(batch) + following[0] > 20 for batch, following in itertools.pairwise(first))
    begun, again = (rows.batches(20, seed=1, epochs=2, lengths=lengths) for _ in range(2))
    for _ in range(9):
        next(begun)
    again.position = begun.position
    assert list(again) == list(begun)
