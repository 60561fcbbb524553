"""Every field of a row is used, named as unused, or refused: the rows that other trainers read wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from gradwire.data import LOADERS, DataError, conversations, kind_of, preferences, prompts, ratings, steps
from gradwire.data.rows import Conversation
from gradwire_jobs.check import checked
from support.drawn_rows import KINDS, ODDITIES, draw, write

Q, GO = {"role": "user", "content": "Q"}, {"role": "user", "content": "go on"}
STEP, GOOD, BAD = ({"role": "assistant", "content": text} for text in ("step", "good", "bad"))
S = {"role": "system", "content": "S"}
LONG = {"chosen": [STEP, GO, GOOD], "rejected": [STEP, GO, BAD]}
WHOLE = {"chosen": [Q, STEP, GO, GOOD], "rejected": [Q, STEP, GO, BAD]}


@pytest.mark.parametrize(
    ("row", "context"),
    [
        ({"prompt": [Q], **LONG}, [Q, STEP, GO]),
        ({"prompt": "Q", **LONG}, [Q, STEP, GO]),
        ({"messages": [Q], **LONG}, [Q, STEP, GO]),
        ({"input": {"messages": [Q]}, "preferred_output": LONG["chosen"], "non_preferred_output": LONG["rejected"]},
         [Q, STEP, GO]),
        ({"system": "S", **WHOLE}, [S, Q, STEP, GO]),
        ({"system": "S", "prompt": "Q", **LONG}, [S, Q, STEP, GO]),
        ({"system": "S", "prompt": " Q ", **WHOLE}, [S, Q, STEP, GO]),
        ({"prompt": [S, Q], **WHOLE}, [S, Q, STEP, GO]),
        ({"prompt": "go on", **WHOLE}, [Q, STEP, GO]),
        ({"prompt": [Q, STEP, GO], **WHOLE}, [Q, STEP, GO]),
        ({"prompt": "Q", "chosen": [S, *WHOLE["chosen"]], "rejected": [S, *WHOLE["rejected"]]}, [S, Q, STEP, GO]),
        ({"history": [["Q", "step"]], "prompt": "go on", "chosen": "good", "rejected": "bad"}, [Q, STEP, GO]),
        ({"history": [["Q", "step"]], "chosen": [GO, GOOD], "rejected": [GO, BAD]}, [Q, STEP, GO]),
        ({"prompt": json.dumps([Q]), **{name: json.dumps(each) for name, each in LONG.items()}}, [Q, STEP, GO]),
    ],
    ids=str,
)  # fmt: skip
def test_pairs_keep_what_comes_before_the_messages_they_share(row: Any, context: Any) -> None:
    (pair,) = preferences([row])
    assert list(pair.prompt) == context and (pair.chosen, pair.rejected) == ((GOOD,), (BAD,))


@pytest.mark.parametrize("completion", [[GOOD], [Q, STEP, GO, GOOD], json.dumps([Q, STEP, GO, GOOD])], ids=str)
def test_an_answer_may_repeat_its_prompt(completion: Any) -> None:
    row = {"system": "S", "prompt": [Q, STEP, GO], "completion": completion}
    assert list(conversations([row])[0].messages) == [S, Q, {**STEP, "weight": 0}, GO, GOOD]
    (rated,) = ratings([row | {"label": "good"}])
    assert (list(rated.prompt), list(rated.completion), rated.label) == ([S, Q, STEP, GO], [GOOD], True)


def test_alpacas_input_belongs_to_every_kind_of_rows() -> None:
    asked = {"instruction": "add", "input": "2 2"}
    for load, more in ((conversations, {"output": "4"}), (preferences, {"chosen": "4", "rejected": "5"}), (prompts, {}),
                       (ratings, {"output": "4", "label": 1}), (steps, {"steps": ["4"], "labels": [1]})):  # fmt: skip
        (row,) = load([asked | more])
        assert row.prompt[0]["content"] == "add\n\n2 2", load


CALL = {"name": "f", "arguments": {"city": "Bern"}}
CALLED = {"type": "function", "function": CALL}


@pytest.mark.parametrize(
    "value", [CALL, json.dumps(CALL), [CALL], json.dumps([CALL]), json.dumps(CALLED),
              json.dumps(CALL | {"arguments": json.dumps(CALL["arguments"])})], ids=str
)  # fmt: skip
def test_sharegpts_calls_are_calls(value: Any) -> None:
    asked, called = {"from": "human", "value": "Q"}, {"from": "function_call", "value": value}
    talk = [asked, called, {"from": "observation", "value": "3"}, {"from": "gpt", "value": "good"}]
    (row,) = conversations([{"conversations": talk, "tools": json.dumps([{"name": "f", "parameters": {}}])}])
    assert row.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALLED]}
    assert row.tools == ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    (pair,) = preferences([{"conversations": [asked], "chosen": called, "rejected": {"from": "gpt", "value": "no"}}])
    (rated,) = ratings([{"conversations": [asked, called], "label": True}])
    assert pair.chosen == rated.completion == (row.messages[1],)


def test_messages_in_a_text_are_messages() -> None:
    for column, answer in (([GOOD], [GOOD]), (GOOD, [GOOD])):
        (row,) = conversations([{"prompt": json.dumps([S, Q]), "completion": json.dumps(column)}])
        assert list(row.messages) == [S, Q, *answer]
    assert prompts([{"prompt": json.dumps([S, Q])}])[0].prompt == (S, Q)
    for text in ("[1, 2]", '{"role": "engineer", "content": "c"}', "[half", '[{"role": "user"}]', "{}"):
        (row,) = conversations([{"prompt": "a list", "completion": text}])
        assert row.messages[1]["content"] == text


@pytest.mark.parametrize("form", ["parquet", "datasets", "iterable"])
def test_the_fields_of_other_rows_are_no_arguments(form: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs gradwire[data]")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs gradwire[data]")
    called = [{"city": "Bern"}, {"a": 1, "b": [{"c": 2}]}, {}]
    rows = [
        {"messages": [Q, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": each}]}],
         "tools": [{"name": "f", "parameters": {"properties": {name: {"type": "string"} for name in each}}}]}
        for each in called
    ]  # fmt: skip
    source: Any = tmp_path / "rows.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), source)
    if form != "parquet":
        datasets = pytest.importorskip("datasets", reason="needs gradwire[data]")
        table = pytest.importorskip("datasets.table", reason="needs gradwire[data]").InMemoryTable
        source = datasets.Dataset(table(arrow.Table.from_pylist(rows)), fingerprint="rows")  # or it hashes pyarrow
        if form == "datasets":
            source.save_to_disk(str(tmp_path / "saved"))
            source = tmp_path / "saved"
    for row, arguments in zip(conversations(source), called, strict=True):
        assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
        assert set(row.tools[0]["function"]["parameters"].get("properties", {})) == set(arguments)


NAN = float("nan")
PAIR = {"prompt": "Q", "chosen": "good", "rejected": "bad"}
REFUSED: list[tuple[Any, Any, str]] = [
    *((conversations, {"messages": [Q, GOOD | {"content": each}]}, words) for each, words in (
        (NAN, "message 1 of messages has no content"), (42, "has the content 42, which is no text"),
        ({"a": 1}, "has the content {'a': 1}, which is no text"), ("", "an answer in messages is empty"),
        ([], "message 1 of messages has no content"), ([{"type": "text", "text": " "}], "an answer in messages is"),
    )),
    (conversations, {"prompt": NAN, "completion": "a"}, "prompt is null"),
    (conversations, {"prompt": 42, "completion": "a"}, "prompt is 42; it must be a text or a list of messages"),
    (conversations, {"messages": "user: hi"}, "messages is 'user: hi'; it must be a list of messages"),
    (conversations, {"messages": [Q | {"content": 3.5}, GOOD]}, "message 0 of messages has the content 3.5"),
    (conversations, {"messages": [Q, GOOD | {"reasoning_content": 4}]}, "has a reasoning_content that is no text, 4"),
    (conversations, {"messages": [Q, GOOD | {"reasoning": "a", "thinking": "b"}]}, "has reasoning twice"),
    (conversations, {"messages": [Q, GOOD | {"train": "perhaps"}]}, "train of message 1 of messages is true or fal"),
    (conversations, {"text": json.dumps([Q, GOOD])}, "text holds messages: name its column as that of messages"),
    (conversations, {"prompt": str([Q]), "completion": "a"}, "prompt holds messages as Python shows them"),
    (conversations, {"messages": str([Q, GOOD])}, "messages is written as Python shows it"),
    (conversations, {"system": "T", "messages": [S, Q, GOOD]}, "two system messages, .* and they differ"),
    (conversations, {"prompt": "Q", "completion": [GO, GOOD]}, "begin with a question of their own, 'go on', and the"),
    (conversations, {"conversations": [Q, {"from": "function_call", "value": "f(x)"}]}, "is no call of a tool, 'f"),
    *((conversations, {"prompt": "a", "completion": "b", "label": label}, "label is .*: the completion is a bad one")
      for label in (0, "0", -1, "bad", False, 0.0)),
    (preferences, PAIR | {"chosen": [GOOD | {"content": ""}]}, "an answer in chosen is empty"),
    (preferences, {"prompt": "other", **WHOLE}, "begin with a question of their own, 'Q', and the prompt is 'other'"),
    (preferences, {"prompt": "Q", "chosen": [STEP, GO, GOOD], "rejected": [STEP, Q, BAD]}, "differ before the assist"),
    (ratings, {"prompt": "Q", "completion": NAN, "label": 1}, "completion is null"),
    (ratings, {"messages": [Q, GOOD | {"content": 42}], "label": 1}, "has the content 42, which is no text"),
    (prompts, {"prompt": [Q | {"content": 42}]}, "has the content 42, which is no text"),
    (conversations, {"messages": [Q, GOOD], "tools": "add"}, "tools is a list of schemas"),
    *((load, row, r"holds half of a character, '\\ud83d', at its character 3") for load, row in (
        (conversations, {"prompt": "Q", "completion": "hi\ud83d"}), (preferences, PAIR | {"chosen": "hi\ud83d"}),
        (ratings, {"prompt": "hi\ud83d", "completion": "a", "label": 1}), (conversations, {"text": "hi\ud83d!"}),
        (conversations, {"messages": json.dumps([Q, GOOD | {"content": "hi\ud83d"}])}),
        (prompts, {"prompt": "Q", "answer": "hi\ud83d"}),
        (steps, {"prompt": "Q", "steps": ["hi\ud83d"], "labels": [1]}),
        (conversations, {"messages": [Q, GOOD], "tools": [{"name": "hi\ud83d"}]}),
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("load", "row", "words"), REFUSED, ids=lambda value: getattr(value, "__name__", str(value))[:50]
)
def test_what_would_be_learned_as_something_else_is_refused(load: Any, row: Any, words: str) -> None:
    with pytest.raises(DataError, match=f"row 0: .*{words}"):
        load([row])


def test_missing_values_of_pandas_say_nothing() -> None:
    row = {"prompt": "Q", "completion": "good", "system": NAN, "weight": NAN, "tools": NAN, "label": NAN, "input": NAN}
    assert conversations([row])[0] == Conversation((Q, GOOD))
    assert kind_of([row]) == "conversations"


def test_a_half_character_is_skipped_and_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "\\ud83d"}\n')
    found = conversations(file, on_error="skip")
    assert len(found) == 1 and found.skipped[0].where.startswith(f"{file}, line 2: completion holds half of a char")


def test_uploaded_files_are_read_as_recipes_read_them(tmp_path: Path) -> None:
    file = tmp_path / "0f1e"
    rows = [{"prompt": "Q", "completion": "hi\ud83d"}, PAIR | {"chosen": ""}, PAIR, {"messages": [Q, GOOD], "id": 4}]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = checked(file, ".jsonl")
    assert [line for line, _ in found["problems"]] == [1, 2] and found["lines"] == 4
    assert "half of a character" in found["problems"][0][1]
    file.write_text(json.dumps(rows, indent=1))
    assert checked(file, ".jsonl")["lines"] == 4
    file.write_bytes(json.dumps(rows).encode("utf-16"))
    assert "UTF-16" in checked(file, ".json")["problems"][0][1]


def test_columns_that_are_not_used_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "rows.jsonl"
    called = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": None}}]}
    rows = [{"messages": [Q, GOOD], "id": 1, "prompt": "Q"}, {"messages": [Q, called], "id": 2, "source": None}]
    file.write_text("\n".join(map(json.dumps, rows)))
    with caplog.at_level(logging.WARNING, "gradwire.data"):
        conversations(file)
        prompts(file, on_error="skip")  # a reward may read any column
        conversations([{"prompt": "Q", "completion": "good", "hard": 1}], order_by="hard")
    assert caplog.messages == [
        f"{file}: rows have id, which is not used (2, first at {file}, line 1); prompt, which is not used (1, first at "
        f"{file}, line 1); a null in a tool's schema or in a call's arguments, which is learned as null (1, first at "
        f"{file}, line 2)"
    ]


DRAWN = [drawn for form in KINDS for oddity in ODDITIES for seed in range(2) if (drawn := draw(form, oddity, seed))]


@pytest.mark.parametrize("oddity", ODDITIES)
def test_drawn_rows_are_read_as_they_are_meant(oddity: str, tmp_path: Path) -> None:
    for drawn in (each for each in DRAWN if each.oddity == oddity):
        if oddity == "bad_label" and drawn.kind == "ratings":  # which may be bad
            continue
        sources: list[Any] = [[drawn.row], tmp_path / "row.jsonl", tmp_path / "row.json", tmp_path / "row.csv"]
        for source in sources if drawn.answers is not None else sources[:2]:
            if isinstance(source, Path):
                write([drawn.row], source)
            try:
                (row,) = LOADERS[drawn.kind](source)
            except DataError as error:
                assert drawn.answers is None, (drawn, error)
                continue
            assert drawn.answers is not None, drawn
            if drawn.kind == "conversations":
                own = drawn.format == "prompt_completion"  # answers within a prompt are not learned
                context = [
                    {"weight": 0, **each} if own and each["role"] == "assistant" else each for each in drawn.context
                ]
                assert list(row.messages) == [*context, *drawn.answers[0]], drawn
            else:
                found = (
                    [row.chosen, row.rejected] if drawn.kind == "preferences" else [getattr(row, "completion", None)]
                )
                assert [list(each) for each in found if each is not None] == drawn.answers, drawn
                assert list(row.prompt) == drawn.context, drawn
            assert getattr(row, "tools", drawn.tools) == drawn.tools, drawn
