"""Images among the chunks of rows and prompts: the tokens in their places, and each distinct image once.

A chunk says how many tokens its image is (``expected_tokens``), and a row's targets and weights have an entry for each
of them. So all are put into the row; the engine refuses another number than the model's own processor makes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gradwire_proto.codec import IMAGE_BYTES, IMAGES, Column
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.errors import ServiceError, limit_exceeded
from gradwire_server.limits import Limits

MAX_TOKENS = 1 << 22
"""Tokens of the images of one request."""


class ChunkImages:
    """The images of a request.

    Args:
        model: The model that reads them.

    Attributes:
        rows: Each row's images, as indices into the contents.
        contents: The distinct images.
    """

    def __init__(self, model: pb.ModelInfo, limits: Limits) -> None:
        self._model, self._limits = model, limits
        self._numbers: dict[bytes, int] = {}
        self._tokens = 0
        self.rows: list[list[int]] = []

    @property
    def contents(self) -> list[bytes]:
        return list(self._numbers)

    def begin_row(self) -> None:
        """Begin with the images of the next row."""
        self.rows.append([])

    def add(self, content: bytes, count: int, where: str, field: str, row: int | None = None) -> npt.NDArray[np.int32]:
        """Add an image to the row; returns the tokens that stand for it.

        Args:
            count: How many they are.
            where: The row, for messages.

        Raises:
            ServiceError: UNSUPPORTED for a model that takes no images here; INVALID_BATCH; LIMIT_EXCEEDED.
        """
        model = self._model
        if not model.HasField("image_token_id"):
            why = f"the model {model.name!r} ({model.architecture}) takes no images"
            if model.takes_images:
                why = (
                    f"an image of {model.name!r} ({model.architecture}) is several tiles with tokens between them,"
                    " which a chunk of this protocol cannot tell; gradwire's own SDK and chat completions take them"
                )
            message = f"{where} has an image, and {why}; through this protocol Qwen2-VL, Qwen2.5-VL and Qwen3-VL do"
            raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field=field, row=row)
        self._tokens += count
        if not 1 <= count <= model.context_length or self._tokens > MAX_TOKENS:
            message = (
                f"an image of {where} is to be {count} tokens; the model's context has {model.context_length}, and the"
                f" images of a request have {MAX_TOKENS:,} at most"
            )
            raise ServiceError(pb.ERROR_CODE_INVALID_BATCH, message, field=field, row=row)
        if len(content) > self._limits.max_image_bytes:
            most = self._limits.max_image_bytes
            raise limit_exceeded(f"an image of {len(content)} bytes", "max_image_bytes", most, field)
        self.rows[-1].append(self._numbers.setdefault(content, len(self._numbers)))
        return np.full(count, model.image_token_id, np.int32)

    def columns(self) -> dict[str, Column]:
        """The columns of a batch; none if no row has an image."""
        if not self._numbers:
            return {}
        return {
            IMAGES: Column.from_rows([np.array(row, np.int32) for row in self.rows]),
            IMAGE_BYTES: Column.from_rows([np.frombuffer(content, np.uint8) for content in self._numbers]),
        }
