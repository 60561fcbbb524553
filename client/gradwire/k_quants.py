"""K-quants of GGUF files, which the package gguf reads but does not compute: 256 weights share a scale of scales.

The levels, scales and minima of a block are those of least squares over a line search; no importance matrix is used.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
BLOCK = 256
CHUNK = 1 << 9
"""Blocks that are computed at once."""
STEPS = np.arange(-10, 11, dtype=np.float32) / 10
"""By how many levels the range of a line search is widened or narrowed."""


def in_blocks(tensor: Floats, pack: Callable[[Floats], Bytes]) -> Bytes:
    """Quantize a matrix whose rows are multiples of 256.

    Args:
        tensor: The matrix.
        pack: :func:`q4_k` or :func:`q6_k`.

    Returns:
        The bytes of each row.
    """
    blocks = tensor.reshape(-1, BLOCK)
    with ThreadPoolExecutor() as threads:  # NumPy lets them run side by side
        packed = list(threads.map(pack, [blocks[start : start + CHUNK] for start in range(0, len(blocks), CHUNK)]))
    return np.concatenate(packed).reshape(tensor.shape[0], -1)


def q4_k(blocks: Floats) -> Bytes:
    """Quantize blocks [N, 256] to bytes [N, 144]: a weight is ``d * scale * level - dmin * minimum``.

    A level has 4 bits; 32 weights share a scale and a minimum of 6 bits each.
    """
    x = blocks.reshape(-1, 8, 32)
    scales, minima = _affine(x)
    d, step = _shared(scales, 63)
    dmin, least = _shared(minima, 63)
    scale, offset = d * step, dmin * least
    levels = np.clip(np.rint(_over(x + offset[..., None], scale[..., None])), 0, 15).astype(np.uint8)
    s, m = step.astype(np.uint8), least.astype(np.uint8)
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    halves = (levels[:, ::2] | levels[:, 1::2] << 4).reshape(-1, 128)
    return np.concatenate([_half(d), _half(dmin), *packed, halves], 1)


def q6_k(blocks: Floats) -> Bytes:
    """Quantize blocks [N, 256] to bytes [N, 210]: a weight is ``d * scale * level``.

    A level has 6 bits and is from -32 to 31; 16 weights share a scale of 8 bits.
    """
    x = blocks.reshape(-1, 16, 16)
    scales = _symmetric(x)
    d, step = _shared(scales, 127)
    levels = np.clip(np.rint(_over(x, (d * step)[..., None])), -32, 31) + 32
    rows = levels.astype(np.uint8).reshape(-1, 2, 4, 32)  # halves, quarters of a half
    low = np.concatenate([rows[:, :, :2] & 15 | (rows[:, :, 2:] & 15) << 4], -1).reshape(-1, 128)
    high = rows >> 4
    tops = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(-1, 64)
    return np.concatenate([low, tops, step.astype(np.int8).view(np.uint8), _half(d)], 1)


def _affine(x: Floats) -> tuple[Floats, Floats]:
    """Scale and minimum of groups [..., G], so that ``scale * level - minimum`` with levels 0 to 15 is nearest."""
    low, high = np.minimum(x.min(-1), 0), x.max(-1)
    count, total, square = x.shape[-1], x.sum(-1), _dot(x, x)
    above, ones = x - low[..., None], np.ones_like(low)
    best = np.full(low.shape, np.inf, np.float32)
    scales, minima = np.zeros_like(low), np.zeros_like(low)
    for step in STEPS:
        level = _levels(above, _over((15 + step) * ones, high - low), 0, 15)
        sums, squares, products = level.sum(-1), _dot(level, level), _dot(level, x)
        scale = _over(count * products - sums * total, count * squares - sums * sums)
        offset = (total - scale * sums) / count
        alone = offset > 0  # a minimum is not negative: without one, the scale is that of a line through zero
        scale = np.where(alone, _over(products, squares), scale)
        offset = np.where(alone, 0, offset)
        error = square - 2 * (scale * products + offset * total) + scale * scale * squares
        error += 2 * scale * offset * sums + count * offset * offset
        better = (error < best) & (scale >= 0)
        best, scales, minima = (np.where(better, a, b) for a, b in ((error, best), (scale, scales), (-offset, minima)))
    return scales, minima


def _symmetric(x: Floats) -> Floats:
    """Scale of groups [..., G], so that ``scale * level`` with levels -32 to 31 is nearest; it may be negative."""
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    ones = np.ones_like(largest)
    most, scales = np.zeros(x.shape[:-1], np.float32), np.zeros(x.shape[:-1], np.float32)
    for step in STEPS:
        level = _levels(x, _over(-(32 + step) * ones, largest), -32, 31)  # the largest has the level -32
        squares, products = _dot(level, level), _dot(level, x)
        gain = _over(products * products, squares)
        scales = np.where(gain > most, _over(products, squares), scales)
        most = np.maximum(gain, most)
    return scales


def _levels(x: Floats, factor: Floats, least: int, most: int) -> Floats:
    """Whole multiples [..., G] of numbers, each group with a factor of its own."""
    scaled = x * factor[..., None]
    np.rint(scaled, out=scaled)
    return np.clip(scaled, least, most, out=scaled)


def _dot(a: Floats, b: Floats) -> Floats:
    return np.einsum("...i,...i->...", a, b)  # type: ignore[no-any-return]


def _shared(values: Floats, most: int) -> tuple[Floats, Floats]:
    """Write the values of a block as whole multiples of one half-precision number."""
    unit = (np.abs(values).max(-1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    return unit, np.clip(np.rint(_over(values, unit)), -most, most)


def _over(above: Floats, below: Floats) -> Floats:
    """Divide; 0 where the divisor is."""
    return np.divide(above, below, out=np.zeros(np.broadcast_shapes(above.shape, below.shape), np.float32),
                     where=below != 0)  # fmt: skip


def _half(numbers: Floats) -> Bytes:
    return np.ascontiguousarray(numbers, np.float16).view(np.uint8)
