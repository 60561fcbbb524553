"""Norms, gated activations and rotary embeddings by kernels, each in one pass.

transformers computes each of them as some ten small operations, which read and write the hidden states every time: on
an H200 they took half of a step of Qwen3-0.6B. On a GPU liger-kernel's stand for them (``gradwire[kernels]``), in
bfloat16 and float16; on a CPU our own, in float32 (:mod:`gradwire_server.engine.model.layers.cpu_kernels`). A kernel
stands for a module or function only where it gave the same on random numbers at load, with the same gradients. Else
transformers computes as ever; so it does with ``--kernels plain``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from gradwire_server.engine.generators import preserved_rng, seed_generators
from gradwire_server.engine.model.comparison import forward_by, largest_difference
from gradwire_server.engine.model.layers import cpu_kernels
from gradwire_server.engine.model.layers.dropout import DropoutPlaces
from gradwire_server.engine.model.layers.feed_forward import feed_forward_layers, takes_one_argument
from gradwire_server.engine.model.meta_device import computes_as_cpu

logger = logging.getLogger(__name__)

PACKAGE = "liger_kernel"
ROTATE = "apply_rotary_pos_emb"
"""Name in transformers' files of ``(q [B, H, M, D], k [B, K, M, D], cos [B, M, D], sin) -> (q, k)``."""

BEYOND_LIMITS = 30.0
"""Gates have this size in a trial: some models bound them, by 7 or 10."""
PROJECTIONS = "gate_proj", "up_proj", "down_proj"

Gate = Callable[[Tensor, Tensor], Tensor]
Compute = Callable[[Any, Tensor], Tensor]
"""The replacement of a module's forward: takes the module and the hidden states."""


class Kernels(Protocol):
    """The kernels of a kind of device.

    Attributes:
        tolerance: Largest difference from what they stand for, as a part of the largest number.
        gates: Products of an activated tensor and another.
        version: Name -> version of the kernels.
    """

    device: ClassVar[str]
    tolerance: ClassVar[float]
    gates: Sequence[Gate]
    version: Mapping[str, str]

    def take(self, *tensors: Tensor) -> bool:
        """Whether they compute these."""

    def norm(self, hidden: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """``hidden / sqrt(mean(hidden^2) + eps) * (offset + weight)``."""

    def rotate(self, q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        """:data:`ROTATE`."""


class _Liger:
    device: ClassVar[str] = "cuda"
    tolerance: ClassVar[float] = 0.02  # some roundings of bfloat16

    def __init__(self) -> None:
        operations: Any = importlib.import_module(f"{PACKAGE}.ops")
        self._norm, self._rotation = operations.LigerRMSNormFunction.apply, operations.LigerRopeFunction.apply
        self.version: Mapping[str, str] = {"liger-kernel": importlib.metadata.version("liger-kernel")}
        silu, gelu = operations.LigerSiLUMulFunction.apply, operations.LigerGELUMulFunction.apply
        self.gates: Sequence[Gate] = (lambda gate, up: silu(gate, up, 1.0, 1.0), gelu)

    def take(self, *tensors: Tensor) -> bool:
        return all(each.is_cuda for each in tensors) and not torch.is_autocast_enabled("cuda")

    def norm(self, hidden: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        normed: Tensor = self._norm(hidden, weight, eps, offset, "gemma" if offset else "llama", False, None)
        return normed  # not in place

    def rotate(self, q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = self._rotation(q, k, cosines, sines)
        return rotated


class _OnCpu:
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-5

    def __init__(self, kernels: cpu_kernels.CpuKernels) -> None:
        self._kernels = kernels
        self.gates: Sequence[Gate] = (partial(kernels.gated, gelu=False), partial(kernels.gated, gelu=True))
        self.version: Mapping[str, str] = {"kernels": kernels.version}

    def take(self, *tensors: Tensor) -> bool:
        return cpu_kernels.takes(*tensors)

    def norm(self, hidden: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        return self._kernels.norm(hidden, weight, eps, offset)

    def rotate(self, q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.rotate(q, cosines, sines), self._kernels.rotate(k, cosines, sines)


class _OnMeta(_OnCpu):
    """Shapes of the CPU's kernels, for the meta device where it stands for a CPU."""

    device: ClassVar[str] = "meta"

    def __init__(self) -> None:
        super().__init__(cpu_kernels.CpuKernels(None))

    def take(self, *tensors: Tensor) -> bool:
        return cpu_kernels.takes(*tensors, device="meta") and computes_as_cpu(tensors[0].device)


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The kernels for a device, if there are any; on a GPU, float32 and float64 put exactness before speed."""
    if device.type in ("cpu", "meta") and dtype == torch.float32 and (own := cpu_kernels.cpu_kernels()) is not None:
        return _OnCpu(own) if device.type == "cpu" else _OnMeta()
    halves = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    return _Liger() if halves and importlib.util.find_spec(PACKAGE) is not None else None


def use_fused_kernels(model: PreTrainedModel, kernels: Kernels) -> None:
    """Let a model, whose weights are on their device, compute with them where they are right."""
    norms: list[Compute] = [partial(_normed, kernels, offset) for offset in (0.0, 1.0)]
    gates: list[Compute] = [partial(_gated, gate) for gate in kernels.gates]
    replacing = _Replacing(kernels)
    with preserved_rng(), _dropping(model):
        seed_generators(0)
        gated = {id(layer) for layer in feed_forward_layers(model) if _is_gated(layer)}
        for module in model.modules():
            if _is_norm(module):
                weight = module.get_parameter("weight")
                # A weight as it may be after training tells the weight from one plus the weight, and states of the size
                # of its root what is added to the mean.
                states, trained = torch.randn(1, 6, len(weight)).to(weight), torch.empty_like(weight).uniform_(0.5, 1.5)
                sizes = 1.0, cast(float, _eps(module)) ** 0.5 or 1.0
                trials = [[states * size, trained] for size in sizes]
                replacing.replace(module, norms, partial(_called, module), trials)
            elif id(module) in gated:
                states = torch.randn(1, 6, cast(int, module.get_submodule("gate_proj").in_features))
                states = states.to(module.get_parameter("gate_proj.weight").device, model.dtype)
                with _projected(module, states):
                    replacing.replace(module, gates, module, [[states], [states * BEYOND_LIMITS]])
        rotated = _rotate_by(kernels, model)
    logger.info("fused kernels for %s", ", ".join([*replacing.names, *[ROTATE] * rotated]) or "nothing")


class _Replacing:
    """Gives modules classes that compute by kernels.

    Each module is compared, as those of one class may differ in what they were made with. A class whose first module
    has no kernel is left as it is.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._classes: dict[type[nn.Module], list[type[nn.Module]]] = {}

    @property
    def names(self) -> list[str]:
        """Names of the classes that were replaced."""
        return [kind.__name__ for kind, own in self._classes.items() if own]

    def replace(
        self,
        module: nn.Module,
        computes: Sequence[Compute],
        call: Callable[..., Tensor],
        trials: Sequence[list[Tensor]],
    ) -> None:
        """Replace a module's class by the first that gives the same for each trial's ``call(*inputs)``, if one does."""
        plain = type(module)
        if trials[0][0].device.type != self._kernels.device:
            return
        known = self._classes.get(plain)
        candidates = [_subclass(plain, self._kernels, each) for each in computes] if known is None else known
        self._classes.setdefault(plain, [])

        def by(kind: type[nn.Module], *given: Tensor) -> Tensor:
            module.__class__ = kind
            return call(*given)

        for own in candidates:
            compared = partial(_alike, partial(by, own), partial(by, plain), kernels=self._kernels, name=plain.__name__)
            if all(compared(inputs) for inputs in trials):
                module.__class__, self._classes[plain] = own, [own]
                return
        module.__class__ = plain


def _is_norm(module: nn.Module) -> bool:
    own = [name for name, _ in module.named_parameters()]
    named = type(module).__name__.endswith("RMSNorm") and own == ["weight"] and takes_one_argument(module)
    return named and isinstance(_eps(module), float)


def _eps(norm: nn.Module) -> Any:
    own = vars(norm)
    return own.get("variance_epsilon", own.get("eps"))


def _normed(kernels: Kernels, offset: float, norm: Any, hidden: Tensor) -> Tensor:
    return kernels.norm(hidden, norm.weight, _eps(norm), offset)


def _called(norm: nn.Module, hidden: Tensor, weight: Tensor) -> Tensor:
    normed: Tensor = functional_call(norm, {"weight": weight}, (hidden,))
    return normed


def _is_gated(module: nn.Module) -> bool:
    return {name for name, _ in module.named_children()} >= set(PROJECTIONS)


@contextmanager
def _projected(layer: nn.Module, like: Tensor) -> Iterator[None]:
    """Put products of few random factors for a layer's own: what they give is as large as what they are given, while
    those of weights that are small or zero would hide what is done with them."""
    with ExitStack() as projected:
        for each in map(layer.get_submodule, PROJECTIONS):
            wide, narrow = cast(int, each.in_features), 8
            into, out = torch.randn(wide, narrow) / wide**0.5, torch.randn(narrow, cast(int, each.out_features))
            through = partial(_through, into.to(like), out.to(like) / narrow**0.5)
            projected.enter_context(forward_by(each, through))
        yield


def _through(into: Tensor, out: Tensor, states: Tensor) -> Tensor:
    return states @ into @ out


@contextmanager
def _dropping(model: nn.Module) -> Iterator[None]:
    """Let a model drop activations, as a run may ask for: no kernel does."""
    places, training = DropoutPlaces(model), model.training
    places.set(0.5)
    model.train()
    try:
        yield
    finally:
        model.train(training)
        places.restore()


def _gated(gate: Gate, layer: Any, hidden: Tensor) -> Tensor:
    narrowed: Tensor = layer.down_proj(gate(layer.gate_proj(hidden), layer.up_proj(hidden)))
    return narrowed


def _subclass(plain: Any, kernels: Kernels, compute: Compute) -> type[nn.Module]:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        if not kernels.take(hidden):
            return plain.forward(self, hidden)  # type: ignore[no-any-return]
        return compute(self, hidden)

    return type(plain.__name__, (plain,), {"__module__": plain.__module__, "forward": forward})


class _Rotation:
    """Rotates by a kernel what it can, and as ``plain`` what else there is: maybe by the kernel of another device."""

    def __init__(self, plain: Callable[..., Any], kernels: Kernels) -> None:
        self.plain, self.kernels = plain, kernels
        self.devices: set[str] = {kernels.device} | (plain.devices if isinstance(plain, _Rotation) else set())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 4 or not self._takes(*args):
            return self.plain(*args, **kwargs)
        return self.kernels.rotate(*args)

    def _takes(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
        fits = q.dim() == 4 and (len(q) == 1 or q.is_cuda) and cos.dim() == 3
        same = cos.shape[-1] == q.shape[-1] == k.shape[-1] and q.dtype == k.dtype == cos.dtype
        return fits and same and self.kernels.take(q, k, cos, sin)


def _rotate_by(kernels: Kernels, model: PreTrainedModel) -> bool:
    """Rotate by a kernel wherever a file of transformers that the model comes from rotates as it does."""
    replaced = False
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        plain = vars(file).get(ROTATE)
        known = isinstance(plain, _Rotation) and kernels.device in plain.devices
        if plain is None or model.device.type != kernels.device or known:
            continue
        q, k = (torch.randn(1, heads, 6, 64).to(model.device, model.dtype) for heads in (4, 2))
        angles = torch.rand(1, 6, 32).repeat(1, 1, 2)
        rotary = [each.to(q) for each in (angles.cos(), angles.sin())]
        rotation = _Rotation(plain, kernels)
        if _alike(partial(_rotated, rotation, rotary), partial(_rotated, plain, rotary), [q, k], kernels, ROTATE):
            setattr(file, ROTATE, rotation)
            replaced = True
    return replaced


def _rotated(compute: Callable[..., Any], rotary: Sequence[Tensor], q: Tensor, k: Tensor) -> Any:
    return compute(q, k, *rotary)


@torch.enable_grad()
def _values(compute: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results of a computation, and the gradients in its inputs of their product with fixed numbers."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    results = compute(*(each * 1 for each in leaves))  # a kernel may overwrite what it is given
    results = list(results) if isinstance(results, tuple) else [results]
    weights = [torch.sin(torch.arange(each.numel(), device=each.device)).view_as(each) for each in results]
    total = sum((each.float() * weight).sum() for each, weight in zip(results, weights, strict=True))
    return [each.detach() for each in (*results, *torch.autograd.grad(total, leaves))]


def _alike(
    compute: Callable[..., Any], plain: Callable[..., Any], inputs: Sequence[Tensor], kernels: Kernels, name: str
) -> bool:
    if inputs[0].is_meta:  # there is nothing to compare
        return True
    try:
        expected, fused = _values(plain, inputs), _values(compute, inputs)
    except Exception as error:  # whatever a kernel raises, what it would replace is right
        logger.warning("%s has no fused kernel: %s", name, error)
        return False
    apart = [largest_difference(mine, theirs) for mine, theirs in zip(fused, expected, strict=True)]
    return all(error <= kernels.tolerance * size for error, size in apart)
