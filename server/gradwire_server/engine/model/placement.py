"""Where the tensors of models and runs live.

A tensor is *whole* if this process holds all of its elements. :class:`Placement` keeps every tensor whole;
:class:`Sharded` divides models among ranks. A sharded parameter is a DTensor, except within
:meth:`.split_model.SplitModel.compute`, where modules see a whole copy. Code that needs a whole tensor elsewhere, or
combines many tensors, calls the functions of this module, which accept both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm

from gradwire_server.engine.generators import use_gpus


class Placement:
    """Every tensor whole on one device.

    Args:
        device: ``"cpu"``, ``"cuda"`` (the first GPU), or ``"cuda:N"``.

    Attributes:
        note: A sentence for a person on the choice; empty for none.
        parts: Number of parts that the weights of a model are divided into, of which this process holds one.
    """

    parts = 1

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self.note = ""
        if self.device.type != "cuda":
            return
        count = torch.cuda.device_count()
        if count > 1 and self.device.index is None:
            self.device = torch.device("cuda", 0)
            self.note = (
                f"this machine has {count} GPUs, and the engine uses one, {self.device}; --engines auto starts one on"
                " each, --ranks shares the work of each run among several, and --device cuda:N takes another"
            )
        if count:
            use_gpus([self.device.index or 0])

    def loading_arguments(self) -> dict[str, Any]:
        """Arguments of transformers' ``from_pretrained`` that load a model onto its device."""
        return {"device_map": {"": str(self.device)}} if self.device.type == "cuda" else {}

    def place(self, module: nn.Module, layers: Sequence[nn.Module] = ()) -> None:
        """Move a loaded module's parameters to their places; they are there already.

        Args:
            layers: Parts of it that every forward goes through one after the other.
        """

    def recover(self, module: nn.Module) -> None:
        """Put a placed module in order after an error within its forward or backward; it is in order already."""

    def expect_unused(self, module: nn.Module, *, around_layers: bool) -> None:
        """Say whether the next backward leaves weights around the layers unused in some of the processes only."""

    def adds_in_place(self, weight: Tensor) -> bool:
        """Whether a backward may add a weight's gradient to ``weight.grad`` itself; otherwise autograd must do it.

        This saves a tensor of the weight's size. It requires that ``weight.grad`` is the gradient that is collected.
        """
        return weight.is_leaf


class Sharded(Placement):
    """Each layer of a model, and what is around the layers, divided among all ranks by ``fully_shard``.

    A layer is whole for as long as it computes. All ranks go through the layers at the same time, each with rows of its
    own, because each takes part in making every layer whole. The gradients of divided weights are added among the ranks
    in each backward. What is added to a model later, such as an adapter, is whole in each rank, and so is its gradient.

    Args:
        device: This rank's.
        group: All ranks.
        defer: Takes an error of a layer; whether this rank goes on after it.
    """

    def __init__(
        self, device: str | torch.device, group: dist.ProcessGroup, defer: Callable[[Exception], bool]
    ) -> None:
        super().__init__(device)
        self.parts, self._defer = group.size(), defer
        self._mesh = DeviceMesh.from_group(group, self.device.type)

    def loading_arguments(self) -> dict[str, Any]:
        """None: a model that does not fit one device is read into the memory of the host."""
        return {}

    def place(self, module: nn.Module, layers: Sequence[nn.Module] = ()) -> None:
        """Move the layers, and the weights around them, to the device, and keep this rank's part of each there."""
        for layer in layers:
            _go_on_after_errors(layer, self._defer)
        for part in (*layers, module):
            divided = fully_shard(part, mesh=self._mesh, reshard_after_forward=True)
            divided.set_gradient_divide_factor(1.0)
            divided.set_force_sum_reduction_for_comms(True)
            has_experts = part is not module and any(isinstance(each, nn.ModuleList) for each in part.modules())
            divided.set_reduce_scatter_unused_params(has_experts, recurse=False)

    def recover(self, module: nn.Module) -> None:
        """Let go of layers that are whole; the next forward would go on with them, and another rank would not."""
        if isinstance(module, FSDPModule):
            module.reset_iter_state()

    def expect_unused(self, module: nn.Module, *, around_layers: bool) -> None:
        """See :class:`Placement`: their gradients are added to those of the other ranks as zeros then."""
        if isinstance(module, FSDPModule):
            module.set_reduce_scatter_unused_params(around_layers, recurse=False)

    def adds_in_place(self, weight: Tensor) -> bool:
        """Never: the gradient of a weight is divided, too."""
        return False


def _go_on_after_errors(layer: nn.Module, defer: Callable[[Exception], bool]) -> None:
    """Let a layer's forward return its input after an error that is deferred, so that this rank comes to the next one.

    The other ranks, where it may not have happened, need this one's part of it. An error in a backward is raised.
    """
    forward = layer.forward

    @wraps(forward)
    def going_on(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(hidden, *args, **kwargs)
        except Exception as error:
            if torch._C._current_graph_task_id() >= 0 or not defer(error):
                raise
            error.__traceback__ = None  # it keeps the computed tensors alive
        return hidden

    layer.forward = going_on


def layers_of(trunk: nn.Module) -> list[nn.Module]:
    """The layers that are divided one by one: all tokens go through each, unlike the experts within them."""
    layers = []
    for part in trunk.children():
        if isinstance(trunk, nn.ModuleList) and not isinstance(part, nn.ModuleList):
            layers.append(part)
        else:
            layers += layers_of(part)
    return layers


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds another part of the tensor."""
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The tensor with all its elements, detached: itself, not a copy, if it is whole."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, each whole and contiguous, as safetensors writes them."""
    return {name: whole(tensor).contiguous() for name, tensor in tensors.items()}


def whole_on_host(tensors: Mapping[str, Tensor], *, keep: bool) -> Mapping[str, Tensor]:
    """Tensors by name, those that are sharded as whole ones in the memory of the host.

    All ranks call it for the same tensors, one by one, so that a device never holds more than one whole tensor.

    Args:
        keep: Whether this rank wants them.
    """
    on_host = {}
    for name, tensor in tensors.items():
        value = whole(tensor).cpu() if isinstance(tensor, DTensor) else tensor
        if keep:
            on_host[name] = value
    return on_host


def placed_like(value: Tensor, target: Tensor) -> Tensor:
    """A whole tensor, detached, on the device or shards of another."""
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        return distribute_tensor(value.detach().to(target.device), target.device_mesh, target.placements)
    return value.detach().to(target.device)


@torch.no_grad()
def assign(target: Tensor, value: Tensor) -> None:
    """Copy a tensor, whole or placed like the target, into the target."""
    target.copy_(placed_like(value, target) if isinstance(target, DTensor) else value)


@torch.no_grad()
def assign_each(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into targets that are placed like them."""
    torch._foreach_copy_([_local(target) for target in targets], [_local(value) for value in values])


def total_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Norm of all elements of all tensors, 0-d and whole."""
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if not sharded:
        if len({(tensor.device, tensor.dtype) for tensor in tensors}) == 1:  # what torch does then, by fewer calls
            total: Tensor = torch.linalg.vector_norm(
                torch.stack(torch._foreach_norm(list(tensors), norm_type)), norm_type
            )
            return total
        return get_total_norm(tensors, norm_type)
    norms = [whole(get_total_norm(sharded, norm_type))]
    if len(sharded) < len(tensors):
        norms.append(get_total_norm([tensor for tensor in tensors if not isinstance(tensor, DTensor)], norm_type))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)


@torch.no_grad()
def total_norms(groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """:func:`total_norm` of each of several lists of tensors, with the same bits and by as few calls as possible."""
    tensors = [tensor for group in groups for tensor in group]
    plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
    if not plain or not all(groups) or len({(tensor.device, tensor.dtype) for tensor in tensors}) != 1:
        return [total_norm(group) for group in groups]
    norms = iter(torch._foreach_norm(tensors))
    return [torch.linalg.vector_norm(torch.stack([next(norms) for _ in group])) for group in groups]


def storage_addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the memory that this process permanently holds of these tensors."""
    return {storage_address(_local(tensor)) for tensor in tensors}


def storage_address(tensor: Tensor) -> int:
    """Address of a tensor's memory; of the storage's own record for a meta tensor, which has no memory."""
    storage = tensor.untyped_storage()
    return storage._cdata if tensor.is_meta else storage.data_ptr()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
