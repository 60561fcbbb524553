"""The models that the server may use, and one shared copy of each that is in use.

A hosted model is split where the engine works: a *trunk* from token ids to final hidden states, and an *output
head* from hidden states to logits, which :mod:`.scoring` applies in chunks. The split is checked against the
model's own logits once, at load, so that an architecture that does more than that between the two is refused and
not trained wrongly. Never remote code, never pickled weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from gradwire_losses.batch import sent
from gradwire_proto.v1 import training_pb2
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from gradwire_server.engine.attention import LAYOUT
from gradwire_server.engine.embedding import add_rows_in_place
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.packing import Layout, Padded
from gradwire_server.engine.packing_check import choose_packing

if TYPE_CHECKING:
    from peft import PeftModel

    from gradwire_server.engine.grouped_lora import AdapterLayers, Span

logger = logging.getLogger(__name__)

Dtype = torch.dtype | Literal["mixed"]


@dataclass(frozen=True)
class ModelFacts:
    """What can be said of a model without its weights; as ``ModelInfo`` on the wire."""

    name: str
    path: str
    architecture: str
    num_parameters: int
    vocab_size: int
    context_length: int
    hidden_size: int
    num_layers: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


@dataclass(frozen=True)
class OutputHead:
    """From hidden states to logits: ``softcap * tanh(scale * (h W^T + b) / softcap)``, the cap where there is one.

    Attributes:
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        scale: factor of the product.
        softcap: bound of the logits, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def transform(self, logits: Tensor) -> Tensor:
        """What happens to ``h W^T + b`` before the softmax; elementwise."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class HostedModel:
    """One copy of a model.

    Attributes:
        facts: its facts.
        model: the transformers model; frozen where it is a shared base.
        trunk: the part of it that ends in hidden states.
        adapters: the peft wrapper around ``model``, once a LoRA run has been put on it.
        adapter_layers: what computes with the adapters.
        mixed: whether the trunk computes in bfloat16 (autocast) with weights of float32.
        packing: the form that it may be given ragged sequences in.
        has_dropout: whether the model itself, adapters aside, drops anything in training mode.
    """

    def __init__(
        self, facts: ModelFacts, model: PreTrainedModel, *, mixed: bool = False, compiled: bool = False
    ) -> None:
        self.facts = facts
        self.model = model
        self.trunk = cast(nn.Module, model.get_decoder())
        self.mixed = mixed
        if mixed:
            self.trunk.forward = torch.autocast(self.device.type, torch.bfloat16)(self.trunk.forward)
        self.adapters: PeftModel | None = None
        self.adapter_layers: AdapterLayers | None = None
        self._training = False
        self._checkpointing = False
        self.has_dropout = _has_dropout(model)
        model.eval()
        add_rows_in_place(model.get_input_embeddings())
        check_split(self)
        self.packing = choose_packing(self)
        if compiled:
            from gradwire_server.engine.compiled import compile_layers

            compile_layers(self.trunk)

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.model.get_input_embeddings().weight.device)

    @property
    def dtype(self) -> torch.dtype:
        """That the trunk computes in."""
        return torch.bfloat16 if self.mixed else cast(torch.dtype, self.model.get_input_embeddings().weight.dtype)

    def states(self, sequences: Layout | Padded) -> Tensor:
        """``[M, H]`` final hidden states of everything that is computed, in one forward of the trunk."""
        if isinstance(sequences, Padded):
            rows = sent(sequences.input_ids, self.device)
            padded: Tensor = self.trunk(input_ids=rows, use_cache=False).last_hidden_state
            return padded.flatten(0, 1)
        packed: Tensor = self.trunk(
            input_ids=sent(sequences.input_ids[None], self.device),
            position_ids=sent(sequences.position_ids[None], self.device),
            # A mask of four dimensions is passed on as it is; with a layout nobody looks at it.
            attention_mask=torch.empty(1, 1, 1, 1, dtype=torch.bool, device=self.device),
            use_cache=False,
            **{LAYOUT: sequences},
        ).last_hidden_state
        return packed[0]

    def output_head(self) -> OutputHead:
        """The output head with the weights that the model has now."""
        config = self.model.config.get_text_config()
        linear = self.model.get_output_embeddings()
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        softcap = getattr(config, "final_logit_softcapping", None)
        # The CPU's products are of float32 anyway; a GPU's are many times faster in bfloat16.
        weight = linear.weight.to(self.dtype) if self.device.type == "cuda" else linear.weight
        return OutputHead(weight, getattr(linear, "bias", None), scale, float(softcap) if softcap else None)

    def adapters_changed(self) -> None:
        """To be called when adapters were added to or removed from the model."""
        from gradwire_server.engine.grouped_lora import AdapterLayers

        self.adapter_layers = AdapterLayers(self.model)
        self._training = False
        self.model.eval()

    def activate(self, adapter: str | None = None, *, training: bool = False, checkpointing: bool = False) -> None:
        """Puts an adapter (None: the bare base), the mode and gradient checkpointing in place; free when they are."""
        if self.adapter_layers is not None:
            self.adapter_layers.use(adapter)
        self._set_mode(training, checkpointing)

    def activate_spans(self, spans: Sequence[Span], *, checkpointing: bool = False) -> None:
        """Puts several adapters in place, each for its tokens, in training mode; :meth:`activate` ends it."""
        assert self.adapter_layers is not None
        self.adapter_layers.use_spans(spans, self.device)
        self._set_mode(True, checkpointing)

    def _set_mode(self, training: bool, checkpointing: bool) -> None:
        if training != self._training:
            self.model.train(training)
            self._training = training
        if checkpointing != self._checkpointing:
            _set_checkpointing(self.model, checkpointing)
            self._checkpointing = checkpointing


def _has_dropout(model: PreTrainedModel) -> bool:
    if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()):
        return True
    rates = vars(model.config) | vars(model.config.get_text_config())
    return any(isinstance(rate, float) and rate > 0 for name, rate in rates.items() if "drop" in name)


def _set_checkpointing(model: PreTrainedModel, enabled: bool) -> None:
    # transformers 5.23 renames gradient_checkpointing_* and warns about the old name.
    kwargs = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        if enabled:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        else:
            model.activation_checkpointing_disable()
    elif enabled:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_disable()


@torch.no_grad()
def check_split(hosted: HostedModel) -> None:
    """Checks that trunk and output head reproduce the model's logits, alone and beside a longer sequence.

    Raises:
        OperationError: UNSUPPORTED.
    """
    facts = hosted.facts
    length = min(6, facts.context_length)
    ids = torch.arange(2 * length, device=hosted.device).view(2, length) % facts.vocab_size
    head = hosted.output_head()
    hidden = hosted.trunk(input_ids=ids, use_cache=False).last_hidden_state
    bias = 0.0 if head.bias is None else head.bias.float()
    ours = head.transform(hidden.float() @ head.weight.float().T + bias)
    tolerance = 1e-3 if hosted.dtype in (torch.float32, torch.float64) else 5e-2
    for row, width in enumerate((length, max(1, length // 2))):
        theirs = hosted.model(input_ids=ids[row : row + 1, :width], use_cache=False).logits[0].float()
        error = (ours[row, :width] - theirs).abs().max().item()
        if not error <= tolerance * (1.0 + theirs.abs().max().item()):
            raise OperationError(
                training_pb2.ERROR_CODE_UNSUPPORTED,
                f"model {facts.name!r} ({facts.architecture}) is not supported: its logits differ by {error:.3g} from "
                "those of its output head on its causal hidden states",
            )


class ModelHost:
    """The allowed models, loaded on first use.

    Args:
        models: name -> folder or hub name. Only these may be named in a request.
        device: ``"cpu"``, ``"cuda"`` (spread by accelerate over the GPUs where there are several) or ``"cuda:N"``.
        dtype: of the weights, or ``"mixed"``: bfloat16 arithmetic over float32 weights; by default bfloat16 on CUDA and
            float32 on CPU.
        compiled: whether layers go through ``torch.compile``.

    Attributes:
        dtype: of the weights.
    """

    def __init__(
        self,
        models: Mapping[str, str],
        device: str | torch.device = "cpu",
        dtype: Dtype | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self._mixed, self._compiled = dtype == "mixed", compiled
        on_device = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.dtype = torch.float32 if dtype == "mixed" else dtype or on_device
        self._paths = dict(models)
        transformers_logging.disable_progress_bar()
        self._loaded: dict[str, HostedModel] = {}
        self._facts: dict[str, ModelFacts] = {}

    @property
    def names(self) -> list[str]:
        return list(self._paths)

    def facts(self, name: str) -> ModelFacts:
        """A model's facts, from its config alone.

        Raises:
            OperationError: UNKNOWN_MODEL, or UNSUPPORTED where it is no causal LM of transformers.
        """
        if name not in self._facts:
            self._facts[name] = self._read_facts(name)
        return self._facts[name]

    def get(self, name: str) -> HostedModel:
        """The shared, frozen copy of a model.

        Raises:
            OperationError: UNKNOWN_MODEL, or UNSUPPORTED where it cannot be loaded.
        """
        if name not in self._loaded:
            hosted = self.load(name)
            hosted.model.requires_grad_(False)
            self._loaded[name] = hosted
        return self._loaded[name]

    def is_loaded(self, name: str) -> bool:
        """Whether the shared copy of a model is in memory."""
        return name in self._loaded

    def release(self, name: str) -> None:
        """Forgets the shared copy of a model, unless adapters are on it."""
        if name in self._loaded and self._loaded[name].adapters is None:
            del self._loaded[name]

    def load(self, name: str, dtype: torch.dtype | None = None) -> HostedModel:
        """A copy of a model for one owner's use, from disk; in another dtype than the server's where one is given."""
        facts = self.facts(name)
        kwargs: dict[str, Any] = {}
        if self.device.type == "cuda":
            spread = self.device.index is None and torch.cuda.device_count() > 1
            kwargs["device_map"] = "auto" if spread else {"": str(self.device)}
        logger.info("loading %s from %s as %s on %s", name, facts.path, dtype or facts.dtype, self.device)
        with _explained(name, facts.path), preserved_rng():
            model = AutoModelForCausalLM.from_pretrained(
                facts.path,
                dtype=dtype or self.dtype,
                use_safetensors=True,
                trust_remote_code=False,
                **kwargs,
            )
        return HostedModel(facts, model, mixed=self._mixed and dtype is None, compiled=self._compiled)

    def _read_facts(self, name: str) -> ModelFacts:
        if name not in self._paths:
            raise OperationError(
                training_pb2.ERROR_CODE_UNKNOWN_MODEL,
                f"there is no model {name!r} here; there are: {', '.join(self._paths) or 'none'}",
                field="base_model",
                rule="one of the server's models",
            )
        path = self._paths[name]
        with _explained(name, path), preserved_rng():
            config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        text = config.get_text_config()
        generation = getattr(model, "generation_config", None)
        generation_file = Path(path) / "generation_config.json"
        if generation_file.is_file():
            from transformers import GenerationConfig

            generation = GenerationConfig.from_pretrained(path)
        eos = getattr(generation, "eos_token_id", None)
        eos = getattr(text, "eos_token_id", None) if eos is None else eos
        return ModelFacts(
            name=name,
            path=path,
            architecture=type(model).__name__,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            vocab_size=int(text.vocab_size),
            context_length=int(getattr(text, "max_position_embeddings", None) or 2**31 - 1),
            hidden_size=int(text.hidden_size),
            num_layers=int(text.num_hidden_layers),
            dtype="mixed" if self._mixed else str(self.dtype).removeprefix("torch."),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),),
            pad_token_id=getattr(text, "pad_token_id", None),
        )


@contextmanager
def _explained(name: str, path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        logger.error("model %r at %s could not be loaded: %s", name, path, error)
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"model {name!r} could not be loaded as a causal LM of transformers with safetensors weights; the server's"
            " log says why",
        ) from error


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Leaves torch's global generators as they were: loading and making modules draws numbers."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=list(devices)):
        yield


def generator_states() -> dict[str, Tensor]:
    """The states of torch's global generators: "cpu", and "cuda:N" where there are GPUs; uint8."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Puts states that :func:`generator_states` gave in place."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all([states[f"cuda:{index}"] for index in range(torch.cuda.device_count())])
