"""The models that the server may use, with one shared copy of each model in use.

Remote code and pickled weights are never loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from gradwire_proto.v1 import training_pb2
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from gradwire_server.config import model_named
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.machine import machine_memory
from gradwire_server.engine.model.attention.blocks import has_right_kernel
from gradwire_server.engine.model.attention.packed import HALVES, rows_in_order
from gradwire_server.engine.model.layers.exact_products import compute_exactly, panel_bytes
from gradwire_server.engine.model.layers.packed_linear import has_right_products
from gradwire_server.engine.model.loading import quantization
from gradwire_server.engine.model.loading.compilation import compile_layers
from gradwire_server.engine.model.loading.configuration import (
    ConfigurationError,
    read_configuration,
    without_path,
    without_weights,
)
from gradwire_server.engine.model.loading.fused_kernels import kernels_for, use_fused_kernels
from gradwire_server.engine.model.loading.offload import offload_layers
from gradwire_server.engine.model.loading.packing_check import check_exact, check_rows, choose_packing
from gradwire_server.engine.model.loading.quantization import Quantization
from gradwire_server.engine.model.placement import Placement, layers_of
from gradwire_server.engine.model.split_check import check_split, explained_failures
from gradwire_server.engine.model.split_model import ModelFacts, SplitModel
from gradwire_server.engine.model.vision.image_tokens import Vision, auto_class, image_token_of, takes_images
from gradwire_server.engine.threads import choose_functions

logger = logging.getLogger(__name__)


NAMED = 3
"""Tensors that a message names, of those that are at fault."""


class WeightsError(ValueError):
    """A model's weights cannot be loaded; the message says which file or tensor is at fault."""


def check_weights(path: str) -> None:
    """Read the headers of a model's files, and compare names and shapes with those that its configuration asks for.

    Args:
        path: Folder or hub name.

    Raises:
        WeightsError: A file is missing or cut short, or a tensor is missing or has another shape.
    """
    config = read_configuration(path)
    if getattr(config, "quantization_config", None) is not None:
        return  # its tensors are not those of the configuration; loading it says what is wrong
    try:
        with _silent(), preserved_rng():
            _, report = auto_class(takes_images(config)).from_pretrained(
                path,
                use_safetensors=True,
                trust_remote_code=False,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise WeightsError(f"a file of its weights is cut short or damaged ({error})") from error
    except OSError as error:
        reason = without_path(str(error).partition("\n")[0], path)
        raise WeightsError(reason.removeprefix("Error ").rstrip(".")) from error
    except Exception as error:  # whatever transformers cannot do without weights; loading them will tell
        logger.warning("the weights of %s are not checked before they are loaded: %s", path, error)
        return
    if mismatched := sorted(report["mismatched_keys"]):
        shapes = [f"{name} has the shape {list(was)}, not {list(wanted)}" for name, was, wanted in mismatched]
        raise WeightsError(f"its weights do not fit its config.json: {_some(shapes)}")
    if missing := sorted(report["missing_keys"]):
        raise WeightsError(f"its files lack weights that its config.json asks for: {_some(missing)}")


def _some(faults: Collection[str]) -> str:
    more = f" and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
    return ", ".join(list(faults)[:NAMED]) + more


@contextmanager
def _silent() -> Iterator[None]:
    """Hold back transformers' report, which the error takes the place of."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


PACKED_SHARE = 16
"""Share of the machine's memory, as its denominator, that a sampler's copy of a model's weights may take."""

Dtype = torch.dtype | Literal["mixed"]


class ModelPool:
    """The allowed models, loaded on first use.

    Args:
        models: Name -> folder or hub name. Requests may name only these.
        placement: Where models live; a device stands for one whole copy on it.
        dtype: Dtype of the weights, or ``"mixed"``: bfloat16 arithmetic over float32 weights; by default bfloat16 on
            CUDA and float32 on the CPU.
        compiled: Whether layers go through ``torch.compile``.
        quantize: How shared copies hold their linear layers; None in ``dtype``.
        fused: Whether :mod:`.fused_kernels` are used, where there are any, graphs of kernels on a GPU, and a sampler's
            copies of weights on a CPU.
        exact: Whether the bits of a row's scores and samples depend on nothing beside it, where nobody says otherwise;
            needs ``fused`` on a CPU.

    Attributes:
        kernels: The fused kernels that are used; None for none.
    """

    def __init__(
        self,
        models: Mapping[str, str],
        placement: Placement | str | torch.device = "cpu",
        dtype: Dtype | None = None,
        *,
        compiled: bool = False,
        quantize: Quantization | None = None,
        fused: bool = True,
        exact: bool = False,
    ) -> None:
        choose_functions()
        self.quantize, self.compiled, self.exact = quantize, compiled, exact
        self.placement = placement if isinstance(placement, Placement) else Placement(placement)
        self._mixed = dtype == "mixed"
        on_device = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.dtype = torch.float32 if dtype == "mixed" else dtype or on_device
        torch.backends.cuda.enable_cudnn_sdp(fused)
        fused = fused and not compiled
        self._orders = fused
        whole = fused and type(self.placement) is Placement and not self._mixed
        fits = fused and (self.device.type == "cuda" or not self._mixed)
        self.kernels = kernels_for(self.device, self.dtype) if fits else None
        on_cpu = self.device.type == "cpu" and self.kernels is not None
        self._packs = whole and self.device.type == "cpu" and has_right_products()
        self._replays = whole and (on_cpu or self.device.type == "cuda")
        self._paths = dict(models)
        transformers_logging.disable_progress_bar()
        self._loaded: dict[tuple[str, bool], SplitModel] = {}
        self._facts: dict[str, ModelFacts] = {}
        self._checked = set[str]()

    @property
    def device(self) -> torch.device:
        return self.placement.device

    @property
    def names(self) -> list[str]:
        return list(self._paths)

    def known(self, name: str) -> str | None:
        """The name of the model with this name or path; None if there is none."""
        return model_named(self._paths, name)

    def facts(self, name: str) -> ModelFacts:
        """A model's facts, from its config alone.

        Raises:
            OperationError: UNKNOWN_MODEL, or UNSUPPORTED if it is not a causal LM of transformers.
        """
        if name not in self._facts:
            self._facts[name] = self._read_facts(name)
        return self._facts[name]

    def check(self, name: str) -> None:
        """Check that a model's weights are there and fit its configuration; they are not read.

        Raises:
            OperationError: As for :meth:`get`.
        """
        facts = self.facts(name)
        if name not in self._checked:
            with _explained(name, facts.path):
                check_weights(facts.path)
            self._checked.add(name)

    def get(self, name: str, *, exact: bool | None = None) -> SplitModel:
        """The shared, frozen copy of a model. An exact one has the weights of another that is there, not a copy.

        Args:
            exact: As for :meth:`load`.

        Raises:
            OperationError: UNKNOWN_MODEL, or UNSUPPORTED if it cannot be loaded.
        """
        key = name, exact = self._key(name, exact)
        if key not in self._loaded:
            split_model = self.load(name, quantize=self.quantize, exact=exact)
            split_model.model.requires_grad_(False)
            other = self._loaded.get((name, not exact))
            if other is not None:
                _share_weights(split_model.model, other.model)
            self._loaded[key] = split_model
        return self._loaded[key]

    def _key(self, name: str, exact: bool | None) -> tuple[str, bool]:
        """The key of a shared copy; None stands for the pool's own setting."""
        return name, self.exact if exact is None else exact

    def meta_model(self, name: str) -> PreTrainedModel:
        """A model without weights, to compute with shapes.

        Raises:
            OperationError: As for :meth:`facts`.
        """
        return self._meta_model(name, self.facts(name).path)

    def _meta_model(self, name: str, path: str) -> PreTrainedModel:
        with _explained(name, path):
            return without_weights(read_configuration(path))

    @property
    def held_bytes(self) -> int:
        """Bytes of the shared copies, without adapters."""
        loaded = dict(self._loaded)
        whole = {name: split_model.weight_bytes for (name, _), split_model in loaded.items()}
        return sum(whole.values()) + sum(panel_bytes(each.model) for each in loaded.values() if each.exact)

    def is_loaded(self, name: str, *, exact: bool | None = None) -> bool:
        """Whether the shared copy of a model is in memory."""
        return self._key(name, exact) in self._loaded

    def release(self, name: str, *, exact: bool | None = None) -> None:
        """Drop the shared copy of a model, unless it has adapters."""
        key = self._key(name, exact)
        if key in self._loaded and self._loaded[key].adapters is None:
            del self._loaded[key]

    def load(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        quantize: Quantization | None = None,
        *,
        offload: bool = False,
        placement: Placement | None = None,
        exact: bool | None = None,
    ) -> SplitModel:
        """Load a copy of a model from disk for one owner.

        Args:
            dtype: Overrides the server's.
            quantize: Holds the linear layers in few bits, which cannot be trained.
            offload: Keeps the layers in host memory, which cannot be trained either.
            placement: Where its tensors live, instead of the pool's placement.
            exact: Whether the bits of a row's scores and samples depend on nothing beside it; None: as the pool's.

        Raises:
            OperationError: UNKNOWN_MODEL, or UNSUPPORTED if it cannot be loaded.
        """
        facts, placement = self.facts(name), placement or self.placement
        if placement.parts > 1 and (quantize or offload):
            raise OperationError(
                training_pb2.ERROR_CODE_UNSUPPORTED,
                f"models are divided among {placement.parts} ranks here, and one that is"
                f" {'offloaded' if offload else f'held as {quantize}'} cannot be: leave that out, or start the server"
                " with --shard off, where every rank has a whole copy",
                field="reference_model",
            )
        # What is quantised or offloaded is a reference, whose log-probabilities need no other's bits.
        exact = (self.exact if exact is None else exact) and quantize is None and not offload
        if exact and placement.parts > 1:
            raise OperationError(
                training_pb2.ERROR_CODE_UNSUPPORTED,
                f"models are divided among {placement.parts} ranks here, which a deterministic run does not know: leave"
                " that out, or start the server with --shard off",
                field="deterministic",
            )
        self.check(name)
        logger.info("loading %s from %s as %s on %s", name, facts.path, quantize or dtype or facts.dtype, self.device)
        arguments = {} if offload else placement.loading_arguments()
        check_quantization(facts, quantize)
        if quantize is not None:
            arguments |= quantization.loading_arguments(quantize, dtype or self.dtype, self.device)
        with _explained(name, facts.path), preserved_rng():
            model = auto_class(facts.takes_images).from_pretrained(
                facts.path,
                dtype=dtype or self.dtype,
                use_safetensors=True,
                trust_remote_code=False,
                **arguments,
            )
        if quantize is not None:
            quantization.compute_dequantised(model)
        if model.dtype == torch.float64 and getattr(model.config, "_experts_implementation", None) == "grouped_mm":
            model.set_experts_implementation("eager")  # grouped products know no float64
        on_cpu = self.device.type == "cpu"
        fused = self.kernels is not None and (on_cpu or not offload) and model.dtype == self.dtype
        if self.kernels is not None and fused:
            use_fused_kernels(model, self.kernels)
        if offload:
            offload_layers(model, self.device)
        split_model = SplitModel(facts, model, placement, mixed=self._mixed and dtype is None)
        split_model.by_kernels = fused and on_cpu and has_right_kernel()
        orders = exact or split_model.dtype in HALVES
        split_model.in_order = self._orders and on_cpu and orders and has_right_kernel()
        if exact:
            compute_exactly(model)
            split_model.exact = True
        if on_cpu or quantize is not None or split_model.routers is not None:
            quantization.release_file(model)  # transformers joins the weights of experts
        if facts.takes_images and quantize is None:
            split_model.vision = Vision(model, facts.path, mixed=split_model.mixed)
        with explained_failures(split_model):
            check_split(split_model)
            with rows_in_order(split_model.in_order):
                split_model.packing = choose_packing(split_model)
                check_rows(split_model)
            if exact:
                check_exact(split_model)
        split_model.replays = self._replays and not offload and quantize is None and not exact
        small = split_model.weight_bytes <= machine_memory() // PACKED_SHARE
        whole = self._packs and not offload and quantize is None and not exact
        split_model.packs = whole and small and split_model.weight_dtype in (torch.float32, *HALVES)
        if self.compiled and not offload:
            compile_layers(split_model.trunk)
        placement.place(split_model.root, layers_of(split_model.trunk))
        split_model.weight_bytes //= placement.parts
        return split_model

    def _read_facts(self, name: str) -> ModelFacts:
        if name not in self._paths:
            raise OperationError(
                training_pb2.ERROR_CODE_UNKNOWN_MODEL,
                f"there is no model {name!r} here; there are: {', '.join(self._paths) or 'none'}",
                field="base_model",
                rule="one of the server's models",
            )
        path = self._paths[name]
        model = self._meta_model(name, path)
        text = model.config.get_text_config()
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
            takes_images=takes_images(model.config),
            image_token_id=image_token_of(model.config),
        )


TEXT_IN_FEW_BITS = frozenset({"Gemma3ForConditionalGeneration"})
"""Models that take images, and that many hold in few bits for text alone."""


def check_quantization(facts: ModelFacts, quantize: Quantization | None) -> None:
    """Refuse to hold a model that takes images in few bits, but for Gemma 3, which then takes text alone."""
    if quantize is not None and facts.takes_images and facts.architecture not in TEXT_IN_FEW_BITS:
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"model {facts.name!r} takes images, and such a model is not held as {quantize}: leave the quantization"
            " out",
            field="quantize",
        )


def _share_weights(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Let a model compute with the weights of another copy of it, in their place in memory."""
    inside = ".base_layer."  # peft's layers hold the model's own
    theirs = {name.replace(inside, "."): weight for name, weight in other.named_parameters()}
    for name, weight in model.named_parameters():
        weight.data = theirs[name].data


@contextmanager
def _explained(name: str, path: str) -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED, f"model {name!r} cannot be used: {error}", field="base_model"
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        logger.error("model %r at %s could not be loaded: %s", name, path, error)
        reason = without_path(str(error).partition("\n")[0], path)
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"model {name!r} cannot be loaded as a causal LM of transformers with safetensors weights: {reason}",
            field="base_model",
        ) from error
