"""The weights of one run on a model: an adapter on the shared copy, or a full copy.

Legend: ``S`` sequences, ``N`` tokens of all of them, ``H`` hidden size. Sequences are ragged and flat, as in
``gradwire_losses.batch``. If the model computes in bfloat16, every trained tensor has a float32 *master*, which the
optimizer updates and checkpoints contain; the model's own tensor is its rounded copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import torch
from gradwire_losses.batch import sent
from gradwire_proto.v1 import training_pb2
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.generators import preserved_rng, seed_generators
from gradwire_server.engine.model.adapters.lora_settings import lora_config, only_the_head_of_tied
from gradwire_server.engine.model.layers.activations import Activations
from gradwire_server.engine.model.layers.heads import Head
from gradwire_server.engine.model.packing import Layout, Packing, Padded, arrange
from gradwire_server.engine.model.placement import assign, assign_each
from gradwire_server.engine.model.split_model import ModelFacts, OutputHead, SplitModel

if TYPE_CHECKING:
    from gradwire_losses.images import ImageTokens
    from peft import LoraConfig

HEAD_PREFIX = ".head."

T = TypeVar("T")


class Policy:
    """A model with the weights of one run. This base class is the frozen base model, with nothing to train.

    Attributes:
        head: The head beside the output head, or None.
        gradient_checkpointing: Whether training recomputes the activations of all micro-batches in the backward pass.
        dropout: Rate of the model's own dropout in training mode.
        router_aux_loss_coef: Coefficient of the experts' load-balancing loss in training; 0 for none.
        noise_alpha: Size of the noise on the embeddings in training mode; 0 for none.
    """

    def __init__(
        self,
        split_model: SplitModel,
        *,
        head: Head | None = None,
        gradient_checkpointing: bool = False,
        dropout: float = 0.0,
    ) -> None:
        self.router_aux_loss_coef = self.noise_alpha = 0.0
        self.split_model = split_model
        self.head = head
        self.gradient_checkpointing = gradient_checkpointing
        self.dropout = dropout
        self._parameters: dict[str, nn.Parameter] = {}
        self._masters: dict[str, Tensor] = {}
        self._sizes: dict[str, int] = {}

    @property
    def facts(self) -> ModelFacts:
        return self.split_model.facts

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model; call :meth:`activate` before using it directly."""
        return self.split_model.model

    @property
    def device(self) -> torch.device:
        return self.split_model.device

    @property
    def adapter(self) -> str | None:
        """The peft adapter's name, or None."""
        return None

    def activate(self, *, training: bool = False, activations: Activations = Activations.KEEP) -> None:
        """Activate these weights and the mode (dropout, gradient checkpointing); free if they are active already.

        Args:
            activations: How activations are handled in training mode.
        """
        recompute = self.gradient_checkpointing or Activations.RECOMPUTE in activations
        self.split_model.activate(
            self.adapter,
            training=training,
            checkpointing=training and recompute,
            chunks=training and Activations.CHUNK in activations,
            dropout=self.dropout,
            noise_alpha=self.noise_alpha,
        )

    def packing(self, *, training: bool = False, images: bool = False) -> Packing:
        """Form in which sequences go through the model; no shared prefixes with dropout, which is per sequence.

        Args:
            training: Whether dropout is applied.
            images: Whether they have images.
        """
        vision = self.split_model.vision
        if images and vision is not None and vision.bidirectional:
            return Packing.PADDED
        if training and self.has_dropout:
            return min(self.split_model.packing, Packing.PACKED)
        return self.split_model.packing

    @property
    def has_dropout(self) -> bool:
        """Whether a forward in training mode draws random numbers."""
        return self.dropout > 0 or self.noise_alpha > 0

    @property
    def draws(self) -> list[str]:
        """The sources of randomness in training mode, each with its rate; empty unless the run asked for one."""
        noise = [f"neftune_noise_alpha {self.noise_alpha:g}"] if self.noise_alpha > 0 else []
        return [f"{name} {self.dropout:g}" for name in self.split_model.dropout_names if self.dropout > 0] + noise

    def arranged(
        self,
        input_ids: Tensor,
        lengths: Tensor,
        *,
        sharing: Tensor | None = None,
        training: bool = False,
        images: ImageTokens | None = None,
    ) -> Layout | Padded:
        """Ragged sequences in the form in which they go through the model; arguments as of :meth:`hidden`."""
        packing = self.packing(training=training, images=images is not None)
        return arrange(packing, input_ids, lengths, sharing, None if images is None else images.keys(input_ids))

    def hidden(
        self,
        input_ids: Tensor,
        lengths: Tensor,
        positions: Tensor | None = None,
        *,
        sharing: Tensor | None = None,
        training: bool = False,
        activations: Activations = Activations.KEEP,
        router_sums: dict[str, Tensor] | None = None,
        images: ImageTokens | None = None,
        arranged: Layout | Padded | None = None,
    ) -> Tensor:
        """Final hidden states of ragged sequences, from one forward of the trunk.

        Args:
            input_ids: ``[N]``, on the CPU.
            lengths: ``[S]``, on the CPU.
            positions: ``[P]`` indices into the tokens; by default all of them.
            sharing: ``[G]`` numbers of consecutive sequences whose common prefixes are computed once.
            training: Apply the run's dropout and gradient checkpointing.
            activations: How activations are handled in training mode.
            router_sums: Receives what the routers of a mixture of experts decide, as :data:`.routers.ROUTER_SCORES`.
            images: The image tokens among the tokens, if there are images.
            arranged: The sequences as of :meth:`arranged`, if that is known already.

        Returns:
            ``[P, H]`` on the policy's device, in the model's dtype.

        Raises:
            OperationError: INVALID_ARGUMENT if the images were read for another model.
        """
        if images is not None and images.model != self.facts.path:
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"the batch has images, which each model reads by its own processor, and {self.facts.name!r} is another"
                " model than the run's: compare with the base model, or with checkpoints on it",
                field="reference_model",
                rule="the same base model, with images",
            )
        self.activate(training=training, activations=activations)
        if arranged is None:
            arranged = self.arranged(input_ids, lengths, sharing=sharing, training=training, images=images)
        weights = chain(self.model.parameters(), self.model.buffers(), self._parameters.values())
        routers = self.split_model.routers if router_sums is not None else None
        with activations.saving(weights), nullcontext() if routers is None else routers.observed() as seen:
            states = self.split_model.states(arranged, images)
        if router_sums is not None and routers is not None and seen is not None:
            router_sums |= routers.sums(seen, arranged.places, differentiable=self.router_aux_loss_coef > 0)
        wanted = arranged.places if positions is None else arranged.places[positions]
        return states.index_select(0, sent(wanted, states.device))

    def compute(self, computation: Callable[[], T]) -> T:
        """Run a computation that uses the weights; see :meth:`.split_model.SplitModel.compute`."""
        return self.split_model.compute(computation)

    def output_head(self, *, training: bool = False) -> OutputHead:
        """The output head with the current weights; only within :meth:`compute`.

        Args:
            training: Apply the adapter's dropout.
        """
        return self.split_model.output_head(self.adapter)

    @property
    def trains_output_head(self) -> bool:
        """Whether the output weight, or an adapter on it, gets a gradient in training."""
        return self.split_model.trains_output_head(self.adapter)

    def trainable_parameters(self) -> Mapping[str, nn.Parameter]:
        """Name -> parameter that the model computes with, in an order that depends only on the configuration.

        Names do not contain the run, so that one run's tensors load into another. The head's begin with
        :data:`HEAD_PREFIX`.
        """
        return self._parameters

    def masters(self) -> Mapping[str, Tensor]:
        """Name -> tensor that the optimizer updates: the parameter, or its float32 copy if of lower precision.

        Call :meth:`sync` after changing one.
        """
        return self._masters

    @property
    def num_trainable_parameters(self) -> int:
        return sum(self._sizes.values())

    @property
    def version(self) -> tuple[tuple[int, int], ...]:
        """Numbers that change whenever a weight that may change is replaced or changed in place."""
        return tuple((id(master), master._version) for master in self._masters.values())

    def sync(self) -> None:
        """Take note of changed masters, and round those that are not the parameters themselves into these."""
        increment_version(self._masters.values())  # a fused AdamW does not count its changes
        pairs = [(self._parameters[name], master) for name, master in self._masters.items()]
        rounded = [(parameter, master) for parameter, master in pairs if parameter is not master]
        if rounded:
            assign_each([parameter for parameter, _ in rounded], [master for _, master in rounded])

    def state_tensors(self) -> dict[str, Tensor]:
        """Name -> the master itself, detached and not copied."""
        return {name: master.detach() for name, master in self._masters.items()}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor], *, head: bool = True) -> None:
        """Copy weights into this run's.

        Args:
            tensors: Result of :meth:`state_tensors` of a run with the same model, LoRA settings and head.
            head: False keeps this run's head weights and ignores those given.

        Raises:
            OperationError: INVALID_ARGUMENT, before any change, if names or shapes differ.
        """
        mine, theirs = (
            {name for name in names if head or not name.startswith(HEAD_PREFIX)} for names in (self._masters, tensors)
        )
        differing = sorted(mine ^ theirs) or [
            name for name in sorted(mine) if self._masters[name].shape != tensors[name].shape
        ]
        if differing:
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"these weights belong to a run of another model, LoRA rank or head: {len(differing)} tensors differ, "
                f"the first is {differing[0]!r}",
                field="checkpoint",
                rule="same base model, LoRA settings and head",
            )
        for name in sorted(mine):  # where ranks divide a tensor, all assign to the same one
            assign(self._masters[name], tensors[name])
        self.sync()

    def release_tensors(self) -> None:
        """Give up the tensors of :meth:`state_tensors`, which somebody else keeps until :meth:`put_tensors`."""
        for tensor in (*self._parameters.values(), *self._masters.values()):
            tensor.data = tensor.new_empty(0)

    def put_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors, as of :meth:`state_tensors`, as this policy's own, without a copy."""
        for name, master in self._masters.items():
            master.data = tensors[name]
            parameter = self._parameters[name]
            if parameter is not master:
                parameter.data = master.to(parameter.dtype)
        increment_version(self._parameters.values())

    def close(self) -> None:
        """Release what the policy holds of the model."""

    def add_head(self, head: Head) -> list[nn.Parameter]:
        """Give a policy without a head this one, and return its parameters, which are trained from now on."""
        self.head = head
        added = {HEAD_PREFIX + name: value for name, value in head.named_parameters()}
        self._track(added)
        return list(added.values())

    def drop_head(self) -> None:
        """Undo :meth:`add_head`."""
        self.head = None
        for names in (self._parameters, self._masters, self._sizes):
            for name in [name for name in names if name.startswith(HEAD_PREFIX)]:
                del names[name]

    def _train(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._track(parameters)
        if self.head is not None:
            self.add_head(self.head)

    def _track(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            parameter.requires_grad_(True)
            wide = parameter.dtype in (torch.float32, torch.float64)
            self._parameters[name], self._sizes[name] = parameter, parameter.numel()
            self._masters[name] = parameter if wide else parameter.detach().float()


def _dtype_beside(split_model: SplitModel, name: str) -> torch.dtype:
    """Dtype of an adapter's weights: that of its layer, which a model may keep in float32 beside others in bfloat16."""
    layer: nn.Module | None = None
    with suppress(AttributeError):  # the weights of experts are no layer's
        layer = split_model.model.get_submodule(name.partition(".lora_")[0])
    weight = getattr(getattr(layer, "base_layer", layer), "weight", None)
    floats = type(getattr(layer, "base_layer", layer)) in (nn.Linear, Conv1D, nn.Embedding)
    return weight.dtype if floats and isinstance(weight, Tensor) else split_model.weight_dtype


class LoraPolicy(Policy):
    """A LoRA adapter (Hu et al. 2021) on the model's shared copy, independent of other adapters on it.

    Args:
        adapter: Name of letters, digits and hyphens, unique on that copy, such as the run's id.
        settings: Rank, alpha (0: twice the rank), dropout, target modules as for :func:`lora_config`.
        seed: Seed of the initial weights, which depend on nothing else.
    """

    def __init__(
        self,
        split_model: SplitModel,
        adapter: str,
        settings: training_pb2.LoraSettings,
        *,
        seed: int,
        head: Head | None = None,
        gradient_checkpointing: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(split_model, head=head, gradient_checkpointing=gradient_checkpointing, dropout=dropout)
        self._adapter = adapter
        self._adapter_dropout = settings.dropout
        parameters = self._add(lora_config(split_model.model, settings), seed)
        for name, parameter in parameters.items():  # on a quantised layer, peft makes them in float32
            parameter.data = parameter.data.to(_dtype_beside(split_model, name))
        self._train(parameters)

    @property
    def adapter(self) -> str:
        return self._adapter

    @property
    def has_dropout(self) -> bool:
        return self._adapter_dropout > 0 or super().has_dropout

    @property
    def draws(self) -> list[str]:
        adapter = [f"the adapter's dropout {self._adapter_dropout:g}"] if self._adapter_dropout > 0 else []
        return super().draws + adapter

    @property
    def peft_config(self) -> LoraConfig:
        """The adapter's settings as peft has them, with the target modules resolved."""
        assert self.split_model.adapters is not None
        return self.split_model.adapters.config(self._adapter)

    def output_head(self, *, training: bool = False) -> OutputHead:
        return self.split_model.output_head(self.adapter, dropout=self._adapter_dropout if training else 0.0)

    def close(self) -> None:
        adapters = self.split_model.adapters
        if adapters is None or self._adapter not in adapters:
            return
        self.split_model.activate(None)
        adapters.remove(self._adapter)
        if not len(adapters):
            self.split_model.adapters = None

    def _add(self, config: LoraConfig, seed: int) -> Mapping[str, nn.Parameter]:
        from gradwire_server.engine.model.adapters.adapter_set import AdapterSet

        self.split_model.activate(None)
        adapters = self.split_model.adapters or AdapterSet(self.split_model.model, exact=self.split_model.exact)
        try:
            with preserved_rng(), only_the_head_of_tied():
                seed_generators(seed)
                parameters = adapters.add(self._adapter, config)
        except ValueError as error:
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"the LoRA settings do not fit model {self.facts.name!r}: {' '.join(str(error).split())}",
                field="lora",
            ) from error
        self.split_model.adapters = adapters
        return parameters


class FullPolicy(Policy):
    """A full copy of the model, all of whose weights are trained.

    Args:
        split_model: A copy that nothing else uses.
    """

    def __init__(
        self,
        split_model: SplitModel,
        *,
        head: Head | None = None,
        gradient_checkpointing: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(split_model, head=head, gradient_checkpointing=gradient_checkpointing, dropout=dropout)
        self._train(dict(split_model.model.named_parameters()))
