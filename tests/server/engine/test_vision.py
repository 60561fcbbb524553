"""Rows with images: losses, gradients, samples and exports are those of transformers with the model's own processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradwire.wire.images import to_image_columns
from gradwire_proto import codec
from gradwire_proto.codec import IMAGE_BYTES, IMAGES, Column
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.model.vision import decoders
from gradwire_server.engine.model.vision.processing import opened
from gradwire_server.engine.operations.images_ahead import ImagesAhead
from gradwire_server.engine.operations.request import Request
from peft import PeftModel
from PIL import Image
from support.engine import LocalEngine, token_rows
from support.vision import KINDS, image_mark, picture, plain_processor, png, vision_model
from transformers import AutoModelForImageTextToText, AutoTokenizer

CAT, DOG, TALL = picture(1, 16, 24), picture(2, 32, 16), picture(3, 40, 8)
SCORED = 5
"""Tokens at the end of each row that are scored."""
TOLERANCE = 1e-5
"""Rotary embeddings and log-probabilities are float32 on both sides, whatever the weights are."""


@dataclass
class Row:
    """A row as its text, with ``IMAGE`` in the place of each image."""

    text: str
    images: Sequence[np.ndarray] = ()


ROWS = (
    Row("a row of text alone"),
    Row("what is IMAGE? a cat", [CAT]),
    Row("IMAGE and IMAGE and IMAGE: two alike", [DOG, TALL, DOG]),
)


@dataclass
class Plain:
    """A model as transformers has it."""

    kind: str
    path: Path
    dtype: torch.dtype = torch.float64
    model: Any = field(init=False)
    processor: Any = field(init=False)
    tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(self.path, dtype=self.dtype).eval()
        self.processor = plain_processor(self.path, self.kind)
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)

    def written(self, row: Row) -> str:
        return row.text.replace("IMAGE", image_mark(self.kind))

    def ids(self, row: Row) -> list[int]:
        """With one token for each image."""
        return self.tokenizer.encode(self.written(row))

    def inputs(self, row: Row) -> dict[str, torch.Tensor]:
        images = [list(row.images)] if row.images else None
        return dict(self.processor(images=images, text=[self.written(row)], return_tensors="pt"))

    def logprobs(self, row: Row) -> torch.Tensor:
        """Of the last tokens."""
        inputs = self.inputs(row)
        logits = self.model(**inputs, use_cache=False).logits[0, :-1]
        targets = inputs["input_ids"][0, 1:, None]
        return logits.log_softmax(-1).gather(1, targets)[-SCORED:, 0]

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        named = dict(self.model.named_parameters())
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return {name: each for name, each in zip(named, found, strict=True) if each is not None}


OFTEN = ("qwen3_vl", "smolvlm")
"""One of each shape; the others are computed by the same code."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.slow) for kind in KINDS],
)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(request.param, vision_model(tmp_path_factory.mktemp("vision") / request.param, request.param))


@pytest.fixture
def engine(plain: Plain, tmp_path: Path) -> LocalEngine:
    return LocalEngine({"m": plain.path}, tmp_path, dtype=plain.dtype)


def columns_of(plain: Plain, rows: Sequence[Row], prefix: str = "", ids: Any = None) -> dict[str, Column]:
    """A batch whose rows' last tokens are scored."""
    numbered = [plain.ids(row) if ids is None else ids(row) for row in rows]
    masks = [np.arange(len(row)) >= len(row) - SCORED for row in numbered]
    return (
        token_rows(numbered, f"{prefix}input_ids")
        | {f"{prefix}loss_mask": Column.from_rows(masks)}
        | to_image_columns([list(row.images) for row in rows], len(rows))
    )


def close(found: np.ndarray, expected: torch.Tensor) -> bool:
    expected = expected.detach()
    return bool((torch.tensor(found) - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.abs().max())))


def accumulated(engine: LocalEngine, run_id: str) -> dict[str, torch.Tensor]:
    gradients, factor = engine.context.runs[run_id].accumulator.normalised()
    return {name: each * factor for name, each in gradients.items()}


def check_gradients(engine: LocalEngine, run_id: str, expected: dict[str, torch.Tensor]) -> None:
    found = accumulated(engine, run_id)
    assert any("visual" in name or "vision" in name for name in found)
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, each in expected.items():
        difference = (found[name] - each).abs().max() if name in found else each.abs().max()
        assert difference <= TOLERANCE * largest, name


def test_gemmas_image_tokens_see_all_of_their_image_and_its_line_ends_join(tmp_path: Path) -> None:
    """The processor puts an image into the text, where its line ends and the text's own are one token."""
    plain = Plain("gemma3", vision_model(tmp_path / "gemma3", "gemma3"))
    engine = LocalEngine({"m": plain.path}, tmp_path / "state", dtype=plain.dtype)
    engine.create("run-a", base_model="m")
    rows = [Row("user\nIMAGE\nwhat is it?", [CAT]), Row("IMAGE\n\n and IMAGE: alike", [DOG, TALL]), ROWS[0]]
    rows.append(Row("IMAGEIMAGE: side by side", [CAT, DOG]))
    found = engine.do("run-a", columns_of(plain, rows), forward=pb.LossCall(loss_fn="causal_lm", outputs=["logprobs"]))
    assert close(found.columns["logprobs"].values, torch.cat([plain.logprobs(row) for row in rows]))


def test_a_loss_and_its_gradients_are_those_of_transformers(plain: Plain, engine: LocalEngine) -> None:
    engine.create("run-a", base_model="m")
    result = engine.do(
        "run-a", columns_of(plain, ROWS), forward_backward=pb.LossCall(loss_fn="causal_lm", outputs=["logprobs"])
    )
    expected = [plain.logprobs(row) for row in ROWS]
    assert close(result.columns["logprobs"].values, torch.cat(expected))
    loss = -torch.cat(expected).mean()
    assert abs(result.proto.loss.loss - loss.item()) <= TOLERANCE
    check_gradients(engine, "run-a", plain.gradients(loss))
    tokens = sum(plain.inputs(row)["input_ids"].numel() for row in ROWS)
    assert result.proto.loss.num_tokens == tokens


def test_dpo_has_the_gradients_of_transformers_for_both_sides_of_a_pair(plain: Plain, engine: LocalEngine) -> None:
    pairs = [
        (Row("IMAGE shows a long prompt: a cat", [CAT]), Row("IMAGE shows a long prompt: a bus", [CAT])),
        (Row("text: good answer"), Row("text: poor answer, longer")),
    ]
    chosen, rejected = ([pair[side] for pair in pairs] for side in (0, 1))
    batch = columns_of(plain, chosen, "chosen_") | columns_of(plain, rejected, "rejected_")
    engine.create("run-a", base_model="m")
    call = pb.LossCall(loss_fn="dpo", loss_kwargs_json='{"beta": 0.5, "reference_model": "base"}')
    result = engine.do("run-a", batch, forward_backward=call)
    differences = torch.stack([plain.logprobs(a).sum() - plain.logprobs(b).sum() for a, b in pairs])
    loss = -torch.nn.functional.logsigmoid(0.5 * (differences - differences.detach())).mean()
    assert abs(result.proto.loss.loss - loss.item()) <= TOLERANCE
    check_gradients(engine, "run-a", plain.gradients(loss))


def test_rows_of_text_need_no_images(plain: Plain, engine: LocalEngine) -> None:
    rows = [Row("one of text"), Row("another, which is longer")]
    batch = columns_of(plain, rows)
    assert set(batch) == {"input_ids", "loss_mask"}
    engine.create("run-a", base_model="m", lora=2)
    found = engine.logprobs("run-a", batch)
    assert close(found, torch.cat([plain.logprobs(row) for row in rows]))


def test_a_row_may_have_all_tokens_that_the_processor_makes(plain: Plain, engine: LocalEngine) -> None:
    engine.create("run-a", base_model="m", lora=2)
    made = columns_of(plain, ROWS, ids=lambda row: plain.inputs(row)["input_ids"][0].tolist())
    assert np.array_equal(engine.logprobs("run-a", made), engine.logprobs("run-a", columns_of(plain, ROWS)))


def test_the_tokens_of_images_are_never_scored(plain: Plain, engine: LocalEngine) -> None:
    engine.create("run-a", base_model="m", lora=2)
    batch = columns_of(plain, ROWS)
    del batch["loss_mask"]
    result = engine.do("run-a", batch, forward=pb.LossCall(loss_fn="causal_lm", outputs=["logprobs"])).proto.loss
    assert result.num_loss_tokens == sum(len(plain.ids(row)) - 1 - len(row.images) for row in ROWS)
    assert any("not scored" in warning for warning in result.warnings)


@pytest.mark.long
def test_adapters_are_on_the_language_model_unless_vision_is_named(
    plain: Plain, engine: LocalEngine, tmp_path: Path
) -> None:
    def names(run_id: str) -> set[bool]:
        """Whether the trained tensors are of the vision part."""
        trained = engine.context.runs[run_id].policy.trainable_parameters()
        return {not name.startswith(("model.language_model.", "model.text_model.")) for name in trained}

    engine.create("run-a", base_model="m", lora=2)
    engine.create("run-b", base_model="m", lora={"rank": 2, "target_modules": ["all-linear", "vision"]})
    engine.create("run-c", base_model="m", lora={"rank": 2, "target_modules": ["vision"]})
    assert [names(run) for run in ("run-a", "run-b", "run-c")] == [{False}, {False, True}, {True}]
    batch = columns_of(plain, ROWS)
    for run in ("run-a", "run-b", "run-c"):
        losses = [engine.train(run, batch)[0] for _ in range(3)]
        assert losses[2] < losses[0]
        exported = engine.do(run, export=pb.ExportModel(name="out")).proto.export
        assert exported.format == "peft"
        folder = tmp_path / "runs" / run / "exports" / "out"
        fresh = AutoModelForImageTextToText.from_pretrained(plain.path, dtype=plain.dtype)
        trained = Plain.__new__(Plain)
        vars(trained).update(vars(plain) | {"model": PeftModel.from_pretrained(fresh, folder).eval()})
        with torch.no_grad():
            expected = torch.cat([trained.logprobs(row) for row in ROWS])
        assert close(engine.logprobs(run, batch), expected)


@pytest.mark.parametrize("lora", [None, 2])
def test_whole_exports_load_with_their_processor(
    plain: Plain, engine: LocalEngine, tmp_path: Path, lora: int | None
) -> None:
    engine.create("run-a", base_model="m", lora=lora)
    batch = columns_of(plain, ROWS)
    engine.train("run-a", batch)
    engine.do("run-a", export=pb.ExportModel(name="out", format="hf"))
    trained = Plain(plain.kind, tmp_path / "runs" / "run-a" / "exports" / "out")
    with torch.no_grad():
        expected = torch.cat([trained.logprobs(row) for row in ROWS])
    assert close(engine.logprobs("run-a", batch), expected)


@pytest.mark.parametrize("outside", [False, True], ids=["in the run", "outside"])
def test_greedy_samples_are_those_of_generate(plain: Plain, engine: LocalEngine, outside: bool) -> None:
    prompts = [
        Row("a prompt of text, longer than a page of keys and values is"),
        Row("a long beginning, alike: IMAGE and then?", [CAT]),
        Row("a long beginning, alike: IMAGE and then?", [picture(4, 16, 24)]),
        Row("a long beginning, alike: IMAGE IMAGE and?", [DOG, TALL]),
    ]
    expected = []
    for row in prompts:
        inputs = plain.inputs(row)
        with torch.no_grad():
            made = plain.model.generate(
                **inputs, max_new_tokens=8, eos_token_id=-1, do_sample=False, return_dict_in_generate=True,
                output_logits=True,
            )  # fmt: skip
        tokens = made.sequences[0, inputs["input_ids"].shape[1] :]
        logprobs = torch.cat(made.logits).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        expected.append((tokens.tolist(), logprobs))
    call = pb.SampleCall(max_tokens=8, temperature=0.0, n=2, ignore_eos=True)
    images = to_image_columns([list(row.images) for row in prompts], len(prompts))
    ids = [plain.ids(row) for row in prompts]
    if outside:
        request = pb.SampleRequest(model="m", call=call, prompt_ids=[pb.TokenIds(ids=row) for row in ids])
        request.images.extend(each.tobytes() for each in images[IMAGE_BYTES].rows())
        request.prompt_images.extend(pb.ImageNumbers(images=row.tolist()) for row in images[IMAGES].rows())
        reply, payload = engine.request(sample=request)
        from gradwire_proto import codec

        result, columns = reply.result, codec.decode(list(reply.result.tensors), payload)
    else:
        engine.create("run-a", base_model="m", lora=2)
        found = engine.do("run-a", token_rows(ids, "prompt_ids") | images, sample=call)
        result, columns = found.proto, found.columns
    assert result.sample.num_prompt_tokens == sum(plain.inputs(row)["input_ids"].numel() for row in prompts)
    samples = columns["token_ids"].values.reshape(len(prompts), 2, 8)
    logprobs = columns["logprobs"].values.reshape(len(prompts), 2, 8)
    for row, (tokens, wanted) in enumerate(expected):
        assert samples[row].tolist() == [tokens, tokens], prompts[row]
        assert close(logprobs[row], wanted.expand(2, -1))


# ------------------------------------------------------------------ what is refused


REFUSED = {
    "no image": (Row("IMAGE", []), "1 image tokens"),
    "no token": (Row("a b c", [CAT]), "1 images and 0 image tokens"),
    "too many": (Row("IMAGE IMAGE IMAGE", [CAT, DOG]), "2 images and 3 image tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_row_with_other_images_than_tokens_is_refused_by_name(plain: Plain, engine: LocalEngine, case: str) -> None:
    row, message = REFUSED[case]
    engine.create("run-a", base_model="m", lora=2)
    batch = columns_of(plain, [Row("IMAGE is well", [CAT]), row])
    result = engine.op("run-a", batch, forward_backward=pb.LossCall(loss_fn="causal_lm"))
    error = result.proto.error
    assert (error.code, error.field, error.row) == (pb.ERROR_CODE_INVALID_BATCH, "images", 1)
    assert message in error.message
    assert engine.context.runs["run-a"].accumulator.empty
    without = {name: column for name, column in columns_of(plain, [Row("text"), row]).items() if "image" not in name}
    forgotten = engine.op("run-a", without, forward=pb.LossCall(outputs=["logprobs"])).proto
    assert (forgotten.status == pb.STATUS_SUCCEEDED) == (case == "no token")
    if case != "no token":
        assert (forgotten.error.field, forgotten.error.row) == ("images", 1)
    assert engine.do("run-a", columns_of(plain, ROWS), forward_backward=pb.LossCall(loss_fn="causal_lm"))


def damaged(case: str) -> bytes:
    whole = png(CAT)
    return {
        "cut": whole[: len(whole) // 2],
        "text": b"no image at all",
        "array": to_image_columns([[CAT]], 1)[IMAGE_BYTES].values.tobytes()[:200],
        "huge": huge(),
    }[case]


def huge() -> bytes:
    """A PNG file of few bytes and many pixels."""
    from io import BytesIO

    from PIL import Image

    stream = BytesIO()
    Image.new("1", (9000, 9000)).save(stream, format="PNG")
    return stream.getvalue()


@pytest.mark.parametrize("plain", ["smolvlm"], indirect=True)
@pytest.mark.parametrize(
    ("case", "message"),
    [("cut", "damaged"), ("text", "PNG, JPEG, WEBP"), ("array", "damaged"), ("huge", "9000 x 9000 pixels")],
)
def test_a_damaged_image_is_refused_with_its_row(plain: Plain, engine: LocalEngine, case: str, message: str) -> None:
    engine.create("run-a", base_model="m", lora=2)
    batch = columns_of(plain, ROWS) | to_image_columns([[], [damaged(case)], [DOG, TALL, DOG]], 3)
    error = engine.op("run-a", batch, forward_backward=pb.LossCall(loss_fn="causal_lm")).proto.error
    assert (error.code, error.field, error.row) == (pb.ERROR_CODE_INVALID_BATCH, "images", 1)
    assert message in error.message and "row 1, image 0" in error.message


def test_an_image_that_takes_too_long_is_refused_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    before = opened(png(CAT))
    monkeypatch.setattr(decoders, "DECODE_S", 0.0)
    with pytest.raises(decoders.ImageRefused, match="took more than 0 s"):
        opened(png(DOG))
    monkeypatch.undo()
    assert opened(png(CAT)).tobytes() == before.tobytes() == CAT.tobytes()


@pytest.mark.parametrize("plain", ["qwen2_5_vl"], indirect=True)
def test_images_are_read_before_the_engine_comes_to_them(plain: Plain, engine: LocalEngine) -> None:
    engine.create("run-a", base_model="m", lora=2)
    ahead = ImagesAhead(engine.engine.context)
    tensors, payload = codec.encode(columns_of(plain, ROWS) | to_image_columns([[CAT], [DOG], [TALL]], 3))
    operation = pb.Operation(forward_backward=pb.LossCall(loss_fn="causal_lm"))
    message = engine_pb2.EngineRequest(
        operation=engine_pb2.EngineOperation(run_id="run-a", operation=operation, tensors=tensors)
    )
    request = ahead.begin(Request.read(message, memoryview(b"".join(payload))))
    assert request.images is not None and request.images.exception(60) is None and request.ready
    vision = engine.engine.context.runs["run-a"].policy.split_model.vision
    assert vision is not None and len(vision.processor._kept) == 3


def test_what_is_transparent_is_read_as_the_models_own_processor_reads_it(plain: Plain) -> None:
    """In a file, an array, and a file with a palette: on white, whatever color the transparent pixels hide."""
    alpha = np.where(np.arange(24) < 12, 0, 160).astype(np.uint8)
    pixels = np.dstack([CAT, np.broadcast_to(alpha, CAT.shape[:2])])
    image = Image.fromarray(pixels)
    palette, stream = image.quantize(16), BytesIO()
    palette.save(stream, format="PNG", transparency=3)
    array = to_image_columns([[pixels]], 1)[IMAGE_BYTES].values.tobytes()
    for content, given in ((png(pixels), image), (array, image), (stream.getvalue(), Image.open(stream))):
        tiles = [[given]] if plain.kind in ("idefics3", "smolvlm") else [given]
        expected = plain.processor.image_processor(images=tiles, return_tensors="pt")["pixel_values"]
        found = plain.processor.image_processor(
            images=[[opened(content)]] if tiles == [[given]] else [opened(content)], return_tensors="pt"
        )["pixel_values"]
        assert torch.equal(found, expected)
    assert np.asarray(opened(png(pixels)))[0, 0].tolist() == [255, 255, 255]


def test_a_model_of_text_refuses_images(tiny_model_path: Path, tmp_path: Path) -> None:
    engine = LocalEngine({"tiny": tiny_model_path}, tmp_path)
    engine.create("run-a", lora=2)
    batch = token_rows([[5, 6, 7]]) | to_image_columns([[png(CAT)]], 1)
    error = engine.op("run-a", batch, forward_backward=pb.LossCall(loss_fn="causal_lm")).proto.error
    assert (error.code, error.field) == (pb.ERROR_CODE_UNSUPPORTED, "images")
    assert "SmolVLM" in error.message
    create = engine_pb2.EngineCreateRun(run_id="run-b", config=pb.RunConfig(base_model="tiny"))
    create.config.lora.rank = 2
    create.config.lora.target_modules.append("vision")
    reply, _ = engine.request(create_run=create)
    assert reply.error.field == "lora.target_modules" and "takes no images" in reply.error.message
