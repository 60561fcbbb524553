"""Images of a batch: each distinct one travels once, whatever form it has, and what is wrong is named by row."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire.batches import SCORING_FIELDS, to_columns
from gradwire.errors import InvalidBatchError
from gradwire.wire.sample_calls import sample_call
from PIL import Image

PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)


def columns(images: Any) -> dict[str, Any]:
    return to_columns("forward", SCORING_FIELDS, {"input_ids": [[1], [2, 3], [4]], "images": images})


def test_each_distinct_image_travels_once() -> None:
    made = columns([[b"one", b"two"], [], [b"two", b"one", b"two"]])
    assert list(made) == ["input_ids", "images", "image_bytes"]
    assert [row.tolist() for row in made["images"].rows()] == [[0, 1], [], [1, 0, 1]]
    assert [each.tobytes() for each in made["image_bytes"].rows()] == [b"one", b"two"]


def test_rows_and_columns_give_the_same_bytes_and_no_image_gives_none() -> None:
    rows = [{"input_ids": [1], "images": [b"a"]}, {"input_ids": [2], "images": None}]
    made = to_columns("forward", SCORING_FIELDS, rows)
    same = to_columns("forward", SCORING_FIELDS, {"input_ids": [[1], [2]], "images": [[b"a"], []]})
    assert all(np.array_equal(made[name].values, same[name].values) for name in same)
    assert list(columns([[], [], None])) == ["input_ids"]


@pytest.mark.parametrize("pixels", [PIXELS, PIXELS[:, :, 0], PIXELS[:, :, :1], PIXELS.transpose(1, 0, 2)])
def test_an_array_travels_as_numpy_saves_it(pixels: np.ndarray) -> None:
    content = columns([[pixels], [], []])["image_bytes"].values.tobytes()
    assert np.array_equal(np.load(BytesIO(content), allow_pickle=False), pixels)


def test_a_pillow_image_travels_as_a_png_file() -> None:
    content = columns([[Image.fromarray(PIXELS)], [], []])["image_bytes"].values.tobytes()
    assert np.array_equal(np.asarray(Image.open(BytesIO(content))), PIXELS)


def test_a_pillow_image_is_turned_as_its_file_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    stream = BytesIO()
    Image.fromarray(PIXELS).save(stream, format="PNG", exif=exif)
    content = columns([[Image.open(BytesIO(stream.getvalue()))], [], []])["image_bytes"].values.tobytes()
    sent = Image.open(BytesIO(content))
    assert np.array_equal(np.asarray(sent), np.rot90(PIXELS, -1)) and 0x0112 not in sent.getexif()


@pytest.mark.parametrize(
    ("images", "row", "message"),
    [
        ([[b"a"]], None, "has 1 rows, and there are 3"),
        (b"a", None, "a list with a list of images for each row"),
        ([b"a", [], []], 0, "holds a bytes where a list of images is expected"),
        ([[], ["https://example.org/cat.png"], []], 1, "image 0 is a str.*read the file and send its bytes"),
        ([[Path("cat.png")], [], []], 0, "read the file and send its bytes"),
        ([[], [b""], []], 1, "image 0 is empty"),
        ([[], [], [PIXELS.astype(np.float32)]], 2, r"float32 \[2, 4, 3\]"),
    ],
)
def test_what_is_no_image_is_named_by_row(images: Any, row: int | None, message: str) -> None:
    with pytest.raises(InvalidBatchError, match=message) as caught:
        columns(images)
    assert (caught.value.field, caught.value.row) == ("images", row)


def test_prompts_as_texts_or_as_ids_may_have_images() -> None:
    call, made = sample_call(["a", "b"], {}, images=[[b"one"], []])
    assert list(call.prompts) == ["a", "b"] and list(made) == ["images", "image_bytes"]
    _, made = sample_call([[1, 2]], {}, images=[[b"one"]])
    assert list(made) == ["prompt_ids", "images", "image_bytes"]
    with pytest.raises(InvalidBatchError, match="has 1 rows, and there are 2"):
        sample_call(["a", "b"], {}, images=[[b"one"]])
