"""Kernels of our own for attention, what is computed between products, and products of some rows: float32 on a CPU.

torch computes a norm, a rotation or the attention of one token as 6 to 30 operations, each with a call from Python and
a pass over the numbers, and its products are made for many rows. ``cpu/`` has a function for each in C. They are
compiled for this processor in some seconds by the machine's C compiler (``CC``, else ``cc``) when an engine first
starts, and kept in the user's cache folder. Without a compiler torch computes as ever; so it does with
``--kernels plain``.

Each is compared with what it stands for when a model is loaded
(:mod:`gradwire_server.engine.model.loading.fused_kernels`,
:func:`gradwire_server.engine.sampling.pages.pages.paged_token_bytes` for attention to pages,
:func:`gradwire_server.engine.model.attention.blocks.has_right_kernel` for that of packed sequences, and
:func:`gradwire_server.engine.model.layers.packed_linear.has_right_products`).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import c_float, c_int64, c_void_p
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gradwire_server.checkpoint_files import StoredFile
from gradwire_server.engine.model.packing import OrderedKeys, QueryBlocks
from gradwire_server.engine.threads import product_threads

logger = logging.getLogger(__name__)

SOURCES = sorted((Path(__file__).parent / "cpu").iterdir())
FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",  # torch's own threads compute: its OpenMP is loaded already
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",  # sums as vectors; not -ffast-math, which changes how all of the process computes
    # Vectors as long as there are: 1.2 times as fast.
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
)
SECONDS = 60.0
"""Time for the compiler."""
SHOWN = 500
"""Characters of what it says."""
ALL_KEYS = 1 << 40
"""A window that leaves nothing out."""
FEWEST_NUMBERS = 1 << 17
"""Numbers from which on more than one thread computes: waking another takes as long as some ten thousand."""


_STRIDED = (c_void_p, c_int64, c_int64)
_SIGNATURES = {
    "write_tokens": (c_void_p, c_int64, c_int64, c_void_p, c_void_p, *[c_int64] * 4),
    "attend": (c_void_p, c_int64, c_int64, *[c_void_p] * 4, c_float, c_void_p, c_void_p, *[c_int64] * 9),
    "norm": (c_void_p, c_void_p, c_float, c_float, c_void_p, c_void_p, *[c_int64] * 3),
    "norm_gradients": (*[c_void_p] * 4, c_float, c_void_p, c_void_p, *[c_int64] * 3),
    "gated": (c_void_p, c_void_p, c_void_p, *[c_int64] * 3),
    "gated_gradients": (*[c_void_p] * 5, *[c_int64] * 3),
    "rotate": (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p, *[c_int64] * 4),
    "product": (*[c_void_p] * 4, *[c_int64] * 4),
    "small_product": (c_void_p, c_void_p, c_float, c_int64, c_void_p, *[c_int64] * 4),
    "attend_in_blocks": (*_STRIDED * 3, *[c_void_p] * 2, c_float, *[c_void_p] * 2, *[c_int64] * 5),
    "attend_in_order": (*_STRIDED * 3, *[c_void_p] * 2, c_float, *[c_void_p] * 2, *[c_int64] * 6),
    "attend_to_pages_in_order": (c_void_p, c_int64, c_int64, *[c_void_p] * 4, c_float, *[c_void_p] * 2, *[c_int64] * 9),
    "attend_in_blocks_gradients": (
        (c_void_p, *_STRIDED * 3, *[c_void_p] * 5, c_float, *[c_void_p] * 3) + (c_int64,) * 5
    ),
    "log_probabilities": (*[c_void_p] * 3, *[c_int64] * 4),
    "draw": (c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 3),
}

Note = Callable[[Callable[[], object], Sequence[object]], None]
"""Takes what calls a function again, and what it was given."""

_sampling: ContextVar[bool] = ContextVar("sampling", default=False)
_noted: ContextVar[Note | None] = ContextVar("noted", default=None)


@contextmanager
def sampling_by_kernels(used: bool) -> Iterator[None]:
    """Attend to pages and draw tokens by kernels within the body, if ``used``."""
    before = _sampling.set(used)
    try:
        yield
    finally:
        _sampling.reset(before)


@contextmanager
def noting_calls(note: Note) -> Iterator[None]:
    """Tell ``note`` of each call of a function within the body."""
    before = _noted.set(note)
    try:
        yield
    finally:
        _noted.reset(before)


def sampling_kernels(*tensors: Tensor) -> CpuKernels | None:
    """The kernels, within :func:`sampling_by_kernels`, if they know these tensors."""
    return cpu_kernels() if _sampling.get() and takes(*tensors) else None


def takes(*tensors: Tensor, device: str = "cpu") -> bool:
    """Whether kernels know these: float32, on such a device."""
    for each in tensors:  # several times a layer, so without a generator
        there = each.is_cpu if device == "cpu" else each.is_meta
        if not there or each.dtype is not torch.float32 or each.stride(-1) != 1:
            return False
    return True


class CpuKernels:
    """The compiled functions.

    Args:
        path: Their library; None for kernels that compute nothing, on meta tensors.

    Attributes:
        version: Names the source and the processor.

    Legend: ``M`` tokens, ``R`` rows, ``H`` heads, ``K`` heads of keys and values, ``D`` head size, ``V`` that of
    values, ``T`` tokens that there is room for in pages, ``N`` pages of a row. All tensors are float32, their last
    dimension without gaps.
    """

    def __init__(self, path: Path | None) -> None:
        self.version = "" if path is None else path.stem.partition("-")[0]
        self._library: Any = SimpleNamespace(**dict.fromkeys(_SIGNATURES, _nothing))
        if path is not None:
            self._library = ctypes.CDLL(str(path))
            for name, signature in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = signature, None
            self._columns = c_int64.in_dll(self._library, "panel_columns").value

    def write(self, tokens: Tensor, places: Tensor, whole: Tensor) -> None:
        """Write ``[M, K, D]`` at the places ``[M]`` of ``[K, T, D]``."""
        count, heads, size = tokens.shape
        places = _whole(places)
        self._call("write_tokens", tokens, *tokens.stride()[:2], places, whole, count, heads, whole.shape[1], size)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """``[R, H, D]``, ``[K, T, D]``, ``[K, T, V]``, pages ``[R, N]`` with ``[R]`` tokens -> ``[R, H, V]`` and
        log-sum-exps ``[R, H]``."""
        rows, heads, size = query.shape
        kv_heads, room, value_size = values.shape
        out, lse = query.new_empty(rows, heads, value_size), query.new_empty(rows, heads)
        table, lengths = _whole(table), _whole(lengths)
        self._call(
            "attend", query, *query.stride()[:2], keys, values, table, lengths, scale, out,
            lse, rows, heads, kv_heads, room, table.shape[1], size, value_size, product_threads(), FEWEST_NUMBERS,
        )  # fmt: skip
        return out, lse

    def attend_in_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, plan: QueryBlocks, scale: float
    ) -> tuple[Tensor, Tensor]:
        """``[M, H, D]``, twice ``[M, K, D]`` -> ``[M, H, D]`` and log-sum-exps ``[M, H]``, if :meth:`fit`."""
        count, heads, size = query.shape
        out, lse = query.new_empty(count, heads, size), query.new_empty(count, heads)
        self._call(
            "attend_in_blocks", *_strided(query, key, value), plan.blocks, plan.parts, scale, out, lse,
            len(plan.blocks), heads, key.shape[1], size, product_threads(),
        )  # fmt: skip
        return out, lse

    def attend_in_order(
        self, query: Tensor, key: Tensor, value: Tensor, plan: OrderedKeys, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same as :meth:`attend_in_blocks` with keys at places, ``[T, K, D]`` twice, if nothing is :meth:`missing`.

        A query's bits are the same whatever is beside it and wherever its keys lie, also in those of
        :meth:`attend_to_pages_in_order`.

        Args:
            window: Number of newest keys that a query attends to; all by default.
        """
        count, heads, size = query.shape
        out, lse = query.new_empty(count, heads, size), query.new_empty(count, heads)
        self._call(
            "attend_in_order", *_strided(query, key, value), *plan, scale, out, lse, len(plan.blocks), heads,
            key.shape[1], size, window or ALL_KEYS, product_threads(),
        )  # fmt: skip
        return out, lse

    def attend_to_pages_in_order(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        lengths: Tensor,
        page: int,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The same as :meth:`attend`, in the order and within the window of :meth:`attend_in_order`."""
        rows, heads, size = query.shape
        kv_heads, room, _ = values.shape
        out, lse = torch.empty(query.shape, dtype=query.dtype), query.new_empty(rows, heads)
        table, lengths = _whole(table), _whole(lengths)
        self._call(
            "attend_to_pages_in_order", query, *query.stride()[:2], keys, values, table, lengths, scale, out, lse, rows,
            heads, kv_heads, room, table.shape[1], page, size, window or ALL_KEYS, product_threads(),
        )  # fmt: skip
        return out, lse

    def attend_in_blocks_gradients(
        self,
        of_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        plan: QueryBlocks,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the query, the key and the value of :meth:`attend_in_blocks`, given what it returned."""
        count, heads, size = query.shape
        kv_heads = key.shape[1]
        of_query = query.new_empty(count, heads, size)
        of_key, of_value = (key.new_empty(count, kv_heads, size) for _ in range(2))
        self._call(
            "attend_in_blocks_gradients", _whole(of_out), *_strided(query, key, value), out, lse, *plan, scale,
            of_query, of_key, of_value, len(plan.families) - 1, heads, kv_heads, size, product_threads(),
        )  # fmt: skip
        return of_query, of_key, of_value

    def fit(self, kv_heads: int, size: int, plan: QueryBlocks) -> bool:
        """Whether heads of this size are whole panels, and there is work for all threads in a backward pass."""
        return not self.missing(size) and kv_heads * (len(plan.families) - 1) >= product_threads()

    def missing(self, size: int) -> int:
        """By how much heads of this size are to be filled up to whole panels."""
        return int(-size % self._columns)

    def norm(self, hidden: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """``hidden [.., D] / sqrt(mean(hidden^2) + eps) * (offset + weight [D])``."""
        if _has_gradient(hidden, weight):
            normed: Tensor = _Norm.apply(hidden, weight, self, eps, offset)  # type: ignore[no-untyped-call]
            return normed
        return self.norm_with_factors(_whole(hidden), weight, eps, offset)[0]

    def norm_with_factors(self, hidden: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        """:meth:`norm` of a tensor without gaps, and ``[rows]`` what each row was multiplied by before its weight."""
        size, count = weight.numel(), hidden.numel()
        rows = count // size
        out, factors = torch.empty_like(hidden), hidden.new_empty(rows)
        self._call("norm", hidden, weight, eps, offset, out, factors, rows, size, _threads(count))
        return out, factors

    def norm_gradients(
        self, of_out: Tensor, hidden: Tensor, weight: Tensor, factors: Tensor, offset: float
    ) -> tuple[Tensor, Tensor]:
        """Gradients of ``hidden`` and of the weight."""
        of_out = _whole(of_out)
        threads = _threads(hidden.numel())
        of_hidden, parts = torch.empty_like(hidden), hidden.new_empty(threads, len(weight))
        self._call(
            "norm_gradients", of_out, hidden, weight, factors, offset, of_hidden, parts, len(factors),
            len(weight), threads,
        )  # fmt: skip
        return of_hidden, parts.sum(0)

    def gated(self, gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
        """``act(gate) * up``; without a gradient in place of ``gate``, if that has no gaps. SiLU, or GELU by its tanh
        formula."""
        if _has_gradient(gate, up):
            product: Tensor = _Gated.apply(gate, up, self, gelu)  # type: ignore[no-untyped-call]
            return product
        gate, up = _whole(gate), _whole(up)
        self.gate(gate, up, gate, gelu=gelu)
        return gate

    def gate(self, gate: Tensor, up: Tensor, out: Tensor, *, gelu: bool) -> None:
        """:meth:`gated` into ``out``; no tensor has gaps."""
        self._call("gated", gate, up, out, gelu, gate.numel(), _threads(gate.numel()))

    def gated_gradients(self, of_out: Tensor, gate: Tensor, up: Tensor, *, gelu: bool) -> tuple[Tensor, Tensor]:
        """Gradients of ``gate`` and ``up``."""
        of_out = _whole(of_out)
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        self._call("gated_gradients", of_out, gate, up, of_gate, of_up, gelu, gate.numel(), _threads(gate.numel()))
        return of_gate, of_up

    def rotate(self, states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """``[1, H, M, D]`` with its halves turned by ``[1, M, D]``, which need no gradient."""
        if _has_gradient(states):
            rotated: Tensor = _Rotated.apply(states, cosines, sines, self)  # type: ignore[no-untyped-call]
            return rotated
        return self.turn(states, cosines, sines)

    def turn(self, states: Tensor, cosines: Tensor, sines: Tensor, *, back: bool = False) -> Tensor:
        """:meth:`rotate` without a gradient, or, ``back``, the gradient of ``states`` of the result's."""
        _, heads, count, size = states.shape
        cosines, sines = _whole(cosines), _whole(sines)
        out = states.new_empty(1, count, heads, size)
        self._call(
            "rotate", states, states.stride(2), states.stride(1), cosines, sines, back, out, count, heads,
            size, _threads(states.numel()),
        )  # fmt: skip
        return out.transpose(1, 2)

    def packed(self, weight: Tensor) -> Tensor:
        """A copy of a weight ``[O, I]`` for :meth:`product`: panels of some outputs each, the last filled up."""
        missing = -len(weight) % self._columns
        filled = F.pad(weight, (0, 0, 0, missing)) if missing else weight
        return filled.reshape(-1, self._columns, weight.shape[1]).mT.contiguous()

    def product(self, x: Tensor, panels: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """``[.., I]`` by :meth:`packed` ``[O, I]``, and a bias ``[O]`` -> ``[.., O]``."""
        x, shape = _whole(x), x.shape
        inputs = shape[-1]
        out = x.new_empty((*shape[:-1], outputs))
        self._call(
            "product", x, panels, bias, out, x.numel() // inputs, inputs, outputs,
            product_threads(),
        )  # fmt: skip
        return out

    def log_probabilities(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Log-probabilities ``[R, C]`` of ``ids [R, C]`` given ``[R, V]`` logits; :meth:`draw` gives the same bits."""
        logits, ids = _whole(logits), _whole(ids)
        out = logits.new_empty(ids.shape)
        self._call("log_probabilities", logits, ids, out, *ids.shape, logits.shape[1], product_threads())
        return out

    def small_product(self, x: Tensor, weight: Tensor, scale: float = 1.0, *, into: Tensor | None = None) -> Tensor:
        """``scale x W^T`` of ``[N, I]`` and a weight ``[O, I]`` as it is, or the same added to ``into [N, O]``; a row's
        bits do not depend on the others."""
        x, weight = _whole(x), _whole(weight)
        (rows, inputs), outputs = x.shape, len(weight)
        out = x.new_empty(rows, outputs) if into is None else into
        threads = _threads(rows * inputs * outputs // 8)
        self._call("small_product", x, weight, scale, into is not None, out, rows, inputs, outputs, threads)
        return out

    def draw(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Draw from ``[R, V]`` logits by ``[R]`` uniform numbers in float64 -> ``[R]`` tokens and log-probabilities."""
        rows, vocabulary = logits.shape
        tokens, logprobs = uniform.new_empty(rows, dtype=torch.long), logits.new_empty(rows)
        uniform = _whole(uniform.double())
        self._call("draw", logits, logits.stride(0), uniform, tokens, logprobs, rows, vocabulary, product_threads())
        return tokens, logprobs

    def _call(self, name: str, *given: Tensor | float | None) -> None:
        function, states = getattr(self._library, name), given[0]
        if self.version and isinstance(states, Tensor) and not states.is_cpu:
            # Its address, null on the meta device, would end the process.
            raise ValueError(f"the kernel {name!r} computes on a CPU, and got a tensor on {states.device}")
        values = [each.data_ptr() if isinstance(each, Tensor) else each for each in given]
        function(*values)
        note = _noted.get()
        if note is not None:
            note(partial(function, *values), given)


def _nothing(*given: object) -> None:
    """Stands for a function on meta tensors."""


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, kernels: CpuKernels, eps: float, offset: float) -> Tensor:
        hidden = _whole(hidden)
        out, factors = kernels.norm_with_factors(hidden, weight, eps, offset)
        ctx.save_for_backward(hidden, weight, factors)
        ctx.kernels, ctx.offset = kernels, offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.kernels.norm_gradients(of_out, *ctx.saved_tensors, ctx.offset)
        return of_hidden, of_weight, None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: CpuKernels, gelu: bool) -> Tensor:
        gate, up = _whole(gate), _whole(up)
        out = torch.empty_like(gate)
        kernels.gate(gate, up, out, gelu=gelu)
        ctx.save_for_backward(gate, up)
        ctx.kernels, ctx.gelu = kernels, gelu
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.kernels.gated_gradients(of_out, *ctx.saved_tensors, gelu=ctx.gelu), None, None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cosines: Tensor, sines: Tensor, kernels: CpuKernels) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.kernels = kernels
        return kernels.turn(states, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        if of_out.stride(-1) != 1:
            of_out = of_out.contiguous()
        return ctx.kernels.turn(of_out, *ctx.saved_tensors, back=True), None, None, None


def _has_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(each.requires_grad for each in tensors)


@cache
def cpu_kernels() -> CpuKernels | None:
    """The kernels of this machine; None where they could not be compiled, which is logged."""
    try:
        return CpuKernels(_compiled())
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError, ValueError) as error:
        detail = str(getattr(error, "stderr", None) or error)[:SHOWN]
        logger.warning("torch computes alone, as the kernels for this CPU were not compiled: %s", detail)
        return None


def _compiled() -> Path:
    """The library, compiled from this source for this processor unless it was before and is whole: a part of one would
    end the process."""
    command, *arguments = shlex.split(os.environ.get("CC") or "cc")
    found = shutil.which(command)
    if found is None:
        raise FileNotFoundError("there is no C compiler (install gcc or clang, or name one by CC)")
    compiler = [os.path.abspath(found), *arguments]  # it runs in another folder
    state = hashlib.blake2b(b"".join(each.read_bytes() for each in SOURCES), digest_size=8)
    state.update(repr((FLAGS, os.path.realpath(compiler[0]), arguments, platform.machine(), _processor())).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire" / "kernels"
    for known in folder.glob(f"{state.hexdigest()}-*.so"):
        if known.stat().st_uid == os.getuid() and known.stem.endswith(StoredFile.of(known).blake2b):
            return known
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        sources = [each for each in SOURCES if each.suffix == ".c"]
        made, linked = [f"{each.stem}.o" for each in sources], "kernels.so"
        compiling = [*compiler, *FLAGS, "-c", *map(str, sources)]
        for step in (compiling, [*compiler, "-shared", *made, "-lm", "-o", linked]):
            subprocess.run(step, cwd=own, check=True, capture_output=True, text=True, timeout=SECONDS)
        library = folder / f"{state.hexdigest()}-{StoredFile.of(Path(own) / linked).blake2b}.so"
        return (Path(own) / linked).replace(library)


def _processor() -> str:
    """The line of this processor's features in ``/proc/cpuinfo``; its name where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _whole(tensor: Tensor) -> Tensor:
    """A tensor without gaps; asking first takes a tenth of the time."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _strided(*by_token: Tensor) -> list[Tensor | int]:
    """Each tensor and the strides of its tokens and heads."""
    return [given for each in by_token for given in (each, each.stride(0), each.stride(1))]


def _threads(numbers: int) -> int:
    return product_threads() if numbers >= FEWEST_NUMBERS else 1
