"""The weights of one run over a hosted model: an adapter on the shared copy, or a copy of its own.

Legend: ``S`` sequences, ``N`` tokens of all of them, ``H`` hidden size. Sequences are ragged and flat, as in
``gradwire_losses.batch``. Where the model computes in bfloat16, every trained tensor has a float32 *master* that
the optimizer updates and checkpoints hold; the model's own tensor is its rounded image.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from gradwire_losses.batch import sent
from gradwire_proto.v1 import training_pb2
from torch import Tensor, nn
from transformers import PreTrainedModel

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.model.heads import Head, make_head
from gradwire_server.engine.model.packing import Packing, arrange
from gradwire_server.engine.model.pool import ModelPool
from gradwire_server.engine.model.split_model import ModelFacts, OutputHead, SplitModel

HEAD_PREFIX = "head."


class Policy:
    """A model with one run's weights in it. This class itself is the frozen base, with nothing to train.

    Attributes:
        hosted: the copy of the model that it computes with.
        head: its head beside the output head, or None.
        dropout: the rate of the model's own places in training mode.
    """

    def __init__(
        self,
        split_model: SplitModel,
        *,
        head: Head | None = None,
        gradient_checkpointing: bool = False,
        dropout: float = 0.0,
    ) -> None:
        self.split_model = split_model
        self.head = head
        self.gradient_checkpointing = gradient_checkpointing
        self.dropout = dropout
        self._parameters: dict[str, nn.Parameter] = {}
        self._masters: dict[str, Tensor] = {}

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

    def activate(self, *, training: bool = False) -> None:
        """Puts these weights and the mode (dropout, gradient checkpointing) in place. Free when they are already."""
        self.split_model.activate(
            self.adapter,
            training=training,
            checkpointing=training and self.gradient_checkpointing,
            dropout=self.dropout,
        )

    def packing(self, *, training: bool = False) -> Packing:
        """The form that sequences take through the model. Dropout is drawn for each sequence of its own."""
        if training and self.has_dropout:
            return min(self.split_model.packing, Packing.PACKED)
        return self.split_model.packing

    @property
    def has_dropout(self) -> bool:
        """Whether a forward in training mode draws random numbers."""
        return self.dropout > 0

    def hidden(
        self,
        input_ids: Tensor,
        lengths: Tensor,
        positions: Tensor | None = None,
        *,
        group_sizes: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        """Final hidden states of ragged sequences, in one forward of the trunk.

        Args:
            input_ids: ``[N]``, on the CPU.
            lengths: ``[S]``, on the CPU.
            positions: ``[P]`` indices into the tokens; all of them by default.
            group_sizes: ``[B]`` sequences an example, which may begin alike: that is then computed once.
            training: with dropout and gradient checkpointing, where the run has them.

        Returns:
            ``[P, H]`` on the policy's device, in the model's dtype.
        """
        self.activate(training=training)
        arranged = arrange(self.packing(training=training), input_ids, lengths, group_sizes)
        states = self.split_model.states(arranged)
        wanted = arranged.places if positions is None else arranged.places[positions]
        return states.index_select(0, sent(wanted, states.device))

    def output_head(self) -> OutputHead:
        return self.split_model.output_head()

    def trainable_parameters(self) -> Mapping[str, nn.Parameter]:
        """Name -> parameter as the model computes with it, in an order that depends only on the configuration.

        Names say nothing of the run, so that one run's tensors load into another's. The head's begin with "head.".
        """
        return self._parameters

    def masters(self) -> Mapping[str, Tensor]:
        """Name -> float32 tensor that the optimizer updates: the parameter itself where it is not of lower precision.

        Call :meth:`sync` after changing one.
        """
        return self._masters

    @property
    def num_trainable_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters.values())

    @torch.no_grad()
    def sync(self) -> None:
        """Rounds the masters into the parameters that are not their own masters."""
        pairs = [(self._parameters[name], master) for name, master in self._masters.items()]
        rounded = [(parameter, master) for parameter, master in pairs if parameter is not master]
        if rounded:
            torch._foreach_copy_([parameter for parameter, _ in rounded], [master for _, master in rounded])

    def state_tensors(self) -> dict[str, Tensor]:
        """Name -> the master itself, not a copy, detached."""
        return {name: master.detach() for name, master in self._masters.items()}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor], *, head: bool = True) -> None:
        """Copies these weights into the run's.

        Args:
            tensors: as :meth:`state_tensors` gave them, of a run of the same model, LoRA settings and head.
            head: False leaves the head's weights as they are, on both sides.

        Raises:
            OperationError: INVALID_ARGUMENT, before anything is changed, when names or shapes differ.
        """
        mine, given = (
            {name for name in names if head or not name.startswith(HEAD_PREFIX)} for names in (self._masters, tensors)
        )
        differing = sorted(mine ^ given) or [
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
        for name in mine:
            self._masters[name].copy_(tensors[name])
        self.sync()

    def close(self) -> None:
        """Gives back what the policy holds of the hosted model."""

    def _train(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        if self.head is not None:
            self._parameters |= {HEAD_PREFIX + name: value for name, value in self.head.named_parameters()}
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(True)
            wide = parameter.dtype in (torch.float32, torch.float64)
            self._masters[name] = parameter if wide else parameter.detach().float()


class LoraPolicy(Policy):
    """A LoRA adapter (Hu et al. 2021) on the model's shared copy. Many share one copy; none disturbs another.

    Args:
        hosted: the shared copy.
        adapter: a name of letters, digits and hyphens, unique on that copy: the run's id, say.
        settings: rank, alpha (0: twice the rank), dropout, target modules (none: every linear layer but the head).
        seed: of the initial weights, which depend on nothing else.
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
        self._add(_lora_config(split_model, settings), seed)
        parameters = {
            ".".join(part for part in name.split(".") if part != adapter): parameter
            for name, parameter in split_model.model.named_parameters()
            if adapter in name.split(".")
        }
        self._train(parameters)

    @property
    def adapter(self) -> str:
        return self._adapter

    @property
    def has_dropout(self) -> bool:
        return self._adapter_dropout > 0 or self.dropout > 0

    def close(self) -> None:
        peft_model = self.split_model.adapters
        if peft_model is None or self._adapter not in peft_model.peft_config:
            return
        self.split_model.activate(None)
        if len(peft_model.peft_config) == 1:
            peft_model.unload()
            self.split_model.adapters = None
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that another adapter is active now: activate() sees to that
                peft_model.delete_adapter(self._adapter)
        self.split_model.adapters_changed()

    def _add(self, config: Any, seed: int) -> None:
        from peft import PeftModel

        try:
            with preserved_rng():
                torch.manual_seed(seed)
                if self.split_model.adapters is None:
                    self.split_model.adapters = PeftModel(
                        self.split_model.model, config, adapter_name=self._adapter, autocast_adapter_dtype=False
                    )
                else:
                    self.split_model.adapters.add_adapter(self._adapter, config, autocast_adapter_dtype=False)
        except ValueError as error:
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"the LoRA settings do not fit model {self.facts.name!r}: {error}",
                field="lora",
            ) from error
        finally:
            self.split_model.adapters_changed()


class FullPolicy(Policy):
    """A copy of the model of its own, all of whose weights are trained.

    Args:
        hosted: a copy that nobody else uses.
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


def make_policy(pool: ModelPool, config: training_pb2.RunConfig, run_id: str) -> Policy:
    """The policy that a run's configuration asks for.

    Raises:
        OperationError: UNKNOWN_MODEL, or INVALID_ARGUMENT with the field.
    """
    facts = pool.facts(config.base_model)
    if config.HasField("lora"):
        split_model = pool.get(config.base_model)
        head = make_head(config, facts.hidden_size, split_model.device, model_path=facts.path)
        settings = training_pb2.LoraSettings()
        settings.CopyFrom(config.lora)
        settings.dropout = settings.dropout or config.dropout
        return LoraPolicy(
            split_model,
            run_id,
            settings,
            seed=config.seed,
            head=head,
            gradient_checkpointing=config.gradient_checkpointing,
            dropout=config.dropout,
        )
    split_model = pool.load(config.base_model)
    head = make_head(config, facts.hidden_size, split_model.device, model_path=facts.path)
    return FullPolicy(
        split_model, head=head, gradient_checkpointing=config.gradient_checkpointing, dropout=config.dropout
    )


def _lora_config(split_model: SplitModel, settings: training_pb2.LoraSettings) -> Any:
    from peft import LoraConfig

    def refuse(field: str, message: str, rule: str) -> OperationError:
        return OperationError(training_pb2.ERROR_CODE_INVALID_ARGUMENT, message, field=f"lora.{field}", rule=rule)

    if settings.rank < 1:
        raise refuse("rank", f"lora rank is {settings.rank}; it is at least 1", "rank >= 1")
    if settings.alpha < 0:
        raise refuse("alpha", f"lora alpha is {settings.alpha}; it is positive, or 0 for twice the rank", "alpha >= 0")
    if not 0 <= settings.dropout < 1:
        raise refuse("dropout", f"lora dropout is {settings.dropout}; it is in [0, 1)", "0 <= dropout < 1")
    targets: Sequence[str] = list(settings.target_modules)
    output_head = split_model.model.get_output_embeddings()
    head_name = next(name for name, module in split_model.model.named_modules() if module is output_head)
    for target in targets:
        if head_name == target or head_name.endswith("." + target):
            raise refuse(
                "target_modules",
                f"{target!r} is the output head, and LoRA on it is not supported; leave it out",
                "not the output head",
            )
    return LoraConfig(
        r=settings.rank,
        lora_alpha=cast(int, settings.alpha or 2.0 * settings.rank),
        lora_dropout=settings.dropout,
        target_modules=list(targets) or "all-linear",
        bias="none",
        task_type="CAUSAL_LM",
    )
