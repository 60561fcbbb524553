"""Images as a model takes them: bytes of a file, or an array, read by the model's own processor.

The processors are those of transformers that compute with Pillow and numpy, so that an image is read alike on every
machine. Pillow comes with ``gradwire[images]``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.tokenizers import load_tokenizer
from gradwire_server.engine.model.vision.decoders import ImageRefused, decode
from gradwire_server.image_decoding import too_large
from gradwire_server.image_sizes import MAX_PIXELS
from gradwire_server.tokenizer_files import find_tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

ARRAY = b"\x93NUMPY"
"""Beginning of an array as ``numpy.save`` writes it."""
KEPT_BYTES = 256 << 20
"""Bytes of images that were read and are kept for later batches."""
_REFUSAL_BYTES = 1 << 10
LONGEST_RUN = 32
"""Line ends that a token may be."""
TAKEN = frozenset({"pixel_values", "pixel_attention_mask", "image_grid_thw"})


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """One image as the vision part of its model takes it.

    Attributes:
        digest: Digest of the image's content.
        inputs: The processor's result.
        tokens: The tokens that stand for it in a sequence.
        count: How many of them are image tokens.
    """

    digest: bytes
    inputs: Mapping[str, Tensor]
    tokens: Tensor
    count: int

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.inputs.values()) + self.tokens.nbytes


class ImageProcessor:
    """Reads images for one model.

    Args:
        path: The model's folder or hub name.
        image_token: Id of an image token.
        tile_tokens: Image tokens of a tile, for models that cut images into tiles and describe them by further tokens;
            None for others.
        image_tokens: Image tokens of an image, for models whose images all have as many; None for models that tell the
            number of tokens by a grid or by tiles.
        around: Ids of the tokens before and behind those of an image, which stand between two pairs of line ends.

    Raises:
        OperationError: UNSUPPORTED without Pillow, without the processor's settings, or without a tokenizer where the
            model has further tokens around those of an image.
    """

    def __init__(
        self,
        path: str,
        image_token: int,
        tile_tokens: int | None,
        image_tokens: int | None = None,
        around: tuple[int, int] | None = None,
    ) -> None:
        try:
            import PIL  # noqa: F401
        except ImportError:
            raise _unsupported(
                "images need Pillow, which is not installed on the server: pip install 'gradwire[images]'"
            ) from None
        from transformers import AutoImageProcessor

        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise _unsupported(
                f"the folder of the model has no settings of an image processor (preprocessor_config.json): {error}"
            ) from error
        self._image_token, self._tile_tokens, self._image_tokens = image_token, tile_tokens, image_tokens
        described = tile_tokens is not None or around is not None
        tokenizer = find_tokenizer(path) if described else None
        if described and tokenizer is None:
            raise _unsupported("the model has no tokenizer.json, which knows the tokens around those of an image")
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer is not None else None
        self._around, self._line_ends = around, dict[int, int]()
        if around is not None:
            self._line_ends = self._runs_of_line_ends()
        self._kept: OrderedDict[bytes, ProcessedImage | ImageRefused] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def read(self, content: bytes) -> ProcessedImage:
        """Read a PNG, JPEG or WebP file, or an array as ``numpy.save`` writes it. May be called in any thread.

        Raises:
            ImageRefused: It is not an image, it is damaged, it has more than ``MAX_PIXELS`` pixels, or takes too long.
        """
        digest = blake2b(content, digest_size=16).digest()
        with self._lock:
            image = self._kept.get(digest)
            if image is not None:
                self._kept.move_to_end(digest)
        if image is None:
            try:
                image = self._processed(digest, opened(content))
            except ImageRefused as error:  # whoever reads it ahead is not whoever is told
                image = error
            self._keep(digest, image)
        if isinstance(image, ImageRefused):
            raise ImageRefused(str(image)) from image
        return image

    def _keep(self, digest: bytes, read: ProcessedImage | ImageRefused) -> None:
        with self._lock:
            if digest not in self._kept:
                self._kept[digest] = read
                self._kept_bytes += _size(read)
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._kept_bytes -= _size(dropped)

    def _processed(self, digest: bytes, image: Image) -> ProcessedImage:
        tiles = {} if self._tile_tokens is None else {"return_row_col_info": True}
        try:
            made = self._processor(images=[[image]] if tiles else [image], return_tensors="pt", **tiles)
        except ValueError as error:  # of a shape that the model's processor does not take
            raise ImageRefused(f"the model's processor does not take it: {error}") from error
        inputs = {name: each for name, each in made.items() if name in TAKEN}
        if self._tile_tokens is None:
            count = self._image_tokens
            if count is None:
                count = int(inputs["image_grid_thw"].prod()) // self._processor.merge_size**2
            tokens = torch.full((count,), self._image_token)
            if self._around is not None:
                before, behind = (torch.tensor([token]) for token in self._around)
                tokens = torch.cat([self._ids("\n\n"), before, tokens, behind, self._ids("\n\n")])
            return ProcessedImage(digest, inputs, tokens, count)
        tokens = self._around_tiles(int(made["rows"][0][0]), int(made["cols"][0][0]))
        count = int((tokens == self._image_token).sum())
        expected = inputs["pixel_values"].shape[1] * self._tile_tokens
        if count != expected:
            raise _unsupported(
                f"the tokenizer makes {count} image tokens of an image for which the model computes {expected}"
            )
        return ProcessedImage(digest, inputs, tokens, count)

    def joined(self, ids: Tensor, mark: int, tokens: Tensor) -> Tensor:
        """The tokens of an image for the place ``mark`` of a sequence.

        Line ends beside it become one token with the image's own, as the model's processor, which puts the image into
        the text, has them: these tokens of ``ids`` are changed.
        """
        ends = {count: token for token, count in self._line_ends.items()}
        for neighbour, first in ((mark - 1, True), (mark + 1, False)):
            count = self._line_ends.get(int(ids[neighbour])) if 0 <= neighbour < len(ids) else None
            own = self._line_ends.get(int(tokens[0 if first else -1])) if len(tokens) else None
            if count is not None and own == 2 and count + own in ends:
                ids[neighbour] = ends[count + own]
                tokens = tokens[1:] if first else tokens[:-1]
        return tokens

    def side_by_side(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of two images with nothing between them, whose line ends become one token, that of the first."""
        counts = [self._line_ends.get(int(token)) for token in (first[-1], second[0])]
        ends = {count: token for token, count in self._line_ends.items()}
        if None in counts or (total := sum(count or 0 for count in counts)) not in ends:
            return first, second
        return torch.cat([first[:-1], torch.tensor([ends[total]])]), second[1:]

    def _runs_of_line_ends(self) -> dict[int, int]:
        """Tokens that are line ends alone, and how many."""
        runs = ((self._ids("\n" * count), count) for count in range(1, LONGEST_RUN + 1))
        return {int(ids[0]): count for ids, count in runs if len(ids) == 1}

    def _ids(self, text: str) -> Tensor:
        assert self._tokenizer is not None
        return torch.tensor(self._tokenizer.encode([text], add_special_tokens=False)[0])

    def _around_tiles(self, rows: int, columns: int) -> Tensor:
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        text = get_image_prompt_string(
            rows, columns, self._tile_tokens, "<fake_token_around_image>", "<image>", "<global-img>"
        )
        return self._ids(text)


def _size(read: ProcessedImage | ImageRefused) -> int:
    return read.nbytes if isinstance(read, ProcessedImage) else _REFUSAL_BYTES


def opened(content: bytes) -> Image:
    """Decode an image to red, green and blue, turned as its file says, on white where it is transparent.

    It is what transformers' own processors make of it. Files are decoded in another process.

    Raises:
        ImageRefused: As for :meth:`ImageProcessor.read`.
    """
    from PIL import Image

    return _on_white(Image.fromarray(_array(content)) if content.startswith(ARRAY) else decode(content))


def _on_white(image: Image) -> Image:
    from PIL import Image
    from transformers.image_transforms import convert_to_rgb

    return Image.fromarray(np.asarray(convert_to_rgb(image, return_numpy=True)))


def _array(content: bytes) -> np.ndarray[Any, Any]:
    stream = BytesIO(content)
    try:
        np.lib.format.read_magic(stream)
        shape, by_column, dtype = np.lib.format.read_array_header_1_0(stream)
    except ValueError as error:
        raise ImageRefused(f"the array is damaged: {error}") from error
    gray = len(shape) == 2
    if dtype != np.uint8 or by_column or not (gray or (len(shape) == 3 and shape[2] in (1, 3, 4))) or min(shape) < 1:
        raise ImageRefused(
            f"an array is uint8 [height, width], or [height, width, channels] with 1, 3 or 4 channels; this is {dtype}"
            f" {list(shape)}"
        )
    _check_size(shape[1], shape[0])
    values = np.frombuffer(content, np.uint8, offset=stream.tell())
    if values.size != np.prod(shape):
        raise ImageRefused(f"the array is damaged: {values.size} bytes for the shape {list(shape)}")
    return values.reshape(shape[:2] if gray or shape[2] == 1 else shape)


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ImageRefused(too_large(width, height))


def _unsupported(message: str) -> OperationError:
    return OperationError(training_pb2.ERROR_CODE_UNSUPPORTED, message, field="images")
