"""Tensors packed into one piece of host memory, and files of such pieces.

On a GPU the memory is pinned, so that the device copies it by itself; what is queued behind a copy sees its result.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from gradwire_server.engine.errors import DamagedFile

ALIGNMENT = 64


class PackedTensor(NamedTuple):
    """One tensor of a packed piece; ``start`` is its first byte."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    start: int

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class PackedLayout(NamedTuple):
    """The parts of a packed piece, and its size in bytes."""

    parts: tuple[PackedTensor, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> PackedLayout:
        """The layout of these tensors. Equal layouts are one object, because runs that are alike have equal ones."""
        parts, start = [], 0
        for name, tensor in tensors.items():
            parts.append(PackedTensor(name, tensor.dtype, tensor.shape, tensor.device, start))
            start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return _one(cls(tuple(parts), start))


@lru_cache(maxsize=1024)
def _one(layout: PackedLayout) -> PackedLayout:
    return layout


class Packed:
    """Packed tensors.

    Attributes:
        buffer: ``[layout.nbytes]`` uint8.
    """

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout
        self._devices = {part.device for part in layout.parts if part.device.type == "cuda"}
        self._copied: list[torch.cuda.Event] = []
        self.buffer = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=bool(self._devices))

    @classmethod
    @torch.no_grad()
    def of(cls, tensors: Mapping[str, Tensor]) -> Packed:
        """Copy tensors into one piece."""
        packed = cls(PackedLayout.of(tensors))
        _copy(packed._views(), [tensor.detach() for tensor in tensors.values()])
        for device in packed._devices:
            packed._copied.append(torch.cuda.current_stream(device).record_event())
        return packed

    @torch.no_grad()
    def unpacked(self) -> dict[str, Tensor]:
        """Name -> a new tensor on the device where it was."""
        parts = self.layout.parts
        tensors = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts]
        _copy(tensors, self._views())
        return {part.name: tensor for part, tensor in zip(parts, tensors, strict=True)}

    def write(self, file: Path) -> int:
        """Write the piece to a file, which need not survive a crash, and return its checksum."""
        for copied in self._copied:
            copied.synchronize()
        with file.open("wb") as stream:
            stream.write(self._bytes())
        return zlib.crc32(self._bytes())

    @classmethod
    def read(cls, file: Path, layout: PackedLayout, checksum: int) -> Packed:
        """Read a file that :meth:`write` has written.

        Raises:
            DamagedFile: It is missing, shorter or different.
        """
        packed, read = cls(layout), 0
        into = packed._bytes()
        try:
            with file.open("rb") as stream:
                while read < layout.nbytes and (count := stream.readinto(into[read:])):
                    read += count
        except OSError as error:
            raise DamagedFile(f"{file} cannot be read: {error}") from error
        if read < layout.nbytes or zlib.crc32(into) != checksum:
            raise DamagedFile(f"{file} does not hold what was written to it")
        return packed

    def _views(self) -> list[Tensor]:
        return [
            self.buffer[part.start : part.start + part.nbytes].view(part.dtype).view(part.shape)
            for part in self.layout.parts
        ]

    def _bytes(self) -> memoryview:
        return memoryview(cast(bytearray, self.buffer.numpy()))


def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(values), non_blocking=True)
