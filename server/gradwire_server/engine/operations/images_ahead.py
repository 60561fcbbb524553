"""Images read in threads of their own before the engine's thread comes to their request.

The engine executes requests of other runs meanwhile. What is read is kept by the model's processor, where the request
finds it; images beyond what it keeps are read by the request itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from gradwire_proto.codec import IMAGE_BYTES

from gradwire_server.engine.model.vision.decoders import PROCESSES, ImageRefused
from gradwire_server.engine.model.vision.image_tokens import Vision
from gradwire_server.engine.model.vision.processing import KEPT_BYTES, ImageProcessor
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.request import Request

AHEAD_BYTES = KEPT_BYTES // 2
"""Bytes of images, as their model takes them, that are read ahead for one request."""


class ImagesAhead:
    """Reads the images of requests that have not begun."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._threads = ThreadPoolExecutor(PROCESSES, "gradwire-images")

    def begin(self, request: Request) -> Request:
        """Begin to read a request's images, if it has any and its model is in memory; returns the request with that."""
        contents = _contents(request)
        vision = self._vision(request) if contents else None
        if vision is None:
            return request
        return replace(request, images=self._threads.submit(_read, vision, contents))

    def _vision(self, request: Request) -> Vision | None:
        context = self._context
        if request.run_id:
            run = context.runs.get(request.run_id)
            return None if run is None else run.policy.split_model.vision
        name = request.message.sample.model
        return context.pool.get(name).vision if context.pool.is_loaded(name) else None


def _contents(request: Request) -> Sequence[bytes]:
    if request.message.HasField("sample"):
        return list(request.message.sample.images)
    column = request.columns.get(IMAGE_BYTES)
    if column is None or len(column.levels) != 1 or column.values.ndim != 1:
        return []  # its request says what is wrong
    return [each.tobytes() for each in column.rows()]


def _read(vision: Vision, contents: Sequence[bytes]) -> None:
    processor: ImageProcessor = vision.processor
    size = 0
    for content in contents:
        try:
            size += processor.read(content).nbytes
        except ImageRefused:
            return  # of which the request tells
        if size > AHEAD_BYTES:
            return
