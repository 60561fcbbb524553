"""Frozen base models in 4 or 8 bits, by bitsandbytes (``gradwire[quantize]``).

NF4 with double quantisation (Dettmers et al. 2023, arXiv:2305.14314) or int8 with a scale for each output. The linear
layers except the output head are quantised at load. They compute with their dequantised weights, in the forward and
in the backward, so results are those of a plain model with these weights; inputs are never rounded.
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal, cast

import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from gradwire_server.engine.errors import OperationError

Quantization = Literal["nf4", "int8"]
QUANTIZATIONS: tuple[Quantization, ...] = ("nf4", "int8")
INT8_LEVELS = 127


def loading_arguments(kind: Quantization, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of transformers' ``from_pretrained`` that quantise a model while it is loaded.

    Raises:
        OperationError: UNSUPPORTED without bitsandbytes.
    """
    from transformers import BitsAndBytesConfig

    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"holding a model as {kind} needs bitsandbytes, which is not installed on the server: "
            "pip install 'gradwire[quantize]'",
            field="quantize",
        ) from None
    config = BitsAndBytesConfig(
        load_in_4bit=kind == "nf4",
        load_in_8bit=kind == "int8",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": str(device)}}


def quantized_layers(model: PreTrainedModel) -> list[nn.Linear]:
    """The layers that a model not loaded yet will hold in few bits: the linear ones except the output head."""
    head = model.get_output_embeddings()
    return [module for module in model.modules() if type(module) is nn.Linear and module is not head]


def compute_dequantised(model: nn.Module) -> None:
    """Let the quantised layers of a loaded model compute with their dequantised weights.

    After that the model is an ordinary one for peft, whose adapters on these layers are its ordinary ones.
    """
    import bitsandbytes

    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.__class__ = _Nf4Linear
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            module.__class__ = _Int8Linear
    for name in ("is_loaded_in_4bit", "is_loaded_in_8bit"):
        setattr(model, name, False)


@torch.no_grad()
def release_file(model: nn.Module) -> None:
    """Free the memory in which a model was loaded on a CPU, if it computes there or its weights were changed meanwhile.

    Weights that are as in the file are views of the mapped file. They begin at any address, on which the last bits of a
    product depend: a divided model, or one from a file with another header, would differ from it. And if others were
    quantised or joined, all of the file would stay beside what was made of it, and the heap keeps what that took.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.is_floating_point():
            tensor.data = tensor.data.clone()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # the C library is glibc
        trim(0)


class QuantizedLinear(nn.Linear):
    """A frozen linear layer that holds its weight in few bits."""

    def dequantised(self) -> Tensor:
        """``[O, I]`` the weight that it computes with, a new tensor."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Product.apply(x, self))  # type: ignore[no-untyped-call]


class _Nf4Linear(QuantizedLinear):
    def dequantised(self) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        weight: Any = self.weight
        return cast(Tensor, dequantize_4bit(weight.data, weight.quant_state))


class _Int8Linear(QuantizedLinear):
    def dequantised(self) -> Tensor:
        weight: Any = self.weight
        return cast(Tensor, weight.data * (weight.SCB / INT8_LEVELS)[:, None])


class _Product(torch.autograd.Function):
    """``x W^T + bias`` with a dequantised ``W``, which is computed again in the backward rather than kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        bias = layer.bias
        return F.linear(x, layer.dequantised().to(x.dtype), bias if bias is None else bias.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None
        return grad_output @ ctx.layer.dequantised().to(grad_output.dtype), None
