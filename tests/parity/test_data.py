"""The same files, read and rendered by gradwire, TRL and Axolotl with their own loaders: the same is learned.

Rows are drawn over formats and oddities (:mod:`support.drawn_rows`), those of one kind to a file. Where one does
otherwise, a :class:`Difference` says how and why. One that is not listed fails, and so does a listed one that no longer
occurs. ``tests/client/data`` has the formats that they do not read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire.cli.data import model_of as named
from gradwire.cli.learned import learned
from gradwire.data import LOADERS, DataError
from gradwire.recipes.tokens import RowEncoder, RowRefusedError
from support.chats import chat_model
from support.drawn_rows import KINDS, ODDITIES, Drawn, Row, draw, write

pytest.importorskip("trl")
import datasets
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

AXOLOTL_PYTHON = Path(__file__).parents[2] / ".venv-axolotl" / "bin" / "python"
QWEN = os.environ.get("GRADWIRE_QWEN3_TOKENIZER", "")
"""Folder with Qwen3's tokenizer, if there is one."""
MOST = 1024
"""Longest row in tokens."""
ROWS = 6
MARKED = """
{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
            {{- message.content }}
            {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson }}{%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""It says itself what the assistant writes, which TRL asks for."""
Sequences = list[tuple[list[int], list[int]]]
"""Ids and masks of what is made of a row."""


def model_of(folder: Path, name: str) -> Path:
    """A model in a folder: with the template above, with Qwen3's own tokenizer, or in the form of a family."""
    if name == "qwen3":
        if not QWEN:
            pytest.skip("GRADWIRE_QWEN3_TOKENIZER names no folder with Qwen3's tokenizer")
        shutil.copytree(QWEN, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        sizes: dict[str, Any] = dict.fromkeys(("num_attention_heads", "num_hidden_layers"), 1)
        sizes |= {"vocab_size": len(tokenizer), "hidden_size": 8, "intermediate_size": 8}
        config = LlamaConfig(**sizes, max_position_embeddings=MOST, eos_token_id=tokenizer.eos_token_id)
        LlamaForCausalLM(config).save_pretrained(folder)
        return folder
    chat_model(folder, "qwen" if name == "marked" else name)
    if name == "marked":
        (folder / "chat_template.jinja").write_text(MARKED)
    return folder


@dataclass(frozen=True)
class Difference:
    """What a rival does otherwise.

    Attributes:
        reason: What, and why we do not.
        where: Model, format and oddity -> whether it does.
        as_if: The row that it reads in place of this one.
        mask: What it learns in place of what we learn.
        says: A pattern for the beginning of its error, where it ends with one.
        refused: Whether it learns what we refuse.
        learns: The row and the text of its first sequence -> whether it is as the reason says.
    """

    reason: str
    where: Callable[[str, str, str], bool]
    as_if: Callable[[Row], Row] | None = None
    mask: Callable[[Sequences], Sequences] | None = None
    says: str = ""
    refused: bool = False
    learns: Callable[[Row, str], bool] | None = None


def to_the_end(made: Sequences) -> Sequences:
    """All behind the first learned token is learned."""
    return [(ids, [int(at >= mask.index(1)) for at in range(len(mask))] if 1 in mask else mask) for ids, mask in made]


PAIRS = ("chosen_rejected", "whole_pairs")
AXOLOTL = (
    Difference(
        "Axolotl learns what stands in place of a text, an empty answer, half a character, a bad answer",
        lambda model, form, oddity: oddity in ("number", "object", "empty", "half_character", "bad_label"),
        refused=True,
    ),
)
TRL = (
    Difference(
        "TRL learns what stands in place of a text, an empty answer, what is left of half a character, a bad answer",
        lambda model, form, oddity: (
            oddity in ("empty", "half_character", "bad_label")
            or (oddity in ("number", "object") and model == "marked")
            or (oddity == "python_text" and form != "messages")
        ),
        refused=True,
    ),
    Difference(
        "TRL reads messages that are stored as JSON in a text as that text",
        lambda model, form, oddity: oddity == "json_text" and form == "messages",
        says="ValueError: You set `assistant_only_loss=True`, but the dataset is not conversational",
    ),
    Difference(
        "TRL reads messages that are stored as JSON in a text as that text",
        lambda model, form, oddity: oddity == "json_text" and form != "messages",
        learns=lambda row, text: str(row.get("completion", row.get("chosen"))) in text,
    ),
    Difference(
        "TRL puts an answer that repeats its prompt behind the prompt",
        lambda model, form, oddity: oddity == "repeated_prompt",
        learns=lambda row, text: text.count(row["prompt"][0]["content"]) == 2,
    ),
    Difference(
        "TRL gives the parts of a content to the template, and this one takes a text",
        lambda model, form, oddity: oddity == "parts",
        says="(TypeError: can only concatenate|UndefinedError: 'list object' has no attribute)",
    ),
    Difference(
        "TRL does not read the column system",
        lambda model, form, oddity: oddity == "system_column",
        as_if=lambda row: {name: each for name, each in row.items() if name != "system"},
    ),
    Difference(
        "TRL also learns the line break behind <|im_end|>, which the model does not write",
        lambda model, form, oddity: form in ("prompt_completion", *PAIRS) and oddity != "long",
        mask=to_the_end,
    ),
)  # fmt: skip


BY_AXOLOTL = """
import json, sys, yaml
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.utils.data import sft

sft.save_preprocessed_dataset = lambda *given, **more: None  # it starts a process for each of them
for line in sys.stdin:
    try:
        with open("axolotl.yaml", "w") as file:
            yaml.safe_dump(json.loads(line), file)
        rows = load_datasets(cfg=load_cfg("axolotl.yaml")).train_dataset
        print("MADE", json.dumps([(row["input_ids"], [int(on != -100) for on in row["labels"]]) for row in rows]))
    except BaseException as error:
        print("MADE", json.dumps(f"{type(error).__name__}: {error!s:.200}"))
"""
"""Settings of a run for each line -> what is learned of its rows, or its error."""


def by_axolotl(model: Path, folder: Path, paths: Sequence[Path]) -> list[Any]:
    """What is learned of each file's rows, or with what Axolotl ends; one process, as it imports for half a minute."""
    settings = {
        "base_model": str(model), "chat_template": "tokenizer_default", "sequence_len": MOST,
        "excess_length_strategy": "truncate", "shuffle_merged_datasets": False, "dataset_num_proc": 1,
        "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1, "learning_rate": 0.001,
        "optimizer": "adamw_torch", "bf16": False, "output_dir": "out",
    }  # fmt: skip
    lines = [
        settings | {
            "datasets": [{"path": str(path), "ds_type": "json", "type": "chat_template"}],
            "dataset_prepared_path": f"prepared/{path.stem}",
        }
        for path in paths
    ]  # fmt: skip
    own = {"AXOLOTL_DO_NOT_TRACK": "1", "AXOLOTL_IS_PREPROCESS": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [AXOLOTL_PYTHON, "-c", BY_AXOLOTL], input="\n".join(map(json.dumps, lines)), capture_output=True, text=True,
        cwd=folder, env=os.environ | own, check=False,
    )  # fmt: skip
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("MADE ")]
    assert len(found) == len(paths), done.stdout[-2000:] + done.stderr[-3000:]
    return found


def drawn_file(folder: Path, form: str, oddity: str, suffix: str) -> tuple[Path, list[Drawn]]:
    rows = [drawn for seed in range(ROWS) if (drawn := draw(form, oddity, seed))]
    path = folder / f"{form}-{oddity}{suffix}"
    if rows:
        write([each.row for each in rows], path)
    return path, rows


async def by_gradwire(service: Any, model: Any, path: Path, kind: str, count: int) -> list[Sequences | str]:
    """What is learned of each row, or why it is refused."""
    found: list[Sequences | str] = ["refused"] * count
    try:
        rows = LOADERS[kind](path, on_error="skip")
    except DataError as error:
        return [str(error)] * count
    for each in rows.skipped:
        found[line_of(each.place)] = each.reason
    tokens = RowEncoder(service, model, MOST)
    for row in rows:
        try:
            made = await learned(tokens, [row], "all" if "sharegpt" in path.name else "assistant")
        except RowRefusedError as refused:
            found[line_of(row.place)] = refused.reason
        else:
            found[line_of(row.place)] = [([int(i) for i in ids], [int(on) for on in mask]) for _, ids, mask in made]
    return found


def line_of(place: str) -> int:
    word, number = place.rsplit(maxsplit=1)
    return int(number) - word.endswith("line")


def by_trl(model: Path, path: Path, form: str, count: int) -> list[Sequences | str]:
    """What is learned of each row, or with what TRL ends."""
    shared = {"output_dir": str(path.parent / "trl"), "report_to": [], "use_cpu": True, "max_length": MOST}
    given = {
        "model": AutoModelForCausalLM.from_pretrained(model),
        "processing_class": AutoTokenizer.from_pretrained(model),
    }
    found: list[Sequences | str] = ["left out"] * count
    try:
        rows = datasets.load_dataset(
            {".jsonl": "json"}.get(path.suffix, path.suffix[1:]), data_files=str(path), split="train",
            cache_dir=str(path.parent / "cache"),
        )  # fmt: skip
        rows = rows.add_column("place", list(range(len(rows))))
        if KINDS[form] == "preferences":
            trainer: Any = trl.DPOTrainer(args=trl.DPOConfig(**shared), train_dataset=rows, **given)
            for row in trainer.train_dataset:
                batch = trainer.data_collator([row])
                sides = zip(
                    batch["input_ids"].tolist(), batch["attention_mask"].tolist(), batch["completion_mask"].tolist()
                )
                found[row["place"]] = [(ids[: sum(there)], mask[: sum(there)]) for ids, there, mask in sides]
        else:
            config = trl.SFTConfig(**shared, assistant_only_loss=form == "messages")
            trainer = trl.SFTTrainer(args=config, train_dataset=rows, **given)
            for row in trainer.train_dataset:
                batch = trainer.data_collator([row])
                ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
                found[row["place"]] = [(ids, [int(label != -100) for label in labels])]
    except Exception as error:
        return [f"{type(error).__name__}: {error!s:.200}"] * count
    return found


@pytest.fixture(scope="module", params=["marked", "qwen3"])
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A service with a model, what it says of the model, and the model's folder."""
    folder = model_of(tmp_path_factory.mktemp("models") / request.param, request.param)
    async with gradwire.connect(models=[str(folder)]) as service:
        yield service, await named(service, ""), folder


CASES = [
    *((form, oddity, ".jsonl") for form in ("messages", "prompt_completion", *PAIRS) for oddity in ODDITIES),
    *(("messages", oddity, ".parquet") for oddity in ("nothing", "nulls", "nan")),
]


@pytest.mark.holds_loop("TRL prepares the data in this process")
@pytest.mark.parametrize(("form", "oddity", "suffix"), [case for case in CASES if draw(*case[:2])])
async def test_trl_learns_the_same(served: Any, tmp_path: Path, form: str, oddity: str, suffix: str) -> None:
    folder = served[2]
    if folder.name == "qwen3" and form == "messages":
        pytest.skip("TRL finds the answers by marks that Qwen3's template does not have, and knows not this one's")
    path, rows = drawn_file(tmp_path, form, oddity, suffix)
    theirs = by_trl(folder, path, form, len(rows))
    await compare(TRL, served, (form, oddity), path, rows, theirs)


@pytest.mark.skipif(not AXOLOTL_PYTHON.exists(), reason=f"{AXOLOTL_PYTHON} is made by `make data-parity`")
@pytest.mark.holds_loop("Axolotl prepares the data meanwhile")
async def test_axolotl_learns_the_same(served: Any, tmp_path: Path) -> None:
    if served[2].name == "qwen3":
        pytest.skip("Axolotl learns the text of a turn behind an empty block for reasoning, which the model writes")
    files = {oddity: drawn_file(tmp_path, "messages", oddity, ".jsonl") for oddity in ODDITIES}
    files = {oddity: each for oddity, each in files.items() if each[1]}
    found = by_axolotl(served[2], tmp_path, [path for path, _ in files.values()])
    for (oddity, (path, rows)), made in zip(files.items(), found):
        theirs = [made] * len(rows) if isinstance(made, str) else [[(ids, mask)] for ids, mask in made]
        assert len(theirs) == len(rows), (oddity, len(theirs))
        await compare(AXOLOTL, served, ("messages", oddity), path, rows, theirs)


async def compare(
    differences: Sequence[Difference], served: Any, case: tuple[str, str], path: Path, rows: Sequence[Drawn],
    theirs: Sequence[Sequences | str],
) -> None:  # fmt: skip
    """Fail where a rival does otherwise than gradwire, unless it does it as the differences say, each of them."""
    service, model, folder = served
    tokenizer = AutoTokenizer.from_pretrained(folder)
    there = [each for each in differences if each.where(folder.name, *case)]
    read = [each.row for each in rows]
    for each in there:
        if each.as_if is not None:
            before, read = read, [each.as_if(row) for row in read]
            assert read != before, f"this changes no row: {each.reason}"
    write(read, path)
    ours = await by_gradwire(service, model, path, KINDS[case[0]], len(rows))
    if ends := [each.says for each in there if each.says]:
        assert not all(isinstance(each, str) for each in ours), ours
        assert all(isinstance(each, str) and re.match(ends[0], each) for each in theirs), theirs
    elif any(each.refused for each in there):
        assert all(isinstance(each, str) for each in ours), ours
        assert not any(isinstance(each, str) for each in theirs), theirs
    elif others := [each.learns for each in there if each.learns]:
        for drawn, one, other in zip(rows, ours, theirs):
            assert not isinstance(one, str) and not isinstance(other, str) and one != other, (drawn.row, one, other)
            text = str(tokenizer.decode(other[0][0]))
            assert others[0](drawn.row, text), (drawn.row, text)
    else:
        for each in there:
            if each.mask is not None and not all(isinstance(made, str) for made in ours):
                before, ours = ours, [made if isinstance(made, str) else each.mask(made) for made in ours]
                assert ours != before, f"this changes no row: {each.reason}"
        for drawn, one, other in zip(rows, ours, theirs):
            assert one == other or (isinstance(one, str) and isinstance(other, str)), (drawn.row, one, other)


def test_every_difference_occurs() -> None:
    for each in (*TRL, *AXOLOTL):
        assert any(each.where("marked", form, oddity) for form, oddity, _ in CASES if draw(form, oddity)), each.reason
